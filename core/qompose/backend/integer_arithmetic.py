# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic of quantized operators in aten.

A quantized tensor is `value = (integer - zero_point) * scale`. An operator first computes integers,
exactly, and then a `Sum`: what those integers stand for. `to_integers` and `to_floats` round it, once.

How it is exact: zero points are subtracted in int64. Products are accumulated in int64, or in float64
where aten has no integer kernel, as long as the largest possible sum stays below 2**63 or 2**53;
`product` raises where it may not. `torch._int_mm` and the int8 kernels of CPUs saturate on processors
without VNNI, so nothing here uses them. What remains is real: one multiplier for each term, a product in
float64 (relative error 2**-52), and one rounding, half to even.

Bounds, in steps of the output: `to_integers` is within 0.5 of the exact value, or within 1 where a bias
was rounded to the accumulator's unit, which happens only where that unit is no larger than a step. The
float32 arithmetic of Q/DQ operators rounds once more, by 0.5 and its own float32 errors: so both agree
to one step wherever those errors stay below half of one.

All functions take tensors, or fx proxies of tensors: they call nothing but aten overloads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

aten = torch.ops.aten
Real: TypeAlias = "float | Tensor"
"""A number, or a float64 tensor that broadcasts against an operator's output."""
EXACT = {torch.int64: 2**63, torch.float64: 2**53}
"""The first integer magnitude that a type cannot be trusted with."""


@dataclass(frozen=True)
class Grid:
    """What the integers of a tensor mean, and their bounds.

    Args:
        scale: in units of the float tensor; a tensor broadcasts against the *output* of the operator
            that reads the integers.
        zero_point: in integers; a tensor broadcasts against the integers themselves.
        low, high: bounds of the integers, inclusive.
    """

    scale: Real
    zero_point: int | Tensor
    low: int
    high: int
    dtype: torch.dtype

    def position(self, value: float) -> int:
        """Return the integer that stands for a value, within the bounds. The grid is per tensor."""
        assert isinstance(self.scale, float) and isinstance(self.zero_point, int)
        steps = min(max(value / self.scale, -(2.0**62)), 2.0**62)
        return min(max(round(steps) + self.zero_point, self.low), self.high)


@dataclass(frozen=True)
class Integers:
    """A quantized tensor."""

    values: Tensor
    grid: Grid

    def centred(self) -> Tensor:
        """Return `values - zero_point` in int64 (float64, for zero points that are not integers)."""
        wide, zero_point = _to(self.values, torch.int64), self.grid.zero_point
        if isinstance(zero_point, int) and zero_point == 0:
            return wide
        return _call(aten.sub.Tensor, wide, zero_point)

    def peak(self) -> int:
        """Return a bound on the magnitude of `centred()`."""
        grid, zero_point = self.grid, cast(object, self.grid.zero_point)  # may be an fx proxy
        if isinstance(zero_point, int):
            return max(abs(grid.low - zero_point), abs(grid.high - zero_point))
        if isinstance(zero_point, Tensor):
            return max(abs(grid.low), abs(grid.high)) + int(zero_point.abs().max())
        return grid.high - grid.low  # a zero point chosen at run time lies within the bounds


@dataclass(frozen=True)
class Sum:
    """What an operator computed: `sum(integers * scale) + offset`, clamped to [minimum, maximum].

    Args:
        terms: pairs of integers and the unit of each, which broadcasts against them.
        offset, minimum, maximum: in units of the float tensor; None for none.
        source: the integers that the sum is equal to, where it is one quantized tensor.
    """

    terms: tuple[tuple[Tensor, Real], ...]
    offset: Real | None = None
    minimum: float | None = None
    maximum: float | None = None
    source: Integers | None = None

    @property
    def is_clamped(self) -> bool:
        """Tell whether the sum has a bound of its own."""
        return self.minimum is not None or self.maximum is not None


def value_of_integers(x: Integers) -> Sum:
    """Return a quantized tensor as a sum of one term."""
    return Sum(((x.centred(), x.grid.scale),), source=x)


