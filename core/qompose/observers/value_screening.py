# SPDX-License-Identifier: Apache-2.0
"""NaN and mask values, which are kept out of the statistics of calibration and training.

Attention masks are added as -inf, as the smallest float, or as a number like -10000. An observer that
takes such a number for data spends all its steps on the distance to it, and every other value becomes one
integer; one that skips it erases the mask. So the tensor is named instead, and stays in float. In calibration
NaN is an error.

In training the counts are tensors that stay where the model is: numbers of Python would make a step wait for
its device, break a compiled graph in two, and be missing in a state dict. NaN is not an error there: the loss
shows it. It never reaches the statistics, and neither does an overflow, after which a loop goes on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

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
            raise CalibrationError(f"{subject} contains NaN")
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
            return f"{self.masked} infinite or almost infinite value{'s' * (self.masked != 1)}"
        if self.bulk >= 0 and self.far > -math.inf and -self.far > STEPS * self.bulk:
            return (
                f"a mask: with values of {self.far:g} and below in range, all others (at most "
                f"{self.bulk:g}) would map to one integer"
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


class TensorScreen(nn.Module):
    """What was seen of one tensor: see `Screen`, whose place it takes in an observer.

    Attributes:
        counts: how many values were masked, and how many were seen that are not NaN, int64 of shape `(2,)`.
        sizes: `bulk` and `far`, float32 of shape `(2,)`.
    """

    counts: Tensor
    sizes: Tensor
    together = False
    """Whether processes are to agree on what they saw. Each counts its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("sizes", torch.tensor([-1.0, -math.inf]))

    def clean(self, x: Tensor, subject: str, ends: tuple[Tensor, Tensor] | None = None) -> Cleaned:
        """Return `x` with mask values and NaN replaced by zero, and the extremes of that."""
        extreme = extreme_of(x.dtype)
        usable = x.abs() < extreme
        kept = torch.where(usable, x, 0.0)
        low, high = torch.aminmax(kept)
        bulk = torch.where(kept > FAR, kept.abs(), -1.0).amax()
        far = torch.where(kept <= FAR, kept, -math.inf).amax()
        # A batch that overflowed, as those that a GradScaler skips, is not a mask: masks are below zero.
        masked = torch.where((~usable & ~(x <= -extreme)).any(), 0, (~usable).sum())
        seen = torch.stack([bulk, far, masked]).float().to(self.sizes.device)
        if self.together:
            distributed.all_reduce(seen, distributed.ReduceOp.MAX)
        values = (x == x).sum().to(self.counts)  # without NaN
        self.counts.add_(torch.stack([seen[2].long(), values]))
        self.sizes.copy_(torch.maximum(self.sizes, seen[:2]))
        return Cleaned(kept, low.float(), high.float())

    def holds_mask(self) -> Tensor:
        """Return whether conversion will leave the tensor in float because of a mask, shape `()`."""
        bulk, far = self.sizes
        beyond = (bulk >= 0) & torch.isfinite(far) & (-far > STEPS * bulk)
        return torch.logical_or(self.counts[0] > 0, beyond)

    def snapshot(self) -> Screen:
        """Return the same in numbers."""
        screen = Screen()
        screen.masked, screen.values = (int(count) for count in self.counts)
        screen.bulk, screen.far = (float(size) for size in self.sizes)
        return screen

    def take(self, screen: Screen) -> None:
        """Go by what another screen has seen."""
        self.counts.copy_(torch.tensor([screen.masked, screen.values]))
        self.sizes.copy_(torch.tensor([screen.bulk, screen.far]))


FAR_FROM_TYPICAL = 1000.0
"""How many times the median a tensor's scale or magnitude is that has an outlier, or a mask."""
