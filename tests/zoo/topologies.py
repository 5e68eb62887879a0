# SPDX-License-Identifier: Apache-2.0
"""Graph shapes that rewrites and sharing rules get wrong: each model is one such shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import ZooModel, floats, ids, zoo_model

CHANNELS = 4
WORDS = 20


def _conv() -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)


class ConvTwoNorms(nn.Module):
    """One convolution, called twice, each time under another batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv()
        self.first = nn.BatchNorm2d(CHANNELS)
        self.second = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.conv(F.relu(self.first(self.conv(x)))))


class ConvOutputTwoNorms(nn.Module):
    """One convolution, called once, its output under two batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv()
        self.first = nn.BatchNorm2d(CHANNELS)
        self.second = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.first(y) - self.second(y)


class ConvWithAndWithoutNorm(nn.Module):
    """Two convolutions of one weight (and two biases), only the first under a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = _conv()
        self.plain = _conv()
        self.plain.weight = self.normed.weight
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(F.relu(self.norm(self.normed(x))))


class ConvNormSkip(nn.Module):
    """`bn(y) + y` with `y` the output of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv()
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class LinearNormSkip(nn.Module):
    """`bn(y) + y` with `y` the output of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.norm(y) + y


class LinearNormTied(nn.Module):
    """A linear layer under a batch norm; its weight is also an embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.linear = nn.Linear(6, WORDS, bias=False)
        self.linear.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.norm(self.linear(self.embedding(words)))


class NormAlone(nn.Module):
    """Norms on the input, after a pool (nothing to fold into), and one without affine."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(CHANNELS)
        self.conv = _conv()
        self.bare = nn.BatchNorm2d(CHANNELS, affine=False)
        self.last = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.max_pool2d(self.bare(self.conv(self.first(x))), 2))


class SharedConv(nn.Module):
    """A Siamese pair: one convolution and norm over two inputs, compared."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(_conv(), nn.BatchNorm2d(CHANNELS), nn.ReLU())

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.tower(left) * self.tower(right)).mean(dim=(1, 2, 3))


class SharedLinear(nn.Module):
    """One linear layer applied three times in a row, its input also added (`x + x`)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.linear(x + x))
        return x


class ShiftedIds(nn.Module):
    """int32 arithmetic on identifiers before the lookup, and identifiers as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.linear = nn.Linear(6, 3)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        shifted = words + 2
        return self.linear(self.embedding(shifted)), shifted


class MultiOutput(nn.Module):
    """`split`, `chunk`, `max` with indices, `topk`; one output of each kind unused or returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        first, second, _ = self.linear(x).split([4, 4, 4], dim=-1)
        left, right = self.head(first + second).chunk(2, dim=-1)
        best, where = second.max(dim=-1)
        top = torch.topk(first, 2, dim=-1)
        return torch.cat([left, right, left], dim=-1), best, where, top.values


class OddOutputs(nn.Module):
    """An input returned, a tensor returned twice, a parameter returned, a nested structure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        y = self.linear(x)
        return {"pair": (y, y), "input": x, "bias": self.linear.bias}


class SharedDataMovement(nn.Module):
    """View-like operators and `cat` around convolutions: all must share one scale."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv()
        self.after = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(2, 3))
        flipped = y.flip(-1).roll(1, dims=2)
        both = torch.cat([y[:, :, 1:, :], flipped[:, :, 1:, :]], dim=1)
        return F.pad(self.after(both), (1, 1)).flatten(1).unsqueeze(-1).squeeze(-1)


