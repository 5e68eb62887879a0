# SPDX-License-Identifier: Apache-2.0
"""Scales, zero points and integers of floats, against the operators of converted models."""

from __future__ import annotations

import math

import pytest
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from hypothesis import given, settings, strategies as st
from qompose.backend import kit
from torch import Tensor

QD = torch.ops.quantized_decomposed
EPS = torch.finfo(torch.float32).eps
MODEST = settings(max_examples=60, deadline=None)


@st.composite
def floats(draw: st.DrawFn) -> Tensor:
    """Of shape (7, 33), from where float32 nearly underflows to where it nearly overflows."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    magnitude = draw(st.sampled_from([0.0, 1e-37, 1e-12, 1e-3, 1.0, 1e4, 1e12, 1e35]))
    offset = draw(st.sampled_from([0.0, 0.5, 3.0, -100.0]))
    values = torch.randn(7, 33)
    return ((values.round() if draw(st.booleans()) else values) + offset) * magnitude


@MODEST
@given(floats(), st.sampled_from([(0, 255), (0, 127), (0, 63)]), st.sampled_from([EPS, 2**-12]))
def test_one_scale_is_torchs_to_the_bit(x: Tensor, bounds: tuple[int, int], eps: float) -> None:
    scale, zero_point = kit.choose_qparams(x, *bounds, eps)
    wanted = QD.choose_qparams.tensor(x, *bounds, eps, torch.uint8)
    assert (float(scale), int(zero_point)) == (float(wanted[0]), int(wanted[1]))
    integers = QD.quantize_per_tensor.tensor(x, *wanted, *bounds, torch.uint8)
    assert torch.equal(kit.quantize(x, scale, zero_point, *bounds, torch.uint8), integers)


@MODEST
@given(floats())
def test_symmetric_rows_are_torchs_to_the_bit(rows: Tensor) -> None:
    scale, zero_point = kit.choose_qparams_per_row(rows, symmetric=True)
    scales, zeros = QD.choose_qparams_per_token.default(rows, torch.int8)
    assert zero_point is None
    assert torch.equal(scale, scales)
    integers = QD.quantize_per_token.default(rows, scales, zeros, -128, 127, torch.int8)
    assert torch.equal(kit.quantize_rows(rows, scale, zero_point), integers)


@MODEST
@given(floats())
def test_affine_rows_are_torchs_but_near_the_middle_of_two_integers(rows: Tensor) -> None:
    scale, zero_point = kit.choose_qparams_per_row(rows, symmetric=False)
    scales, points = QD.choose_qparams_per_token_asymmetric.default(rows, torch.int8)
    assert zero_point is not None
    assert torch.equal(scale.double(), scales)
    assert torch.equal(zero_point.long(), points)
    integers = kit.quantize_rows(rows, scale, zero_point).int()
    theirs = QD.quantize_per_token.default(rows, scales, points, -128, 127, torch.int8).int()
    steps = rows.double() / scales
    middle = (steps - steps.floor() - 0.5).abs() <= 2**-15
    assert (integers - theirs).abs().max() <= 1
    assert torch.equal(integers[~middle], theirs[~middle])


def test_the_least_scale_leaves_the_zero_point_at_the_upper_end() -> None:
    """Where both ends cost the same: rows of one step and a half, of which the upper end keeps both."""
    rows = torch.tensor([[0.0, 1.0], [-0.5, 1.5]]) * EPS
    _, zero_point = kit.choose_qparams_per_row(rows, symmetric=False)
    _, points = QD.choose_qparams_per_token_asymmetric.default(rows, torch.int8)
    assert zero_point is not None and torch.equal(zero_point.long(), points)
    assert points.flatten().tolist() == [126, 126]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_scale(value: float) -> None:
    rows = torch.randn(3, 4)
    rows[1, 2] = value
    scale, zero_point = kit.choose_qparams(rows, 0, 255, EPS)
    assert scale.isnan()
    assert 0 <= int(zero_point) <= 255
    for symmetric in (True, False):
        scale, _ = kit.choose_qparams_per_row(rows, symmetric=symmetric)
        assert scale.isfinite().flatten().tolist() == [True, False, True]


@given(
    st.integers(-(2**20), 2**20), st.floats(1e-6, 0.5), st.integers(-128, 127),
    st.sampled_from([(-128, 127), (0, 127)]),
)  # fmt: skip
def test_sums_are_rounded_half_to_even_shifted_and_clamped(
    total: int, multiplier: float, zero_point: int, bounds: tuple[int, int]
) -> None:
    found = kit.requantize(torch.tensor([total, 3]), multiplier, zero_point, *bounds)
    exact = torch.tensor(total, dtype=torch.float32) * multiplier
    wanted = min(max(round(float(exact)) + zero_point, bounds[0]), bounds[1])
    assert found.dtype is torch.int8 and int(found[0]) == wanted


def test_each_channel_has_its_own_multiplier() -> None:
    total = torch.tensor([[10, 10], [-10, 5]], dtype=torch.int32)
    found = kit.requantize(total, torch.tensor([0.25, 0.5]), 128, 0, 255, torch.uint8)
    assert found.tolist() == [[130, 133], [126, 130]]  # 2.5 to 2, -2.5 to -2


def test_layouts_stay() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    integers = kit.quantize(x, *kit.choose_qparams(x, 0, 255, EPS), 0, 255, torch.uint8)
    assert integers.stride() == x.stride()
