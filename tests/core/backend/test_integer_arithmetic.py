# SPDX-License-Identifier: Apache-2.0
"""The reference functions, against exact rational arithmetic and against what they stand for."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.backend import integer_arithmetic as arithmetic
from qompose.backend.integer_arithmetic import Grid, Integers
from qompose.spec import qdq
from torch import Tensor

aten = torch.ops.aten

RANGES = [
    (torch.int8, -128, 127), (torch.int8, -127, 127), (torch.int8, -8, 7), (torch.uint8, 0, 255),
    (torch.uint8, 0, 15), (torch.int16, -32768, 32767), (torch.uint8, 1, 254),
]  # fmt: skip
SCALES = st.floats(1e-12, 1e12, allow_nan=False) | st.sampled_from([2.0**-40, 1.0, 2.0**30])


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    dtype, low, high = draw(st.sampled_from(RANGES))
    return Grid(draw(SCALES), draw(st.integers(low, high)), low, high, dtype)


@st.composite
def tensors(draw: st.DrawFn, *shape: int, grid: Grid | None = None) -> Integers:
    """Integers of a grid, often at its bounds."""
    grid = grid or draw(grids())
    element = st.sampled_from([grid.low, grid.high]) | st.integers(grid.low, grid.high)
    count = math.prod(shape)
    flat = draw(st.lists(element, min_size=count, max_size=count))
    return Integers(torch.tensor(flat, dtype=grid.dtype).reshape(shape), grid)


def value(x: Integers, *index: int) -> Fraction:
    """One element, exactly; the grid is per tensor."""
    return (int(x.values[index]) - int(x.grid.zero_point)) * Fraction(x.grid.scale)


def distance(got: Tensor, exact: list[Fraction], grid: Grid) -> float:
    """How far integers are from exact values, in steps; beyond the bounds of the grid nothing counts."""
    low, high = (Fraction(end) for end in (grid.low, grid.high))
    steps = (min(max(e / Fraction(grid.scale) + grid.zero_point, low), high) for e in exact)
    pairs = zip(got.flatten().tolist(), steps, strict=True)
    return max(float(abs(Fraction(integer) - step)) for integer, step in pairs)


SOME = settings(max_examples=40)
HALF = 0.5 + 1e-6  # the multiplier is rounded to float64, so a tie may fall to either side


@SOME
@given(st.data(), st.integers(1, 3), st.integers(1, 7), st.integers(1, 3), st.booleans())
def test_linear(data: st.DataObject, rows: int, depth: int, columns: int, biased: bool) -> None:
    """Within half a step of the exact value, whatever the scales, zero points and ranges are.

    A bias costs half a unit of the accumulator more, where that is not coarser than a step.
    """
    x, w = data.draw(tensors(rows, depth)), data.draw(tensors(columns, depth))
    grid = data.draw(grids())
    largest = 1e9 if biased else 0.0
    bias = [data.draw(st.floats(-largest, largest)) for _ in range(columns)]
    real = torch.tensor(bias, dtype=torch.float64) if biased else None
    total = arithmetic.product(aten.linear.default, x, w, depth=depth, bias=real)
    got = arithmetic.to_integers(total, grid)
    exact = [
        sum((value(x, i, k) * value(w, j, k) for k in range(depth)), Fraction(bias[j]))
        for i, j in itertools.product(range(rows), range(columns))
    ]
    unit = Fraction(x.grid.scale) * Fraction(w.grid.scale) / Fraction(grid.scale)
    assert got.dtype is grid.dtype
    assert distance(got, exact, grid) <= HALF + (float(unit / 2) if biased and unit <= 1 else 0.0)
    floats = arithmetic.to_floats(total, torch.float64).flatten().tolist()
    assert biased or all(
        math.isclose(f, e, rel_tol=1e-14) for f, e in zip(floats, exact, strict=True)
    )


def test_a_bias_is_an_integer_where_the_accumulator_is_finer_than_the_output() -> None:
    x = Integers(torch.tensor([[3]], dtype=torch.int8), Grid(0.1, 0, -128, 127, torch.int8))
    w = Integers(torch.tensor([[5]], dtype=torch.int8), Grid(0.1, 0, -128, 127, torch.int8))
    bias = torch.tensor([0.0249], dtype=torch.float64)  # 2.49 units of 0.01
    total = arithmetic.product(aten.linear.default, x, w, depth=1, bias=bias)
    moved = arithmetic._with_integer_bias(total, step=0.02)
    assert moved.offset is None
    assert moved.terms[0][0].tolist() == [[17]]
    assert moved.terms[0][0].dtype is torch.int64
    assert arithmetic._with_integer_bias(total, step=0.009) is total


@pytest.mark.parametrize("depth", [64, 3000, 4096])
@pytest.mark.parametrize("signs", [(127, 127), (-128, -128), (-128, 127)])
def test_long_sums_of_extremes_do_not_saturate(depth: int, signs: tuple[int, int]) -> None:
    """int8 kernels without VNNI give 8160 for 64 products of 127 * 127."""
    grid = Grid(1.0, 0, -128, 127, torch.int8)
    x, w = (Integers(torch.full((1, depth), sign, dtype=torch.int8), grid) for sign in signs)
    expected = signs[0] * signs[1] * depth
    total = arithmetic.product(aten.linear.default, x, w, depth=depth)
    assert total.terms[0][0].item() == expected
    image = Integers(x.values.reshape(1, depth, 1), grid), Integers(w.values.unsqueeze(-1), grid)
    rest = (None, [1], [0], [1], 1)
    total = arithmetic.product(
        aten.conv1d.default, *image, rest, depth=depth, accumulator=torch.float64
    )
    assert total.terms[0][0].item() == expected


def test_a_sum_that_may_be_inexact_is_refused() -> None:
    grid = Grid(1.0, 0, -32768, 32767, torch.int16)
    x = Integers(torch.zeros(1, 4, dtype=torch.int16), grid)
    with pytest.raises(OverflowError, match="a sum of 8388608 products may reach 9"):
        arithmetic.product(aten.linear.default, x, x, depth=2**23, accumulator=torch.float64)
    shifted = Grid(1.0, torch.tensor([[9], [-200]]), -8, 7, torch.int8)
    assert Integers(x.values, shifted).peak() == 208


@SOME
@given(st.data(), st.sampled_from([1.0, -1.0, 2.5]))
def test_added(data: st.DataObject, alpha: float) -> None:
    x, y, grid = data.draw(tensors(2, 2)), data.draw(tensors(1, 2)), data.draw(grids())
    total = arithmetic.added(
        arithmetic.value_of_integers(x), arithmetic.value_of_integers(y), alpha
    )
    exact = [
        value(x, i, j) + Fraction(alpha) * value(y, 0, j)
        for i, j in itertools.product(range(2), range(2))
    ]
    got = arithmetic.to_integers(total, grid)
    span = max(abs(e) for e in (value(x, 0, 0), value(y, 0, 0), *exact))
    slack = float(span / Fraction(grid.scale)) * 2.0**-50  # of float64, where both terms cancel
    assert distance(got, exact, grid) <= HALF + slack


@SOME
@given(st.data())
def test_multiplied(data: st.DataObject) -> None:
    x, y, grid = data.draw(tensors(2, 1)), data.draw(tensors(1, 2)), data.draw(grids())
    got = arithmetic.to_integers(arithmetic.product(aten.mul.Tensor, x, y, depth=1), grid)
    exact = [value(x, i, 0) * value(y, 0, j) for i, j in itertools.product(range(2), range(2))]
    assert distance(got, exact, grid) <= HALF


@SOME
@given(st.data(), st.floats(-100, 100), st.floats(-100, 100))
def test_clamped(data: st.DataObject, one: float, other: float) -> None:
    """Bounds hold to half a step as well, and in float exactly."""
    low, high = sorted((one, other))
    x, grid = data.draw(tensors(5)), data.draw(grids())
    total = arithmetic.clamped(arithmetic.value_of_integers(x), low, high)
    exact = [min(max(value(x, i), Fraction(low)), Fraction(high)) for i in range(5)]
    assert distance(arithmetic.to_integers(total, grid), exact, grid) <= HALF
    floats = arithmetic.to_floats(total, torch.float64)
    assert low <= float(floats.min()) <= float(floats.max()) <= high


@pytest.mark.parametrize(("spatial", "groups"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_channels_of_weights(spatial: int, groups: int, transposed: bool, axis: int) -> None:
    """A factor for each output stands where the weight's own scale would have acted."""
    shape = (groups if transposed and axis == 0 else 4, 2 // groups if not transposed else 3)
    shape = (*shape, *[2] * spatial)
    channels_in = shape[0] if transposed else shape[1] * groups
    w, x = torch.randn(shape).double(), torch.randn(1, channels_in, *[4] * spatial).double()
    scale = torch.rand(shape[axis]).double() + 0.5
    factor = arithmetic.for_output(scale, axis, shape, transposed=transposed, groups=groups)
    if factor is None:
        assert shape[axis] > 1
        assert (axis == 1) != transposed
        return
    convolve = getattr(torch.nn.functional, f"conv{'_transpose' if transposed else ''}{spatial}d")
    view = [-1 if dim == axis else 1 for dim in range(len(shape))]
    expected = convolve(x, w * scale.reshape(view), groups=groups)
    torch.testing.assert_close(convolve(x, w, groups=groups) * factor, expected)


FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


@SOME
@given(st.lists(FLOATS, min_size=1, max_size=9), st.data(), st.floats(1e-20, 1e20))
def test_borders_are_the_decomposed_operators(
    values: list[float], data: st.DataObject, scale: float
) -> None:
    dtype, low, high = data.draw(st.sampled_from(RANGES))
    grid = Grid(scale, data.draw(st.integers(low, high)), low, high, dtype)
    rest = (grid.scale, grid.zero_point, low, high, dtype)
    for kind in (torch.float32, torch.bfloat16):
        x = torch.tensor(values, dtype=kind)
        expected = qdq.quantize_per_tensor(x, *rest)
        assert torch.equal(arithmetic.quantize(x, grid), expected)
        back = qdq.dequantize_per_tensor(expected, *rest, out_dtype=kind)
        got = arithmetic.dequantize(Integers(expected, grid), kind)
        torch.testing.assert_close(got, back, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@given(
    values=st.lists(st.floats(-6e4, 6e4, width=16), min_size=1, max_size=9),
    bounds=st.sampled_from(RANGES[:4]),
)
@settings(max_examples=50)
def test_qparams_are_those_of_the_decomposed_operators(
    symmetric: bool, kind: torch.dtype, values: list[float], bounds: Any
) -> None:
    dtype, low, high = bounds
    x = torch.tensor(values, dtype=kind)
    choose = qdq.choose_qparams_symmetric if symmetric else qdq.choose_qparams
    scale, zero_point = choose(x, low, high, 2.0**-12, dtype)
    got = arithmetic.choose_qparams(x, low, high, 2.0**-12, dtype, symmetric=symmetric)
    assert got[0].dtype is torch.float64
    assert got[1].dtype is torch.int64
    assert (got[0].item(), got[1].item()) == (scale.item(), zero_point.item())


@pytest.mark.parametrize("symmetric", [False, True])
@given(st.lists(FLOATS, min_size=6, max_size=6))
@settings(max_examples=50)
def test_qparams_of_tokens(symmetric: bool, values: list[float]) -> None:
    x = torch.tensor(values).reshape(3, 2)
    choose = qdq.choose_qparams_per_token_symmetric if symmetric else qdq.choose_qparams_per_token
    expected = choose(x, torch.int8)
    got = arithmetic.choose_per_token(x, symmetric=symmetric)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    grid = Grid(*got, -128, 127, torch.int8)
    integers = qdq.quantize_per_token(x, *expected, -128, 127, torch.int8)
    assert torch.equal(arithmetic.quantize(x, grid, late=True), integers)


def test_an_unchanged_grid_hands_integers_on() -> None:
    grid = Grid(0.1, 3, -128, 127, torch.int8)
    x = Integers(torch.tensor([1, 2], dtype=torch.int8), grid)
    assert arithmetic.to_integers(arithmetic.value_of_integers(x), grid) is x.values
    other = Grid(0.1, 3, -128, 126, torch.int8)
    assert arithmetic.to_integers(arithmetic.value_of_integers(x), other) is not x.values


def test_a_zero_point_chosen_at_run_time_lies_within_the_bounds() -> None:
    """So no value minus it is larger than the whole range, which says how wide a product must be."""
    at_run_time: Any = object()  # as the proxy of a node, whose value nobody knows yet
    values = torch.zeros(1, dtype=torch.int8)
    assert Integers(values, Grid(1.0, at_run_time, -128, 127, torch.int8)).peak() == 255


def test_ties_go_to_even() -> None:
    x = Integers(torch.tensor([1, 3, 5, -1], dtype=torch.int8), Grid(0.5, 0, -8, 7, torch.int8))
    out = Grid(1.0, 1, -8, 7, torch.int8)
    assert arithmetic.to_integers(arithmetic.value_of_integers(x), out).tolist() == [1, 3, 3, 1]
