# SPDX-License-Identifier: Apache-2.0
"""Histograms that are the same however their data was split, of a tensor or of each of its channels.

Bin `i` of `BINS` covers `[(i - BINS / 2) * 2**exponent, (i + 1 - BINS / 2) * 2**exponent)`. Scaling by a
power of two is exact in floating point and `floor(floor(v) / 2) == floor(v / 2)`, so widening the bins by
merging pairs gives exactly the counts that wider bins would have given from the start.

Channels have fewer bins, each with an exponent of its own, because a network has tens of thousands of
channels: with 1024 bins a channel takes 4 KB, and the channels of a ResNet-50 about as much as its weights.
At eight bits a bin is then a quarter of a step wide, or half of one where the largest value is just above a
power of two. The error that a search on them leaves was within 0.4 % of the one that a search on the values
themselves leaves, on average over channels with normal or Laplace distribution, and at most 7 % above it in
one channel. On 512 bins a third to all of what there is to gain at eight bits was lost, one to three per
cent.

Of a large tensor a fixed part is counted, because counting every value of an activation costs several times
what computing it does. Of each example, which is a row along the first dimension, the same positions are
taken: one out of each run of equally many, in the order of the dimensions, however the tensor lies in
memory. So what is counted does not depend on how examples are put into batches. The place inside each run
is scattered, because a fixed one would fall on the same column of each image.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qompose.errors import StatisticsError

BINS = 4096
_HALF = BINS // 2


class Histogram:
    """Counts of values in power-of-two bins around zero, with the exact minimum and maximum."""

    def __init__(self) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int64)
        self.exponent: int | None = None
        self.minimum = math.inf
        self.maximum = -math.inf

    @property
    def total(self) -> int:
        """Return how many values were counted."""
        return int(self.counts.sum())

    def add(
        self, x: Tensor, *, each: int = 1, extremes: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Count the elements of a finite float32 tensor of any shape.

        Args:
            each: for how many values each element stands.
            extremes: the least and the largest of those values; None looks for them in `x`.
        """
        low, high = (float(v) for v in extremes or torch.aminmax(x))
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self._widen(_exponent_for(max(-low, high)))
        assert self.exponent is not None
        bins = bins_of(x.flatten(), 2.0**-self.exponent)
        self.counts += each * torch.bincount(bins + _HALF, minlength=BINS).cpu()

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram, exactly as if its data had been counted here."""
        if other.exponent is None:
            return
        self._widen(other.exponent)
        assert self.exponent is not None
        self.counts += _with_wider_bins(other.counts, self.exponent - other.exponent)
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def centres(self) -> Tensor:
        """Return the middle of each bin, shape `(BINS,)`, in the units of the data."""
        width = 2.0 ** (self.exponent or 0)
        return (torch.arange(BINS, dtype=torch.float64) - _HALF + 0.5) * width

    def without_peak_at_zero(self) -> Histogram:
        """Return a copy in which the bin that begins at zero counts no more than the larger one beside it.

        The outputs of a rectifier are zero by the half, which any scale represents exactly.
        """
        found = Histogram()
        found.merge(self)
        beside = max(int(self.counts[_HALF - 1]), int(self.counts[_HALF + 1]), 1)
        found.counts[_HALF] = min(int(self.counts[_HALF]), beside)
        return found

    def _widen(self, exponent: int) -> None:
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            self.counts = _with_wider_bins(self.counts, exponent - self.exponent)
            self.exponent = exponent


def bins_of(x: Tensor, per_unit: float | Tensor) -> Tensor:
    """Return the bin of each value, int32, of which bin 0 begins at zero.

    Args:
        per_unit: how many bins cover one, a power of two: of the whole tensor, or shaped to broadcast.
    """
    bins = torch.floor(x * per_unit).to(torch.int32)
    # A tiny negative value may become -0.0 when it is scaled; it belongs below zero all the same.
    return torch.where((x < 0) & (bins == 0), -1, bins)


def _exponent_for(largest: float) -> int:
    """Return the least exponent whose bins reach beyond `largest`, or beyond 2**-100."""
    return math.frexp(max(largest, 2.0**-101))[1] - int(math.log2(_HALF))


def _with_wider_bins(counts: Tensor, doublings: int) -> Tensor:
    return _coarser(counts.unsqueeze(0), torch.tensor([doublings])).squeeze(0)


def _coarser(counts: Tensor, doublings: Tensor) -> Tensor:
    """Return the counts of some histograms, `(C, B)`, in bins that are so many times, `(C,)`, doubled."""
    rows = doublings.nonzero().flatten()
    if not len(rows):
        return counts
    half = counts.shape[1] // 2
    bins = (torch.arange(2 * half) - half) >> doublings[rows].clamp(max=62).unsqueeze(1)
    wider = torch.zeros_like(counts[rows]).scatter_add_(1, bins + half, counts[rows])
    return counts.index_copy(0, rows, wider)


CHANNEL_BINS = 1024
_CHANNEL_HALF = CHANNEL_BINS // 2
_AT_ONCE = 2**20
"""How many values are counted at once, so that the intermediate tensors are small."""


class OccupiedBins(NamedTuple):
    """What is in the histograms of some slices, in units of each slice's own bins; `(C, B)`, `(C,)`.

    Half of a bin's values stand at each of two places: if they all stood in the middle, steps of a whole
    number of bins would seem to fit them better than others do, by up to a quarter of the error. Behind
    the bins of a slice that has fewer than others stand places with a count of zero.
    """

    centres: Tensor
    counts: Tensor
    low: Tensor
    high: Tensor


class ChannelHistograms:
    """Counts of the values of each slice, with its exact minimum and maximum; of no slices at first.

    Bin `i` of a slice covers `[(i - CHANNEL_BINS / 2) * 2**e, (i + 1 - CHANNEL_BINS / 2) * 2**e)`, where `e`
    is the least exponent for which all its values are within bins, -109 at least.

    Attributes:
        counts: `(C, CHANNEL_BINS)`, int32; int64 once a slice has more values than that counts.
        exponents: `(C,)`, int64.
        low, high: `(C,)`, float32.
        values: how many values each slice had.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(0, CHANNEL_BINS, dtype=torch.int32)
        self.exponents = torch.zeros(0, dtype=torch.int64)
        self.low, self.high = torch.zeros(0), torch.zeros(0)
        self.values = 0

    def add(self, x: Tensor) -> None:
        """Count the elements of a finite float32 tensor, `(C, N)`, with at least one.

        Raises:
            StatisticsError: it has another number of slices than what was counted before.
        """
        found = ChannelHistograms()
        low, high = torch.aminmax(x, dim=1)
        exponents = _exponents_for(torch.maximum(-low, high))
        rows = max(1, _AT_ONCE // max(x.shape[1], CHANNEL_BINS))
        parts = zip(torch.split(x, rows), torch.split(exponents, rows), strict=True)
        found.values = x.shape[1]
        found.counts = torch.cat([_counted(*part).to(found.counts_dtype) for part in parts])
        found.exponents, found.low, found.high = exponents.cpu(), low.cpu(), high.cpu()
        self.merge(found)

    def merge(self, other: ChannelHistograms) -> None:
        """Add the counts of others, exactly as if their data had been counted here.

        Raises:
            StatisticsError: they are of another number of slices.
        """
        if not other.values:
            return
        if not self.values:
            vars(self).update(copy.deepcopy(vars(other)))
            return
        if self.low.shape != other.low.shape:
            raise StatisticsError(f"numbers of channels differ: {len(self.low)}, {len(other.low)}")
        exponents = torch.maximum(self.exponents, other.exponents)
        self.values += other.values
        counts = _coarser(self.counts.to(self.counts_dtype), exponents - self.exponents)
        self.counts = counts + _coarser(other.counts, exponents - other.exponents)
        self.exponents = exponents
        self.low = torch.minimum(self.low, other.low)
        self.high = torch.maximum(self.high, other.high)

    @property
    def counts_dtype(self) -> torch.dtype:
        """Return the smallest type that holds the number of values of a slice."""
        return torch.int32 if self.values <= torch.iinfo(torch.int32).max else torch.int64

    def occupied(self, slices: int) -> Iterator[OccupiedBins]:
        """Yield what is in the bins, for so many slices at once."""
        unit = _power_of_two(-self.exponents)
        parts = (torch.split(t, slices) for t in (self.counts, self.low * unit, self.high * unit))
        for counts, low, high in zip(*parts, strict=True):
            row, place = counts.nonzero(as_tuple=True)
            filled = counts > 0
            column = (filled.cumsum(1) - 1)[filled]
            shape = len(counts), int(filled.sum(1).max())
            start = torch.zeros(shape).index_put_((row, column), (place - _CHANNEL_HALF).float())
            halves = torch.zeros(shape).index_put_((row, column), counts[filled] / 2)
            centres = torch.stack([start + 0.25, start + 0.75], -1).flatten(1)
            centres = centres.clamp(low.unsqueeze(1), high.unsqueeze(1))
            yield OccupiedBins(centres, halves.repeat_interleave(2, 1), low, high)

    def in_units_of_data(self, values: Tensor) -> Tensor:
        """Return values, `(C,)`, that are in units of each slice's bins."""
        return values * _power_of_two(self.exponents)


def _exponents_for(largest: Tensor) -> Tensor:
    """Return the least exponents whose bins reach beyond `largest`, or beyond 2**-100; `(C,)`, int64."""
    return torch.frexp(largest.clamp(min=2.0**-101)).exponent.long() - int(math.log2(_CHANNEL_HALF))


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return exactly `2**exponents` in float32, for exponents of -126 to 127; `exp2` may be a bit off."""
    return ((exponents + 127) << 23).to(torch.int32).view(torch.float32)


def _counted(x: Tensor, exponents: Tensor) -> Tensor:
    """Return the counts of some slices, `(C, CHANNEL_BINS)`, on the CPU."""
    bins = bins_of(x, _power_of_two(-exponents).unsqueeze(1)) + _CHANNEL_HALF
    first = torch.arange(len(x), device=x.device).unsqueeze(1) * CHANNEL_BINS
    counts = torch.bincount((bins + first).flatten(), minlength=len(x) * CHANNEL_BINS)
    return counts.view(len(x), CHANNEL_BINS).cpu()


EXAMPLE = 4096
"""The most values of an example that are counted."""
_SCATTER = 2654435761  # 2**32 over the golden ratio: multiples of it are spread evenly modulo 2**32


def sample_of(x: Tensor) -> tuple[Tensor, int]:
    """Return values of a tensor of any shape, and for how many of its values each of them stands.

    A tensor of no or one dimension has one value in each example, and is taken whole.
    """
    example = x.shape[1:]
    if math.prod(example) <= EXAMPLE:
        return x, 1
    places, run = places_in(tuple(example), EXAMPLE, x.device)
    return taken(x, places), run


def taken(x: Tensor, places: tuple[Tensor, ...]) -> Tensor:
    """Return the values at some places of each example, `(N, P)` or `(N, P, ...)` for fewer dimensions."""
    index: tuple[Any, ...] = (slice(None), *places)
    return x[index]


@lru_cache(maxsize=1024)
def places_in(
    shape: tuple[int, ...], most: int, device: torch.device
) -> tuple[tuple[Tensor, ...], int]:
    """Return at most so many positions in an example, an index for each dimension, and a run's length."""
    size = math.prod(shape)
    run = -(-size // most)
    starts = torch.arange(0, size, run)
    number = torch.arange(len(starts))
    lengths = torch.clamp(size - starts, max=run)
    chosen = starts + (((number * _SCATTER) % 2**32) * lengths >> 32)
    return tuple(index.to(device) for index in torch.unravel_index(chosen, shape)), run
