# SPDX-License-Identifier: Apache-2.0
"""Multi-layer perceptrons, recurrent networks and attention in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import ZooModel, floats, ids, keep_mask, net, zoo_model

WIDTH = 16
HEADS = 4
WORDS = 50
LENGTH = 8


def mlp() -> nn.Module:
    """Linear layers with and without bias."""
    return nn.Sequential(
        nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24, bias=False), nn.GELU(), nn.Linear(24, 4)
    )


def mlp_bn() -> nn.Module:
    """Linear layers followed by batch norm."""
    return nn.Sequential(
        nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(),
        nn.Linear(24, 8, bias=False), nn.BatchNorm1d(8),
    )  # fmt: skip


@net(
    city=lambda: nn.Embedding(WORDS, 6),
    kind=lambda: nn.Embedding(7, 2, padding_idx=0),
    layers=lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2)),
)
def embedding_mlp(m: Any, city: Tensor, kind: Tensor, numbers: Tensor) -> Tensor:
    """Two categorical columns and numeric ones, as in tabular models."""
    return m.layers(torch.cat([m.city(city), m.kind(kind), numbers], dim=-1))


@net(
    bags=lambda: nn.ModuleList(
        [nn.EmbeddingBag(WORDS, 8, mode="sum"), nn.EmbeddingBag(WORDS, 8, mode="mean")]
    ),
    dense=lambda: nn.Linear(5, 8),
    top=lambda: nn.Linear(9 + 8, 1),
)
def recommender(m: Any, clicks: Tensor, tags: Tensor, numbers: Tensor) -> Tensor:
    """Embedding bags whose pairwise dot products (`bmm`) feed a linear layer, as in DLRM."""
    dense = F.relu(m.dense(numbers))
    rows = torch.stack([dense, m.bags[0](clicks), m.bags[1](tags)], dim=1)
    products = torch.bmm(rows, rows.transpose(1, 2)).flatten(1)
    return torch.sigmoid(m.top(torch.cat([dense, products], dim=1)))


class Recurrent(nn.Module):
    """Embedding, a recurrent network, last state, linear."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], **options: int | bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(words))
        return self.head(states[:, -1])


@net(cell=lambda: nn.LSTMCell(WIDTH, WIDTH), head=lambda: nn.Linear(WIDTH, 3))
def unrolled_cell(m: Any, x: Tensor) -> Tensor:
    """An LSTM cell written out over time: one weight used at every step."""
    hidden = cell = x.new_zeros(x.shape[0], WIDTH)
    for step in x.unbind(1):
        hidden, cell = m.cell(step, (hidden, cell))
    return m.head(hidden)


class TiedLanguageModel(nn.Module):
    """The output projection is the embedding table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.lm_head(self.body(self.embedding(words)))


class Attention(nn.Module):
    """Self-attention from separate projections; `scores` turns a mask into probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(self.attend(query, key, value, mask).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """`mask: (N, L)` bool, true where a key may be seen."""
        return F.scaled_dot_product_attention(query, key, value, mask[:, None, None, :])


class FilledMaskAttention(Attention):
    """Written-out attention; hidden keys are filled with -inf before the softmax."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """`mask: (N, L)` bool, true where a key may be seen."""
        scores = torch.matmul(query, key.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
        return torch.matmul(scores.softmax(-1), value)


class AdditiveMaskAttention(Attention):
    """A causal mask of -inf kept as a buffer, and the caller's added to it."""

    def __init__(self, hidden: float = -torch.inf) -> None:
        super().__init__()
        self.hidden = hidden
        self.register_buffer("causal", torch.full((LENGTH, LENGTH), hidden).triu(1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """`mask: (N, L)` bool, true where a key may be seen; the first key always is."""
        added = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, self.hidden)
        scores = torch.matmul(query, key.transpose(-2, -1)) / (WIDTH // HEADS) ** 0.5
        scores = scores + torch.maximum(self.causal + added[:, None, None, :], self.floor())
        return torch.matmul(F.softmax(scores, dim=-1), value)

    def floor(self) -> Tensor:
        """The smallest mask value: two of them may not add up to -inf in a finite mask."""
        return torch.full((), self.hidden)


@net(qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH), out=lambda: nn.Linear(WIDTH, WIDTH))
def packed_attention(m: Any, x: Tensor) -> Tensor:
    """One projection for query, key and value, split afterwards; causal by flag."""
    query, key, value = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in m.qkv(x).chunk(3, -1)
    )
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return m.out(attended.transpose(1, 2).flatten(2))


@net(
    encoder=lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True),
    decoder=lambda: nn.TransformerDecoderLayer(
        WIDTH, HEADS, 32, batch_first=True, activation="gelu", norm_first=True
    ),
)
def encoder_decoder(m: Any, source: Tensor, target: Tensor) -> Tensor:
    """torch's own transformer layers; the decoder's cross-attention reads the encoder twice."""
    return m.decoder(target, m.encoder(source))


