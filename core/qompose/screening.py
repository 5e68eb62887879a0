# SPDX-License-Identifier: Apache-2.0
"""Screening: what must not reach an observer's statistics. NaN is an error; mask values are set aside.

Attention masks are added as -inf, as the smallest float, or as a number like -10000. An observer that
takes such a number for data spends all its steps on the distance to it, and every other value becomes one
integer; one that skips it erases the mask. So the tensor is named instead, and stays in float.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qompose.errors import CalibrationError

FAR = -1000.0
"""No finite mask in use is closer to zero; -10000 and -1e9 are common."""
STEPS = 256


class Cleaned(NamedTuple):
    """A tensor without mask values, and the least and the largest value of it, in float32."""

    values: Tensor
    low: Tensor
    high: Tensor


class Screen:
    """What was seen of one tensor, whatever the way its range is estimated.

    All of it is exact and does not depend on how the data is split into batches.

    Attributes:
        masked: how many values were infinite or near the largest of their dtype.
        values: how many values were seen, masked ones included.
        bulk: the largest magnitude of the values above -1000; -1 until one is seen.
        far: the one closest to zero of the values below; -inf until one is seen.
    """

    def __init__(self) -> None:
        self.masked = 0
        self.values = 0
        self.bulk = -1.0
        self.far = -math.inf

    def clean(self, x: Tensor, subject: str, ends: tuple[Tensor, Tensor] | None = None) -> Cleaned:
        """Return `x` with mask values replaced by zero, which is in every range anyway; else `x` itself.

        Args:
            ends: the least and the largest value of `x`, where somebody has looked already.

        Raises:
            CalibrationError: there is a NaN; the message names `subject`.
        """
        low, high = torch.aminmax(x) if ends is None else ends
        smallest, largest = float(low), float(high)
        if math.isnan(smallest) or math.isnan(largest):
            raise CalibrationError(f"{subject} holds NaN")
        self.values += x.numel()
        extreme = extreme_of(x.dtype)
        if smallest <= -extreme or largest >= extreme:
            self.masked += int((x.abs() >= extreme).sum())
            x = unmasked(x)
            low, high = torch.aminmax(x)
        self._note(x, float(low), float(high))
        return Cleaned(x, low.float(), high.float())

    def merge(self, other: Screen) -> None:
        """Add what another saw, exactly as if it had been seen here."""
        self.masked += other.masked
        self.values += other.values
        self.bulk, self.far = max(self.bulk, other.bulk), max(self.far, other.far)

    def _note(self, x: Tensor, smallest: float, largest: float) -> None:
        if smallest > FAR:
            self.bulk = max(self.bulk, -smallest, largest)
            return
        far = x <= FAR
        self.far = max(self.far, float(x[far].amax()))
        if not bool(far.all()):
            self.bulk = max(self.bulk, float(x[~far].abs().amax()))

    @property
    def mask(self) -> str | None:
        """Return what makes the tensor one with a mask in it, None where nothing does."""
        if self.masked:
            return f"{self.masked} mask values (infinite, or near the largest float)"
        if self.bulk >= 0 and self.far > -math.inf and -self.far > STEPS * self.bulk:
            return (
                f"a mask: values of {self.far:g} and below, beside which the others, "
                f"of at most {self.bulk:g}, would be one integer"
            )
        return None


def slice_extremes(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of each slice along a dimension, in float32, shape `(C,)`."""
    others = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    if not others:
        return x.float(), x.float()
    return x.amin(others).float(), x.amax(others).float()


def unmasked(x: Tensor) -> Tensor:
    """Return a tensor without NaN with its mask values, if there are any, replaced by zero."""
    return x.masked_fill(x.abs() >= extreme_of(x.dtype), 0.0)


def extreme_of(dtype: torch.dtype) -> float:
    """Return the least magnitude that is a mask value: masks are summed with scores, and are not exact.

    float16 has so little room that a quarter of its largest value occurs as data.
    """
    if dtype is torch.float16:
        return 0.9 * torch.finfo(dtype).max
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max) / 4
