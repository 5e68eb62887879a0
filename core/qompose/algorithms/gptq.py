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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qompose.algorithms.blocks import Block
from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import Algorithm, Part
from qompose.algorithms.products import (
    NOTHING,
    InputMoments,
    InputRows,
    NotChanged,
    Operands,
    change_products,
    columns_of,
    moments_asked,
    moments_read,
    noted,
    reader_of,
    rows_read,
    set_integers,
    taps_of,
    weight_group,
)
from qompose.observers.auto_range import Reader
from qompose.observers.input_sums import Columns
from qompose.spec.algorithm_choice import GPTQ as WORD, GPTQ_SEQUENTIAL as SEQUENTIAL
from qompose.spec.claim import Claim
from qompose.spec.qdq import QParams, for_each_value

_NEEDED = 1.05
"""How many times smaller the squared error has to become on data held back."""
MOST_TOGETHER = 2048
"""Columns whose errors are handed on to one another: the time for that grows with their cube."""
_BLOCK = 64
"""Columns whose errors are handed on to the others together, which is one large product."""
_JUDGED = 256
"""How many outputs, at least, the gain is measured on."""
Inputs = InputRows | InputMoments


@dataclass(frozen=True)
class _Form:
    """How errors are handed on.

    Attributes:
        believed: the part of the correlations that is believed.
        near: whether each integer is one of the two next to the value.
    """

    believed: float
    near: bool


_OF_ROWS = (_Form(0.5, near=True),)
_OF_MOMENTS = tuple(_Form(believed, near=False) for believed in (0.5, 0.9, 0.97))


@dataclass(frozen=True)
class GPTQ(Algorithm):
    """Rounds the weights of products whose claims ask for it.

    Args:
        sequential: round one product after another, each by the inputs that the quantized program gives it
            with all weights in front of it rounded (`qompose.calibrate`). Its word is "gptq_sequential".
    """

    sequential: bool = False

    @property
    def word(self) -> str:  # type: ignore[override]
        """Return by which word configurations ask for it."""
        return SEQUENTIAL if self.sequential else WORD

    def __str__(self) -> str:
        return self.word

    def watch_moments(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, Columns, int]]:
        if not self.sequential:
            yield from moments_asked(self, claims, nodes)

    def learns(self, claim: Claim) -> Part | None:
        return "product" if self.sequential else None

    def learn(self, found: Calibrated, block: Block) -> None:
        for product in block.products:
            with noted(found, self, product) as effect:
                effect.append(self._round_by(found, product, block.moments(product)))

    def correct(self, found: Calibrated) -> None:
        if not self.sequential:
            change_products(found, self, partial(self._round, found))

    def _round(self, found: Calibrated, product: Operands, claim: Claim) -> str:
        """Decide on the integers of a product's weight, and say what they gain.

        Raises:
            NotChanged: those next to its values stay.
        """
        if self.is_asked(claim):
            return self._round_by(found, product, moments_read(found, product))
        inputs = rows_read(found, product, reader_of(found, product))
        return self._round_by(found, product, inputs)

    def _round_by(self, found: Calibrated, product: Operands, inputs: Inputs) -> str:
        _, q = weight_group(found, product)
        if q.zero_point.is_floating_point():
            raise NotChanged(f"the zero points of {product.weight.target} are not integers")
        by_moments = isinstance(inputs, InputMoments)
        forms = _OF_MOMENTS if by_moments else _OF_ROWS
        together = by_moments and columns_of(product)[0].window is not None
        if inputs.channels == 1:
            raise NotChanged("each output reads a single value, so no other can compensate")
        rounding = _Rounding.of(reader_of(found, product), q, together=together)
        first, second = inputs.halves()
        form, gain = rounding.some().best_form(forms, first, second)
        if not gain >= _NEEDED:  # NaN neither
            raise NotChanged(
                f"on calibration data held back its squared error would become {gain:.2f} times smaller, and "
                f"{_NEEDED} is needed"
            )
        set_integers(found, product, rounding.integers(inputs, form))
        effect = f"squared error on calibration data held back {gain:.2f} times smaller"
        return effect if inputs.number >= inputs.channels else f"{effect}, {_few(inputs)}"


