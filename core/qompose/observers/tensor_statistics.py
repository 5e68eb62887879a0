# SPDX-License-Identifier: Apache-2.0
"""What was seen of one tensor, as data that merges exactly.

An observer gives what it has seen (`Observer.facts`) and takes what it needs (`Observer.take`), which may
come from another observer, another backend's or another process's. Nothing depends on how the data was
split, ordered or merged.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from qompose.errors import StatisticsError
from qompose.observers.histogram import ChannelHistograms, Histogram
from qompose.observers.row_sample import RowSample
from qompose.observers.value_screening import Screen


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
                f"{len(self.low)} channels along dimension {self.axis} and {len(other.low)} "
                f"along dimension {other.axis} do not belong to the same tensor"
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
                    f"{part.averaged} depends on the order of batches, so its statistics cannot be "
                    'merged; use range="minmax" or range="histogram"'
                )
        if self.set_range != other.set_range:
            raise StatisticsError(
                f"the set ranges differ (None: not set): {self.set_range} and {other.set_range}"
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
            raise StatisticsError(f"no ranges were recorded for the slices along dimension {axis}")
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
    raise AssertionError(f"unknown kind of histogram {name!r}")
