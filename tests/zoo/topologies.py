# SPDX-License-Identifier: Apache-2.0
"""Graph shapes that rewrites and sharing rules get wrong: each model is one such shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import ZooModel, floats, ids, net, zoo_model

CHANNELS = 4
WORDS = 20


def _conv() -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)


@net(conv=_conv, first=lambda: nn.BatchNorm2d(CHANNELS), second=lambda: nn.BatchNorm2d(CHANNELS))
def conv_two_norms(m: Any, x: Tensor) -> Tensor:
    """One convolution, called twice, each time under another batch norm."""
    return m.second(m.conv(F.relu(m.first(m.conv(x)))))


@net(conv=_conv, first=lambda: nn.BatchNorm2d(CHANNELS), second=lambda: nn.BatchNorm2d(CHANNELS))
def conv_output_two_norms(m: Any, x: Tensor) -> Tensor:
    """One convolution, called once, its output under two batch norms."""
    y = m.conv(x)
    return m.first(y) - m.second(y)


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


@net(conv=_conv, norm=lambda: nn.BatchNorm2d(CHANNELS))
def conv_norm_skip(m: Any, x: Tensor) -> Tensor:
    """`bn(y) + y` with `y` the output of a convolution."""
    y = m.conv(x)
    return m.norm(y) + y


@net(linear=lambda: nn.Linear(6, 6), norm=lambda: nn.BatchNorm1d(6))
def linear_norm_skip(m: Any, x: Tensor) -> Tensor:
    """`bn(y) + y` with `y` the output of a linear layer."""
    y = m.linear(x)
    return m.norm(y) + y


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


@net(
    first=lambda: nn.BatchNorm2d(CHANNELS),
    conv=_conv,
    bare=lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    last=lambda: nn.BatchNorm2d(CHANNELS),
)
def norm_alone(m: Any, x: Tensor) -> Tensor:
    """Norms on the input, after a pool (nothing to fold into), and one without affine."""
    return m.last(F.max_pool2d(m.bare(m.conv(m.first(x))), 2))


@net(tower=lambda: nn.Sequential(_conv(), nn.BatchNorm2d(CHANNELS), nn.ReLU()))
def shared_conv(m: Any, left: Tensor, right: Tensor) -> Tensor:
    """A Siamese pair: one convolution and norm over two inputs, compared."""
    return (m.tower(left) * m.tower(right)).mean(dim=(1, 2, 3))


@net(linear=lambda: nn.Linear(6, 6))
def shared_linear(m: Any, x: Tensor) -> Tensor:
    """One linear layer applied three times in a row, its input also added (`x + x`)."""
    for _ in range(3):
        x = torch.tanh(m.linear(x + x))
    return x


@net(embedding=lambda: nn.Embedding(WORDS, 6), linear=lambda: nn.Linear(6, 3))
def shifted_ids(m: Any, words: Tensor) -> tuple[Tensor, Tensor]:
    """int32 arithmetic on identifiers before the lookup, and identifiers as an output."""
    shifted = words + 2
    return m.linear(m.embedding(shifted)), shifted


@net(linear=lambda: nn.Linear(6, 12), head=lambda: nn.Linear(4, 4))
def multi_output(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`split`, `chunk`, `max` with indices, `topk`; one output of each kind unused or returned."""
    first, second, _ = m.linear(x).split([4, 4, 4], dim=-1)
    left, right = m.head(first + second).chunk(2, dim=-1)
    best, where = second.max(dim=-1)
    top = torch.topk(first, 2, dim=-1)
    return torch.cat([left, right, left], dim=-1), best, where, top.values


