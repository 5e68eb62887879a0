# SPDX-License-Identifier: Apache-2.0
"""Networks of operators that chance put together: what is lowered computes what the converted model does.

The zoo has what people build. Here values are read twice, along other dimensions, moved, cut and joined in
ways that nobody thought of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.core.toy import export, sqnr
from tests.sampling import at_once

MOST_VALUES = 50_000
STEPS = range(4, 15)
CLOSE = 40.0
"""Decibels. Both round to the same integers but for ties, of which a small result may have one."""
SHAPES: dict[str, Callable[[random.Random], tuple[int, ...]]] = {
    "images": lambda chance: (2, chance.choice([3, 4, 8, 16]), chance.choice([7, 8, 12]), 9),
    "tokens": lambda chance: (2, chance.choice([5, 8, 12]), chance.choice([8, 16, 32])),
    "rows": lambda chance: (3, chance.choice([16, 24, 64])),
}


@dataclass(frozen=True)
class Step:
    """An operator or a layer, and which of the values so far it reads."""

    compute: Callable[..., Any]
    reads: tuple[int, ...]


class Network(nn.Module):
    """Steps one after another; the results are the last and some other value."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.chance = random.Random(seed)
        shape = SHAPES[self.chance.choice([*SHAPES])](self.chance)
        self.layers, self.steps = nn.ModuleList(), list[Step]()
        values = [torch.randn(shape)]
        length = self.chance.choice(STEPS)
        while len(self.steps) < length:
            self._extend(values)
        self.input, self.results = values[0], (-1, self.chance.randrange(1, len(values)))
        self.eval()

    def _extend(self, values: list[Tensor]) -> None:
        """Add a step, unless chance took one that does not fit."""
        at = len(values) - 1 if self.chance.random() < 0.75 else self.chance.randrange(len(values))
        kind = self.chance.choices([*KINDS], [*KINDS.values()])[0] if self.steps else product
        try:
            step = Step(*kind(self.chance, values, at))
            if isinstance(step.compute, nn.Module):
                step.compute.eval()
            value = step.compute(*(values[read] for read in step.reads))
        except (RuntimeError, ValueError, IndexError):
            return
        if 0 < value.numel() < MOST_VALUES and bool(value.isfinite().all()):
            values.append(value.detach())
            self.steps.append(step)
            if isinstance(step.compute, nn.Module):
                self.layers.append(step.compute)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for step in self.steps:
            values.append(step.compute(*(values[read] for read in step.reads)))
        return tuple(values[result] for result in self.results)


Drawn = tuple[Callable[..., Any], tuple[int, ...]]


def product(chance: random.Random, values: Sequence[Tensor], at: int) -> Drawn:
    x, out, bias = values[at], chance.choice([4, 8, 10, 16]), chance.random() < 0.8
    size, stride = chance.choice([1, 2, 3, (3, 1)]), chance.choice([1, 1, 2])
    channels, groups = x.shape[1], chance.choice([1, 1, 2, x.shape[1]])
    kinds: dict[int, list[Callable[[], nn.Module]]] = {
        4: [
            lambda: nn.Conv2d(channels, out, size, stride, chance.choice([0, 1, 2]), bias=bias),
            lambda: nn.Conv2d(channels, channels, 3, padding="same", groups=groups, bias=bias),
            lambda: nn.Conv2d(channels, out, 3, dilation=2, padding=1, padding_mode="reflect"),
            lambda: nn.ConvTranspose2d(channels, out, 3, stride, output_padding=stride - 1),
        ],
        3: [lambda: nn.Conv1d(channels, out, 3, stride, padding=1, bias=bias)],
    }
    linear = [lambda: nn.Linear(x.shape[-1], out, bias=bias)]
    return chance.choice(kinds.get(x.dim(), []) + linear)(), (at,)


def norm(chance: random.Random, values: Sequence[Tensor], at: int) -> Drawn:
    x = values[at]
    if chance.random() < 0.3:
        return nn.LayerNorm(x.shape[-1]), (at,)
    made: Any = (nn.BatchNorm2d if x.dim() == 4 else nn.BatchNorm1d)(x.shape[1])
    made.running_mean.normal_()
    made.running_var.uniform_(0.5, 2)
    return made, (at,)


