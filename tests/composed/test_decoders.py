# SPDX-License-Identifier: Apache-2.0
"""Decoders of `transformers` with a static cache: a prompt, then one token at a time."""

from __future__ import annotations

import functools
import gc
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.program.meta import STAGE_KEY
from qompose.testing.fixtures import sqnr
from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
from qompose_onnx import ONNXQuantizer, get_onnx_quantization_config as onnx
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config as x86,
)
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

PROMPT, STEPS, WORDS = 6, 8, 64
SAME = 110.0
"""dB between what should differ by the order of float32 sums alone."""
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 32, "attn_implementation": "sdpa",
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_OWN: dict[str, dict[str, Any]] = {
    "Llama": _GROUPED,
    "Qwen2": _GROUPED,
    "Gemma": {**_GROUPED, "head_dim": 16},
    "Phi": {},
    "Mistral": {**_GROUPED, "sliding_window": None},
    "Mixtral": {**_GROUPED, "num_local_experts": 2, "sliding_window": None},
    "GPTNeoX": {},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 48, "tie_word_embeddings": True},
    "Cohere2": {**_GROUPED, "sliding_window": 4, "num_hidden_layers": 4, "logit_scale": 0.25},
    "Gemma2": {
        **_GROUPED, "head_dim": 48, "sliding_window": 4, "attn_implementation": "eager",
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    },
    "StableLm": {**_GROUPED, "partial_rotary_factor": 0.25, "use_qkv_bias": True},
}  # fmt: skip
"""Of some, the window (4) is shorter than what is read (14), heads are of another width, or caps bind."""
_LEAST = {"Gemma2": (33.0, 11.0)}
"""dB to float that 8 and 4 bits keep of capped logits; of others 36 and 14."""
ORDINARY = ("Llama",)
FAMILIES = [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.full) for name in _OWN]


def _example(length: int, first: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(first + 1))
    return {"input_ids": ids, "cache_position": torch.arange(first, first + length)}


