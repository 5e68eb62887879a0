# SPDX-License-Identifier: Apache-2.0
"""What was seen of one tensor, as data that merges exactly.

An observer gives what it has seen (`Observer.facts`) and takes what it needs (`Observer.take`), which may
come from another observer, another backend's or another process's. Nothing depends on how the data was
split, ordered or merged.

Means of channels are sums of integers, since a sum of floats depends on the order: values are rounded to a
grid of 2**-24. The rounding averages out far below any quantization step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.errors import StatisticsError
from qompose.observers.histogram import ChannelHistograms, Histogram
from qompose.observers.row_sample import RowSample
from qompose.observers.value_screening import Screen
from qompose.program.control_flow import nodes_in
from qompose.program.graph import free_attribute, get_attribute, owner_of, value_of
from qompose.program.meta import tag, tag_of


@dataclass(frozen=True)
class Channels:
    """The exact range of each slice along a dimension, two tensors of shape `(C,)`.

    `histograms` are counts of the values of each slice, None where no observer kept them.
    """

    axis: int
    low: Tensor
    high: Tensor
    histograms: ChannelHistograms | None = None

    def merged(self, other: Channels) -> Channels:
        """Return the range of both, and their histograms if both have them.

        Raises:
            StatisticsError: they are not of the same slices.
        """
        if (self.axis, self.low.shape) != (other.axis, other.low.shape):
            raise StatisticsError(
                f"{len(self.low)} channels of dimension {self.axis} and {len(other.low)} of dimension "
                f"{other.axis} are not of one tensor"
            )
        return Channels(
            self.axis,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
            _merge_one("histograms", self.histograms, other.histograms),
        )


@dataclass(frozen=True)
class Facts:
    """What was seen of a tensor; None is what no observer of it kept.

    Attributes:
        minimum, maximum: exact, or averages where `averaged` names the observer that computed them.
        histogram: counts of values, whose own minimum and maximum are those.
        channels: ranges of slices, and their histograms.
        sample: some rows.
        screen: what was seen of mask values, and how many values there were.
        averaged: the class that depends on the order of batches, "" where nothing does.
        set_range: bounds that somebody chose, which take the place of any estimate.
    """

    minimum: float | None = None
    maximum: float | None = None
    histogram: Histogram | None = None
    channels: Channels | None = None
    sample: RowSample | None = None
    screen: Screen | None = None
    averaged: str = ""
    set_range: tuple[float, float] | None = None

    def merged(self, other: Facts) -> Facts:
        """Return the facts of both, as if all had been seen by one observer; what only one has is lost.

        Raises:
            StatisticsError: one depends on the order of batches, or they are not of the same tensor.
        """
        for part in (self, other):
            if part.averaged:
                raise StatisticsError(
                    f"a {part.averaged} depends on the order of batches, so two of them cannot be merged; "
                    'use range="minmax" or range="histogram"'
                )
        if self.set_range != other.set_range:
            raise StatisticsError(
                f"one has the range {self.set_range}, the other {other.set_range}"
            )
        both: dict[str, Any] = {
            f.name: _merge_one(f.name, getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
            if f.name not in ("averaged", "set_range")
        }
        return replace(self, **both)

    @property
    def values(self) -> int:
        """Return how many values were seen."""
        return 0 if self.screen is None else self.screen.values

    def channel_ranges(self, axis: int) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value of each slice along a dimension, each `(C,)`.

        Bounds that somebody chose for the tensor are those of each slice.

        Raises:
            StatisticsError: no observer of those slices kept them.
        """
        seen = self.channels
        if seen is None or seen.axis != axis:
            raise StatisticsError(f"no ranges of the slices along dimension {axis}")
        if self.set_range is None:
            return seen.low, seen.high
        low, high = self.set_range
        return torch.full_like(seen.low, low), torch.full_like(seen.high, high)


def _merge_one(name: str, one: Any, other: Any) -> Any:
    if one is None or other is None:
        return None
    if isinstance(one, float) and isinstance(other, float):
        return min(one, other) if name == "minimum" else max(one, other)
    if isinstance(one, Channels) and isinstance(other, Channels):
        return one.merged(other)
    for kind in (Histogram, ChannelHistograms, RowSample, Screen):
        if isinstance(one, kind) and isinstance(other, kind):
            result: Any = kind()
            result.merge(one)
            result.merge(other)
            return result
    raise AssertionError(f"{name} is of no known kind")


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
    asked = True
    """Whether somebody wants it by word, and not only where it is known."""
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


def watch_means(wanted: Iterable[tuple[Node, int, bool]]) -> None:
    """Insert observers of means, each once, for values and the dimensions of their channels.

    What somebody asked for by word, the last of the three, has to be in statistics too.
    A value whose number of channels is open has none. The observers read the values themselves, and nothing
    reads them: what other observers are asked does not change.
    """
    places: dict[Node, tuple[int, bool]] = {}
    for value, dim, asked in wanted:
        places[value] = dim, asked or (value in places and places[value][1])
    for value, (dim, asked) in places.items():
        channels = value_of(value).shape[dim]
        if not isinstance(channels, int):
            continue
        owner, graph = owner_of(value), value.graph
        name = free_attribute(owner, f"{_PREFIX}0")
        observer = MeanObserver(channels, dim)
        observer.asked = asked
        owner.add_module(name, observer)
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
