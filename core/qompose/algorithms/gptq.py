# SPDX-License-Identifier: Apache-2.0
"""GPTQ: a weight rounded one column after another, each making up for the errors before it.

Rounding to the nearest integer makes the error `E` of a weight small. What counts is the error of the
product, `E H E'` for the second moments `H` of its input: what one column's rounding does to the output,
the columns that are rounded later can take back where they correlate with it (Frantar et al., "GPTQ", 2022).
The columns that matter most go first; scales are known before.

Where a configuration asks for it by word, `H` is summed over all calibration data
(`qompose.observers.input_sums`), and a convolution's columns are the taps of each channel. Where it is
left to the engine, `H` comes from the rows that the observer of the input keeps anyway: some hundred, for
up to thousands of channels. The taps of a convolution are rounded apart then, all with the same `H`, and
each integer stays next to its value: else channels that are quiet in those rows take up everything. The
input's own rounding adds `scale^2 / 12` to the diagonal.

`H` of other data differs, the more the fewer rows there were. So correlations are believed in part only,
`c H + (1 - c) diag H`. Several parts are tried with each half of the examples held back once, and the best is
made, if it is better there than the nearest integers. Of very many columns, some are rounded together and
then the next ones: time and memory grow with their number, not with its cube.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from qompose.algorithms.blocks import Block
from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import Algorithm, NotChanged, Part
from qompose.algorithms.product_inputs import (
    InputRows,
    Inputs,
    Symmetric,
    pooled,
    times_smaller,
)
from qompose.algorithms.products import (
    NOTHING,
    Operands,
    change_products,
    check_own_integers,
    check_own_scales,
    columns_of,
    moments_asked,
    moments_read,
    noted,
    reader_of,
    rows_read,
    set_integers,
    set_scales,
    sharing,
    taps_of,
    weight_group,
)
from qompose.errors import ConfigError, kind_faults
from qompose.observers.auto_range import Reader
from qompose.observers.input_sums import Columns
from qompose.observers.make_observer import make_observer, qparams_of
from qompose.spec.algorithm_choice import GPTQ as WORD, GPTQ_SEQUENTIAL as SEQUENTIAL
from qompose.spec.claim import Claim
from qompose.spec.qdq import QParams, for_each_value

_NEEDED = 1.05
"""How many times smaller the squared error has to become on data held back."""
MOST_TOGETHER = 2048
"""Columns whose errors are handed on to one another: the time for that grows with their cube."""
_JUDGED = 256
"""How many outputs, at least, the gain is measured on."""
_AT_A_TIME = 2**18
"""How many values of a weight are rounded side by side: what that needs is several times as large."""


@dataclass(frozen=True)
class _Form:
    """How errors are handed on.

    Attributes:
        believed: the part of the correlations that is believed.
        near: whether each integer is one of the two next to the value.
        damping: what is added to the diagonal of `H`, in units of its mean.
        by_size: whether columns are rounded in the order of their size, the largest first.
        block_size: columns whose errors are handed on to all later ones together, which is one product.
        spec: where groups get their scales once their columns are reached, their specification.
        group_size: how many columns each of those has.
    """

    believed: float
    near: bool = False
    damping: float = 0.0
    by_size: bool = True
    block_size: int = 64
    spec: Any = None
    group_size: int = 1


_OF_ROWS = (_Form(0.5, near=True),)
_OF_MOMENTS = tuple(_Form(believed) for believed in (0.5, 0.9, 0.97))


@dataclass(frozen=True)
class GPTQ(Algorithm):
    """Rounds the weights of products whose claims ask for it, by second moments of all calibration data.

    Args:
        damping: what is added to the diagonal of the second moments, in units of its mean, as 0.01. With
            None several ways to believe in correlations less are tried on data held back.
        act_order: whether columns are rounded in the order of the size of their inputs, the largest first,
            rather than as they come.
        block_size: columns whose errors are handed on to later ones together. It changes time, and integers
            only by the order of sums.
        static_groups: whether groups have the scales of the weight as it is. Without, each has those of what
            its columns have become when they are reached, and columns are rounded as they come.

    Raises:
        ConfigError: an option is invalid, or `static_groups` is off and `act_order` is not.
    """

    word: ClassVar[str] = WORD
    needs_data = True
    damping: float | None = None
    act_order: bool = True
    block_size: int = 64
    static_groups: bool = True

    def __post_init__(self) -> None:
        self._check_numbers()
        for fault in kind_faults(self, dict.fromkeys(("act_order", "static_groups"), bool)):
            raise ConfigError(f"GPTQ option {fault}")
        if self.act_order and not self.static_groups:
            raise ConfigError(
                "GPTQ with static_groups=False requires act_order=False: group scales come from "
                "updated weights, so columns must be rounded in order"
            )

    def _check_numbers(self) -> None:
        damping: object = self.damping
        if damping is not None:
            number = isinstance(damping, (int, float)) and not isinstance(damping, bool)
            if not number or not 0 < damping < math.inf:  # type: ignore[operator]
                raise ConfigError(f"GPTQ option damping must be a positive number, got {damping!r}")
            object.__setattr__(self, "damping", float(damping))  # type: ignore[arg-type]
        size: object = self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"GPTQ option block_size must be a positive integer, got {size!r}")

    def watch_moments(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, Columns, int]]:
        return moments_asked(self, claims, nodes)

    def correct(self, found: Calibrated) -> None:
        rounded = dict[int, Operands | NotChanged]()

        def change(product: Operands, claim: Claim) -> str:
            number, _ = weight_group(found, product)
            if number not in rounded:
                try:
                    effect = self._round_for_all(found, product, claim)
                except NotChanged as reason:
                    rounded[number] = reason
                else:
                    rounded[number] = product
                    return effect
            before = rounded[number]
            if isinstance(before, NotChanged):
                raise before
            return f"has the weight of {before.node.name}"

        change_products(found, self, change)

    def _round_for_all(self, found: Calibrated, product: Operands, claim: Claim) -> str:
        """Decide on the integers of a weight by the inputs of all that read it, and say what they gain.

        Raises:
            NotChanged: those next to its values stay.
        """
        asked = self.is_asked(claim)
        readers = sharing(
            found, product, self.is_asked if asked else lambda one: self.is_wanted(one, found)
        )
        check_own_integers(found, product, shared=True)  # before data is looked at
        read = [
            moments_read(found, one) if asked else rows_read(found, one, reader_of(found, one))
            for one in readers
        ]
        effect = self._round(found, product, pooled(read))
        return f"{effect}; for {len(readers)} layers that share it" if len(readers) > 1 else effect

    def _round(self, found: Calibrated, product: Operands, inputs: Inputs) -> str:
        """Decide on the integers of a weight, for all that read it, and say what they gain.

        Raises:
            NotChanged: those next to its values stay.
        """
        _, q = weight_group(found, product)
        if q.zero_point.is_floating_point():
            raise NotChanged(f"the zero points of {product.weight.target} are not integers")
        if inputs.channels == 1:
            raise NotChanged(
                "each output depends on a single value, so rounding errors cannot be compensated"
            )
        reader = reader_of(found, product)
        together = not isinstance(inputs, InputRows) and columns_of(product)[0].window is not None
        form, gain = _best_form(reader, q, inputs, self._forms(found, product, inputs), together)
        if gain < _NEEDED:
            reason = (
                "rounding to nearest has a squared error on held-out calibration data of only "
                f"{gain:.2f}x that of GPTQ; at least {_NEEDED}x is required"
            )
            raise NotChanged("; ".join([reason, *_few_rows(inputs)]))
        q, integers = _integers(reader, q, inputs, form, together)
        if form.spec is not None:
            set_scales(found, product, q.scale, q.zero_point)
        set_integers(found, product, integers, shared=True)
        effect = f"squared error on held-out calibration data reduced {gain:.2f}x"
        return "; ".join([effect, *self._remarks(q, inputs)])

    def _remarks(self, q: QParams, inputs: Inputs) -> Iterator[str]:
        """Yield what else there is to say of a weight that was rounded."""
        yield from _few_rows(inputs)
        if not self.static_groups and not _has_groups_of_columns(q):
            yield "static_groups=False has no effect because its columns have no group scales"

    def _forms(self, found: Calibrated, product: Operands, inputs: Inputs) -> list[_Form]:
        """Return the forms that are to be tried."""
        forms = _OF_ROWS if isinstance(inputs, InputRows) else _OF_MOMENTS
        if self.damping is not None:
            forms = (replace(forms[0], believed=1.0, damping=self.damping),)
        number, q = weight_group(found, product)
        spec, size = None, 1
        if not self.static_groups and _has_groups_of_columns(q):
            check_own_scales(found, number)
            spec, size = found.plan.groups[number].spec, inputs.channels // q.scale.shape[1]
        return [
            replace(
                form, by_size=self.act_order, block_size=self.block_size, spec=spec, group_size=size
            )
            for form in forms
        ]


@dataclass(frozen=True)
class SequentialGPTQ(GPTQ):
    """GPTQ of one product after another, each by the inputs that the program before it gives it rounded.

    `qompose.calibrate` does it, and holds second moments of one product at a time. Options are those of
    `GPTQ`. A weight that several products read is rounded when the first of them comes, by what all read
    with the integers that are chosen by then.
    """

    word: ClassVar[str] = SEQUENTIAL

    def watch_moments(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, Columns, int]]:
        yield from ()

    def correct(self, found: Calibrated) -> None:
        """Do nothing: all is done once calibration ends."""

    def learns(self, claim: Claim) -> Part | None:
        return "product"

    def learn(self, found: Calibrated, block: Block) -> None:
        for product in block.products:
            with noted(found, self, product) as effect:
                readers = sharing(found, product, self.is_asked)
                check_own_integers(found, product, shared=True)  # before data is looked at
                also = [one for one in readers if one.node is not product.node]
                effect.append(self._round(found, product, block.read_by(product, also=also)))


def _few_rows(inputs: Inputs) -> Iterator[str]:
    """Say of second moments if they are of too few rows to be of full rank."""
    if inputs.number < inputs.channels:
        yield (
            f"based on {inputs.number} rows for {inputs.channels} channels (more calibration "
            "data would help)"
        )


def compensated(found: Calibrated, product: Operands, inputs: Inputs, otherwise: Tensor) -> Tensor:
    """Return where each value of a product's weight is, in steps, when GPTQ rounds it to its integer.

    Args:
        inputs: what it reads (`Block.read_by`, `moments_read`).
        otherwise: what is returned where the nearest integers are better on data held back, in the shape of
            the parameter.

    Raises:
        NotChanged: the weight is not quantized, or its parameters are not known here.
    """
    _, q = weight_group(found, product)
    together = columns_of(product)[0].window is not None
    reader = reader_of(found, product)
    form, gain = _best_form(reader, q, inputs, _OF_MOMENTS, together)
    if inputs.channels == 1 or not gain > 1:
        return otherwise
    result = otherwise.new_empty(otherwise.shape)
    for rows, columns, part, rounded in _rounded_parts(reader, q, inputs, form, together):
        part.put(result[rows], columns, rounded.positions)
    return result


def _has_groups_of_columns(q: QParams) -> bool:
    """Tell whether each row of a matrix has several scales, and no two rows share one."""
    return bool(q.blocks) and q.scale.dim() == 2 and q.scale.shape[1] > 1


@dataclass(frozen=True)
class _Rounded:
    """Where values are, in steps, when they are rounded; with the steps and zero points of each."""

    positions: Tensor
    step: Tensor
    zero_point: Tensor

    @property
    def values(self) -> Tensor:
        """Return what the integers stand for."""
        return (self.positions.round() - self.zero_point) * self.step


@dataclass(frozen=True)
class _Rounding:
    """A weight and how it is quantized, as rows of columns for each group of a convolution.

    Attributes:
        weight, step, zero_point: `(groups, rows, K)`.
        shape: of the taps that they are made of, `(groups, outputs, C / groups, taps)`.
        together: whether the taps are columns; else they are rows.
    """

    weight: Tensor
    step: Tensor
    zero_point: Tensor
    q: QParams
    reader: Reader
    shape: torch.Size
    together: bool

    @classmethod
    def of(cls, reader: Reader, q: QParams, *, together: bool) -> _Rounding:
        assert reader.weight is not None
        weight = reader.weight.float()
        spread = (v.to(weight.device) for v in for_each_value(q, tuple(weight.shape)))
        taps = [taps_of(v, reader.groups, reader.transposed) for v in (weight, *spread)]
        rows = [v.flatten(2) if together else v.transpose(2, 3).flatten(1, 2) for v in taps]
        weights, step, zero_point = rows
        return cls(weights, step, zero_point, q, reader, taps[0].shape, together)

    def some(self) -> _Rounding:
        """Return one of fewer outputs, spread over all: they are rounded one apart from the other."""
        return self._rows(slice(None, None, max(1, self.weight.shape[1] // _JUDGED)))

    def in_parts(self) -> Iterator[_Rounding]:
        """Yield one of some outputs after another."""
        groups, rows, width = self.weight.shape
        most = max(1, _AT_A_TIME // max(1, groups * width))
        yield from (self._rows(slice(first, first + most)) for first in range(0, rows, most))

    def _rows(self, rows: slice) -> _Rounding:
        names = ("weight", "step", "zero_point")
        return replace(self, **{name: getattr(self, name)[:, rows] for name in names})

    def nearest(self) -> Tensor:
        """Return the nearest integers, as floats."""
        q = self.q
        return (self.weight / self.step).round_().add_(self.zero_point).clamp_(q.low, q.high)

    def rounded(self, order: _Order) -> _Rounded:
        """Return how the columns of an order are rounded."""
        values = [
            v.transpose(1, 2)[:, order.columns] for v in (self.weight, self.step, self.zero_point)
        ]
        return _Rounded(*(v.transpose(1, 2) for v in order.positions(values, self.q)))

    def put(self, parameter: Tensor, columns: slice, found: Tensor) -> None:
        """Write values of some columns, `(groups, rows, c)`, into a tensor in the shape of the parameter."""
        taps = taps_of(parameter, self.reader.groups, self.reader.transposed)
        if self.together:
            taps.view(*self.shape[:2], -1)[..., columns] = found
        else:
            by_tap = found.reshape(len(found), self.shape[1], self.shape[3], -1)
            taps[:, :, columns] = by_tap.transpose(2, 3)


@dataclass(frozen=True)
class _Judged:
    """Some outputs of a weight, spread over all, that a gain is measured on.

    What each value is quantized with is worked out for a few of them at a time.
    """

    reader: Reader
    q: QParams
    together: bool

    def parts(self) -> Iterator[_Rounding]:
        """Yield one of some of them after another."""
        weight = self.reader.weight
        assert weight is not None
        apart = slice(None, None, max(1, len(weight) // _JUDGED))
        reader, q = self.reader, self.q
        if _by_rows(reader, q):
            reader, q = replace(reader, weight=weight[apart]), _of_rows(q, apart)
            if self.together or weight.dim() == 2:  # outputs are rows
                yield from (part for _, part in _row_parts(reader, q, self.together))
                return
        yield from _Rounding.of(reader, q, together=self.together).some().in_parts()

    def rounded(self, order: _Order) -> Tensor:
        """Return integers of an order's columns, `(groups, K, rows)`; where scales change, their values."""
        found = []
        for part in self.parts():
            one = part.rounded(order)
            integers = order.form.spec is None
            values = one.positions.round().to(self.q.dtype) if integers else one.values
            found.append(values.transpose(1, 2))
        return torch.cat(found, dim=2)

    def off(self, rounded: Tensor) -> Tensor:
        """Return what weights are off by once they are rounded so, `(groups, rows, K)`."""
        result = torch.empty(rounded.shape, dtype=torch.float32, device=rounded.device)
        at = 0
        for part in self.parts():
            rows = slice(at, at := at + part.weight.shape[1])
            weight, step, zero_point = (
                v.transpose(1, 2) for v in (part.weight, part.step, part.zero_point)
            )
            values, found = result[..., rows], rounded[..., rows]
            values.copy_(found)
            if not rounded.is_floating_point():
                values.sub_(zero_point).mul_(step)
            values.sub_(weight)
        return result.transpose(1, 2)

    def off_nearest(self) -> Tensor:
        """Return what weights are off by once each is rounded to nearest, `(groups, rows, K)`."""
        parts = [
            part.nearest().sub_(part.zero_point).mul_(part.step).sub_(part.weight)
            for part in self.parts()
        ]
        return torch.cat(parts, dim=1)