def product(
    operator: Any,
    x: Integers,
    y: Integers,
    rest: tuple[Any, ...] = (),
    *,
    depth: int,
    bias: Real | None = None,
    accumulator: torch.dtype = torch.int64,
) -> Sum:
    """Multiply quantized tensors with a bilinear operator: linear, a convolution, matmul, mul.

    Args:
        operator: an aten overload, called as `operator(x, y, *rest)`; `rest` holds None for its bias.
        depth: how many products one output is the sum of, at most.
        bias: real, broadcasts against the output.
        accumulator: int64; float64 for operators that aten has no integer kernel of.

    Raises:
        OverflowError: a sum may leave the integers that `accumulator` represents exactly.
    """
    largest = x.peak() * y.peak() * depth
    if largest >= EXACT[accumulator]:
        raise OverflowError(
            f"a sum of {depth} products may reach {largest:.3g}, but {accumulator} is exact only "
            f"below {EXACT[accumulator]:.3g}"
        )
    left, right = (_to(operand.centred(), accumulator) for operand in (x, y))
    total = _to(_call(operator, left, right, *rest), torch.int64)
    return Sum(((total, times(x.grid.scale, y.grid.scale)),), bias)


def for_output(
    vector: Tensor, axis: int, shape: tuple[int, ...], *, transposed: bool = False, groups: int = 1
) -> Tensor | None:
    """Arrange one number per channel of a weight so that it broadcasts against the operator's output.

    Args:
        vector: shape `(C,)`, along dimension `axis` of a weight of the given shape: `(out, in)` and
            `(out, in / groups, *kernel)`, or, transposed, `(in, out / groups, *kernel)`.

    Returns:
        shape `(out,)` or `(out, 1, ...)`, with a 1 for each dimension of the kernel; None where the sum
        runs over `axis`, so that no factor per output exists.
    """
    if vector.numel() > 1:
        if len(shape) < 2:
            return None
        if transposed and axis == 0 and shape[0] == groups:  # depthwise: one input channel a group
            vector = vector.repeat_interleave(shape[1])
        elif transposed and axis == 1:
            vector = vector.repeat(groups)
        elif transposed or axis != 0:
            return None
    return vector.reshape(-1, *[1] * (len(shape) - 2))


def added(x: Sum, y: Sum, alpha: float = 1.0) -> Sum:
    """Return `x + alpha * y`. Neither is clamped."""
    scaled = tuple((integers, times(scale, float(alpha))) for integers, scale in y.terms)
    offset = x.offset
    if y.offset is not None:
        more = times(y.offset, float(alpha))
        offset = more if offset is None else _call(aten.add.Tensor, offset, more)
    return Sum((*x.terms, *scaled), offset)


def scaled(x: Integers, factor: Real) -> Sum:
    """Return the product of a quantized and a real tensor (or number)."""
    return Sum(((x.centred(), times(x.grid.scale, factor)),))


def clamped(x: Sum, minimum: float | None, maximum: float | None) -> Sum:
    """Return a sum with bounds, in units of the float tensor."""
    return replace(x, minimum=minimum, maximum=maximum)


def pooled(operator: Any, x: Integers, *rest: Any) -> Sum:
    """Return the largest integer of each window; the scale is positive, so it is the largest value's.

    In float64, since aten pools integers of some ranks only.
    """
    values = _call(operator, _to(x.values, torch.float64), *rest)
    return value_of_integers(Integers(_to(values, x.grid.dtype), x.grid))


def averaged(x: Integers, count: int, operator: Any, *rest: Any) -> Sum:
    """Return means of `count` integers each: their sums, in units of the scale over `count`.

    Args:
        operator: an aten overload that sums, called as `operator(values, *rest)`; in float64, since aten
            pools no integers.

    Raises:
        OverflowError: a sum may leave the integers that float64 represents exactly.
    """
    if x.peak() * count >= EXACT[torch.float64]:
        raise OverflowError(
            f"a sum of {count} integers may be too large for float64 to represent exactly"
        )
    total = _to(_call(operator, _to(x.centred(), torch.float64), *rest), torch.int64)
    return Sum(((total, over(x.grid.scale, float(count))),))


