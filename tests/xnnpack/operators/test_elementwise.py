# SPDX-License-Identifier: Apache-2.0
"""Sums, differences and products of int8 tensors, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from tests.xnnpack.operators.arithmetic import (
    FULL,
    KERNELS,
    Out,
    assert_step,
    examples,
    grid,
    int8,
    outputs,
    real,
    scales,
    seeds,
    zero_points,
)

FUNCTIONS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}


@examples
@given(
    st.sampled_from(sorted(FUNCTIONS)), seeds, scales, zero_points, scales, zero_points, outputs(),
    st.booleans(),
)  # fmt: skip
def test_ranges(
    name: str,
    seed: int,
    a_scale: float,
    a_zp: int,
    b_scale: float,
    b_zp: int,
    out: Out,
    extreme: bool,
) -> None:
    a, b = int8(seed, 2, 3, 8, extreme=extreme), int8(seed + 1, 3, 1, extreme=extreme)
    exact = FUNCTIONS[name](real(a, a_scale, a_zp), real(b, b_scale, b_zp))
    actual = getattr(KERNELS, name)(a, a_scale, a_zp, b, b_scale, b_zp, *out)
    assert_step(actual, grid(exact, out))


@pytest.mark.parametrize("ratio", [1e-12, 1e-6, 2.0**-10, 2.0**8, 2.0**19, 1e9])
@pytest.mark.parametrize("name", ["add", "sub"])
def test_sums_at_ratios_beyond_fixed_point(name: str, ratio: float) -> None:
    a, b = int8(0, 64), int8(1, 64)
    exact = FUNCTIONS[name](real(a, ratio, -5), real(b, ratio, 7))
    actual = getattr(KERNELS, name)(a, ratio, -5, b, ratio, 7, 1.0, 3, *FULL)
    assert_step(actual, grid(exact, (1.0, 3, *FULL)))