def _best_form(
    reader: Reader, q: QParams, inputs: Inputs, forms: Sequence[_Form], together: bool
) -> tuple[_Form, float]:
    """Return the form that is best on the half that it is not rounded by, and its gain there.

    Raises:
        NotChanged: moments cannot be factorized, or errors are not finite.
    """
    judged, halves = _Judged(reader, q, together), inputs.halves()
    before, errors = 0.0, dict.fromkeys(forms, 0.0)
    for half, held_back in (halves, halves[::-1]):
        offs = [judged.off(rounded) for rounded in _by_forms(judged, half, forms)]
        offs.append(judged.off_nearest())
        *others, first = held_back.errors(offs)
        del offs  # before the other half is taken up
        before += first
        for form, error in zip(forms, others, strict=True):
            errors[form] += error
    gains = {form: times_smaller(before, error) for form, error in errors.items()}
    return max(gains.items(), key=lambda item: item[1])


def _by_forms(judged: _Judged, inputs: Inputs, forms: Sequence[_Form]) -> list[Tensor]:
    """Return how a weight is rounded by each form (`_Judged.rounded`)."""
    found: list[list[Tensor]] = [[] for _ in forms]
    for some in _together(inputs.channels, forms[0].group_size):
        moments = inputs.symmetric(some)
        for rounded, form in zip(found, forms, strict=True):
            rounded.append(judged.rounded(_Order.of(some, moments, form)))
    return [torch.cat(rounded, dim=1) for rounded in found]