def function(chance: random.Random, values: Sequence[Tensor], at: int) -> Drawn:
    factor = chance.choice([0.5, -1.25, 3.0])
    names = "relu relu6 hardswish hardsigmoid silu gelu leaky_relu elu mish softplus tanh sigmoid"
    others: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.clamp(-0.5, 1.5), lambda x: functional.hardtanh(x, -2, 2), lambda x: x * x.sigmoid(),
        lambda x: x * factor, lambda x: x + factor, lambda x: factor - x, torch.neg, torch.abs,
        lambda x: functional.relu(x.clone(), inplace=True), lambda x: x.softmax(-1),
        lambda x: x.where(x > 0, 0.1 * x),
    ]  # fmt: skip
    return chance.choice([*(getattr(functional, name) for name in names.split()), *others]), (at,)


def pool(chance: random.Random, values: Sequence[Tensor], at: int) -> Drawn:
    size, stride, ceil = chance.choice([2, 3]), chance.choice([1, 2]), chance.random() < 0.3
    counted = chance.random() < 0.5
    pools: list[Callable[[Tensor], Tensor]] = [
        lambda x: functional.max_pool2d(x, size, stride, 1, ceil_mode=ceil),
        lambda x: functional.avg_pool2d(x, size, stride, 1, ceil, counted),
        lambda x: functional.adaptive_avg_pool2d(x, (2, 3)),
        lambda x: x.mean((2, 3)), lambda x: x.amax((2, 3), keepdim=True), lambda x: x.mean(1),
    ]  # fmt: skip
    return chance.choice(pools), (at,)


def sum_of_two(chance: random.Random, values: Sequence[Tensor], at: int) -> Drawn:
    fitting = [number for number, value in enumerate(values) if value.shape == values[at].shape]
    operators: list[Callable[[Tensor, Tensor], Tensor]] = [
        torch.add, lambda a, b: a - 0.5 * b, torch.mul, torch.maximum, lambda a, b: functional.relu(a + b),
        lambda a, b: torch.add(a, b, alpha=0.5), lambda a, b: functional.relu6(a + b),
    ]  # fmt: skip
    return chance.choice(operators), (at, chance.choice(fitting))


def join(chance: random.Random, values: Sequence[Tensor], at: int) -> Drawn:
    of_rank = [number for number, value in enumerate(values) if value.dim() == values[at].dim()]
    dim = chance.randrange(values[at].dim())
    return (lambda *parts: torch.cat(parts, dim)), (at, chance.choice(of_rank))


def move(chance: random.Random, values: Sequence[Tensor], at: int) -> Drawn:
    rank, dim = values[at].dim(), chance.randrange(values[at].dim())
    order = chance.sample(range(rank), rank)
    moves: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.permute(order), lambda x: x.permute(order).contiguous(), lambda x: x.flatten(1),
        lambda x: x.narrow(dim, 1, x.shape[dim] - 1), lambda x: x.select(dim, 0), lambda x: x[..., ::2],
        lambda x: x.chunk(2, dim)[-1], lambda x: x.flip(dim), lambda x: x.roll(1, dim),
        lambda x: functional.pad(x, (1, 2), value=0.7), lambda x: x.unsqueeze(1),
        lambda x: functional.interpolate(x, scale_factor=2.0),
        lambda x: functional.pixel_shuffle(x, 2), lambda x: x.flatten(2).transpose(1, 2),
        lambda x: torch.bmm(x, x.transpose(1, 2)), lambda x: x.index_select(dim, torch.tensor([1, 0, 0])),
    ]  # fmt: skip
    return chance.choice(moves), (at,)


def again(chance: random.Random, values: Sequence[Tensor], at: int) -> Drawn:
    """Two products of one tensor, of which one reads it along another dimension if it can."""
    first, second = (product(chance, values, at)[0] for _ in range(2))
    return Both(first, second), (at,)


class Both(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x).flatten(1), self.second(x).flatten(1)], 1)


KINDS: dict[Callable[..., Drawn], int] = {
    product: 8, norm: 4, function: 5, pool: 3, sum_of_two: 4, join: 2, move: 6, again: 2,
}  # fmt: skip
"""What a step may be, and how often it is."""


@pytest.mark.parametrize("seed", at_once(range(8), *range(4)))
@pytest.mark.parametrize("backend", ["x86_inductor", "xnnpack"])
def test_what_is_lowered_computes_what_is_converted(backend: str, seed: int) -> None:
    network = Network(seed)
    prepared = qompose.prepare_pt2e(export(network, network.input), backend)
    batches = [torch.randn(network.input.shape) for _ in range(3)]
    qompose.calibrate(prepared, batches, progress=False)
    converted = qompose.convert_pt2e(prepared)
    lowered = qompose.lower(converted)
    qompose.assert_lowered(lowered, 0.01)
    for x in (*batches[:1], torch.randn(network.input.shape)):
        pairs = zip(converted(x), lowered(x), strict=True)
        assert all(sqnr(wanted, found) > CLOSE for wanted, found in pairs)