@functools.cache
def _float(family: str) -> Any:
    settings = getattr(transformers, f"{family}Config")(**{**_SIZES, **_OWN[family]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    return model.requires_grad_(False)


@functools.cache
def _methods(family: str) -> dict[str, torch.export.ExportedProgram]:
    """Of a prompt and of one token, from one module. (OPT is not here: torch cannot export its cache.)"""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model = _float(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers and torch say of their own code
        model.generation_config.cache_implementation = "static"
        cached = TorchExportableModuleWithStaticCache(
            model, batch_size=1, max_cache_len=PROMPT + STEPS
        ).eval()
        return {
            name: torch.export.export(cached, (), _example(length), strict=False)
            for name, length in (("prefill", PROMPT), ("decode", 1))
        }


def _tokens() -> list[dict[str, Tensor]]:
    """A prompt, and forced tokens after it."""
    return [_example(PROMPT), *(_example(1, PROMPT + step) for step in range(STEPS))]


@torch.no_grad()
def _logits(runs: Any) -> Tensor:
    prompt, *others = _tokens()
    parts = [runs["prefill"](**prompt), *(runs["decode"](**one).clone() for one in others)]
    return torch.cat(parts, 1)


@torch.no_grad()
def _without_cache(family: str) -> Tensor:
    """Of the same tokens at once, by the model that was exported."""
    ids = torch.cat([part["input_ids"] for part in _tokens()], 1)
    logits: Tensor = _float(family)(input_ids=ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_tokens_on_torch(family: str) -> None:
    """Measured: 37 to 47 dB of 8 bits, 16 to 25 of 4 (Gemma 2: 34.5, 12.4); 119 or more to the converted."""
    expected = _without_cache(family)
    floats = {name: program.module() for name, program in _methods(family).items()}
    assert sqnr(expected, _logits(floats)) > SAME
    words_of = ({}, {"group_size": 32, "algorithms": ()})
    for least, words in zip(_LEAST.get(family, (36.0, 14.0)), words_of, strict=True):
        quantizer = X86InductorQuantizer().set_global(x86(weight_only=True, **words))
        converted = qompose.convert_pt2e(qompose.prepare_pt2e(_methods(family), quantizer))
        actual = _logits(qompose.lower(converted))
        assert sqnr(expected, actual) > least
        assert sqnr(_logits(converted), actual) > SAME


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_in_eight_bits(family: str) -> None:
    """Measured: 50 to 69 dB, and no difference to the converted model."""
    alone = x86(weight_only=True, cache=True).without("weight")
    prepared = qompose.prepare_pt2e(_methods(family), X86InductorQuantizer().set_global(alone))
    converted = qompose.convert_pt2e(prepared)
    lowered = qompose.lower(converted)
    assert sqnr(_without_cache(family), actual := _logits(lowered)) > 30
    assert sqnr(_logits(converted), actual) > SAME
    rows = [  # of one memory once: the exporter has names of its own for buffers
        {
            value.data_ptr(): value
            for value in _state(methods["decode"]).values()
            if value.dim() == 4
        }
        for methods in (converted, lowered)
    ]
    before, after = (sum(value.nbytes for value in part.values()) for part in rows)
    width = next(iter(rows[0].values())).shape[-1]
    assert {value.dtype for value in rows[1].values()} == {torch.int8, torch.float32}
    assert after * 4 * width == before * (width + 4)


class WithState(nn.Module):
    """A decoder that takes its cache and returns the next one, as programs without buffers do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def empty(self) -> list[Tensor]:
        """Return keys and values of each layer, with room for all tokens."""
        config = self.model.config
        width = config.hidden_size // config.num_attention_heads
        shape = (1, config.num_key_value_heads, PROMPT + STEPS, width)
        return [torch.zeros(shape) for _ in range(2 * config.num_hidden_layers)]

    def forward(self, input_ids: Tensor, cache_position: Tensor, state: list[Tensor]) -> Any:
        cache = transformers.StaticCache(self.model.config, PROMPT + STEPS)
        for layer, keys, values in zip(cache.layers, state[::2], state[1::2], strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys.clone(), values.clone()
            layer.cumulative_length = cache_position[0].clone()
        logits = self.model(input_ids=input_ids, past_key_values=cache).logits
        return logits, [part for layer in cache.layers for part in (layer.keys, layer.values)]


def _handing_over(model: WithState, methods: dict[str, Any]) -> dict[str, Any]:
    """Give each call the cache that the last one returned, whichever method it was."""
    held = {"state": model.empty()}

    def run(name: str, words: dict[str, Tensor]) -> Tensor:
        logits, held["state"] = methods[name](**words, **held)
        found: Tensor = logits
        return found

    return {name: lambda name=name, **words: run(name, words) for name in methods}


@pytest.mark.parametrize(
    ("least", "words"),
    [
        pytest.param(36.0, {}, id="8"),
        pytest.param(14.0, {"group_size": 32, "algorithms": ()}, id="4", marks=pytest.mark.full),
    ],
)
def test_a_cache_that_is_inputs_and_outputs_in_onnx_runtime(
    least: float, words: dict[str, Any]
) -> None:
    """Measured: 41.7 and 15.7 dB, and 132 or more to the converted model."""
    pytest.importorskip("onnxruntime")
    model = WithState(_float("Llama"))
    quantizer = ONNXQuantizer().set_global(onnx(weight_only=True, **words))
    converted, files = {}, {}
    for name, length in (("prefill", PROMPT), ("decode", 1)):
        given = {**_example(length), "state": model.empty()}
        program = torch.export.export(model, (), given, strict=False)
        converted[name] = qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))
        files[name] = qompose.lower(converted[name], target="onnxruntime")
    actual = _logits(_handing_over(model, files))
    assert sqnr(_without_cache("Llama"), actual) > least
    assert sqnr(_logits(_handing_over(model, converted)), actual) > SAME


def _state(method: Any) -> Any:
    return method.meta[STAGE_KEY].state


def _held_bytes(root: Any) -> int:
    """Of the distinct storages that are reachable from an object, by whatever way."""
    modules = {
        id(vars(module)) for module in [*sys.modules.values()] if hasattr(module, "__dict__")
    }
    seen, sizes, todo = set(modules), {}, [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType)):
            continue
        seen.add(id(one))
        if type(one) in (Tensor, torch.nn.Parameter):
            storage = one.untyped_storage()
            sizes[storage.data_ptr()] = 0 if storage.device.type == "meta" else storage.nbytes()
        if isinstance(one, types.FunctionType):  # its globals are of a module
            todo += [one.__closure__, one.__defaults__]
        else:
            todo += gc.get_referents(one)
    return sum(sizes.values())


@pytest.mark.parametrize(
    "words",
    [{}, pytest.param({"group_size": 32, "algorithms": ()}, marks=pytest.mark.full)],
    ids=["8", "4"],
)
def test_methods_hold_what_the_report_says(words: dict[str, Any], tmp_path: Path) -> None:
    """Weights once for both methods, as kernels packed them, and the values that the cache starts from."""
    table = EmbeddingQuantizer().set_global(get_embedding_quantization_config(8))
    linears = X86InductorQuantizer().set_global(x86(weight_only=True, **words))
    prepared = qompose.prepare_pt2e(_methods("Llama"), qompose.compose(table, linears))
    converted = qompose.convert_pt2e(prepared)
    qompose.save(qompose.lower(converted), tmp_path / "methods.qompose")
    lowered = qompose.lower(converted, keep_converted=False)
    loaded = qompose.load(tmp_path / "methods.qompose")
    for methods in (lowered, loaded):
        initial = sum(value.nbytes for value in _state(methods["decode"]).values())
        assert _held_bytes(methods) <= qompose.report(methods["decode"]).bytes_after + initial
    with pytest.raises(qompose.errors.StageError):
        qompose.save(lowered, tmp_path / "again.qompose")