def gathered(table: Integers, indices: Tensor, *rest: Any, by_row: bool) -> Sum:
    """Look up rows of a table, shape `(N, C)`, as integers; only those are dequantized.

    Args:
        rest: the further arguments of aten.embedding.
        by_row: scale and zero point have shape `(N, 1)`, one for each row, and are looked up as well;
            a zero point 0 stands for all rows.
    """
    grid = table.grid
    if by_row:
        scale = _to(_call(aten.embedding.default, grid.scale, indices), torch.float64)
        zero_point = grid.zero_point
        if not isinstance(zero_point, int):
            zero_point = _call(aten.embedding.default, zero_point, indices)
        grid = replace(grid, scale=scale, zero_point=zero_point)
    rows = Integers(_call(aten.embedding.default, table.values, indices, *rest), grid)
    return replace(value_of_integers(rows), source=None if by_row else rows)


def to_integers(x: Sum, grid: Grid) -> Tensor:
    """Round a sum to a grid that is per tensor: `clamp(round(x / scale) + zero_point, low, high)`.

    A bias joins the accumulator as an integer, as it does in kernels, where the accumulator's unit is no
    larger than the step of the output; elsewhere rounding it so would cost more than the half step that
    the final rounding does, and it joins the rescaled sum as a real number.
    """
    if x.source is not None and not x.is_clamped and same_grid(x.source.grid, grid):
        return x.source.values
    assert isinstance(grid.scale, float)
    steps = round_half_even(_rescaled(_with_integer_bias(x, grid.scale), grid.scale))
    if grid.zero_point != 0:
        steps = _call(aten.add.Tensor, steps, grid.zero_point)
    low = grid.low if x.minimum is None else grid.position(x.minimum)
    high = grid.high if x.maximum is None else grid.position(x.maximum)
    return _to(_call(aten.clamp.default, steps, low, high), grid.dtype)


def to_floats(x: Sum, dtype: torch.dtype) -> Tensor:
    """Round a sum to a floating point type, once."""
    value = _rescaled(x, 1.0)
    if x.is_clamped:
        value = _call(aten.clamp.default, value, x.minimum, x.maximum)
    return _to(value, dtype)


def round_half_even(x: Tensor) -> Tensor:
    """Round to the nearest integer, ties to the even one."""
    return _call(aten.round.default, x)


def same_grid(one: Grid, other: Grid) -> bool:
    """Tell whether integers of one grid are integers of the other; both must be known and per tensor."""
    return isinstance(one.scale, float) and isinstance(one.zero_point, int) and one == other


def _with_integer_bias(x: Sum, step: float) -> Sum:
    """Move the offset into the accumulator, where it is known, fits, and is not too coarse there."""
    (integers, unit), offset = x.terms[0], x.offset
    if len(x.terms) > 1 or not isinstance(offset, Tensor) or not isinstance(unit, (float, Tensor)):
        return x
    units = torch.as_tensor(unit, dtype=torch.float64, device=offset.device)
    whole = round_half_even(offset.double() / units)
    if bool((units > step).any()) or not bool((whole.abs() < 2.0**62).all()):
        return x
    total = _call(aten.add.Tensor, integers, _to(whole, torch.int64))
    return replace(x, terms=((total, unit),), offset=None)


def _rescaled(x: Sum, step: float) -> Tensor:
    """Return the sum in units of `step`, in float64."""
    parts = [
        _call(aten.mul.Tensor, _to(integers, torch.float64), over(unit, step))
        for integers, unit in x.terms
    ]
    if x.offset is not None:
        parts.append(over(x.offset, step))  # type: ignore[arg-type]  # aten adds numbers too
    total, *others = parts
    for part in others:
        total = _call(aten.add.Tensor, total, part)
    return total


def times(x: Real, y: Real) -> Real:
    """Return the product of two numbers, of two tensors, or of one of each."""
    if isinstance(x, float) and isinstance(y, float):
        return x * y
    return _call(aten.mul.Tensor, *((y, x) if isinstance(x, float) else (x, y)))


def over(x: Real, y: float) -> Real:
    """Return a quotient."""
    if y == 1.0:
        return x
    return x / y if isinstance(x, float) else _call(aten.div.Tensor, x, y)


