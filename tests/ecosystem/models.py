# SPDX-License-Identifier: Apache-2.0
"""Three small models that the quantizers of the ecosystem are tried on, with data.

Weights are random from a fixed seed: SQNR on them says "not broken", not how accurate a model stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from tests.zoo.entry import net

BATCHES = 4
"""Batches to calibrate with; one more is held out."""


class Convolutional(nn.Module):
    """conv-bn-relu, conv-bn-add-relu, adaptive average pool, linear; images of (N, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.body, self.body_norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        # A module that is called twice is one partition for X86's quantizer, which then raises.
        self.first_relu, self.second_relu = nn.ReLU(), nn.ReLU()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)
        for norm in (self.stem_norm, self.body_norm):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_relu(self.stem_norm(self.stem(x)))
        x = self.second_relu(self.body_norm(self.body(x)) + x)
        return self.head(self.pool(x).flatten(1))


@net(
    tokens=lambda: nn.Embedding(50, 32),
    inner=lambda: nn.Linear(32, 64),
    relu=nn.ReLU,
    outer=lambda: nn.Linear(64, 32),
)
def embedded(m: Any, ids: Tensor) -> Tensor:
    """embedding-linear-relu-linear; token ids of (N, 6), 50 different ones."""
    return m.outer(m.relu(m.inner(m.tokens(ids))))


@net(
    first_norm=lambda: nn.LayerNorm(32),
    second_norm=lambda: nn.LayerNorm(32),
    **dict.fromkeys(("query", "key", "value", "out"), lambda: nn.Linear(32, 32)),
    up=lambda: nn.Linear(32, 64),
    down=lambda: nn.Linear(64, 32),
)
def encoder(m: Any, x: Tensor) -> Tensor:
    """A pre-norm transformer layer with scaled dot product attention; (N, 5, 32), two heads."""
    y = m.first_norm(x)
    parts = [
        part(y).reshape(*x.shape[:2], 2, 16).transpose(1, 2) for part in (m.query, m.key, m.value)
    ]
    attended = F.scaled_dot_product_attention(*parts)
    x = x + m.out(attended.transpose(1, 2).reshape(x.shape))
    return x + m.down(F.gelu(m.up(m.second_norm(x))))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "cnn": (Convolutional, lambda made: torch.randn(4, 3, 8, 8, generator=made)),
    "mlp": (embedded, lambda made: torch.randint(50, (8, 6), generator=made)),
    "encoder": (encoder, lambda made: torch.randn(4, 5, 32, generator=made)),
}


@dataclass(frozen=True)
class Sample:
    """A float model, what it is calibrated with, an input that it is judged by, and its output there."""

    model: nn.Module
    batches: tuple[tuple[Tensor], ...]
    held_out: tuple[Tensor]
    expected: Tensor

    def export(self, strict: bool = False) -> ExportedProgram:
        """A new program: engines put their marks on its nodes."""
        return torch.export.export(self.model, self.batches[0], strict=strict)


@functools.cache
def sample(kind: str) -> Sample:
    """The model of a kind of KINDS, the same in every process."""
    make, draw = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    generator = torch.Generator().manual_seed(1)
    *batches, held_out = ((draw(generator),) for _ in range(BATCHES + 1))
    with torch.no_grad():
        expected = model(*held_out)
    return Sample(model, tuple(batches), held_out, expected)
