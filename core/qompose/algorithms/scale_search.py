# SPDX-License-Identifier: Apache-2.0
"""Scale search: ranges of weights of few bits, wider or narrower than that of all values.

With few integers the step is so coarse that the largest value of a channel or a block, for which it has to be
as coarse as it is, may better be clipped. Parts of the range of all values are tried, and for each channel or
block the one of least squared error is taken.

The error of a product goes by the inputs of its columns: `sum(v e^2) + sum(m e)^2` for errors `e` of the
weight, and variances `v` and means `m` of the channels, as if these did not correlate. The second term
counts, since what is clipped often lies on one side of 0. It counts four times where nothing behind takes it
off, which bias correction does, and GPTQ: errors in the mean are alike at all places, so that they pass
pooling and add up over layers. Of 96 convolutional networks without biases three lost, by up to 2.7 dB.

Inputs do correlate, and what is best without that may be worse with it. So parts are chosen by each half of
the examples and judged by the other, there with a sketch of the inputs as they are
(`qompose.observers.input_sums`). The range of all values stays unless the error of the whole product is
smaller.

Without data, `v` and `m` would have to be supposed: some networks gain and others lose by that, so it is done
only where somebody asks for it by word. A table has no inputs: its error is that of its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import Algorithm, NotChanged, NotKnown
from qompose.algorithms.product_inputs import times_smaller
from qompose.algorithms.products import (
    Operands,
    channels_of,
    check_own_scales,
    factors_read,
    groups_of,
    operands_of,
    product_node,
    products_with_weights,
    taps_of,
)
from qompose.observers.auto_range import in_unit, unit_of
from qompose.observers.input_sums import SKETCHED, Columns
from qompose.observers.make_observer import make_observer
from qompose.program.batch_norm_folding import TRANSPOSED
from qompose.program.graph import constant_of
from qompose.spec.algorithm_choice import BIAS_CORRECTION, ROUNDING, SCALE_SEARCH as WORD, word_of
from qompose.spec.claim import Claim
from qompose.spec.qdq import QParams, in_rows, integers_of, values_of_integers
from qompose.spec.qparams import in_blocks

_PARTS = (*(n / 40 for n in range(40, 31, -1)), *(n / 40 for n in range(41, 45)),
          *(n / 20 for n in range(15, 9, -1)))  # fmt: skip
"""Of the range of all values, that itself first; the first that is best is taken."""
_NEEDED = 1.02
"""How many times smaller the squared error has to become on data held back, which a sketch gives roughly."""
_OF_MEANS = 4.0
"""How often errors in the mean count where no bias is corrected; 16 and 64 times gained networks no more."""
_DOUBT = 0.3
"""What is added to each variance, in units of the mean square: other data may have louder channels."""


class _UselessData(NotChanged):
    """Raised where calibration data says nothing of an input, which is worth a line in any case."""


class ScaleSearch(Algorithm):
    """Searches the ranges of weights whose claims ask for it, or have few bits and ask for nothing."""

    word = WORD

    def watch_moments(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, Columns, int]]:
        for product in products_with_weights(filter(self.is_wanted, claims), nodes):
            yield product.source, *channels_of(product)

    def choose_qparams(self, found: Calibrated, number: int, q: QParams) -> QParams | None:
        plan = found.plan
        weight = found.nodes[plan.groups[number].points[0].source]
        claims = [plan.claims[claim] for claim in plan.groups[number].claims]
        if constant_of(weight) is None or not all(map(self.is_wanted, claims)):
            return None
        if q.dtype.is_floating_point:  # `correct` says so
            return None
        asked = any(map(self.is_asked, claims))
        try:
            check_own_scales(found, number)
            seen, what = _seen_by(found, number, asked=asked)
            chosen, gain = _searched(found, number, q, seen)
        except NotChanged as reason:
            if asked or isinstance(reason, _UselessData):
                found.refused.append(f"{self.word} was not applied to {weight.target}: {reason}")
            return None
        found.made.append(
            f"{self.word} on {weight.target}: {what} reduced {gain:.2f}x compared to the min/max "
            "range"
        )
        return chosen

    def correct(self, found: Calibrated) -> None:
        """Say which weights that were asked for are floats, whose range is not searched."""
        plan = found.plan
        for group in plan.groups:
            dtype = getattr(group.spec, "dtype", None)
            weight = found.nodes[group.points[0].source]
            asked = any(self.is_asked(plan.claims[claim]) for claim in group.claims)
            if (
                asked
                and dtype is not None
                and dtype.is_floating_point
                and constant_of(weight) is not None
            ):
                reason = f"it is stored as {dtype}, whose steps are not equal"
                found.refused.append(f"{self.word} was not applied to {weight.target}: {reason}")


@dataclass(frozen=True)
class _Inputs:
    """The inputs of each value of a weight, in shapes that broadcast against it.

    Attributes:
        variance, mean: of the input, in a unit that keeps its square near 1; means by the root of how often
            their errors count.
    """

    variance: Tensor
    mean: Tensor

    @classmethod
    def of(
        cls, sums: Tensor, count: Tensor, unit: Tensor, product: Operands, often: float
    ) -> _Inputs:
        """Return those of sums of channels and of their squares, `(2, C)`, over `count` rows.

        Args:
            often: how often errors in the mean count.
        """
        mean, square = sums / count.clamp(min=1)
        variance = (square - mean.square()).clamp(min=0.0) / unit + _DOUBT
        mean = mean / unit.sqrt() * math.sqrt(often)
        return cls(_as_weight(variance, product), _as_weight(mean, product))

    def rows(self, first: int, last: int) -> _Inputs:
        """Return those of some rows of the weight."""
        if self.mean.dim() == 0 or len(self.mean) == 1:
            return self
        return _Inputs(self.variance[first:last], self.mean[first:last])

    def error(self, off: Tensor, q: QParams) -> Tensor:
        """Return the squared error of a weight that is off by so much, in its unit, by scale."""
        by_mean = _of_scales(off * self.mean, q).square()
        return _of_scales(off.square() * self.variance, q) + by_mean


def _as_weight(values: Tensor, product: Operands) -> Tensor:
    """Return a number for each input channel, `(C,)`, in a shape that broadcasts against the weight."""
    weight = constant_of(product.weight)
    assert weight is not None
    groups, taps = groups_of(product.node), [1] * (weight.dim() - 2)
    values = values.float().to(weight.device)
    if product.node.target in TRANSPOSED:
        return values.view(-1, 1, *taps)
    if groups == 1:
        return values.view(1, -1, *taps)
    each = values.view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)
    return each.reshape(len(weight), -1, *taps)


@dataclass(frozen=True)
class _Sketch:
    """A sketch of the inputs of a product, in the unit of all that read its weight, by halves of examples.

    Attributes:
        rows: `(2, groups, C / groups, 32)`.
        means: of the inputs, such that squares of errors in them count as often as they are to besides,
            `(2, groups, C / groups)`.
        transposed: whether it is that of a transposed convolution.
    """

    rows: Tensor
    means: Tensor
    transposed: bool

    @property
    def whole(self) -> bool:
        """Tell whether the rows of the weight are not outputs that all read the same."""
        return self.transposed or self.rows.shape[1] > 1

    def error(self, off: Tensor, half: int) -> float:
        """Return the squared error of outputs on one half if their weights, all or some rows, are off."""
        of_half, means = self.rows[half].to(off), self.means[half].to(off)
        taps = taps_of(off, len(of_half), self.transposed)
        of_rows = torch.einsum("goit,gir->gotr", taps, of_half).square().sum()
        return float(of_rows + torch.einsum("goit,gi->go", taps, means).square().sum())


@dataclass(frozen=True)
class _Seen:
    """What ranges are chosen and judged by.

    Attributes:
        inputs: those of both halves of the examples and of all; else the one that is supposed.
        sketches: of each product that reads the weight; none where inputs are supposed.
        unit: by which errors of the weight are multiplied before they are squared.
    """

    inputs: tuple[_Inputs, ...]
    sketches: tuple[_Sketch, ...] = ()
    unit: float = 1.0

    def rows(self, first: int, last: int) -> _Seen:
        """Return what is to be known for some rows of the weight."""
        return replace(self, inputs=tuple(given.rows(first, last) for given in self.inputs))

    def held_back(self, off: Sequence[Tensor]) -> float:
        """Return the squared error of weights that are off by so much: by those of each half on that half."""
        errors = (s.error(of, half) for s in self.sketches for half, of in enumerate(off))
        return math.fsum(errors)


def _seen_by(found: Calibrated, number: int, *, asked: bool) -> tuple[_Seen, str]:
    """Return what ranges are chosen and judged by, and what their error is called.

    Raises:
        NotChanged: they are not known, and nobody asked by word.
    """
    numbers = found.plan.groups[number].claims
    one, none = torch.tensor(1.0), torch.tensor(0.0)
    if any(product_node(found.plan.claims[n], found.nodes) is None for n in numbers):
        # Of a table, or of what is no plain product.
        return _Seen((_Inputs(one, none),)), "squared error"
    try:
        products = [operands_of(found, n) for n in numbers]
        claims = [found.plan.claims[n] for n in numbers]
        taken_off = all(map(_takes_means_off, claims, products))
        return _seen(found, products, 1.0 if taken_off else _OF_MEANS), _HELD_BACK
    except NotKnown:
        if not asked:
            raise
        supposed = _Seen((_Inputs(one, one),))
        return supposed, "squared error (no calibration data; inputs assumed equal in magnitude)"


_HELD_BACK = "squared error on held-out calibration data"


def _takes_means_off(claim: Claim, product: Operands) -> bool:
    """Tell whether an algorithm behind this one looks after errors in the mean."""
    words = {word_of(choice) for choice in (*claim.algorithms, *claim.unasked)}
    corrects = product.bias is not None and BIAS_CORRECTION in words
    return corrects or not words.isdisjoint(ROUNDING)


def _seen(found: Calibrated, products: Sequence[Operands], often: float) -> _Seen:
    """Return the inputs of products that share a weight.

    Args:
        often: how often errors in the mean count.

    Raises:
        NotKnown: they never saw data.
        _UselessData: all data is alike, or values are not finite.
    """
    seen: list[tuple[Any, Tensor | float]] = [
        (found.sums.get((p.source, channels_of(p)[0])), _powers(found, p)) for p in products
    ]
    if any(observer is None or not bool(observer.count.any()) for observer, _ in seen):
        raise NotKnown("its layer never saw calibration data")
    totals = [observer.total[:, 0] / powers for observer, powers in seen]
    sums = torch.stack([total[:, :2] for total in totals]).sum(0)
    count = torch.stack([observer.count for observer, _ in seen]).sum(0)
    unit = sums.sum(0)[1].mean() / count.sum()
    if not bool(sums.isfinite().all()) or not unit > 0:
        raise _UselessData("the input of its layer is all zeros or has non-finite values")
    if not bool(count.all()):
        raise _UselessData(
            "calibration saw too few distinct examples of its layer's input to hold any back"
        )
    halves = zip((*sums, sums.sum(0)), (*count, count.sum()), strict=True)
    inputs = (_Inputs.of(some, number, unit, products[0], often) for some, number in halves)
    of_rows = unit_of(unit.sqrt())
    sketches = (
        _sketch(
            in_unit(total, of_rows), SKETCHED * (often - 1) / observer.count.clamp(min=1), product
        )
        for (observer, _), total, product in zip(seen, totals, products, strict=True)
    )
    return _Seen(tuple(inputs), tuple(sketches))


def _sketch(sums: Tensor, besides: Tensor, product: Operands) -> _Sketch:
    """Return the sketch of a product's inputs.

    Args:
        sums: of each half, `(2, 2 + 32, C)`: of channels, of their squares, and with signs.
        besides: how often the square of an error in a sum of channels counts besides, `(2,)`.
    """
    groups, (halves, _, channels) = groups_of(product.node), sums.shape
    each = halves, groups, channels // groups
    of_groups = sums[:, 2:].transpose(1, 2).reshape(*each, SKETCHED)
    means = (sums[:, 0] * besides.sqrt()[:, None]).reshape(each)
    return _Sketch(of_groups.float(), means.float(), product.node.target in TRANSPOSED)


def _powers(found: Calibrated, product: Operands) -> Tensor | float:
    """Return what sums of channels, of their squares and with signs are divided by for factors."""
    values = factors_read(found, product)
    if values is None:
        return 1.0
    one = values.double()
    return torch.stack([one, one.square(), *[one] * SKETCHED])


def _searched(found: Calibrated, number: int, q: QParams, seen: _Seen) -> tuple[QParams, float]:
    """Return the parameters of least error, and how many times smaller that is.

    Raises:
        NotChanged: the range of all values is best.
    """
    group = found.plan.groups[number]
    weight = found.factors.constant(group.points[0].source)
    seen = replace(seen, unit=unit_of(weight))
    in_parts = (q.blocks or q.axis == 0) and not any(s.whole for s in seen.sketches)
    # Several scales along the first dimension are in no two parts.
    block = weight.shape[0] // q.scale.shape[0] if q.blocks else 1
    parts = in_rows(weight, multiple=block) if in_parts else [(0, len(weight), weight)]
    pieces = [_best(rows, q, group.spec, seen.rows(first, last)) for first, last, rows in parts]
    scales, zero_points, before, after = zip(*pieces, strict=True)
    gain = times_smaller(math.fsum(before), math.fsum(after))
    if not seen.sketches and gain <= 1:
        raise NotChanged("no other range reduces the error")
    if seen.sketches and gain < _NEEDED:
        raise NotChanged(
            f"with the min/max range, the {_HELD_BACK} is only {gain:.2f}x that with the best "
            f"range found; at least {_NEEDED}x is required"
        )
    scale, zero_point = (torch.cat(p) if in_parts else p[0] for p in (scales, zero_points))
    return replace(q, scale=scale, zero_point=zero_point), gain


def _best(
    values: Tensor, q: QParams, spec: Any, seen: _Seen
) -> tuple[Tensor, Tensor, float, float]:
    """Return scale and zero point of least error, the error of the range of all values, and the least.

    Of two halves and all, what is best for all is returned, and the errors are those on each half of what is
    best for the other.
    """
    observer: Any = make_observer(spec)
    observer(values)
    tried = (_Try.of(values, replace(q, scale=s, zero_point=z), seen)
             for s, z in map(observer.qparams_of_part, _PARTS))  # fmt: skip
    first = next(tried)
    best = [first.chosen(at) for at in range(len(seen.inputs))]
    for one in tried:
        best = [_better(one.chosen(at), other) for at, other in enumerate(best)]
    scale, zero_point, error = best[-1]
    if not seen.sketches:
        return scale, zero_point, float(first.errors[-1].sum()), float(error.sum())
    chosen = [replace(q, scale=s, zero_point=z) for s, z, _ in (best[1], best[0])]
    after = seen.held_back([_off(values, now, seen.unit) for now in chosen])
    return scale, zero_point, seen.held_back([_off(values, first.q, seen.unit)] * 2), after


Chosen: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Scale, zero point, and the error for each scale."""