def quantize(x: Tensor, grid: Grid, *, late: bool = False) -> Tensor:
    """Quantize floats where they enter, in float32, as the operators of `quantized_decomposed` do.

    Args:
        late: round behind the zero point, not before it, as the operators for tokens and groups do; ties
            then go to even integers, not to even steps.
    """
    scale = grid.scale
    inverse = 1.0 / scale if isinstance(scale, float) else _call(aten.reciprocal.default, scale)
    steps = _call(aten.mul.Tensor, _to(x, torch.float32), inverse)
    if late:
        steps = round_half_even(_call(aten.add.Tensor, steps, grid.zero_point))
    else:
        steps = _call(aten.add.Tensor, round_half_even(steps), grid.zero_point)
    return _to(_call(aten.clamp.default, steps, grid.low, grid.high), grid.dtype)


def dequantize(x: Integers, dtype: torch.dtype, *, late: bool = False) -> Tensor:
    """Dequantize integers where floats are read, as `quantized_decomposed` does.

    Args:
        late: convert to `dtype` behind the product, as all of its operators but those per tensor do.
    """
    values = x.values if late else _to(x.values, dtype)
    centred = _call(aten.sub.Tensor, values, x.grid.zero_point)
    return _to(_call(aten.mul.Tensor, centred, x.grid.scale), dtype)


def choose_qparams(
    x: Tensor, low: int, high: int, eps: float, dtype: torch.dtype, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Choose scale (float64) and zero point (int64), both of shape `()`, from the range of `x`.

    The formulas are those of `qompose.spec.qparams.choose_qparams`, in the order of
    `torch.ao.quantization.utils.determine_qparams`, which chooses for the decomposed operators: bit for
    bit the same, save that a tensor without elements or with NaN has no range here.
    """
    below = _call(aten.clamp.default, _call(aten.amin.default, x), None, 0.0)
    above = _call(aten.clamp.default, _call(aten.amax.default, x), 0.0)
    if symmetric:
        above = _call(aten.maximum.default, _call(aten.neg.default, below), above)
        width, steps = above, float(high - low) / 2
    else:
        width, steps = _call(aten.sub.Tensor, above, below), float(high - low)
    scale = _to(_call(aten.div.Tensor, width, steps), torch.float32)
    scale = _call(aten.clamp.default, scale, eps)
    if symmetric:
        middle = 128 if dtype is torch.uint8 else 0
        zero_point = _call(aten.full_like.default, _to(scale, torch.int64), middle)
    else:
        offset = round_half_even(_call(aten.div.Tensor, _to(below, torch.float32), scale))
        zero_point = _call(aten.rsub.Scalar, _to(offset, torch.int64), low)
        zero_point = _call(aten.clamp.default, zero_point, low, high)
    return _to(scale, torch.float64), zero_point


def choose_per_token(x: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Choose int8 scales and zero points, both of shape `(..., 1)`, for the rows of `x`.

    The formulas are those of `quantized_decomposed`; the asymmetric zero point is rounded from the end
    of the range where that errs less.
    """
    if symmetric:
        most = _call(aten.amax.default, _call(aten.abs.default, x), [-1], True)
        scale = _call(aten.div.Tensor, _call(aten.clamp.default, most, 1e-5), 127)
        return scale, _call(aten.zeros_like.default, scale)
    low, high = -128, 127
    below = _call(aten.clamp.default, _call(aten.amin.default, x, [-1], True), None, 0.0)
    above = _call(aten.clamp.default, _call(aten.amax.default, x, [-1], True), 0.0)
    width = _call(aten.sub.Tensor, above, below)
    eps = torch.finfo(torch.float32).eps
    scale = _call(aten.clamp.default, _call(aten.div.Tensor, width, float(high - low)), eps)
    below, above = (_call(aten.div.Tensor, end, scale) for end in (below, above))
    errors = (_call(aten.add.Tensor, end, at) for end, at in ((below, low), (above, high)))
    sides = (_call(aten.rsub.Scalar, end, at) for end, at in ((below, low), (above, high)))
    positive = _call(aten.gt.Scalar, _call(aten.add.Tensor, *errors), 0)
    chosen = _call(aten.clamp.default, _call(aten.where.self, positive, *sides), low, high)
    return _to(scale, torch.float64), _to(round_half_even(chosen), torch.int64)


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return _call(aten.to.dtype, x, dtype)


def _call(operator: Any, *args: Any) -> Tensor:
    result: Tensor = operator(*args)
    return result
