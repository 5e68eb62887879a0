# SPDX-License-Identifier: Apache-2.0
"""The models of the tests of the ONNX backend."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Images(nn.Module):
    """Most of what ONNX Runtime fuses, in one graph: products, sums, pools, and what moves values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.tokens, self.mixed = nn.Linear(16, 16), nn.Linear(16, 16)
        self.classes = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.first(x)).relu()
        y = (y + F.relu6(self.second(y))).relu()
        y = torch.cat([F.max_pool2d(y, 2), F.avg_pool2d(y, 2)], 1)
        tokens = self.mixed(self.tokens(y.flatten(2).transpose(1, 2)).relu())
        return self.classes(F.adaptive_avg_pool2d(y, 1).flatten(1)), tokens.softmax(-1)


class Texts(nn.Module):
    """A lookup, linears, a keyword that may be left out, and a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(50, 32), nn.EmbeddingBag(20, 32)
        self.hidden, self.out = nn.Linear(32, 64), nn.Linear(64, 8, bias=False)

    def forward(self, ids: Tensor, *, bag: Tensor, scale: float = 1.0) -> dict[str, Tensor | int]:
        x = self.hidden(self.words(ids)).relu()
        y = self.out(x) * scale
        switched = torch.cond(y.sum() > 0, lambda v: v + 1, lambda v: v - 1, (y,))
        return {"texts": switched, "bags": self.bags(bag), "batch": ids.shape[0]}


def images(count: int, batch: int = 4) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(batch, 3, 16, 16, generator=generator),) for _ in range(count)]


def texts(batch: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return {
        "ids": torch.randint(50, (batch, 5), generator=generator),
        "bag": torch.randint(20, (batch, 3), generator=generator),
    }


def sqnr(wanted: Tensor, found: Tensor) -> float:
    """The signal to quantization noise ratio in decibels."""
    noise = (wanted.double() - found.double()).square().sum().clamp_min(1e-30)
    return float(10 * torch.log10(wanted.double().square().sum() / noise))
