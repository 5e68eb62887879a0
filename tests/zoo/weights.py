# SPDX-License-Identifier: Apache-2.0
"""Weights that are not simply one layer's parameter: computed, cut, renamed, unused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .entry import ZooModel, floats, ids, net, zoo_model

WIDTH = 6
CHANNELS = 4
WORDS = 20


class TwoNames(nn.Module):
    """One module under two names, one parameter under three; both names are called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.first.weight
        self.alias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(F.relu(self.first(x)))) * self.alias


@net(
    used=lambda: nn.Linear(WIDTH, WIDTH),
    unused=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    scale=lambda: nn.Parameter(torch.ones(3)),
    count=lambda: nn.Buffer(torch.zeros(2, dtype=torch.int64)),
)
def unused(m: Any, x: Tensor) -> Tensor:
    """Parameters, a buffer and a submodule that `forward` never reads."""
    return m.used(x)


@net(
    weight=lambda: nn.Parameter(0.4 * torch.randn(2 * WIDTH, WIDTH)),
    other=lambda: nn.Parameter(0.4 * torch.randn(WIDTH, 3)),
    bias=lambda: nn.Parameter(torch.randn(3)),
)
def sliced(m: Any, x: Tensor) -> Tensor:
    """`linear` on rows, on columns and on the transpose of one parameter; `addmm` on another."""
    y = F.relu(F.linear(x, m.weight[:WIDTH]))
    y = F.linear(F.linear(y, m.weight), m.weight.t()) + y @ m.weight[WIDTH:]
    return torch.addmm(m.bias, y, m.other)


class BufferWeights(nn.Module):
    """Weights kept as buffers, one of them not saved; a fixed blur beside a learnt convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)
        blur = torch.tensor([1.0, 2.0, 1.0])
        kernel = torch.outer(blur, blur) / 16
        self.register_buffer("blur", kernel.expand(CHANNELS, 1, 3, 3).clone(), persistent=False)
        self.register_buffer("weight", torch.randn(3, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(self.conv(x), self.blur, padding=1, groups=CHANNELS)
        return F.linear(y.mean(dim=(2, 3)), self.weight)


@net(
    conv=lambda: parametrizations.weight_norm(nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)),
    linear=lambda: parametrizations.spectral_norm(nn.Linear(CHANNELS, 3)),
)
def weight_normed(m: Any, x: Tensor) -> Tensor:
    """Weights computed in the graph: by weight norm and by spectral norm in eval mode."""
    return m.linear(F.relu(m.conv(x)).mean(dim=-1))


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised at every call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = weight / (weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, padding=1)


@net(
    latent=lambda: nn.Parameter(torch.randn(2, WIDTH)),
    make_linear=lambda: nn.Linear(WIDTH, WIDTH),
    make_conv=lambda: nn.Linear(2 * WIDTH, CHANNELS * 3),
)
def hypernetwork(m: Any, x: Tensor) -> Tensor:
    """A linear layer and a convolution whose weights are another layer's output."""
    y = F.linear(x, m.make_linear(m.latent), m.latent[:, 0])
    kernel = m.make_conv(m.latent.flatten()).view(CHANNELS, 1, 3)
    return F.conv1d(y.unsqueeze(1), kernel, padding=1)


@net(
    base=lambda: nn.Linear(WIDTH, WIDTH),
    merged=lambda: nn.Linear(WIDTH, WIDTH),
    down=lambda: nn.Linear(WIDTH, 2, bias=False),
    up=lambda: nn.Linear(2, WIDTH, bias=False),
)
def low_rank(m: Any, x: Tensor) -> Tensor:
    """LoRA: a layer plus a product of two narrow ones, and such a product merged at call time."""
    y = F.relu(m.base(x) + 0.5 * m.up(m.down(x)))
    weight = m.merged.weight + 0.5 * m.up.weight @ m.down.weight
    return F.linear(y, weight, m.merged.bias)


@net(conv=lambda: nn.Conv2d(CHANNELS, 6, 2, 2), linear=lambda: nn.Linear(6 * 9, 5))
def tied_autoencoder(m: Any, x: Tensor) -> Tensor:
    """A decoder that uses the encoder's weights transposed, linear and convolution."""
    y = F.relu(m.conv(x))
    code = m.linear(y.flatten(1))
    y = F.linear(code, m.linear.weight.t()).view(-1, 6, 3, 3)
    return F.conv_transpose2d(F.relu(y), m.conv.weight, stride=2)


@net(table=lambda: nn.Embedding(WORDS, WIDTH), project=lambda: nn.Linear(WIDTH, WIDTH))
def table_as_input(m: Any, words: Tensor) -> Tensor:
    """A whole table goes through a linear layer before words are looked up in it."""
    table = F.gelu(m.project(m.table.weight))
    looked_up = F.embedding(words, table)
    return looked_up @ m.table.weight.t() + m.table(words).sum(dim=-1, keepdim=True)


_ROWS = floats(4, WIDTH)
_IMAGE = floats(2, CHANNELS, 6, 6)


def _model(name: str, make: Callable[[], nn.Module], *tags: str) -> ZooModel:
    return zoo_model(name, make, _ROWS, tags={"weights", "linear", *tags})


MODELS: tuple[ZooModel, ...] = (
    _model("weight_of_two_names", TwoNames, "shared", "tied"),
    _model("weight_unused", unused),
    _model("weight_sliced", sliced, "shared", "matmul"),
    zoo_model("weight_in_buffer", BufferWeights, _IMAGE, tags={"weights", "conv", "depthwise"}),
    zoo_model("weight_normed", weight_normed, floats(2, CHANNELS, 8), tags={"weights", "conv"}),
    zoo_model("weight_standardised",
              lambda: nn.Sequential(Standardised(CHANNELS, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()),
              _IMAGE, tags={"weights", "conv"}),
    _model("weight_from_network", hypernetwork),
    _model("weight_low_rank", low_rank, "shared", "matmul"),
    zoo_model("weight_transposed", tied_autoencoder, _IMAGE,
              tags={"weights", "conv", "transposed", "shared"}),
    zoo_model("weight_is_activation", table_as_input, ids(WORDS, 2, 3),
              tags={"weights", "linear", "matmul", "shared"}),
)  # fmt: skip
