# SPDX-License-Identifier: Apache-2.0
"""Architectures of the `transformers` package, two layers each, random weights.

`transformers` is imported when a model is built: without it the zoo still imports.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .entry import Draw, ZooModel, floats, ids, keep_mask, zoo_model

WORDS = 64
LENGTH = 8
WIDTH = 16
HEADS = 2
LAYERS = 2

_BERT: dict[str, object] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "intermediate_size": 32, "max_position_embeddings": 32,
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


class SignalModel(nn.Module):
    """A model of pixels or samples; its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, signal: Tensor) -> Tensor:
        return self.model(signal, return_dict=False)[0]


def _make(kind: str, config: dict[str, object]) -> nn.Module:
    with _quiet():
        model = getattr(importlib.import_module("transformers"), kind)
        return model(model.config_class(**config))


def _text(name: str, kind: str, *tags: str, **config: object) -> ZooModel:
    return zoo_model(
        name,
        lambda: TextModel(_make(kind, config)),
        ids(WORDS, 2, LENGTH),
        keep_mask(2, LENGTH, dtype=torch.int64),
        tags={"transformers", "attention", "embedding", "mask", *tags},
    )


def _signal(name: str, kind: str, draw: Draw, *tags: str, **config: object) -> ZooModel:
    return zoo_model(
        name,
        lambda: SignalModel(_make(kind, config)),
        draw,
        tags={"transformers", "conv", *tags},
    )


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
    _signal("vit", "ViTModel", floats(2, 3, 16, 16), "attention",
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=32, image_size=16, patch_size=4),
    _signal("convnext_v2", "ConvNextV2Model", floats(2, 3, 32, 32), "depthwise",
            hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], image_size=32),
    _signal("wav2vec2", "Wav2Vec2Model", floats(2, 400), "attention",
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=32, conv_dim=[8, 8], conv_kernel=[4, 4], conv_stride=[4, 4],
            num_feat_extract_layers=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2),
)  # fmt: skip