def _by_rows(reader: Reader, q: QParams) -> bool:
    """Tell whether the first dimension of a weight has outputs, none of which shares scales with others."""
    weight = reader.weight
    assert weight is not None
    own = q.per_tensor or (
        q.scale.shape[0] == len(weight) and (q.blocks or q.axis in (0, -weight.dim()))
    )
    return bool(own) and reader.groups == 1 and not reader.transposed


def _of_rows(q: QParams, rows: slice) -> QParams:
    return q if q.per_tensor else replace(q, scale=q.scale[rows], zero_point=q.zero_point[rows])


def _row_parts(reader: Reader, q: QParams, together: bool) -> Iterator[tuple[slice, _Rounding]]:
    """Yield some outputs of a weight after another: all at once where they share scales or inputs."""
    weight = reader.weight
    assert weight is not None
    most = max(1, _AT_A_TIME // max(1, weight[0].numel())) if _by_rows(reader, q) else len(weight)
    for first in range(0, len(weight), most):
        rows = slice(first, first + most)
        some = reader, q
        if most < len(weight):
            some = replace(reader, weight=weight[rows]), _of_rows(q, rows)
        yield rows, _Rounding.of(*some, together=together)


def _rounded_parts(
    reader: Reader, q: QParams, inputs: Inputs, form: _Form, together: bool
) -> Iterator[tuple[slice, slice, _Rounding, _Rounded]]:
    """Yield some outputs and columns of a weight after another, and how they are rounded by all inputs."""
    for columns in _together(inputs.channels, form.group_size):
        order = _Order.of(columns, inputs.symmetric(columns), form)
        for rows, part in _row_parts(reader, q, together):
            yield rows, columns, part, part.rounded(order)
        del order, part  # before the next, as large, is made


def _integers(
    reader: Reader, q: QParams, inputs: Inputs, form: _Form, together: bool
) -> tuple[QParams, Tensor]:
    """Return the integers of a weight in the shape of the parameter, with what they are to be read with."""
    weight = reader.weight
    assert weight is not None
    result = torch.empty(weight.shape, dtype=q.dtype, device=weight.device)
    scale, zero_point = q.scale.clone(), q.zero_point.clone()
    for rows, columns, part, rounded in _rounded_parts(reader, q, inputs, form, together):
        part.put(result[rows], columns, rounded.positions.round().to(q.dtype))
        if form.spec is not None:
            size = form.group_size
            groups = slice(columns.start // size, columns.stop // size)
            scale[rows, groups] = rounded.step[0, :, ::size].to(scale.dtype)
            zero_point[rows, groups] = rounded.zero_point[0, :, ::size].to(zero_point.dtype)
        del part, rounded  # before columns that come next have theirs
    return replace(q, scale=scale, zero_point=zero_point), result


def _together(columns: int, multiple: int = 1) -> list[slice]:
    """Return the columns that are rounded together, as few and as equal parts as can be.

    Args:
        multiple: columns that have to be in one part, though they be more than are together otherwise.
    """
    units = columns // multiple
    parts = -(-units // max(1, MOST_TOGETHER // multiple))
    ends = [units * part // parts * multiple for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


@dataclass(frozen=True)
class _Order:
    """In which order columns are rounded, and how each one's error is handed on to those behind it.

    Attributes:
        columns: that are rounded together, of all.
        places: of these, `(groups, K)`.
        handed_on: in that order, `(groups, K, K)`.
    """

    columns: slice
    places: Tensor
    handed_on: Tensor
    form: _Form

    @classmethod
    def of(cls, columns: slice, moments: Symmetric, form: _Form) -> _Order:
        """Return that of the second moments of some columns.

        Raises:
            NotChanged: they cannot be factorized.
        """
        sizes = moments.diagonal()
        places = sizes.argsort(dim=1, descending=True, stable=True)
        if not form.by_size:
            places = places.sort(dim=1).values
        return cls(columns, places, _handed_on(moments, places, form), form)

    def positions(self, values: Sequence[Tensor], q: QParams) -> tuple[Tensor, Tensor, Tensor]:
        """Return where values are, in steps, of which each column makes up for the rounding of those before.

        They are within bounds, so that rounding them gives integers. Steps and zero points are returned too.

        Args:
            values: weight, step, zero point, `(groups, K, rows)`.
        """
        weight, *scales = values
        if self.form.spec is not None:  # groups get others
            scales = [v.clone() for v in scales]
        found, errors = (weight.new_empty(weight.shape) for _ in range(2))
        size = self.form.block_size if self.form.spec is None else self.form.group_size
        for first in range(0, weight.shape[1], size):
            block = slice(first, first + size)
            places = self.places[:, block, None].expand(-1, -1, weight.shape[2])
            before, *own = (v.gather(1, places) for v in (weight, *scales))  # side by side
            passed_on = self.handed_on[:, :first, block].transpose(1, 2) @ errors[:, :first]
            left = passed_on.add_(before)
            if self.form.spec is not None:
                self._rescale(self._expected(block, before, left), *own)
                for v, part in zip(scales, own, strict=True):
                    v.scatter_(1, places, part)
            walked = self._walked(block, (before, left, *own), errors[:, block], q)
            found.scatter_(1, places, walked)
        return found, scales[0], scales[1]

    def _expected(self, block: slice, before: Tensor, left: Tensor) -> Tensor:
        """Return what columns of a block become if none of them is rounded, `(groups, c, rows)`.

        Each then makes up for those in front of the block, and for those of the block that do.

        Args:
            before: the weight.
            left: it, with what columns in front of the block handed on.
        """
        handed_on = self.handed_on[:, block, block].transpose(1, 2)
        solve: Any = torch.linalg.solve_triangular
        made_up: Tensor = solve(handed_on, before - left, upper=False, unitriangular=True)
        return before - made_up

    def _walked(self, block: slice, values: Sequence[Tensor], errors: Tensor, q: QParams) -> Tensor:
        """Return positions of a block of columns, in their order, and write what each is off by.

        Args:
            values: weight, what it has become, step, zero point, `(groups, c, rows)`.
        """
        before, left, step, zero_point = values
        bounds: list[tuple[Any, Any]] = [(q.low, q.high)] * left.shape[1]
        if self.form.near:
            bounds = _next_to((before / step).add_(zero_point).clamp_(q.low, q.high))
        known = torch.addcmul(before, zero_point, step)  # an integer's step is taken from that
        found, handed_on = torch.empty_like(left), self.handed_on[:, block, block]
        columns = (left, step, zero_point, known, found, errors)
        each = zip(*(v.unbind(1) for v in columns), bounds, strict=True)
        for at, column in enumerate(each):
            value, of_step, zero, of, place, error, (least, most) = column
            torch.addcdiv(zero, value, of_step, out=place).clamp_(least, most)
            torch.addcmul(of, place.round(), of_step, value=-1, out=error)
            left[:, at + 1 :].addcmul_(handed_on[:, at, at + 1 :, None], error[:, None])
        return found

    def _rescale(self, group: Tensor, step: Tensor, zero_point: Tensor) -> None:
        """Give a group of columns, `(1, K, rows)`, the scales of what they have become, in place."""
        values, spec = group[0].T.contiguous(), self.form.spec
        observer: Any = make_observer(spec)
        observer(values)
        q = qparams_of(spec, observer, *observer.calculate_qparams())
        step[0], zero_point[0] = q.scale.float().T, q.zero_point.float().T


def _next_to(inside: Tensor) -> list[tuple[Any, Any]]:
    """Return the integers on both sides of each column's values."""
    return [*zip(inside.floor().unbind(1), inside.ceil().unbind(1), strict=True)]


def _handed_on(moments: Symmetric, places: Tensor, form: _Form) -> Tensor:
    """Return the part of each column's error that is added to each later one, `(groups, K, K)`.

    With `H = R R'` for an upper triangular `R` the squared error `E H E'` is that of `E R`, whose columns can
    be made zero one after another: `E_j = - sum of E_i R_ij / R_jj`. That is what GPTQ does by the inverse of
    `H`, and there is none to compute here. Correlations are believed in part; the smallest eigenvalue of what
    is factorized is the part that is not believed, at least: float32 is enough.

    Args:
        moments: of K columns.
        places: the order of columns, `(groups, K)`.

    Raises:
        NotChanged: they cannot be factorized.
    """
    powers = moments.diagonal().gather(1, places)
    damped = powers + form.damping * powers.mean(1, keepdim=True)
    sizes, back = (
        damped.clamp(min=NOTHING).sqrt(),
        places.flip(1),
    )  # the triangle is that from behind
    shrunk = _in_order(moments, back)
    shrunk.div_(sizes.flip(1)[:, None]).mul_(form.believed / sizes.flip(1)[:, :, None])
    shrunk.diagonal(dim1=1, dim2=2).fill_(1.0)
    failed = torch.empty(len(shrunk), dtype=torch.int32, device=shrunk.device)
    torch.linalg.cholesky_ex(shrunk, out=(shrunk, failed))
    if bool(failed.any()):
        raise NotChanged(
            "the second-moment matrix of its input is singular; calibrate with more data or "
            "increase GPTQ's damping"
        )
    root = _turned(shrunk)
    diagonal = root.diagonal(dim1=1, dim2=2)
    return root.div_((diagonal * sizes)[:, None]).mul_(sizes[:, :, None])


def _in_order(matrices: Symmetric, order: Tensor) -> Tensor:
    """Return matrices whose rows and columns are in an order, `(groups, K)`.

    They are stored by columns, as LAPACK has matrices: a factor can take the place of what is factorized.
    """
    groups, width = order.shape
    result = torch.empty(groups, width, width, dtype=torch.float32, device=order.device)
    places = order.argsort(dim=1)
    for rows, values in matrices.rows():
        for columns, own, to, part in zip(result, order, places, values, strict=True):
            columns.index_copy_(0, to[rows], part.index_select(1, own))
    return result.transpose(1, 2)


def _turned(matrices: Tensor) -> Tensor:
    """Turn square matrices stored by columns upside down and left to right, in place, and return them."""
    flat = matrices.transpose(1, 2).view(len(matrices), -1)
    size = flat.shape[1]
    for first in range(0, size // 2, _AT_A_TIME):
        last = min(first + _AT_A_TIME, size // 2)
        front, behind = flat[:, first:last], flat[:, size - last : size - first]
        before = front.flip(1)
        front.copy_(behind.flip(1))
        behind.copy_(before)
    return matrices
