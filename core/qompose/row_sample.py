# SPDX-License-Identifier: Apache-2.0
"""Some rows of a tensor of channels: the same ones however the data was split, ordered, or merged.

A few positions of each example are candidates, and of all different candidates those whose examples have
the least hash are kept. The least of a union are the least of what each part keeps, so samples merge
exactly. An example is hashed by some of its values, so that most of them cost hardly anything; where two
have the same hash, their rows are told apart by hashes of their own.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from qompose.sampling import places_in, taken

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
