# SPDX-License-Identifier: Apache-2.0
"""What is known of the values that a product reads: sampled rows, or second moments of all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qompose.algorithms.interface import NotChanged, NotKnown
from qompose.observers.auto_range import in_unit, unit_of


class Inputs:
    """What is known of the values that a product reads, as its weight sees them."""

    @property
    def number(self) -> int:
        """Return how many rows there are."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """Return how many columns each group has."""
        raise NotImplementedError

    def halves(self) -> tuple[Inputs, Inputs]:
        """Return what is known of both halves of the examples."""
        raise NotImplementedError

    def moments(self, columns: slice) -> Tensor:
        """Return second moments of some columns of each group, `(groups, c, c)`, in a tensor of their own."""
        return self.symmetric(columns).whole()

    def symmetric(self, columns: slice) -> Symmetric:
        """Return second moments of some columns of each group, in as little memory as they take."""
        raise NotImplementedError

    def errors(self, differences: Sequence[Tensor]) -> list[float]:
        """Return the squared errors of products whose weights are off by `(groups, outputs, K)` each."""
        raise NotImplementedError


@dataclass(frozen=True)
class InputRows(Inputs):
    """Rows that a product reads, as its weight sees them.

    Attributes:
        rows: multiplied by `unit`, `(groups, N, C / groups)`.
        weights: for how many rows each stands, over the squared size of what the product makes of it, `(N,)`
            (`qompose.observers.auto_range`).
        half: which of them are of the examples of the second half, `(N,)`.
        noise: the mean square of what the rounding of a value adds to it, in the unit of rows.
        unit: a power of two (`qompose.observers.auto_range.unit_of`).
    """

    rows: Tensor
    weights: Tensor
    half: Tensor
    noise: float
    unit: float = 1.0

    @property
    def number(self) -> int:
        """Return how many rows there are."""
        return self.rows.shape[1]

    @property
    def channels(self) -> int:
        """Return how many channels each group has."""
        return self.rows.shape[2]

    def halves(self) -> tuple[InputRows, InputRows]:
        """Return the rows of both halves of the examples."""
        first, second = (
            replace(self, rows=self.rows[:, which], weights=self.weights[which])
            for which in (~self.half, self.half)
        )
        return first, second

    def mean(self) -> Tensor:
        """Return the weighted mean, in the unit of rows, `(groups, 1, C / groups)`."""
        return (self.rows * self.weights[:, None]).sum(1, keepdim=True) / self.weights.sum()

    def shifted(self, mean: Tensor) -> InputRows:
        """Return rows that a mean in their unit is taken from, `(groups, 1, C / groups)`."""
        return replace(self, rows=self.rows - mean)

    def symmetric(self, columns: slice) -> Symmetric:
        rows = self.rows[..., columns]
        found = (rows * self.weights[:, None]).transpose(1, 2) @ rows
        found.diagonal(dim1=1, dim2=2).add_(self.noise * float(self.weights.sum()))
        return Symmetric.of(found)

    def error(self, difference: Tensor) -> float:
        """Return the squared error of a product whose weight is off by `(groups, outputs, C / groups)`."""
        difference, back = _in_unit_of_its_own(difference)
        off = self.rows @ difference.transpose(1, 2)
        of_rows = (off.square().sum((0, 2)) * self.weights).sum()
        of_noise = self.noise * self.weights.sum() * difference.square().sum()
        return float(of_rows + of_noise) * back

    def errors(self, differences: Sequence[Tensor]) -> list[float]:
        return [self.error(difference) for difference in differences]


@dataclass(frozen=True)
class InputMoments(Inputs):
    """Second moments of the columns that a product reads, as its weight sees them; like `InputRows`.

    They are in a unit that keeps them near 1, and held as they were added up: a copy would be as large.

    Attributes:
        total: sums of products over the rows of each half of the examples, `(2, groups, K, K)` in float64.
        count: how many rows each half has, `(2,)`.
        noise: the mean square of what the rounding of a value adds to it.
        unit: what the sums are divided by, `()`.
        factors: what columns are multiplied by, `(groups, K)` in float64; None for 1.
        limits: what columns are multiplied by in that unit, `(K,)`; None for 1.
    """

    total: Tensor
    count: Tensor
    noise: float
    unit: Tensor
    factors: Tensor | None = None
    limits: Tensor | None = None

    @property
    def number(self) -> int:
        """Return how many rows were seen."""
        return int(self.count.sum())

    @property
    def channels(self) -> int:
        """Return how many columns each group has."""
        return self.total.shape[-1]

    def halves(self) -> tuple[InputMoments, InputMoments]:
        """Return those of both halves of the examples."""
        first, second = (
            replace(self, total=self.total[at : at + 1], count=self.count[at : at + 1])
            for at in (0, 1)
        )
        return first, second

    def moments(self, columns: slice) -> Tensor:
        """Return the second moments of some columns of each group, `(groups, c, c)`."""
        inside = range(self.channels)[columns]
        found = self.total.new_empty(
            self.total.shape[1], len(inside), len(inside), dtype=torch.float32
        )
        for first, last in in_stripes(len(inside)):
            rows = inside[first:last]
            found[:, first:last] = self._of(slice(rows.start, rows.stop), columns)
        found.diagonal(dim1=1, dim2=2).add_(self._of_noise())
        return found

    def symmetric(self, columns: slice) -> Symmetric:
        inside, noise, stripes = range(self.channels)[columns], self._of_noise(), {}
        for first, last in in_stripes(len(inside)):
            rows, before = inside[first:last], inside[:last]
            part = self._of(slice(rows.start, rows.stop), slice(before.start, before.stop))
            part.diagonal(offset=first, dim1=1, dim2=2).add_(noise)
            stripes[first, last] = part
        return Symmetric(stripes)

    def powers(self) -> Tensor:
        """Return the second moment of each column, `(groups, K)`: the diagonal, without the matrix."""
        parts = [slice(first, last) for first, last in in_stripes(self.channels)]
        found = [self._of(part, part).diagonal(dim1=1, dim2=2) for part in parts]
        return torch.cat(found, dim=1).add_(self._of_noise())

    def _of_noise(self) -> float:
        return self.noise * float(self.count.sum())

    def _of(self, rows: slice, columns: slice) -> Tensor:
        """Return some rows of the moments of columns, `(groups, r, c)`."""
        total = self.total[:, :, rows, columns]
        if self.factors is not None:
            total = total * (self.factors[:, rows, None] * self.factors[:, None, columns])
        halves = (total / self.unit).to(torch.float32)
        if self.limits is not None:
            halves.mul_(self.limits[rows, None]).mul_(self.limits[columns])
        return halves.sum(0)

    def error(self, difference: Tensor) -> float:
        """Return the squared error of a product whose weight is off by `(groups, outputs, K)`."""
        return self.errors([difference])[0]

    def errors(self, differences: Sequence[Tensor]) -> list[float]:
        moments, found = self.moments(slice(None)), []
        for difference in differences:
            off, back = _in_unit_of_its_own(difference)
            found.append(float(((off @ moments) * off).sum()) * back)
        return found


def _in_unit_of_its_own(difference: Tensor) -> tuple[Tensor, float]:
    """Return what weights are off by in a unit, and by what a square in it is multiplied to be without."""
    unit = unit_of(difference)
    return in_unit(difference, unit).float(), unit**-2


def times_smaller(before: float, after: float) -> float:
    """Return how many times smaller an error has become: infinity where none is left, 1 where none was.

    Raises:
        NotChanged: an error is not finite.
    """
    if not (math.isfinite(before) and math.isfinite(after)):
        raise NotChanged("the squared error of its outputs is not finite")
    if after > 0:
        return before / after
    return math.inf if before > 0 else 1.0


_STRIPES = 16


def in_stripes(width: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each part of a matrix and the one behind its last.

    What is made of a matrix part by part takes little more memory than the result.
    """
    size = max(1, -(-width // _STRIPES))
    for first in range(0, width, size):
        yield first, min(first + size, width)


@dataclass(frozen=True)
class Symmetric:
    """Symmetric matrices, `(groups, K, K)`, of which half need be held.

    Attributes:
        stripes: by first row and the one behind the last, some rows of the columns up to there at least.
    """

    stripes: Mapping[tuple[int, int], Tensor]

    @classmethod
    def of(cls, matrices: Tensor) -> Symmetric:
        """Return matrices that are held as they are."""
        columns, parts = matrices.transpose(1, 2), in_stripes(matrices.shape[1])
        return cls({(first, last): columns[:, first:last] for first, last in parts})

    def diagonal(self) -> Tensor:
        """Return their diagonals, `(groups, K)`."""
        return torch.cat(
            [part.diagonal(offset=at, dim1=1, dim2=2) for (at, _), part in self.stripes.items()], 1
        )

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield whole rows of theirs, `(groups, r, K)`, some at a time."""
        width = max(last for _, last in self.stripes)
        for (first, last), part in self.stripes.items():
            if part.shape[2] < width:
                others = [other for (start, _), other in self.stripes.items() if start >= last]
                behind = [other[..., first:last].transpose(1, 2) for other in others]
                part = torch.cat([part[..., :last], *behind], dim=2)
            yield slice(first, last), part

    def whole(self) -> Tensor:
        """Return them in a tensor of their own."""
        return torch.cat([part for _, part in self.rows()], dim=1)


def normalized_moments(
    total: Tensor, count: Tensor, factors: Tensor | None = None, noise: float = 0.0
) -> InputMoments:
    """Return sums of products over rows in a unit that keeps them near 1.

    Args:
        total: of each half, `(2, groups, K, K)`; it is held.
        count: how many rows each half has, `(2,)`.
        factors: what columns are multiplied by first, `(groups, K)`.
        noise: the mean square of what the rounding of a value adds to it.

    Raises:
        NotChanged: there are none, all data is alike, or values are not finite.
    """
    powers = total.diagonal(dim1=-2, dim2=-1)
    unit = (powers if factors is None else powers * (factors * factors)).mean()
    check_seen(count, float(unit))
    unit = unit.clamp(min=noise * float(count.sum()))  # steps may be far coarser than values
    return InputMoments(total, count, noise / float(unit), unit, factors)


def pooled(inputs: Sequence[Inputs]) -> Inputs:
    """Return what all products that read one weight read: errors of its values add up over them.

    Args:
        inputs: of each product, all as rows (`rows_read`) or all as second moments (`moments_read`).

    Raises:
        NotChanged: channels of some are divided by factors, which one weight cannot take up for all.
    """
    if len(inputs) == 1:
        return inputs[0]
    rows = [given for given in inputs if isinstance(given, InputRows)]
    moments = [given for given in inputs if isinstance(given, InputMoments)]
    if rows:
        weights = torch.cat([given.weights for given in rows])  # of a square in the unit of each
        noise = math.fsum(given.noise * float(given.weights.sum()) for given in rows)
        return InputRows(
            torch.cat([given.rows for given in rows], dim=1),
            weights,
            torch.cat([given.half for given in rows]),
            noise / float(weights.sum()),
        )
    if any(given.factors is not None for given in moments):
        raise NotChanged("its inputs are divided by factors")
    noise = math.fsum(given.noise * float(given.unit) * given.number for given in moments)
    count = torch.stack([given.count for given in moments]).sum(0)
    total = moments[0].total + moments[1].total
    for given in moments[2:]:
        total += given.total
    return normalized_moments(total, count, noise=noise / float(count.sum()))


def check_seen(count: Tensor, size: float) -> None:
    """Check that there is what can be learned from.

    Args:
        count: how many rows each half of the examples has, `(2,)`.
        size: the sum of squares of all values, or a part of it.

    Raises:
        NotChanged: there are none, all data is alike, or values are zero or not finite.
    """
    if not bool(count.any()):
        raise NotKnown("its input never saw calibration data")
    if not 0 < size < math.inf:
        raise NotChanged("its input is all zeros or has non-finite values")
    if not bool(count.all()):
        raise NotChanged("calibration saw too few distinct examples of its input to hold any out")
