# SPDX-License-Identifier: Apache-2.0
"""Rows of a tensor of channels, as a sample in which the rare large ones are never missed.

A row is the values of all channels at one place: the features of a token, the channels of a pixel. Rows are
sorted into strata by their largest magnitude, two to an octave. Of each stratum it is counted how many rows
there were, and of its different rows those of least hash are kept. So the few tokens that carry a text are
in the sample however many others there are, and every kept row knows for how many rows it stands.

Rows that make up an eighth of an example, such as those of a background, are kept apart, with how many there
were of each: in the sample a row that is there often is there once, or by chance not at all.

The least of a union are the least of what each part keeps, and the strata lie at the same places whatever
the data is. Nothing depends on how the data was split, ordered or merged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from qompose.observers.histogram import places_in, taken

STRATA = 16
"""How many strata are told apart, below the largest row; all smaller rows are in the last one."""
MOST, FEWEST, VALUES = 256, 8, 2**18
"""The most rows of a stratum: as many as have so many values together, within two bounds."""
PER_EXAMPLE = 1024
"""The most rows of one example that are looked at."""
_HASHED = 256
"""The most values of an example that its hash is made of."""
ODD = -7046029254386353131  # 2**64 over the golden ratio, as a signed number
_SMALLEST = 2.0**-126
_STRATUM, _ROW, _EXAMPLE = range(3)
_REPEATED, _FOR_EACH, _SPREAD = 10, 4, 0.45
"""Rows are repeated where each stands for ten, there are under four different ones for each channel, and they
spread over under so much of the dimensions that they could.

