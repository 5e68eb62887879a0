# SPDX-License-Identifier: Apache-2.0
"""The search for the clipping range with the least error on a histogram.

Each search knows the integers that there are: fewer of them ask for more clipping. One search serves a
whole tensor and many channels at once, which are a dimension in front of all others then: shapes below
have `...` for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from qompose.observers.histogram import ChannelHistograms, Histogram

_CANDIDATES = 64
_CHANNELS = 8
"""How many channels are searched at once: their candidates fit into a cache of 2 MB."""


@dataclass(frozen=True)
class Candidates:
    """Ways to quantize the occupied bins of a histogram, one in a row.

    Attributes:
        centres, counts: of the bins, `(B,)`, or `(..., 1, B)`.
        wanted: the integer nearest to each centre, `(..., K, B)`, clipped or not.
        scale: of each way, `(..., K, 1)`.
        lowest: the least integer of each way, `(..., K, 1)`; there are `steps` more.
    """

    centres: Tensor
    counts: Tensor
    wanted: Tensor
    scale: Tensor
    lowest: Tensor
    steps: int


Cost: TypeAlias = Callable[[Candidates], Tensor]
"""What each way to quantize a histogram costs, `(..., K)`."""


def power_error(power: float) -> Cost:
    """Return the sum of `|value - quantized value| ** power`."""

    def cost(c: Candidates) -> Tensor:
        levels = torch.clamp(c.wanted, c.lowest, c.lowest + c.steps)
        return ((levels * c.scale - c.centres).abs() ** power * c.counts).sum(-1)

    return cost


def divergence(c: Candidates) -> Tensor:
    """Return the Kullback-Leibler divergence of the clipped data from the quantized one.

    The rule of TensorRT's entropy calibration (S. Migacz, "8-bit Inference with TensorRT", 2017): values
    beyond the range are counted in its outermost bins, and of each integer the values in range
    are spread evenly over its bins. It is infinite where less than two bins are in range, of which any
    integers have the distribution.

    Args:
        c: ways to quantize bins that all have counts.
    """
    inside = c.wanted == c.wanted.clamp(c.lowest, c.lowest + c.steps)
    kept = c.counts * inside
    size = inside.shape[-1]
    bins = torch.arange(size).expand_as(inside)
    first = torch.where(inside, bins, size).amin(-1, keepdim=True)
    last = torch.where(inside, bins, -1).amax(-1, keepdim=True)
    below = (c.counts * (bins < first)).sum(-1, keepdim=True)
    above = (c.counts * (bins > last)).sum(-1, keepdim=True)
    clipped = kept + below * (bins == first) + above * (bins == last)
    level = (c.wanted - c.lowest).clamp(0, c.steps).long()
    sums = torch.zeros(*level.shape[:-1], c.steps + 1, dtype=kept.dtype)
    sizes = sums.scatter_add(-1, level, inside.to(kept.dtype)).clamp(min=1.0)
    even = (sums.scatter_add(-1, level, kept) / sizes).gather(-1, level)
    p = clipped / clipped.sum(-1, keepdim=True)
    q = even / kept.sum(-1, keepdim=True).clamp(min=1.0)
    terms = torch.where(inside, p * torch.log(p / q.clamp(min=2.0**-200)), 0.0)
    return terms.sum(-1).where((first < last).squeeze(-1), math.inf)


def best_range(
    histogram: Histogram, *, steps: int, cost: Cost, lowest: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the (minimum, maximum) whose `steps + 1` levels cost the least.

    Each end is shrunk in turn over `_CANDIDATES` fractions of the observed range, the whole range
    being one of them.

    Args:
        lowest: for a symmetric scheme, the least level relative to zero; both ends are then shrunk at
            once, and the step is the largest magnitude over half of `steps`.
    """
    low, high = (
        torch.tensor(end, dtype=torch.float64)
        for end in (min(histogram.minimum, 0.0), max(histogram.maximum, 0.0))
    )
    low, high = _Search(*_occupied(histogram), steps, cost, lowest).shrunk(low, high)
    return low.float(), high.float()


def best_ranges(
    histograms: ChannelHistograms, *, steps: int, cost: Cost, lowest: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return what `best_range` does, for each of some slices by itself; both of shape `(C,)`."""
    found = []
    for part in histograms.occupied(_CHANNELS):
        bins = part.centres.unsqueeze(1), part.counts.unsqueeze(1)
        search = _Search(*bins, steps, cost, lowest)
        found.append(search.shrunk(part.low.clamp(max=0.0), part.high.clamp(min=0.0)))
    lows, highs = (torch.cat(ends) for ends in zip(*found, strict=True))
    return histograms.in_units_of_data(lows), histograms.in_units_of_data(highs)


def percentile_range(histogram: Histogram, percentile: float) -> tuple[Tensor, Tensor]:
    """Return the range of which at most `100 - percentile` percent of all values are beyond each end."""
    centres, counts = _occupied(histogram)
    passed = counts.cumsum(0) / counts.sum()
    beyond = (100.0 - percentile) / 100.0
    first = int(torch.searchsorted(passed, torch.tensor(beyond, dtype=passed.dtype), right=True))
    last = int(torch.searchsorted(passed, torch.tensor(1.0 - beyond, dtype=passed.dtype)))
    half = 2.0 ** (histogram.exponent or 0) / 2
    low = centres[min(first, len(centres) - 1)] - half
    high = centres[min(last, len(centres) - 1)] + half
    ends = max(float(low), histogram.minimum), min(float(high), histogram.maximum)
    least, most = torch.tensor(ends, dtype=torch.float32)
    return least, most


def _occupied(histogram: Histogram) -> tuple[Tensor, Tensor]:
    """Return the middles of the bins that have counts, as far as there is data, and the counts."""
    occupied = histogram.counts > 0
    centres = histogram.centres()[occupied].clamp(histogram.minimum, histogram.maximum)
    return centres, histogram.counts[occupied].double()


@dataclass(frozen=True)
class _Search:
    """Bin centres and counts, and what a way to quantize them costs; see `best_range`."""

    centres: Tensor
    counts: Tensor
    steps: int
    cost: Cost
    lowest: int | None

    def shrunk(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of least cost within `low <= 0 <= high`; all of shape `(...)`."""
        fractions = torch.linspace(1.0, 0.25, _CANDIDATES, dtype=torch.float64).to(low.dtype)
        if self.lowest is not None:
            ends = fractions * torch.maximum(-low, high).unsqueeze(-1)
            return self._best(-ends, ends)
        for _ in range(2):
            highs = fractions * high.unsqueeze(-1)
            _, high = self._best(low.unsqueeze(-1).expand_as(highs), highs)
            lows = fractions * low.unsqueeze(-1)
            low, _ = self._best(lows, high.unsqueeze(-1).expand_as(lows))
        return low, high

    def _best(self, lows: Tensor, highs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pairs of ends, `(...)`, of the `(..., K)` that cost the least; of equals the first."""
        scale = ((highs - lows) / self.steps).clamp(min=2.0**-126).unsqueeze(-1)
        lowest = torch.round(lows.unsqueeze(-1) / scale)
        if self.lowest is not None:
            lowest = torch.full_like(lowest, self.lowest)
        wanted = torch.round(self.centres / scale)
        costs = self.cost(Candidates(self.centres, self.counts, wanted, scale, lowest, self.steps))
        chosen = torch.argmin(costs, -1, keepdim=True)
        return lows.gather(-1, chosen).squeeze(-1), highs.gather(-1, chosen).squeeze(-1)