class SelfConcatenation(nn.Module):
    """One tensor in several places of one operator: `cat([x, x])`, `x + x`, `x @ x^T`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.linear(torch.cat([x, x], dim=-1))
        return torch.matmul(doubled, doubled.transpose(-1, -2)) + (doubled * doubled).sum()


class Scalars(nn.Module):
    """Arithmetic with Python numbers on either side, and with a zero-dimensional buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("gain", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = 1 - self.linear(x * 2) / 3
        return 0.5 * (y + 1.0) ** 2 + self.gain * y - 4


class InPlace(nn.Module):
    """In-place activations and sums on tensors that are read again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv()
        self.other = _conv()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y += self.other(F.relu_(y))
        return y.mul_(0.5).relu_()


class MixedTypes(nn.Module):
    """float64 and bfloat16 parts inside a float32 model."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(6, 6)
        self.wide = nn.Linear(6, 6, dtype=torch.float64)
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.middle(x)
        return self.wide(y.double()), self.narrow(y.bfloat16())


class KeyCache(nn.Module):
    """A buffer written on every call, as a key-value cache is; results depend on the call."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)
        self.register_buffer("cache", torch.zeros(2, 8, 6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[:, 2:5] = self.project(x)
        self.calls.add_(1)
        return torch.matmul(x, self.cache.transpose(1, 2)) + self.calls


class Branches(nn.Module):
    """A data-dependent branch: its linear layers live in nested graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.yes = nn.Linear(6, 6)
        self.no = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.yes, self.no, (x,))


class NoGradRegion(nn.Module):
    """A part under `no_grad`, which export may keep as a nested graph."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.relu(self.frozen(x))
        return self.head(y)


_IMAGE = floats(2, CHANNELS, 6, 6)
_ROWS = floats(4, 6)

MODELS: tuple[ZooModel, ...] = (
    zoo_model("bn_conv_two_norms", ConvTwoNorms, _IMAGE, tags={"topology", "bn", "shared", "fold"}),
    zoo_model("bn_conv_output_two_norms", ConvOutputTwoNorms, _IMAGE,
              tags={"topology", "bn", "fold"}),
    zoo_model("bn_conv_with_and_without", ConvWithAndWithoutNorm, _IMAGE,
              tags={"topology", "bn", "shared", "tied", "fold"}),
    zoo_model("bn_conv_skip", ConvNormSkip, _IMAGE, tags={"topology", "bn", "residual", "fold"}),
    zoo_model("bn_linear_skip", LinearNormSkip, _ROWS,
              tags={"topology", "bn", "residual", "fold"}),
    zoo_model("bn_linear_tied", LinearNormTied, ids(WORDS, 4),
              tags={"topology", "bn", "tied", "embedding", "fold"}),
    zoo_model("bn_alone", NormAlone, _IMAGE, tags={"topology", "bn"}),
    zoo_model("shared_conv", SharedConv, _IMAGE, _IMAGE, tags={"topology", "bn", "shared"}),
    zoo_model("shared_linear", SharedLinear, _ROWS, tags={"topology", "shared"}),
    zoo_model("shifted_ids", ShiftedIds, ids(WORDS - 2, 4, dtype=torch.int32),
              tags={"topology", "embedding", "integer", "multi_output"}),
    zoo_model("multi_output", MultiOutput, _ROWS, tags={"topology", "multi_output", "cat"}),
    zoo_model("odd_outputs", OddOutputs, _ROWS, tags={"topology", "multi_output"}),
    zoo_model("data_movement", SharedDataMovement, _IMAGE, tags={"topology", "conv", "cat"}),
    zoo_model("self_concatenation", SelfConcatenation, _ROWS,
              tags={"topology", "cat", "matmul"}),
    zoo_model("scalars", Scalars, _ROWS, tags={"topology", "linear"}),
    zoo_model("in_place", InPlace, _IMAGE, tags={"topology", "conv", "inplace"}),
    zoo_model("mixed_types", MixedTypes, _ROWS, tags={"topology", "multi_output"}),
    zoo_model("key_cache", KeyCache, floats(2, 3, 6), tags={"topology", "mutation"},
              dynamic=False),
    zoo_model("branches", Branches, _ROWS, tags={"topology", "control_flow"}),
    zoo_model("no_grad_region", NoGradRegion, _ROWS, tags={"topology", "control_flow"}),
)  # fmt: skip