With four rows a channel the smallest eigenvalues of second moments are off by a factor of four (Marchenko and
Pastur). Rows that are few and differ are not odd: there is not much data, and held-out data tells of that.
Nor is a vocabulary that is read without positions: texts of characters spread over 0.59 of them,
of words over 0.74, one-hot codons over 0.98; padded texts over 0.03 to 0.34.
"""


class RowSample:
    """Rows of a tensor whose channels are along one dimension, and how many there were of each size.

    New rows are put among the others some hundred at a time: sorting for each batch would cost more than
    all the rest.

    Args:
        rows: `(N, C)`, float32.
        order: what they are ordered by, ascending, `(N, 3)`: stratum, hash of the row, hash of the example.
        counts: the number of rows of each stratum.
        frequent: the rows that make up much of an example, and how many there were.
    """

    def __init__(
        self,
        rows: Tensor | None = None,
        order: Tensor | None = None,
        counts: Mapping[int, int] | None = None,
        frequent: FrequentRows | None = None,
    ) -> None:
        self.frequent = frequent or FrequentRows()
        self._counts = Counter(counts or {})
        self._kept = [] if rows is None or order is None or not len(rows) else [(rows, order)]
        self._limits: dict[int, int] = {}
        """By stratum that is full, the greatest hash in it: none above that will be kept."""
        self._sorted_from: int | None = None
        """The lowest stratum when rows were put in order last."""

    @property
    def rows(self) -> Tensor:
        """Return the rows, `(N, C)`."""
        return self._settled()[0]

    @property
    def order(self) -> Tensor:
        """Return what the rows are ordered by, `(N, 3)`: stratum, hash of the row, hash of the example."""
        return self._settled()[1]

    @property
    def counts(self) -> dict[int, int]:
        """Return how many rows were seen of each stratum, in order."""
        found: Counter[int] = Counter()
        for stratum, count in self._counts.items():
            found[max(stratum, self._lowest)] += count
        return dict(sorted(found.items()))

    @property
    def seen(self) -> int:
        """Return how many rows there were."""
        return self._counts.total()

    @property
    def different(self) -> int:
        """Return how many of them differ: of strata that are full, by the part of all hashes that is kept."""
        if not len(order := self.order):
            return 0
        _, sizes = _counted(order[:, _STRATUM])
        last = order[sizes.cumsum(0) - 1, _ROW].double()
        full = sizes == _most(self.rows)
        found = torch.where(full, sizes / (last / 2.0**63), sizes.double())  # no hash is negative
        return min(self.seen, round(float(found.sum())))

    @property
    def repeated(self) -> bool:
        """Tell whether there are little but the same rows over and over, as of padding."""
        different, channels = self.different, self.rows.shape[1]
        few = different < min(self.seen / _REPEATED, channels * _FOR_EACH)
        return few and self.dimensions < _SPREAD * min(different, channels)

    @property
    def dimensions(self) -> float:
        """Return over how many dimensions rows spread: the participation ratio of their covariance."""
        rows = self.rows.double()
        weights = (self.weights / self.weights.sum()).to(rows.device)[:, None]
        around = (rows - (weights * rows).sum(0)) * weights.sqrt()
        # Either product has the same trace and sum of squares; a row may have many thousand channels.
        covariance = around.T @ around if len(rows) > rows.shape[1] else around @ around.T
        return float(covariance.trace().square() / covariance.square().sum().clamp(min=1e-300))

    @property
    def weights(self) -> Tensor:
        """Return for how many of the rows that were seen each kept one stands, `(N,)` in float64."""
        counts, strata = self.counts, self.order[:, _STRATUM].tolist()
        kept = Counter(strata)
        return torch.tensor([counts[s] / kept[s] for s in strata], dtype=torch.float64)

    @property
    def half(self) -> Tensor:
        """Return whether each row belongs to the half of all examples that judges, `(N,)`."""
        return self.order[:, _EXAMPLE] & 1 == 1

    @property
    def examples(self) -> int:
        """Return of how many different examples the rows are."""
        return len({*self.order[:, _EXAMPLE].tolist()})

    def add(self, x: Tensor, dim: int) -> None:
        """Take candidates from a finite tensor of any shape with at least one element."""
        examples = examples_of(x, dim)
        rows = _rows(examples)
        of_example = _hashes(_some_values(examples)).repeat_interleave(rows.shape[1])
        rows = rows.flatten(0, 1)
        strata = _strata(rows)
        values, counts = _counted(strata)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        hashes, strata = _hashes(rows), strata.clamp(min=self._lowest)
        self.frequent.add(rows, hashes.view(len(examples), -1))
        kept = self._may_stay(strata, hashes)
        if bool(kept.any()):
            order = torch.stack([strata, hashes, of_example], dim=1)[kept]
            self._keep(rows[kept.to(rows.device)], order)

    def merge(self, other: RowSample) -> None:
        """Add another sample, exactly as if its data had been seen here."""
        self._counts.update(other._counts)
        self.frequent.merge(other.frequent)
        if len(other.rows):
            self._keep(other.rows, other.order)

    @property
    def _lowest(self) -> int:
        return max(self._counts, default=0) - STRATA + 1

    def _may_stay(self, strata: Tensor, hashes: Tensor) -> Tensor:
        kept = torch.ones(len(strata), dtype=torch.bool)
        for stratum, limit in self._limits.items():
            kept &= (strata != stratum) | (hashes <= limit)
        return kept

    def _keep(self, rows: Tensor, order: Tensor) -> None:
        self._kept.append((rows, order))
        if sum(len(part) for part, _ in self._kept[1:]) > 4 * _most(rows):
            self._settled()

    def _settled(self) -> tuple[Tensor, Tensor]:
        """Put all rows in order, once each, and let go of those beyond the most of a stratum."""
        if not self._kept:
            return torch.empty(0, 0), torch.empty(0, 3, dtype=torch.int64)
        lowest = self._lowest
        if len(self._kept) > 1 or self._sorted_from != lowest:
            device = self._kept[-1][0].device
            rows = torch.cat([part.to(device) for part, _ in self._kept])
            order = torch.cat([part for _, part in self._kept])
            order[:, _STRATUM].clamp_(min=lowest)
            ranked = _ranked(order, _most(rows))
            self._kept = [(rows[ranked.to(device)], order[ranked])]
            self._limits = _limits(order[ranked], _most(rows))
            self._sorted_from = lowest
        return self._kept[0]


class FrequentRows:
    """Rows that make up an eighth of an example or more, and how many of them there were.

    Of more than `MOST_FREQUENT` different ones those of least hash are kept.

    Args:
        rows: `(K, C)`, float32.
        numbers: the hash of each row, ascending, and how many there were, `(K, 2)`, int64.
    """

    def __init__(self, rows: Tensor | None = None, numbers: Tensor | None = None) -> None:
        self.rows = torch.empty(0, 0) if rows is None else rows
        self.numbers = torch.empty(0, 2, dtype=torch.int64) if numbers is None else numbers

    def add(self, rows: Tensor, hashes: Tensor) -> None:
        """Take rows, `(N * R, C)`, of examples whose rows have these hashes, `(N, R)`."""
        number, size = hashes.shape
        most = -(-size // _PARTS_OF_EXAMPLE)
        if size < _FEWEST_ROWS:
            return
        ordered, places = hashes.sort(dim=1, stable=True)
        if not bool((ordered[:, most - 1 :] == ordered[:, : size - most + 1]).any()):
            return
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        starts = first.flatten().nonzero().flatten()
        counts = torch.diff(starts, append=torch.tensor([number * size]))
        starts, counts = starts[counts >= most], counts[counts >= most]
        at = (places + size * torch.arange(number)[:, None]).flatten()[starts]
        self._take(rows[at.to(rows.device)], torch.stack([ordered.flatten()[starts], counts], 1))

    def merge(self, other: FrequentRows) -> None:
        """Add other rows, exactly as if their data had been seen here."""
        if len(other.rows):
            self._take(other.rows, other.numbers)

    def _take(self, rows: Tensor, numbers: Tensor) -> None:
        if len(self.rows):
            rows = torch.cat([self.rows.to(rows.device), rows])
            numbers = torch.cat([self.numbers, numbers])
        hashes, same = torch.unique(numbers[:, 0], return_inverse=True)
        counts = torch.zeros_like(hashes).index_add_(0, same, numbers[:, 1])
        at = torch.full_like(hashes, len(rows)).scatter_reduce_(
            0, same, torch.arange(len(rows)), "amin"
        )
        kept = at[:MOST_FREQUENT]
        self.rows = rows[kept.to(rows.device)]
        self.numbers = torch.stack([hashes, counts], 1)[:MOST_FREQUENT]


MOST_FREQUENT = 64
_PARTS_OF_EXAMPLE, _FEWEST_ROWS = 8, 16
"""A row is frequent in an example if it makes up this part of it; of an example with fewer rows none is."""


def example_hashes(x: Tensor, dim: int) -> Tensor:
    """Return a hash of each example of a tensor whose channels are along `dim`, `(N,)` on the CPU."""
    if not x.numel():
        return torch.zeros(len(examples_of(x, dim)), dtype=torch.int64)
    return _hashes(_some_values(examples_of(x, dim)))


def _ranked(order: Tensor, most: int) -> Tensor:
    """Return the numbers of different rows, `(N,)`, in their order, at most so many of each stratum.

    Of equal rows of several examples the first example is taken.
    """
    ranked = torch.arange(len(order))
    for column in reversed(range(order.shape[1])):
        ranked = ranked[torch.argsort(order[ranked, column], stable=True)]
    ordered = order[ranked]
    new = torch.ones(len(ranked), dtype=torch.bool)
    new[1:] = (ordered[1:, :_EXAMPLE] != ordered[:-1, :_EXAMPLE]).any(1)
    ranked, strata = ranked[new], ordered[new, _STRATUM]
    _, sizes = _counted(strata)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return ranked[torch.arange(len(ranked)) - starts < most]


def _limits(order: Tensor, most: int) -> dict[int, int]:
    strata, sizes = _counted(order[:, _STRATUM])
    last = order[sizes.cumsum(0) - 1, _ROW]
    full = (sizes == most).tolist()
    pairs = zip(strata.tolist(), last.tolist(), full, strict=True)
    return {stratum: limit for stratum, limit, is_full in pairs if is_full}


def _most(rows: Tensor) -> int:
    return min(MOST, max(FEWEST, VALUES // rows.shape[1]))


def _strata(rows: Tensor) -> Tensor:
    """Return the number of half octaves of the largest magnitude of each row, `(N,)` on the CPU."""
    found = torch.frexp(rows.abs().amax(1).clamp(min=_SMALLEST).cpu())
    return 2 * found.exponent.long() + (found.mantissa >= math.sqrt(0.5))


def _counted(strata: Tensor) -> tuple[Tensor, Tensor]:
    """Return the strata that there are, ascending, and how often each of them occurs."""
    if not len(strata):
        return strata, strata
    first = int(strata.min())
    counts = torch.bincount(strata - first)
    there = counts.nonzero().flatten()
    return there + first, counts[there]


def examples_of(x: Tensor, dim: int) -> Tensor:
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


def _rows(examples: Tensor) -> Tensor:
    """Return rows at the same places of each example, `(N, R, C)` in float32."""
    between = tuple(examples.shape[1:-1])
    if math.prod(between) > PER_EXAMPLE:
        places, _ = places_in(between, PER_EXAMPLE, examples.device)
        examples = taken(examples, places)
    return examples.reshape(len(examples), -1, examples.shape[-1]).float()


@lru_cache(maxsize=256)
def _weights(size: int, device: torch.device) -> Tensor:
    """Return an odd number for each place: multiplying by it loses none of a value's 32 bits.

    They are scrambled, because of numbers in equal distances many sets have the same sum.
    """
    number = torch.arange(1, size + 1, device=device) * ODD
    number = (number ^ (number >> 29)) * ODD
    return (number >> 32 | 1).to(torch.int32)


def _hashes(x: Tensor) -> Tensor:
    """Return a hash of the bits of each row of float32 values, on the CPU; integers wrap around."""
    bits = (x + 0.0).contiguous().view(torch.int32)  # -0.0 is the same number as 0.0
    bits = bits ^ (bits >> 23)  # small whole numbers have nothing but zeros in their low bits
    return scrambled((bits * _weights(x.shape[1], x.device)).sum(1, dtype=torch.int64)).cpu()


def scrambled(numbers: Tensor) -> Tensor:
    """Return int64 numbers whose low bits depend on all bits of those that are given."""
    mixed = (numbers ^ (numbers >> 29)) * ODD
    return mixed ^ (mixed >> 32)
