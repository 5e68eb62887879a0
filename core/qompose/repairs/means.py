# SPDX-License-Identifier: Apache-2.0
"""Means of channels that do not depend on how the data was split, ordered or merged.

A sum of floats depends on the order. So values are rounded to a grid of 2**-24, and what is added are
integers, in any order with the same result. The rounding averages out far below any quantization step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.errors import StatisticsError
from qompose.graph import free_attribute, get_attribute, owner_of, tag, tag_of, value_of
from qompose.nested import nodes_in

_STEPS = 2.0**24
_ROOM = 2.0**62
"""What the sum of a channel may reach, in steps: the integers have 63 bits."""
_TAG = "means_of"
_PREFIX = "means_"


@dataclass(frozen=True, eq=False)
class Means:
    """The sum of each channel in steps of the grid, `(C,)` integers; how many values it is of.

    `largest` is the largest magnitude of them all.
    """

    total: Tensor
    count: int
    largest: float

    def merged(self, other: Means) -> Means:
        """Return the means of both.

        Raises:
            StatisticsError: they are not of the same channels.
        """
        if self.total.shape != other.total.shape:
            raise StatisticsError(
                f"means of {len(self.total)} channels and of {len(other.total)} are not of one tensor"
            )
        largest = max(self.largest, other.largest, key=lambda x: math.inf if math.isnan(x) else x)
        return Means(self.total + other.total, self.count + other.count, largest)

    def values(self) -> Tensor | str:
        """Return the mean of each channel, `(C,)` in float64, or the reason why they are not known."""
        if not self.count:
            return "it never saw data"
        if not self.largest * _STEPS * self.count < _ROOM:
            return f"its values reach {self.largest:g}, too far to be added exactly"
        return self.total.double() / (_STEPS * self.count)

    def same(self, other: Means) -> bool:
        """Tell whether both are the same to the bit."""
        facts = self.count == other.count and self.largest == other.largest
        return facts and torch.equal(self.total, other.total)


class MeanObserver(nn.Module):
    """Adds up each channel of what it sees.

    Args:
        channels: how many there are.
        dim: their dimension.
    """

    _is_impure = True  # nothing reads its result, and it is called for its effect
    total: Tensor
    count: Tensor
    largest: Tensor

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("total", torch.zeros(channels, dtype=torch.int64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x` and return it unchanged."""
        if x.numel():
            self._add(x.detach())
        return x

    def _add(self, x: Tensor) -> None:
        if self.total.device != x.device:
            self.to(x.device)
        inner = [d for d in range(x.dim()) if d != self.dim % x.dim()]
        exact = x.double()
        self.largest = torch.maximum(self.largest, exact.abs().amax())
        limit = _ROOM / _STEPS / max(1, x.numel())
        steps = (exact.nan_to_num(0.0).clamp(-limit, limit) * _STEPS).round_().to(torch.int64)
        self.total = self.total + (steps.sum(inner) if inner else steps)
        self.count = self.count + x.numel() // len(self.total)

    def means(self) -> Means:
        """Return what was seen."""
        return Means(self.total.cpu().clone(), int(self.count), float(self.largest))

    def take(self, means: Means) -> None:
        """Go by means that were found elsewhere.

        Raises:
            StatisticsError: they are of other channels.
        """
        if means.total.shape != self.total.shape:
            raise StatisticsError(
                f"means of {len(means.total)} channels, and has {len(self.total)}"
            )
        self.total = means.total.clone()
        self.count = torch.tensor(means.count)
        self.largest = torch.tensor(means.largest, dtype=torch.float64)


def watch_means(wanted: Iterable[tuple[Node, int]]) -> None:
    """Insert observers of means, each once, for values and the dimensions of their channels.

    A value whose number of channels is open has none. The observers read the values themselves, and nothing
    reads them: what other observers are asked does not change.
    """
    for value, dim in dict(wanted).items():
        channels = value_of(value).shape[dim]
        if not isinstance(channels, int):
            continue
        owner, graph = owner_of(value), value.graph
        name = free_attribute(owner, f"{_PREFIX}0")
        owner.add_module(name, MeanObserver(channels, dim))
        place = value
        while place.next.op == "placeholder":
            place = place.next
        with graph.inserting_after(place):
            node = graph.create_node("call_module", name, (value,), {}, name)
        node.meta["val"] = value_of(value)
        tag(node, **{_TAG: value.name})


def mean_observers(model: GraphModule) -> Iterator[tuple[Node, Node, MeanObserver]]:
    """Yield each node that observes means, the value that it observes, and its observer."""
    for node in list(nodes_in(model)):
        if node.op == "call_module" and tag_of(node, _TAG) is not None:
            value: Any = node.args[0]
            yield node, value, get_attribute(owner_of(node), str(node.target))
