# SPDX-License-Identifier: Apache-2.0
"""Three small models that the quantizers of the ecosystem are tried on, with data.

Weights are random from a fixed seed: SQNR on them says "not broken", not how accurate a model stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

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


class Embedded(nn.Module):
    """embedding-linear-relu-linear; token ids of (N, 6), 50 different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.inner, self.relu, self.outer = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.outer(self.relu(self.inner(self.tokens(ids))))


class Encoder(nn.Module):
    """A pre-norm transformer layer with scaled dot product attention; (N, 5, 32), two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(32), nn.LayerNorm(32)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.out, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], 2, 16).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(x)
        parts = [self._heads(part(y)) for part in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*parts)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


def _images(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=generator)


def _ids(generator: torch.Generator) -> Tensor:
    return torch.randint(50, (8, 6), generator=generator)


def _vectors(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 5, 32, generator=generator)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "cnn": (Convolutional, _images),
    "mlp": (Embedded, _ids),
    "encoder": (Encoder, _vectors),
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
