# SPDX-License-Identifier: Apache-2.0
"""Screening in training: the same as `qompose.screening`, in tensors that stay where the model is.

Numbers of Python would make a step wait for its device, break a compiled graph in two, and be missing in a
state dict. NaN is no error here, since the loss shows it. It never reaches the statistics, and neither does
an overflow, after which a loop goes on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, distributed, nn

from qompose.screening import FAR, STEPS, Cleaned, Screen, extreme_of


class TensorScreen(nn.Module):
    """What was seen of one tensor: see `qompose.screening.Screen`, whose place it takes in an observer.

    Attributes:
        counts: how many values were masked, and how many were seen, int64 of shape `(2,)`.
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
        # A batch that overflowed, as those that a GradScaler skips, is no mask: masks are below zero.
        masked = torch.where((~usable & ~(x <= -extreme)).any(), 0, (~usable).sum())
        seen = torch.stack([bulk, far, masked]).float().to(self.sizes.device)
        if self.together:
            distributed.all_reduce(seen, distributed.ReduceOp.MAX)
        self.counts.add_(torch.stack([seen[2].long(), torch.full_like(self.counts[1], x.numel())]))
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
