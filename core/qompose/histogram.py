# SPDX-License-Identifier: Apache-2.0
"""A histogram that is the same however its data was split.

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
        self.counts += _coarser(other.counts, self.exponent - other.exponent)
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
            self.counts = _coarser(self.counts, exponent - self.exponent)
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


def _coarser(counts: Tensor, doublings: int) -> Tensor:
    if doublings <= 0:
        return counts
    bins = (torch.arange(BINS) - _HALF) >> min(doublings, 62)
    return torch.zeros_like(counts).index_add_(0, bins + _HALF, counts)