@dataclass(frozen=True)
class _Try:
    """Parameters, and the errors that they make by inputs, in the shape of the scales."""

    q: QParams
    errors: tuple[Tensor, ...]

    @classmethod
    def of(cls, values: Tensor, q: QParams, seen: _Seen) -> _Try:
        off = _off(values, q, seen.unit)
        return cls(q, tuple(given.error(off, q) for given in seen.inputs))

    def chosen(self, at: int) -> Chosen:
        """Return scale, zero point and the error by inputs."""
        return self.q.scale, self.q.zero_point, self.errors[at]


def _off(values: Tensor, q: QParams, unit: float) -> Tensor:
    """Return what values are off by once they are quantized, in a unit."""
    return in_unit(values_of_integers(integers_of(values, q), q) - values.float(), unit)


def _better(one: Chosen, other: Chosen) -> Chosen:
    """Return scales, zero points and errors of the one whose error is smaller, by scale."""
    is_better = one[2] < other[2]
    scale, zero_point, error = (
        torch.where(is_better, *pair) for pair in zip(one, other, strict=True)
    )
    return scale, zero_point, error


def _of_scales(values: Tensor, q: QParams) -> Tensor:
    """Return sums over the values of each scale, in the shape of the scales."""
    if q.blocks:
        sizes = tuple(n // k for n, k in zip(values.shape, q.scale.shape, strict=True))
        return in_blocks(values, sizes).sum(tuple(range(1, 2 * values.dim(), 2)))
    if q.axis is None:
        return values.sum().view(q.scale.shape)
    return values.sum([dim for dim in range(values.dim()) if dim != q.axis % values.dim()])
