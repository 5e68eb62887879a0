# SPDX-License-Identifier: Apache-2.0
"""The integers that bounds of a clamp become."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st
from qompose_xnnpack.operators import quantized_bound

from tests.xnnpack.operators.arithmetic import examples, scales, zero_points

# value, scale, zero point, integer on executorch 1.5.1 (behind a linear, a hardtanh, a clamp)
SEEN = [
    (-0.05, 0.1, 3, 2), (0.35, 0.1, 3, 6), (-0.05, 0.1, 4, 4), (2.25, 0.5, 3, 8), (-0.25, 0.5, 3, 2),
    (6.0, 0.037, -100, 62), (0.0, 0.037, -100, -100), (1e9, 0.05, 5, 127), (-1e30, 0.05, 5, -128),
    (3.0, 0.05, 100, 127),
    # 1 / scale times the value falls short of the tie that the quotient meets.
    (0.13210609555244446, 0.011487486772239208, 0, 12),
    (-3.024672746658325, 0.05873151123523712, 0, -52),
]  # fmt: skip


@pytest.mark.parametrize(("value", "scale", "zero_point", "expected"), SEEN)
def test_is_what_the_runtime_clamps_to(
    value: float, scale: float, zero_point: int, expected: int
) -> None:
    assert quantized_bound(value, scale, zero_point) == expected


@examples
@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), scales, zero_points)
def test_keeps_order_and_errs_by_half_a_step(
    low: float, high: float, scale: float, zero_point: int
) -> None:
    low, high = sorted((low, high))
    steps = [quantized_bound(value, scale, zero_point) for value in (low, high)]
    assert -128 <= steps[0] <= steps[1] <= 127
    exact = min(max(low / scale + zero_point, -128), 127)
    assert abs(steps[0] - exact) <= 0.51


@given(scales, zero_points)
def test_no_bound_is_the_end_of_the_range(scale: float, zero_point: int) -> None:
    assert quantized_bound(math.inf, scale, zero_point) == 127
    assert quantized_bound(-math.inf, scale, zero_point) == -128
    assert quantized_bound(0.0, scale, zero_point) == zero_point


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError):
        quantized_bound(math.nan, 0.1, 0)
