# SPDX-License-Identifier: Apache-2.0
"""Kinds of attention: where positions enter, how heads are laid out, how keys are hidden."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import ZooModel, floats, keep_mask, net, zoo_model

WIDTH = 16
HEADS = 4
LENGTH = 8


def split_heads(x: Tensor, heads: int = HEADS) -> Tensor:
    """`(N, L, W)` to `(N, heads, L, W / heads)`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class SelfAttention(nn.Module):
    """Packed projections around `attend`, which is scaled dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(part) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """All of shape `(N, heads, L, W / heads)`."""
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
        return torch.matmul((scores + self.bias(scores)).softmax(-1), value)

    def bias(self, scores: Tensor) -> Tensor:
        """What is added to the scores before the softmax."""
        return torch.zeros_like(scores)


class RotaryAttention(SelfAttention):
    """Queries and keys rotated by angles of integer positions."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cos, sin = self.angles(query)
        query = query * cos + self.rotate(query) * sin
        key = key * cos + self.rotate(key) * sin
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def angles(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of position times frequency."""
        half = torch.arange(0, query.shape[-1], 2, dtype=torch.int64)
        frequencies = 10000.0 ** (-half.float() / query.shape[-1])
        positions = torch.arange(query.shape[-2])
        angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    def rotate(self, x: Tensor) -> Tensor:
        """The halves swapped, one negated."""
        left, right = x.chunk(2, dim=-1)
        return torch.cat([-right, left], dim=-1)


class BucketedAttention(SelfAttention):
    """T5's bias: relative positions to buckets by integer arithmetic, buckets to a table's rows."""

    def __init__(self, buckets: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, HEADS)

    def bias(self, scores: Tensor) -> Tensor:
        positions = torch.arange(scores.shape[-1])
        relative = positions[None, :] - positions[:, None]
        half = self.table.num_embeddings // 2
        exact = half // 2
        distance = relative.abs()
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(LENGTH / exact)
        far = (exact + (growth * (half - exact)).to(torch.int64)).clamp(max=half - 1)
        bucket = (relative > 0).to(torch.int64) * half + torch.where(
            distance < exact, distance, far
        )
        return self.table(bucket).permute(2, 0, 1).unsqueeze(0)


class AlibiAttention(SelfAttention):
    """A slope per head times the distance, below a causal mask of the smallest finite number."""

    def bias(self, scores: Tensor) -> Tensor:
        positions = torch.arange(scores.shape[-1])
        distance = positions[None, :] - positions[:, None]
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        hidden = torch.finfo(scores.dtype).min
        return (slopes[:, None, None] * distance).masked_fill(distance > 0, hidden)


class CosineAttention(SelfAttention):
    """Normalised queries and keys under a learnt temperature, as in Swin-V2."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((HEADS, 1, 1), 2.0))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
        return (scores * self.temperature.clamp(max=4.6).exp()).softmax(-1) @ value


_HEADS = (WIDTH, HEADS, WIDTH // HEADS)


@net(
    query=lambda: nn.Parameter(0.2 * torch.randn(_HEADS)),
    key=lambda: nn.Parameter(0.2 * torch.randn(_HEADS)),
    value=lambda: nn.Parameter(0.2 * torch.randn(_HEADS)),
    out=lambda: nn.Parameter(0.2 * torch.randn(HEADS, WIDTH // HEADS, WIDTH)),
)
def einsum_attention(m: Any, x: Tensor) -> Tensor:
    """Projections, scores and sums all by `einsum` with three-dimensional parameters."""
    query, key, value = (torch.einsum("nlw,whd->nlhd", x, p) for p in (m.query, m.key, m.value))
    scores = torch.einsum("nqhd,nkhd->nhqk", query, key).softmax(dim=-1)
    return torch.einsum("nhqk,nkhd,hdw->nqw", scores, value, m.out)


@net(
    query=lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    key=lambda: nn.Linear(WIDTH, WIDTH // 2, bias=False),
    value=lambda: nn.Linear(WIDTH, WIDTH // 2, bias=False),
    norm=lambda: nn.RMSNorm(WIDTH),
    out=lambda: nn.Linear(WIDTH, WIDTH, bias=False),
)
def grouped_query_attention(m: Any, x: Tensor) -> Tensor:
    """Two heads of keys and values for four of queries; a causal mask chosen by `where`."""
    normed = m.norm(x)
    query = split_heads(m.query(normed))
    key, value = (
        split_heads(part, 2).repeat_interleave(2, dim=1)
        for part in (m.key(normed), m.value(normed))
    )
    scores = query @ key.mT / 2
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = torch.where(seen, scores, torch.tensor(-torch.inf))
    return x + m.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


@net(attention=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, bias=True))
def torch_attention(m: Any, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """`nn.MultiheadAttention`, its averaged weights returned, keys hidden by their padding mask."""
    return m.attention(x, x, x, key_padding_mask=~keep)


class WindowAttention(nn.Module):
    """Swin's: rolled windows, a table of biases read by an integer buffer."""

    def __init__(self, window: int = 2) -> None:
        super().__init__()
        self.window = window
        self.attention = SelfAttention()
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, HEADS))
        rows = torch.arange(window).repeat_interleave(window)
        columns = torch.arange(window).repeat(window)
        down, across = rows[:, None] - rows, columns[:, None] - columns
        self.register_buffer("index", (down + window - 1) * (2 * window - 1) + across + window - 1)
        self.attention.bias = lambda scores: self.table[self.index].permute(2, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        size = self.window
        shifted = torch.roll(x, (-1, -1), dims=(1, 2))
        windows = shifted.view(batch, height // size, size, width // size, size, WIDTH)
        windows = windows.transpose(2, 3).reshape(-1, size * size, WIDTH)
        mixed = self.attention(windows)
        mixed = mixed.view(batch, height // size, width // size, size, size, WIDTH)
        mixed = mixed.transpose(2, 3).reshape(batch, height, width, WIDTH)
        return x + torch.roll(mixed, (1, 1), dims=(1, 2))


@net(
    latents=lambda: nn.Parameter(torch.randn(3, WIDTH)),
    query=lambda: nn.Linear(WIDTH, WIDTH),
    key_value=lambda: nn.Linear(WIDTH, 2 * WIDTH),
    mlp=lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()),
)
def latents(m: Any, x: Tensor, keep: Tensor) -> Tensor:
    """Perceiver's: learnt latents read the input by cross-attention, twice with one layer."""
    latents = m.latents.expand(x.shape[0], -1, -1)
    hidden = torch.where(keep, 0.0, torch.finfo(x.dtype).min)[:, None, None, :]
    for _ in range(2):
        query = split_heads(m.query(latents))
        key, value = (split_heads(part) for part in m.key_value(x).chunk(2, dim=-1))
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=hidden)
        latents = latents + m.mlp(read.transpose(1, 2).flatten(2))
    return latents.mean(dim=1)


def _decoder_layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 32, batch_first=True, norm_first=True, activation="gelu"
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@net(layers=_decoder_layers)
def causal_decoder(m: Any, x: Tensor) -> Tensor:
    """torch's encoder stack made causal by a mask of -inf built in `forward`; tied nowhere."""
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return m.layers(x, mask=mask, is_causal=True)


@net(
    up=lambda: nn.Linear(WIDTH, 2 * WIDTH),
    down=lambda: nn.Linear(WIDTH, WIDTH),
    norm=lambda: nn.LayerNorm(WIDTH, bias=False),
    positions=lambda: nn.Conv1d(LENGTH, LENGTH, 1),
)
def spatial_gating(m: Any, x: Tensor) -> Tensor:
    """gMLP: half of the channels gate the other half after a linear layer over positions."""
    left, right = F.gelu(m.up(x)).chunk(2, dim=-1)
    return x + m.down(left * m.positions(m.norm(right)))


_TOKENS = floats(2, LENGTH, WIDTH)
_MASK = keep_mask(2, LENGTH)


def _attention(name: str, make: Callable[[], nn.Module], *tags: str) -> ZooModel:
    return zoo_model(name, make, _TOKENS, tags={"attention", *tags})


MODELS: tuple[ZooModel, ...] = (
    _attention("attention_rotary", RotaryAttention, "integer", "cat"),
    _attention("attention_bucketed_bias", BucketedAttention, "integer", "embedding", "matmul"),
    _attention("attention_alibi", AlibiAttention, "integer", "matmul", "mask"),
    _attention("attention_cosine", CosineAttention, "matmul"),
    _attention("attention_einsum", einsum_attention, "matmul"),
    _attention("attention_grouped_query", grouped_query_attention, "matmul", "mask", "residual"),
    zoo_model("attention_torch", torch_attention, _TOKENS, _MASK,
              tags={"attention", "matmul", "mask", "multi_output"}),
    zoo_model("attention_windows", WindowAttention, floats(2, 4, 4, WIDTH),
              tags={"attention", "matmul", "integer", "residual"}),
    zoo_model("attention_latents", latents, _TOKENS, _MASK,
              tags={"attention", "mask", "shared", "residual"}),
    _attention("causal_decoder", causal_decoder, "mask", "linear"),
    zoo_model("spatial_gating", spatial_gating, _TOKENS, tags={"linear", "residual"}),
)  # fmt: skip
