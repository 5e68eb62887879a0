# SPDX-License-Identifier: Apache-2.0
"""Some rows of a tensor of channels: the same ones however the data was split, ordered, or merged.

A few positions of each example are candidates, and of all candidates those whose examples have the least
hash are kept. The least of a union are the least of what each part keeps, so samples merge exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qompose.sampling import places_in, taken

ROWS, PER_EXAMPLE, VALUES = 1024, 32, 2**18
"""The most rows, those of one example, and the most values of all rows together."""
_ODD = -7046029254386353131  # 2**64 over the golden ratio, as a signed number


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass
class RowSample:
    """Rows of a tensor whose channels are along one dimension, shape `(N, C)`, and how many there were.

    Attributes:
        order: for each row the hash of its example and its place there, `(N, 2)`, ascending.
    """

    rows: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    order: Tensor = field(default_factory=lambda: _empty().reshape(0, 2))
    seen: int = 0

    def add(self, x: Tensor, dim: int) -> None:
        """Take candidates from a float tensor of any shape with at least one element."""
        channels = x.shape[dim] if x.dim() else 1
        self.seen += x.numel() // channels
        found, order = _candidates(x, dim)
        self._keep(found, order)

    def merge(self, other: RowSample) -> None:
        """Add another sample, exactly as if its data had been seen here."""
        self.seen += other.seen
        if len(other.rows):
            self._keep(other.rows, other.order)

    def _keep(self, rows: Tensor, order: Tensor) -> None:
        most = min(ROWS, max(1, VALUES // rows.shape[1]))
        if len(self.rows) >= most:  # as a rule nothing of a batch is among the least
            better = order[:, 0] <= self.order[-1, 0]
            rows, order = rows[better], order[better]
        if not len(rows):
            return
        if len(self.rows):
            rows, order = (
                torch.cat([self.rows.to(rows.device), rows]),
                torch.cat([self.order, order]),
            )
        by_place = torch.argsort(order[:, 1], stable=True)
        ranked = by_place[torch.argsort(order[by_place, 0], stable=True)][:most]
        self.rows, self.order = rows[ranked], order[ranked]


def _candidates(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return rows and their order: some of each example, which is a row along the first dimension."""
    if x.dim() < 2 or dim % x.dim() == 0:
        x = (x.movedim(dim, -1) if x.dim() else x.reshape(1)).unsqueeze(0)
    else:
        x = x.movedim(dim, -1)
    between = tuple(x.shape[1:-1])
    if between:
        places, _ = places_in(between, PER_EXAMPLE, x.device)
        x = taken(x, places)
    else:
        x = x.unsqueeze(1)
    x = x.float()
    hashes = _hashes(x.flatten(1))
    place = torch.arange(x.shape[1])
    order = torch.stack([hashes.repeat_interleave(x.shape[1]), place.repeat(x.shape[0])], dim=1)
    return x.flatten(0, 1), order


def _hashes(x: Tensor) -> Tensor:
    """Return a hash of the bits of each row of float32 values, on the CPU; integers wrap around."""
    bits = (x + 0.0).contiguous().view(torch.int32).long()  # -0.0 is the same number as 0.0
    weights = torch.arange(1, x.shape[1] + 1, device=x.device) * _ODD | 1
    mixed = ((bits ^ (bits << 17)) * weights).sum(1)
    mixed = (mixed ^ (mixed >> 29)) * _ODD
    return (mixed ^ (mixed >> 32)).cpu()