def compensated(
    found: Calibrated, product: Operands, inputs: InputMoments, otherwise: Tensor
) -> Tensor:
    """Return where each value of a product's weight is, in steps, when GPTQ rounds it to its integer.

    Args:
        inputs: second moments of what it reads.
        otherwise: what is returned where the nearest integers are better on data held back, in the shape of
            the parameter.

    Raises:
        NotChanged: the weight is not quantized, or its parameters are not known here.
    """
    _, q = weight_group(found, product)
    together = columns_of(product)[0].window is not None
    rounding = _Rounding.of(reader_of(found, product), q, together=together)
    form, gain = rounding.some().best_form(_OF_MOMENTS, *inputs.halves())
    if inputs.channels == 1 or not gain > 1:
        return otherwise
    (found_there,) = rounding.positions((inputs,), form)
    return rounding.as_parameter(found_there)


def _few(inputs: Inputs) -> str:
    return f"from {inputs.number} rows for {inputs.channels} channels (more calibration data would help)"


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
        apart = slice(None, None, max(1, self.weight.shape[1] // _JUDGED))
        names = ("weight", "step", "zero_point")
        return replace(self, **{name: getattr(self, name)[:, apart] for name in names})

    def best_form(
        self, forms: Sequence[_Form], first: Inputs, second: Inputs
    ) -> tuple[_Form, float]:
        """Return the form that is best on the half that it is not rounded by, and its gain there."""
        nearest = self.nearest()
        before = self.error(nearest, first) + self.error(nearest, second)
        gains = {
            form: before / max(self._held_back(form, first, second), NOTHING) for form in forms
        }
        return max(gains.items(), key=lambda item: item[1])

    def _held_back(self, form: _Form, first: Inputs, second: Inputs) -> float:
        by_first, by_second = self.rounded((first, second), form)
        return self.error(by_first, second) + self.error(by_second, first)

    def nearest(self) -> Tensor:
        """Return the nearest integers, as floats."""
        q = self.q
        return (self.weight / self.step).round_().add_(self.zero_point).clamp_(q.low, q.high)

    def error(self, integers: Tensor, inputs: Inputs) -> float:
        """Return the squared error of the product."""
        return inputs.error((integers - self.zero_point) * self.step - self.weight)

    def rounded(self, inputs: Sequence[Inputs], form: _Form) -> Sequence[Tensor]:
        """Return integers by each of the inputs, as floats, in the shape of the weight."""
        return [found.round_() for found in self.positions(inputs, form)]

    def positions(self, inputs: Sequence[Inputs], form: _Form) -> Sequence[Tensor]:
        """Return by each of the inputs where each value is, in steps, when it is rounded.

        All are rounded side by side: what takes time is the number of columns.
        """
        weights = (self.weight, self.step, self.zero_point)
        values = [v.transpose(1, 2).repeat(len(inputs), 1, 1) for v in weights]
        parts = []
        for columns in _together(inputs[0].channels):
            moments = torch.cat([known.moments(columns) for known in inputs])
            parts.append(_positions([v[:, columns] for v in values], moments, self.q, form))
        return torch.cat(parts, dim=1).transpose(1, 2).chunk(len(inputs))

    def as_parameter(self, found: Tensor) -> Tensor:
        """Return values in the shape of the weight in that of the parameter."""
        assert self.reader.weight is not None
        result = torch.empty(self.reader.weight.shape, device=self.weight.device)
        groups, outputs, channels, taps = self.shape
        if self.together:
            found = found.reshape(self.shape)
        else:
            found = found.reshape(groups, outputs, taps, channels).transpose(2, 3)
        taps_of(result, self.reader.groups, self.reader.transposed).copy_(found)
        return result

    def integers(self, inputs: Inputs, form: _Form) -> Tensor:
        """Return the integers in the shape of the parameter."""
        (found,) = self.rounded((inputs,), form)
        return self.as_parameter(found).to(self.q.dtype)


def _together(columns: int) -> list[slice]:
    """Return the columns that are rounded together, as few and as equal parts as can be."""
    parts = -(-columns // MOST_TOGETHER)
    ends = [columns * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _positions(values: Sequence[Tensor], moments: Tensor, q: QParams, form: _Form) -> Tensor:
    """Return where values are, in steps, of which each column makes up for the rounding of those before it.

    They are within bounds, so that rounding them gives integers.

    Args:
        values: weight, step, zero point, `(groups, columns, rows)`: what is handed on lies side by side.
        moments: `(groups, columns, columns)`.
    """
    order = moments.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    handed_on = _handed_on(_permuted(moments, order), form.believed)
    places = order[:, :, None].expand_as(values[0])
    weight, step, zero_point = (v.gather(1, places) for v in values)
    inside = (weight / step).add_(zero_point).clamp_(q.low, q.high)
    bounds = [(q.low, q.high)] * weight.shape[1] if not form.near else _next_to(inside)
    known = torch.addcmul(weight, zero_point, step)  # what an integer times its step is taken from
    left, found, errors = weight, inside, torch.empty_like(weight)
    each = [
        *zip(
            *(v.unbind(1) for v in (left, step, zero_point, known, found, errors)),
            bounds,
            strict=True,
        )
    ]
    for first in range(0, len(each), _BLOCK):
        last = min(first + _BLOCK, len(each))
        left[:, first:last] += handed_on[:, :first, first:last].transpose(1, 2) @ errors[:, :first]
        for at in range(first, last):
            value, size, zero, of, place, error, (least, most) = each[at]
            torch.addcdiv(zero, value, size, out=place).clamp_(least, most)
            torch.addcmul(of, place.round(), size, value=-1, out=error)
            left[:, at + 1 : last].addcmul_(handed_on[:, at, at + 1 : last, None], error[:, None])
    return torch.empty_like(left).scatter_(1, places, found)


def _next_to(inside: Tensor) -> list[tuple[Any, Any]]:
    """Return the integers on both sides of each column's values."""
    return [*zip(inside.floor().unbind(1), inside.ceil().unbind(1), strict=True)]


def _permuted(matrices: Tensor, order: Tensor) -> Tensor:
    found = [
        m.index_select(0, at).index_select(1, at) for m, at in zip(matrices, order, strict=True)
    ]
    return torch.stack(found)


def _handed_on(moments: Tensor, believed: float) -> Tensor:
    """Return the part of each column's error that is added to each later one, `(groups, K, K)`.

    With `H = R R'` for an upper triangular `R` the squared error `E H E'` is that of `E R`, whose columns can
    be made zero one after another: `E_j = - sum of E_i R_ij / R_jj`. That is what GPTQ does by the inverse of
    `H`, and there is none to compute here. Correlations are believed in part; the smallest eigenvalue of what
    is factorized is the part that is not believed, at least: float32 is enough.
    """
    sizes = moments.diagonal(dim1=1, dim2=2).clamp(min=NOTHING).sqrt()
    shrunk = (
        moments.flip(1, 2).div_(sizes.flip(1)[:, None]).mul_(believed / sizes.flip(1)[:, :, None])
    )
    shrunk.diagonal(dim1=1, dim2=2).fill_(1.0)
    root: Tensor = torch.linalg.cholesky(shrunk).flip(1, 2)
    diagonal = root.diagonal(dim1=1, dim2=2)
    return root.div_((diagonal * sizes)[:, None]).mul_(sizes[:, :, None])
