# SPDX-License-Identifier: Apache-2.0
"""Sums, differences and products of int8 tensors, against float64."""

from __future__ import annotations

from typing import Any

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


qparams = st.tuples(scales, zero_points)


@examples
@given(st.sampled_from(sorted(FUNCTIONS)), seeds, qparams, qparams, outputs(), st.booleans())
def test_ranges(name: str, seed: int, one: Any, other: Any, out: Out, extreme: bool) -> None:
    a, b = int8(seed, 2, 3, 8, extreme=extreme), int8(seed + 1, 3, 1, extreme=extreme)
    exact = FUNCTIONS[name](real(a, *one), real(b, *other))
    assert_step(getattr(KERNELS, name)(a, *one, b, *other, *out), grid(exact, out))


@pytest.mark.parametrize("ratio", [1e-12, 1e-6, 2.0**-10, 2.0**8, 2.0**19, 1e9])
@pytest.mark.parametrize("name", ["add", "sub"])
def test_sums_at_ratios_beyond_fixed_point(name: str, ratio: float) -> None:
    a, b = int8(0, 64), int8(1, 64)
    exact = FUNCTIONS[name](real(a, ratio, -5), real(b, ratio, 7))
    actual = getattr(KERNELS, name)(a, ratio, -5, b, ratio, 7, 1.0, 3, *FULL)
    assert_step(actual, grid(exact, (1.0, 3, *FULL)))
