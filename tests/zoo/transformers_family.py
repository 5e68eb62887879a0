# SPDX-License-Identifier: Apache-2.0
"""Text architectures of the `transformers` package, two layers each, random weights.

`transformers` is imported when a model is built: without it the zoo still imports.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .entry import ZooModel, ids, keep_mask, zoo_model

WORDS = 64
LENGTH = 8
WIDTH = 16
HEADS = 2
LAYERS = 2

_BERT: dict[str, object] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
_BART: dict[str, object] = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip
_SPECIAL_IDS: dict[str, object] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


class TextModel(nn.Module):
    """A model of token ids and their mask, without key-value cache; its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, return_dict=False, **self.options
        )[0]


class TranslationModel(nn.Module):
    """An encoder and a decoder of token ids, without key-value cache; the first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, target_ids: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=target_ids,
            use_cache=False, return_dict=False,
        )[0]  # fmt: skip


def make(kind: str, config: dict[str, object]) -> nn.Module:
    """The class `kind` of `transformers` with random weights."""
    with _quiet():
        model = getattr(importlib.import_module("transformers"), kind)
        return model(model.config_class(**config))


def _text(
    name: str, kind: str, *tags: str, wrap: Any = TextModel, more: Any = (), **config: object
) -> ZooModel:
    mask = keep_mask(2, LENGTH, dtype=torch.int64)
    tags = ("transformers", "attention", "embedding", "mask", *tags)
    model = lambda: wrap(make(kind, config))  # noqa: E731
    return zoo_model(name, model, ids(WORDS, 2, LENGTH), mask, *more, tags=tags)


def _translation(name: str, kind: str, *tags: str, **config: object) -> ZooModel:
    more = (ids(WORDS, 2, 5),)
    return _text(name, kind, "causal", *tags, wrap=TranslationModel, more=more, **config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings from what `transformers` tries to import (torchao's optional extensions)."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


MODELS: tuple[ZooModel, ...] = (
    _text("bert", "BertModel", **_BERT),
    _text("roberta_classifier", "RobertaForSequenceClassification", **_BERT, pad_token_id=1),
    _text("albert", "AlbertModel", "shared", **_BERT, embedding_size=8),
    _text("mobilebert", "MobileBertModel", **_BERT, embedding_size=8,
          intra_bottleneck_size=8, true_hidden_size=8),
    _text("distilbert", "DistilBertModel", vocab_size=WORDS, dim=WIDTH, n_layers=LAYERS,
          n_heads=HEADS, hidden_dim=32, max_position_embeddings=32),
    _text("deberta", "DebertaV2Model", "matmul", "shared", **_BERT, relative_attention=True,
          pos_att_type=["p2c", "c2p"], position_buckets=4, norm_rel_ebd="layer_norm",
          share_att_key=True, position_biased_input=False),
    _text("t5_encoder", "T5EncoderModel", "matmul", vocab_size=WORDS, d_model=WIDTH, d_kv=8,
          d_ff=32, num_layers=LAYERS, num_heads=HEADS, relative_attention_num_buckets=8),
    _text("gpt2", "GPT2LMHeadModel", "causal", "tied", vocab_size=WORDS, n_embd=WIDTH,
          n_layer=LAYERS, n_head=HEADS, n_positions=32, **_SPECIAL_IDS),
    _text("opt", "OPTForCausalLM", "causal", "tied", vocab_size=WORDS, hidden_size=WIDTH,
          num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=32,
          max_position_embeddings=32, word_embed_proj_dim=WIDTH, **_SPECIAL_IDS),
    _text("llama", "LlamaForCausalLM", "causal", **_BERT, num_key_value_heads=1),
    _text("mistral", "MistralForCausalLM", "causal", **_BERT, num_key_value_heads=1,
          sliding_window=4),
    _text("clip_text", "CLIPTextModel", "causal", **_BERT, **_SPECIAL_IDS),
    _text("electra", "ElectraModel", **_BERT, embedding_size=8),
    _text("xlnet", "XLNetModel", "matmul", vocab_size=WORDS, d_model=WIDTH, n_layer=LAYERS,
          n_head=HEADS, d_inner=32),
    _text("mpnet", "MPNetModel", "matmul", **_BERT, pad_token_id=1),
    _text("convbert", "ConvBertModel", "conv", "matmul", **_BERT, embedding_size=8,
          conv_kernel_size=3, head_ratio=1),
    _text("squeezebert", "SqueezeBertModel", "conv", "matmul", **_BERT, embedding_size=WIDTH,
          q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2),
    _text("roformer", "RoFormerModel", "matmul", **_BERT, embedding_size=8),
    _text("fnet", "FNetModel", "fft", **_BERT),
    _text("modernbert", "ModernBertModel", **_BERT, global_attn_every_n_layers=2,
          local_attention=4, pad_token_id=0),
    _text("gemma", "GemmaForCausalLM", "causal", "tied", **_BERT, num_key_value_heads=1,
          head_dim=8),
    _text("gemma2", "Gemma2ForCausalLM", "causal", "tied", "matmul", **_BERT,
          num_key_value_heads=1, head_dim=8, sliding_window=4),
    _text("qwen2", "Qwen2ForCausalLM", "causal", **_BERT, num_key_value_heads=1),
    _text("qwen3", "Qwen3ForCausalLM", "causal", **_BERT, num_key_value_heads=1, head_dim=8),
    _text("mixtral", "MixtralForCausalLM", "causal", "integer", **_BERT, num_key_value_heads=1,
          num_local_experts=4),
    _text("phi", "PhiForCausalLM", "causal", **_BERT),
    _text("phi3", "Phi3ForCausalLM", "causal", **_BERT, pad_token_id=0),
    _text("gpt_neox", "GPTNeoXForCausalLM", "causal", **_BERT),
    _text("falcon", "FalconForCausalLM", "causal", "tied", vocab_size=WORDS, hidden_size=WIDTH,
          num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_hidden_size=32),
    _text("mpt", "MptForCausalLM", "causal", "tied", vocab_size=WORDS, d_model=WIDTH,
          n_heads=HEADS, n_layers=LAYERS, max_seq_len=32, expansion_ratio=2),
    _text("bloom", "BloomForCausalLM", "causal", "tied", vocab_size=WORDS, hidden_size=WIDTH,
          n_layer=LAYERS, n_head=HEADS),
    _translation("t5", "T5ForConditionalGeneration", "matmul", "tied", vocab_size=WORDS,
                 d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=HEADS,
                 relative_attention_num_buckets=8),
    _translation("bart", "BartModel", "tied", **_BART),
    _translation("mbart", "MBartForConditionalGeneration", "tied", **_BART),
)  # fmt: skip
