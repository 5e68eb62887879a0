# SPDX-License-Identifier: Apache-2.0
"""Linear and convolutions in int8, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional

from tests.xnnpack.ops.arithmetic import (
    FULL,
    KERNELS,
    Out,
    assert_step,
    examples,
    extreme_scales,
    grid,
    int8,
    outputs,
    real,
    scales,
    seeds,
    weights,
    zero_points,
)


class TestWeighted:
    @examples
    @given(seeds, scales, zero_points, outputs(), st.booleans(), st.booleans(), st.booleans())
    def test_linear(
        self,
        seed: int,
        x_scale: float,
        x_zp: int,
        out: Out,
        extreme: bool,
        with_bias: bool,
        per_channel: bool,
    ) -> None:
        x, weight = int8(seed, 2, 3, 70, extreme=extreme), weights(seed, 6, 70, extreme=extreme)
        w_scale = torch.rand(6 if per_channel else 1) * 0.02 + 1e-4
        unit = x_scale * w_scale.double()
        bias = (torch.randn(6) * 1e3 * unit).float() if with_bias else None
        exact = functional.linear(real(x, x_scale, x_zp), weight.double() * w_scale[:, None])
        exact = exact if bias is None else exact + (bias / unit).round() * unit
        assert_step(KERNELS.linear(x, x_scale, x_zp, weight, w_scale, bias, *out), grid(exact, out))

    @examples
    @given(
        seeds, zero_points, outputs(), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2),
        st.sampled_from([(1, 4), (4, 4), (4, 8), (2, 6)]), st.sampled_from([1, 2, 3]),
    )  # fmt: skip
    def test_conv2d(
        self,
        seed: int,
        x_zp: int,
        out: Out,
        stride: int,
        padding: int,
        dilation: int,
        grouping: tuple[int, int],
        kernel: int,
    ) -> None:
        groups, out_channels = grouping
        x = int8(seed, 2, 4, 9, 11)
        weight = weights(seed, out_channels, 4 // groups, kernel, kernel)
        w_scale = torch.rand(out_channels) * 0.02 + 1e-4
        # Whole units, since a bias is stored as an integer count of them.
        bias = torch.randint(-5000, 5000, (out_channels,)) * 0.03 * w_scale
        geometry = ([stride], [padding], [dilation], groups)
        exact = functional.conv2d(
            real(x, 0.03, x_zp),
            weight.double() * w_scale.double()[:, None, None, None],
            bias.double(),
            *(part[0] if isinstance(part, list) else part for part in geometry),
        )
        actual = KERNELS.conv2d(x, 0.03, x_zp, weight, w_scale, bias, *geometry, *out)
        assert_step(actual, grid(exact, out))
        channels_last = x.to(memory_format=torch.channels_last)
        again = KERNELS.conv2d(channels_last, 0.03, x_zp, weight, w_scale, bias, *geometry, *out)
        assert torch.equal(again, actual)

    def test_conv1d_is_conv2d_of_one_row(self) -> None:
        x, weight = int8(0, 2, 4, 15), weights(0, 6, 2, 3)
        rest = (torch.full((6,), 0.01), torch.randn(6))
        out = (0.1, 3, *FULL)
        line = KERNELS.conv1d(x, 0.03, 7, weight, *rest, [2], [1], [1], 2, *out)
        row = KERNELS.conv2d(
            x[:, :, None], 0.03, 7, weight[:, :, None], *rest, [1, 2], [0, 1], [1, 1], 2, *out
        )
        assert torch.equal(line, row[:, :, 0])

    def test_a_huge_bias_saturates_instead_of_wrapping(self) -> None:
        x, weight = (
            torch.full((1, 8), 127, dtype=torch.int8),
            torch.full((2, 8), 127).to(torch.int8),
        )
        bias = torch.tensor([1e30, -1e30])
        actual = KERNELS.linear(x, 1e-3, 0, weight, torch.ones(1), bias, 1.0, 0, *FULL)
        assert actual.tolist() == [[127, -128]]

    def test_an_empty_batch(self) -> None:
        out = (0.1, 0, *FULL)
        one = torch.ones(1)
        linear = KERNELS.linear(int8(0, 0, 4), 0.1, 3, weights(0, 2, 4), one, None, *out)
        conv = KERNELS.conv2d(
            int8(0, 0, 4, 5, 5), 0.1, 3, weights(0, 2, 4, 3, 3), one, None, [1], [1], [1], 1, *out
        )
        assert (linear.shape, conv.shape) == ((0, 2), (0, 2, 5, 5))

    @examples
    @given(seeds, extreme_scales, extreme_scales, extreme_scales, zero_points)
    def test_scales_at_the_ends_of_float32(
        self, seed: int, x_scale: float, w_scale: float, out_scale: float, x_zp: int
    ) -> None:
        x, weight = int8(seed, 3, 20), weights(seed, 4, 20)
        exact = (x.long() - x_zp) @ weight.long().t()
        steps = exact.double() * (x_scale * w_scale / out_scale)
        out = (out_scale, 5, *FULL)
        actual = KERNELS.linear(x, x_scale, x_zp, weight, torch.tensor([w_scale]), None, *out)
        # A product of scales below the range of float32 counts as zero, one above it saturates.
        if 1e-37 < x_scale * w_scale < 1e30 and steps.abs().max() < 1e30:
            assert_step(actual, (steps.round() + 5).clamp(*FULL))
        else:
            assert actual.dtype == torch.int8


@st.composite
def transposed(draw: Any) -> tuple[list[int], list[int], list[int], int, list[int]]:
    """Stride, padding, output padding, groups and dilation."""
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    extra = min(draw(st.integers(0, 2)), max(stride, dilation) - 1)
    groups = draw(st.sampled_from([1, 2, 4]))
    return ([stride], [draw(st.integers(0, 2))], [extra], groups, [dilation])


class TestTransposed:
    @examples
    @given(seeds, zero_points, outputs(), transposed(), st.booleans(), st.booleans())
    def test_conv_transpose2d(
        self,
        seed: int,
        x_zp: int,
        out: Out,
        geometry: tuple[list[int], list[int], list[int], int, list[int]],
        per_channel: bool,
        extreme: bool,
    ) -> None:
        groups = geometry[3]
        x, weight = int8(seed, 2, 4, 5, 6, extreme=extreme), weights(seed, 4, 3, 3, 2)
        per_channel = per_channel and groups == 1
        w_scale = torch.rand(3 if per_channel else 1) * 0.02 + 1e-4
        # Whole units, since a bias is stored as an integer count of them.
        bias = torch.randint(-5000, 5000, (3 * groups,)) * 0.03 * w_scale
        exact = functional.conv_transpose2d(
            real(x, 0.03, x_zp),
            weight.double() * w_scale.double().view(-1, 1, 1),
            bias.double(),
            *(part[0] if isinstance(part, list) else part for part in geometry),
        )
        constants = (weight, w_scale, bias)
        actual = KERNELS.conv_transpose2d(x, 0.03, x_zp, *constants, *geometry, *out)
        assert_step(actual, grid(exact, out))

    def test_conv_transpose1d_is_conv_transpose2d_of_one_row(self) -> None:
        x, weight = int8(0, 2, 4, 15), weights(0, 4, 3, 3)
        rest = (torch.full((1,), 0.01), torch.randn(6))
        out = (0.1, 3, *FULL)
        line = KERNELS.conv_transpose1d(x, 0.03, 7, weight, *rest, [2], [1], [1], 2, [1], *out)
        row = KERNELS.conv_transpose2d(
            x[:, :, None],
            0.03,
            7,
            weight[:, :, None],
            *rest,
            [1, 2],
            [0, 1],
            [0, 1],
            2,
            [1, 1],
            *out,
        )
        assert torch.equal(line, row[:, :, 0])

    def test_an_absent_input_is_no_zero_point(self) -> None:
        """With stride 3 and one tap two of three outputs have no input at all: they are the bias."""
        x = torch.full((1, 1, 2, 2), 100, dtype=torch.int8)
        weight = torch.ones((1, 1, 1, 1), dtype=torch.int8)
        bias = torch.tensor([2.0])
        args = ([3], [0], [2], 1, [1], 1.0, 0, *FULL)
        actual = KERNELS.conv_transpose2d(x, 1.0, 90, weight, torch.ones(1), bias, *args)
        expected = torch.full((6, 6), 2, dtype=torch.int8)
        expected[::3, ::3] = 12
        assert torch.equal(actual[0, 0], expected)

    def test_an_empty_batch(self) -> None:
        args = ([2], [0], [0], 1, [1], 0.1, 0, *FULL)
        weight = weights(0, 4, 2, 3, 3)
        actual = KERNELS.conv_transpose2d(
            int8(0, 0, 4, 5, 5), 0.1, 3, weight, torch.ones(1), None, *args
        )
        assert actual.shape == (0, 2, 11, 11)

    def test_what_does_not_fit_is_named(self) -> None:
        x, weight, one = int8(0, 1, 4, 5, 5), weights(0, 4, 2, 3, 3), torch.ones(1)

        def call(x: Tensor, w_scale: Tensor, extra: int, groups: int) -> None:
            args = ([2], [0], [extra], groups, [1], 0.1, 0, *FULL)
            KERNELS.conv_transpose2d(x, 0.1, 3, weight, w_scale, None, *args)

        with pytest.raises(
            ValueError, match=r"::conv_transpose2d: input \(1, 3, 5, 5\).*4 channels"
        ):
            call(x[:, :3], one, 0, 1)
        with pytest.raises(ValueError, match=r"output_padding \[2, 2\] is not below stride"):
            call(x, one, 2, 1)
        with pytest.raises(ValueError, match=r"all channels share one scale"):
            call(x, torch.ones(2), 0, 2)
        with pytest.raises(ValueError, match=r"no batch of images"):
            call(x[0], one, 0, 1)
