# SPDX-License-Identifier: Apache-2.0
"""A LlamaForCausalLM of transformers in llama.cpp (llama-cpp-python, gguf), as it is or in Q4_0."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from torch import Tensor, nn

_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_TABLE = "model.embed_tokens"
_OUTSIDE = {_TABLE: "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def made(
    model: nn.Module, cache: int, four_bits: bool
) -> tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]:
    """Return what computes logits (1, T, vocabulary) of tokens (1, T) at positions (T,), and facts.

    Positions from the first one on are forgotten before, so a call may be made again.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        size = write(model, file, four_bits)
        context = _context(file, cache)
    memory = llama_cpp.llama_get_memory(context)
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    batch = llama_cpp.llama_batch_init(cache, 0, 1)

    def run(ids: Tensor, place: Tensor) -> Tensor:
        batch.n_tokens = ids.shape[1]
        for i, (token, position) in enumerate(zip(ids[0].tolist(), place.tolist(), strict=True)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        llama_cpp.llama_memory_seq_rm(memory, 0, int(place[0]), -1)
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        logits = llama_cpp.llama_get_logits(context)
        found = np.ctypeslib.as_array(logits, (ids.shape[1], vocabulary))
        return torch.from_numpy(found)[None].clone()

    return run, {"bytes": size, "llama_cpp_python": llama_cpp.__version__}


def _context(file: Path, cache: int) -> Any:
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    _KEPT.append(silent)
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    of_model = llama_cpp.llama_model_default_params()
    of_model.use_mmap = False  # its file is deleted
    loaded = llama_cpp.llama_model_load_from_file(str(file).encode(), of_model)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = cache
    options.n_threads = options.n_threads_batch = torch.get_num_threads()
    context = llama_cpp.llama_init_from_model(loaded, options) if loaded else None
    if not context:
        raise RuntimeError("llama.cpp does not load the file")
    return context


_KEPT: list[Any] = []
"""What C calls back."""


def write(model: nn.Module, file: Path, four_bits: bool) -> int:
    """Write a GGUF file without a tokenizer, and return its bytes; the table has eight bits beside four."""
    config: Any = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("none")
    for name, value in _tensors(model.state_dict(), config):
        kind = Kind.F32
        if four_bits and value.ndim == 2:
            kind = Kind.Q8_0 if name == f"{_OUTSIDE[_TABLE]}.weight" else Kind.Q4_0
        writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.stat().st_size


def _tensors(state: dict[str, Tensor], config: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield tensors by the names of llama.cpp, which rotates neighbours where transformers rotates halves."""
    for name, other in _OUTSIDE.items():
        yield f"{other}.weight", state[f"{name}.weight"].numpy()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for name, other in _LAYER.items():
            value = state[f"model.layers.{layer}.{name}.weight"]
            if other in heads:
                halves = value.unflatten(0, (heads[other], 2, -1))
                value = halves.transpose(1, 2).reshape(value.shape)
            yield f"blk.{layer}.{other}.weight", value.contiguous().numpy()