@net(
    patches=lambda: nn.Conv2d(3, WIDTH, 4, 4),
    token=lambda: nn.Parameter(torch.randn(1, 1, WIDTH)),
    positions=lambda: nn.Parameter(torch.randn(1, 17, WIDTH)),
    norm1=lambda: nn.LayerNorm(WIDTH),
    attention=packed_attention,
    norm2=lambda: nn.LayerNorm(WIDTH),
    mlp=lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)),
    head=lambda: nn.Linear(WIDTH, 10),
)
def vision_transformer(m: Any, images: Tensor) -> Tensor:
    """Patch convolution, class token, learned positions, one pre-norm block."""
    x = m.patches(images).flatten(2).transpose(1, 2)
    x = torch.cat([m.token.expand(x.shape[0], -1, -1), x], dim=1) + m.positions
    x = x + m.attention(m.norm1(x))
    x = x + m.mlp(m.norm2(x))
    return m.head(x[:, 0])


@net(
    tokens=lambda: nn.Linear(LENGTH, LENGTH),
    gate=lambda: nn.Linear(WIDTH, WIDTH),
    up=lambda: nn.Linear(WIDTH, WIDTH),
    norm=lambda: nn.LayerNorm(WIDTH),
)
def mixer(m: Any, x: Tensor) -> Tensor:
    """Linear layers over tokens and over channels, with a gated unit between."""
    x = x + m.tokens(x.transpose(1, 2)).transpose(1, 2)
    return m.norm(x + F.silu(m.gate(x)) * m.up(x))


@net(qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH, bias=False))
def linear_attention(m: Any, x: Tensor) -> Tensor:
    """`einsum` contractions and a feature map instead of a softmax."""
    query, key, value = m.qkv(x).split(WIDTH, dim=-1)
    query, key = F.elu(query) + 1.0, F.elu(key) + 1.0
    memory = torch.einsum("nld,nle->nde", key, value)
    scale = torch.einsum("nld,nd->nl", query, key.sum(dim=1)).reciprocal()
    return torch.einsum("nld,nde,nl->nle", query, memory, scale)


_TOKENS = floats(2, LENGTH, WIDTH)
_WORDS = ids(WORDS, 2, LENGTH)
_MASK = keep_mask(2, LENGTH)
_FINITE = torch.finfo(torch.float32).min

MODELS: tuple[ZooModel, ...] = (
    zoo_model("mlp", mlp, floats(4, 12), tags={"linear"}),
    zoo_model("mlp_3d_input", mlp, floats(2, 5, 12), tags={"linear"}),
    zoo_model("mlp_bn", mlp_bn, floats(4, 12), tags={"linear", "bn"}),
    zoo_model(
        "embedding_mlp", embedding_mlp, ids(WORDS, 4), ids(7, 4), floats(4, 4),
        tags={"linear", "embedding", "cat"},
    ),
    zoo_model(
        "recommender", recommender, ids(WORDS, 4, 3), ids(WORDS, 4, 5), floats(4, 5),
        tags={"linear", "embedding", "matmul"},
    ),
    zoo_model("lstm", lambda: Recurrent(nn.LSTM, num_layers=2), _WORDS, tags={"recurrent", "embedding"}),
    zoo_model("gru", lambda: Recurrent(nn.GRU, bidirectional=True), _WORDS, tags={"recurrent", "embedding"}),
    zoo_model("lstm_cell", unrolled_cell, floats(2, 4, WIDTH), tags={"recurrent", "shared"}),
    zoo_model("tied_language_model", TiedLanguageModel, _WORDS, tags={"linear", "embedding", "tied"}),
    zoo_model("attention_bool_mask", Attention, _TOKENS, _MASK, tags={"attention", "mask"}),
    zoo_model("attention_filled_mask", FilledMaskAttention, _TOKENS, _MASK,
              tags={"attention", "mask", "matmul"}),
    zoo_model("attention_additive_mask", AdditiveMaskAttention, _TOKENS, _MASK,
              tags={"attention", "mask", "matmul"}),
    zoo_model("attention_finite_mask", lambda: AdditiveMaskAttention(_FINITE), _TOKENS, _MASK,
              tags={"attention", "mask", "matmul"}),
    zoo_model("attention_packed", packed_attention, _TOKENS, tags={"attention"}),
    zoo_model("encoder_decoder", encoder_decoder, _TOKENS, floats(2, 5, WIDTH), tags={"attention", "linear"}),
    zoo_model("vision_transformer", vision_transformer, floats(2, 3, 16, 16),
              tags={"attention", "conv", "linear"}),
    zoo_model("mixer", mixer, _TOKENS, tags={"linear"}),
    zoo_model("linear_attention", linear_attention, _TOKENS, tags={"attention", "matmul"}),
)  # fmt: skip
