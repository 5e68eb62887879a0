# SPDX-License-Identifier: Apache-2.0
"""Scales, zero points and integers of floats, against the operators of converted models."""

from __future__ import annotations

import math

import pytest
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.operators import choose_qparams
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
    scale, zero_point = choose_qparams.choose(x, *bounds, eps)
    wanted = QD.choose_qparams.tensor(x, *bounds, eps, torch.uint8)
    assert (float(scale), int(zero_point)) == (float(wanted[0]), int(wanted[1]))
    integers = QD.quantize_per_tensor.tensor(x, *wanted, *bounds, torch.uint8)
    assert torch.equal(choose_qparams.quantize(x, scale, zero_point, *bounds), integers)


@MODEST
@given(floats())
def test_symmetric_rows_are_torchs_to_the_bit(rows: Tensor) -> None:
    scale, zero_point = choose_qparams.choose_rows(rows, symmetric=True)
    scales, zeros = QD.choose_qparams_per_token.default(rows, torch.int8)
    assert zero_point is None
    assert torch.equal(scale, scales)
    integers = QD.quantize_per_token.default(rows, scales, zeros, -128, 127, torch.int8)
    assert torch.equal(choose_qparams.quantize_rows(rows, scale, zero_point), integers)


@MODEST
@given(floats())
def test_affine_rows_are_torchs_but_near_the_middle_of_two_integers(rows: Tensor) -> None:
    scale, zero_point = choose_qparams.choose_rows(rows, symmetric=False)
    scales, points = QD.choose_qparams_per_token_asymmetric.default(rows, torch.int8)
    assert zero_point is not None
    assert torch.equal(scale.double(), scales)
    assert torch.equal(zero_point.long(), points)
    integers = choose_qparams.quantize_rows(rows, scale, zero_point).int()
    theirs = QD.quantize_per_token.default(rows, scales, points, -128, 127, torch.int8).int()
    steps = rows.double() / scales
    middle = (steps - steps.floor() - 0.5).abs() <= 2**-15
    assert (integers - theirs).abs().max() <= 1
    assert torch.equal(integers[~middle], theirs[~middle])


def test_the_least_scale_leaves_the_zero_point_at_the_upper_end() -> None:
    """Where both ends cost the same: rows of one step and a half, of which the upper end keeps both."""
    rows = torch.tensor([[0.0, 1.0], [-0.5, 1.5]]) * EPS
    _, zero_point = choose_qparams.choose_rows(rows, symmetric=False)
    _, points = QD.choose_qparams_per_token_asymmetric.default(rows, torch.int8)
    assert zero_point is not None and torch.equal(zero_point.long(), points)
    assert points.flatten().tolist() == [126, 126]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_scale(value: float) -> None:
    rows = torch.randn(3, 4)
    rows[1, 2] = value
    scale, zero_point = choose_qparams.choose(rows, 0, 255, EPS)
    assert scale.isnan()
    assert 0 <= int(zero_point) <= 255
    for symmetric in (True, False):
        scale, _ = choose_qparams.choose_rows(rows, symmetric)
        assert scale.isfinite().flatten().tolist() == [True, False, True]


def test_layouts_stay() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    integers = choose_qparams.quantize(x, *choose_qparams.choose(x, 0, 255, EPS), 0, 255)
    assert integers.stride() == x.stride()
