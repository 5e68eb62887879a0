# SPDX-License-Identifier: Apache-2.0
"""A histogram that is the same however its data was split, and the range search that reads it.

Bin `i` of `BINS` covers `[(i - BINS / 2) * 2**exponent, (i + 1 - BINS / 2) * 2**exponent)`. Scaling by a
power of two is exact in floating point and `floor(floor(v) / 2) == floor(v / 2)`, so widening the bins
by merging pairs gives exactly the counts that wider bins would have given from the start.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BINS = 4096
_HALF = BINS // 2
_CANDIDATES = 64


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

    def add(self, x: Tensor) -> None:
        """Count the elements of a finite float32 tensor of any shape."""
        low, high = (float(v) for v in torch.aminmax(x))
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self._widen(_exponent_for(max(-low, high)))
        assert self.exponent is not None
        bins = torch.floor(x.flatten() * 2.0**-self.exponent).to(torch.int32) + _HALF
        self.counts += torch.bincount(bins, minlength=BINS).cpu()

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram, exactly as if its data had been counted here."""
        if other.exponent is None:
            return
        self._widen(other.exponent)
        assert self.exponent is not None
        self.counts += _coarser(other.counts, self.exponent - other.exponent)
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def centres(self) -> Tensor:
        """Return the middle of each bin, shape `(BINS,)`, in the units of the data."""
        width = 2.0 ** (self.exponent or 0)
        return (torch.arange(BINS, dtype=torch.float64) - _HALF + 0.5) * width

    def _widen(self, exponent: int) -> None:
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            self.counts = _coarser(self.counts, exponent - self.exponent)
            self.exponent = exponent


def _exponent_for(largest: float) -> int:
    """Return the least exponent whose bins reach beyond `largest`, at least 2**-100."""
    return max(math.frexp(largest)[1], -100) - int(math.log2(_HALF))


def _coarser(counts: Tensor, doublings: int) -> Tensor:
    if doublings <= 0:
        return counts
    bins = (torch.arange(BINS) - _HALF) >> min(doublings, 62)
    return torch.zeros_like(counts).index_add_(0, bins + _HALF, counts)


def best_range(
    histogram: Histogram, *, steps: int, symmetric: bool, power: float
) -> tuple[Tensor, Tensor]:
    """Return the (minimum, maximum) whose `steps + 1` levels reproduce the data with the least error.

    The error is the sum of `|value - quantized value| ** power`. Each end is shrunk in turn over
    `_CANDIDATES` fractions of the observed range, the whole range being one of them. A symmetric range
    shrinks both ends at once.
    """
    low, high = min(histogram.minimum, 0.0), max(histogram.maximum, 0.0)
    if symmetric:
        high = max(-low, high)
        low = -high
    occupied = histogram.counts > 0
    centres = histogram.centres()[occupied].clamp(histogram.minimum, histogram.maximum)
    counts = histogram.counts[occupied].double()
    fractions = torch.linspace(1.0, 0.25, _CANDIDATES, dtype=torch.float64)
    for _ in range(2):
        lows, highs = fractions * low, fractions * high
        if symmetric:
            low, high = _best(centres, counts, lows, highs, steps, power)
            break
        _, high = _best(centres, counts, torch.full_like(highs, low), highs, steps, power)
        low, _ = _best(centres, counts, lows, torch.full_like(lows, high), steps, power)
    return torch.tensor(low, dtype=torch.float32), torch.tensor(high, dtype=torch.float32)


def _best(
    centres: Tensor, counts: Tensor, lows: Tensor, highs: Tensor, steps: int, power: float
) -> tuple[float, float]:
    scale = ((highs - lows) / steps).clamp(min=2.0**-126).unsqueeze(1)
    origin = torch.round(lows.unsqueeze(1) / scale)
    levels = torch.clamp(torch.round(centres / scale), origin, origin + steps)
    errors = ((levels * scale - centres).abs() ** power * counts).sum(1)
    chosen = int(torch.argmin(errors))
    return float(lows[chosen]), float(highs[chosen])