@net(linear=lambda: nn.Linear(6, 6))
def odd_outputs(m: Any, x: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """An input returned, a tensor returned twice, a parameter returned, a nested structure."""
    y = m.linear(x)
    return {"pair": (y, y), "input": x, "bias": m.linear.bias}


@net(conv=_conv, after=lambda: nn.Conv2d(2 * CHANNELS, CHANNELS, 1))
def shared_data_movement(m: Any, x: Tensor) -> Tensor:
    """View-like operators and `cat` around convolutions: all must share one scale."""
    y = m.conv(x.transpose(2, 3))
    flipped = y.flip(-1).roll(1, dims=2)
    both = torch.cat([y[:, :, 1:, :], flipped[:, :, 1:, :]], dim=1)
    return F.pad(m.after(both), (1, 1)).flatten(1).unsqueeze(-1).squeeze(-1)


@net(linear=lambda: nn.Linear(12, 6))
def self_concatenation(m: Any, x: Tensor) -> Tensor:
    """One tensor in several places of one operator: `cat([x, x])`, `x + x`, `x @ x^T`."""
    doubled = m.linear(torch.cat([x, x], dim=-1))
    return torch.matmul(doubled, doubled.transpose(-1, -2)) + (doubled * doubled).sum()


@net(linear=lambda: nn.Linear(6, 6), gain=lambda: nn.Buffer(torch.tensor(0.5)))
def scalars(m: Any, x: Tensor) -> Tensor:
    """Arithmetic with Python numbers on either side, and with a zero-dimensional buffer."""
    y = 1 - m.linear(x * 2) / 3
    return 0.5 * (y + 1.0) ** 2 + m.gain * y - 4


@net(conv=_conv, other=_conv)
def in_place(m: Any, x: Tensor) -> Tensor:
    """In-place activations and sums on tensors that are read again."""
    y = m.conv(x)
    y += m.other(F.relu_(y))
    return y.mul_(0.5).relu_()


@net(
    middle=lambda: nn.Linear(6, 6),
    wide=lambda: nn.Linear(6, 6, dtype=torch.float64),
    narrow=lambda: nn.Linear(6, 6, dtype=torch.bfloat16),
)
def mixed_types(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """float64 and bfloat16 parts inside a float32 model."""
    y = m.middle(x)
    return m.wide(y.double()), m.narrow(y.bfloat16())


@net(
    project=lambda: nn.Linear(6, 6),
    cache=lambda: nn.Buffer(torch.zeros(2, 8, 6)),
    calls=lambda: nn.Buffer(torch.zeros((), dtype=torch.int64)),
)
def key_cache(m: Any, x: Tensor) -> Tensor:
    """A buffer written on every call, as a key-value cache is; results depend on the call."""
    m.cache[:, 2:5] = m.project(x)
    m.calls.add_(1)
    return torch.matmul(x, m.cache.transpose(1, 2)) + m.calls


@net(yes=lambda: nn.Linear(6, 6), no=lambda: nn.Linear(6, 6))
def branches(m: Any, x: Tensor) -> Tensor:
    """A data-dependent branch: its linear layers live in nested graphs."""
    return torch.cond(x.sum() > 0, m.yes, m.no, (x,))


@net(frozen=lambda: nn.Linear(6, 6), head=lambda: nn.Linear(6, 2))
def no_grad_region(m: Any, x: Tensor) -> Tensor:
    """A part under `no_grad`, which export may keep as a nested graph."""
    with torch.no_grad():
        y = F.relu(m.frozen(x))
    return m.head(y)


_IMAGE = floats(2, CHANNELS, 6, 6)
_ROWS = floats(4, 6)

MODELS: tuple[ZooModel, ...] = (
    zoo_model("bn_conv_two_norms", conv_two_norms, _IMAGE, tags={"topology", "bn", "shared", "fold"}),
    zoo_model("bn_conv_output_two_norms", conv_output_two_norms, _IMAGE, tags={"topology", "bn", "fold"}),
    zoo_model("bn_conv_with_and_without", ConvWithAndWithoutNorm, _IMAGE,
              tags={"topology", "bn", "shared", "tied", "fold"}),
    zoo_model("bn_conv_skip", conv_norm_skip, _IMAGE, tags={"topology", "bn", "residual", "fold"}),
    zoo_model("bn_linear_skip", linear_norm_skip, _ROWS, tags={"topology", "bn", "residual", "fold"}),
    zoo_model("bn_linear_tied", LinearNormTied, ids(WORDS, 4),
              tags={"topology", "bn", "tied", "embedding", "fold"}),
    zoo_model("bn_alone", norm_alone, _IMAGE, tags={"topology", "bn"}),
    zoo_model("shared_conv", shared_conv, _IMAGE, _IMAGE, tags={"topology", "bn", "shared"}),
    zoo_model("shared_linear", shared_linear, _ROWS, tags={"topology", "shared"}),
    zoo_model("shifted_ids", shifted_ids, ids(WORDS - 2, 4, dtype=torch.int32),
              tags={"topology", "embedding", "integer", "multi_output"}),
    zoo_model("multi_output", multi_output, _ROWS, tags={"topology", "multi_output", "cat"}),
    zoo_model("odd_outputs", odd_outputs, _ROWS, tags={"topology", "multi_output"}),
    zoo_model("data_movement", shared_data_movement, _IMAGE, tags={"topology", "conv", "cat"}),
    zoo_model("self_concatenation", self_concatenation, _ROWS, tags={"topology", "cat", "matmul"}),
    zoo_model("scalars", scalars, _ROWS, tags={"topology", "linear"}),
    zoo_model("in_place", in_place, _IMAGE, tags={"topology", "conv", "inplace"}),
    zoo_model("mixed_types", mixed_types, _ROWS, tags={"topology", "multi_output"}),
    zoo_model("key_cache", key_cache, floats(2, 3, 6), tags={"topology", "mutation"}, dynamic=False),
    zoo_model("branches", branches, _ROWS, tags={"topology", "control_flow"}),
    zoo_model("no_grad_region", no_grad_region, _ROWS, tags={"topology", "control_flow"}),
)  # fmt: skip
