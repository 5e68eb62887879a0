# SPDX-License-Identifier: Apache-2.0
"""Weights that are not simply one layer's parameter: computed, cut, renamed, unused."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .entry import ZooModel, floats, ids, zoo_model

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


class Unused(nn.Module):
    """Parameters, a buffer and a submodule that `forward` never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Sliced(nn.Module):
    """`linear` on rows, on columns and on the transpose of one parameter; `addmm` on another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.4 * torch.randn(2 * WIDTH, WIDTH))
        self.other = nn.Parameter(0.4 * torch.randn(WIDTH, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.linear(x, self.weight[:WIDTH]))
        y = F.linear(F.linear(y, self.weight), self.weight.t()) + y @ self.weight[WIDTH:]
        return torch.addmm(self.bias, y, self.other)


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


class WeightNormed(nn.Module):
    """Weights computed in the graph: by weight norm and by spectral norm in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1))
        self.linear = parametrizations.spectral_norm(nn.Linear(CHANNELS, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu(self.conv(x)).mean(dim=-1))


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised at every call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = weight / (weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, padding=1)


class Hypernetwork(nn.Module):
    """A linear layer and a convolution whose weights are another layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(2, WIDTH))
        self.make_linear = nn.Linear(WIDTH, WIDTH)
        self.make_conv = nn.Linear(2 * WIDTH, CHANNELS * 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.make_linear(self.latent), self.latent[:, 0])
        kernel = self.make_conv(self.latent.flatten()).view(CHANNELS, 1, 3)
        return F.conv1d(y.unsqueeze(1), kernel, padding=1)


class LowRank(nn.Module):
    """LoRA: a layer plus a product of two narrow ones, and such a product merged at call time."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.base(x) + 0.5 * self.up(self.down(x)))
        weight = self.merged.weight + 0.5 * self.up.weight @ self.down.weight
        return F.linear(y, weight, self.merged.bias)


class TiedAutoencoder(nn.Module):
    """A decoder that uses the encoder's weights transposed, linear and convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, 6, 2, 2)
        self.linear = nn.Linear(6 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        code = self.linear(y.flatten(1))
        y = F.linear(code, self.linear.weight.t()).view(-1, 6, 3, 3)
        return F.conv_transpose2d(F.relu(y), self.conv.weight, stride=2)


class TableAsInput(nn.Module):
    """A whole table goes through a linear layer before words are looked up in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        table = F.gelu(self.project(self.table.weight))
        looked_up = F.embedding(words, table)
        return looked_up @ self.table.weight.t() + self.table(words).sum(dim=-1, keepdim=True)


_ROWS = floats(4, WIDTH)
_IMAGE = floats(2, CHANNELS, 6, 6)


def _model(name: str, make: type[nn.Module], *tags: str) -> ZooModel:
    return zoo_model(name, make, _ROWS, tags={"weights", "linear", *tags})


MODELS: tuple[ZooModel, ...] = (
    _model("weight_of_two_names", TwoNames, "shared", "tied"),
    _model("weight_unused", Unused),
    _model("weight_sliced", Sliced, "shared", "matmul"),
    zoo_model("weight_in_buffer", BufferWeights, _IMAGE, tags={"weights", "conv", "depthwise"}),
    zoo_model("weight_normed", WeightNormed, floats(2, CHANNELS, 8), tags={"weights", "conv"}),
    zoo_model("weight_standardised",
              lambda: nn.Sequential(Standardised(CHANNELS, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()),
              _IMAGE, tags={"weights", "conv"}),
    _model("weight_from_network", Hypernetwork),
    _model("weight_low_rank", LowRank, "shared", "matmul"),
    zoo_model("weight_transposed", TiedAutoencoder, _IMAGE,
              tags={"weights", "conv", "transposed", "shared"}),
    zoo_model("weight_is_activation", TableAsInput, ids(WORDS, 2, 3),
              tags={"weights", "linear", "matmul", "shared"}),
)  # fmt: skip
