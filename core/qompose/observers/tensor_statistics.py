# SPDX-License-Identifier: Apache-2.0
"""What was seen of one tensor, as data that merges exactly.

An observer gives what it has seen (`Observer.facts`) and takes what it needs (`Observer.take`), which may
come from another observer, another backend's or another process's. Nothing depends on how the data was
split, ordered or merged.

Rows of a tensor of channels are sampled so: a few positions of each example are candidates, and of all
different candidates those whose examples have the least hash are kept. The least of a union are the least
of what each part keeps. An example is hashed by some of its values, so that most of them cost hardly
anything; where two have the same hash, their rows are told apart by hashes of their own.

Means of channels are sums of integers, since a sum of floats depends on the order: values are rounded to a
grid of 2**-24. The rounding averages out far below any quantization step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.errors import StatisticsError
from qompose.observers.histogram import ChannelHistograms, Histogram, places_in, taken
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


ROWS, PER_EXAMPLE, VALUES = 1024, 32, 2**18
"""The most rows, those of one example, and the most values of all rows together."""
_HASHED = 256
"""The most values of an example that its hash is made of."""
_ODD = -7046029254386353131  # 2**64 over the golden ratio, as a signed number


class RowSample:
    """Rows of a tensor whose channels are along one dimension, and how many there were.

    New rows are put among the others a thousand at a time: sorting for each batch would cost more than
    all the rest.
    """

    def __init__(
        self, rows: Tensor | None = None, order: Tensor | None = None, seen: int = 0
    ) -> None:
        self.seen = seen
        self._kept = [] if rows is None or order is None else [(rows, order)]
        self._last: int | None = None
        """The greatest hash among as many rows as are kept: none above it will be."""

    @property
    def rows(self) -> Tensor:
        """Return the rows, `(N, C)`."""
        return self._settled()[0]

    @property
    def order(self) -> Tensor:
        """Return what the rows are ordered by, ascending, `(N, 3)`.

        That is the hash of the example, the place in it and the hash of the row.
        """
        return self._settled()[1]

    def add(self, x: Tensor, dim: int) -> None:
        """Take candidates from a float tensor of any shape with at least one element."""
        examples = _examples(x, dim)
        self.seen += examples[..., 0].numel()
        hashes = _hashes(_some_values(examples))
        if self._last is not None:  # as a rule no example of a batch is among the least
            better = hashes <= self._last
            examples, hashes = examples[better.to(x.device)], hashes[better]
        if len(examples):
            self._keep(*_candidates(examples, hashes))

    def merge(self, other: RowSample) -> None:
        """Add another sample, exactly as if its data had been seen here."""
        self.seen += other.seen
        if len(other.rows):
            self._keep(other.rows, other.order)

    def _keep(self, rows: Tensor, order: Tensor) -> None:
        room = 2 * _most(rows)
        if sum(len(part) for part, _ in self._kept) + len(rows) > room:
            self._settled()
        self._kept.append((rows, order))
        if len(rows) > room:
            self._settled()

    def _settled(self) -> tuple[Tensor, Tensor]:
        """Put all rows in order, once each, and let go of those beyond the most that are kept."""
        if not self._kept:
            return torch.empty(0, 0), torch.empty(0, 3, dtype=torch.int64)
        if len(self._kept) > 1 or self._last is None:
            device = self._kept[-1][0].device
            rows = torch.cat([part.to(device) for part, _ in self._kept])
            order = torch.cat([part for _, part in self._kept])
            ranked = _ranked(order)[: _most(rows)]
            self._kept = [(rows[ranked.to(device)], order[ranked])]
            self._last = int(order[ranked[-1], 0]) if len(ranked) == _most(rows) else None
        return self._kept[0]


def _ranked(order: Tensor) -> Tensor:
    """Return the numbers of different rows, `(N,)`, by all columns of their order, the first before all."""
    ranked = torch.arange(len(order))
    for column in reversed(range(order.shape[1])):
        ranked = ranked[torch.argsort(order[ranked, column], stable=True)]
    ordered = order[ranked]
    new = torch.ones(len(ranked), dtype=torch.bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    return ranked[new]


def _most(rows: Tensor) -> int:
    return min(ROWS, max(1, VALUES // rows.shape[1]))


def _examples(x: Tensor, dim: int) -> Tensor:
    """Return a tensor with its examples in the first dimension and its channels in the last, `(N, ..., C)`.

    One whose first dimension has the channels, or that has no other, is one example.
    """
    if x.dim() < 2 or dim % x.dim() == 0:
        return (x.movedim(dim, -1) if x.dim() else x.reshape(1)).unsqueeze(0)
    return x.movedim(dim, -1)


def _some_values(examples: Tensor) -> Tensor:
    """Return values at the same places of each example, `(N, P)` in float32."""
    if examples[0].numel() > _HASHED:
        places, _ = places_in(tuple(examples.shape[1:]), _HASHED, examples.device)
        examples = taken(examples, places)
    return examples.flatten(1).float()


def _candidates(examples: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """Return some rows of each example, `(R, C)` in float32, and what they are ordered by, `(R, 3)`."""
    between = tuple(examples.shape[1:-1])
    if between:
        places, _ = places_in(between, PER_EXAMPLE, examples.device)
        examples = taken(examples, places)
    else:
        examples = examples.unsqueeze(1)
    count, each = examples.shape[:2]
    rows = examples.flatten(0, 1).float()
    place = torch.arange(each).repeat(count)
    return rows, torch.stack([hashes.repeat_interleave(each), place, _hashes(rows)], dim=1)


@lru_cache(maxsize=256)
def _weights(size: int, device: torch.device) -> Tensor:
    """Return an odd number for each place: multiplying by it loses none of a value's 32 bits.

    They are scrambled, because of numbers in equal distances many sets have the same sum.
    """
    number = torch.arange(1, size + 1, device=device) * _ODD
    number = (number ^ (number >> 29)) * _ODD
    return (number >> 32 | 1).to(torch.int32)


def _hashes(x: Tensor) -> Tensor:
    """Return a hash of the bits of each row of float32 values, on the CPU; integers wrap around."""
    bits = (x + 0.0).contiguous().view(torch.int32)  # -0.0 is the same number as 0.0
    bits = bits ^ (bits >> 23)  # small whole numbers have nothing but zeros in their low bits
    mixed = (bits * _weights(x.shape[1], x.device)).sum(1, dtype=torch.int64)
    mixed = (mixed ^ (mixed >> 29)) * _ODD
    return (mixed ^ (mixed >> 32)).cpu()


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
