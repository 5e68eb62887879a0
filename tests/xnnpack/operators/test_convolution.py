# SPDX-License-Identifier: Apache-2.0
"""Convolutions with int8 weights, static and dynamic, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from qompose_xnnpack.operators.dynamic_quantization import quantize_rows
from torch import Tensor
from torch.nn import functional

from tests.xnnpack.operators.arithmetic import (
    FULL,
    KERNELS,
    UNBOUNDED,
    Out,
    assert_close,
    assert_step,
    examples,
    float_inputs,
    grid,
    int8,
    normal,
    outputs,
    real,
    sample,
    seeds,
    weights,
    zero_points,
)


class TestStatic:
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


@st.composite
def transposed(draw: Any) -> tuple[list[int], list[int], list[int], int, list[int]]:
    """Stride, padding, output padding, groups and dilation."""
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    extra = min(draw(st.integers(0, 2)), max(stride, dilation) - 1)
    groups = draw(st.sampled_from([1, 2, 4]))
    return ([stride], [draw(st.integers(0, 2))], [extra], groups, [dilation])


class TestStaticTransposed:
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
        geometry = ([1, 2], [0, 1], [0, 1], 2, [1, 1])
        row = KERNELS.conv_transpose2d(
            x[:, :, None], 0.03, 7, weight[:, :, None], *rest, *geometry, *out
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


def by_image(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers less their zero point, and scales ``(N, 1, 1, 1)``."""
    quantized, scale, zp = quantize_rows(x.flatten(1))
    return (quantized.double() - zp).view(x.shape), scale.double().view(-1, 1, 1, 1)


def scaled(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    geometry: Sequence[Any],
) -> tuple[Tensor, Tensor]:
    """What ``function`` makes of images that are quantized one by one, and the sum of magnitudes."""
    shifted, scale = by_image(x)
    unit = scale * w_scale.double().view(-1, 1, 1)
    exact = function(shifted, weight.double(), None, *geometry) * unit
    added = torch.zeros(1, 1, 1) if bias is None else bias.double().view(-1, 1, 1)
    return exact + added, exact.abs() + added.abs()


# Images of different ranges have different scales and zero points.
RANGES = torch.tensor([1.0, 0.01, -30.0]).view(3, 1, 1, 1)


class TestDynamic:
    @examples
    @given(
        float_inputs(), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2),
        st.sampled_from([(1, 4), (4, 4), (2, 6)]), st.sampled_from([1, 3]), st.booleans(),
        st.booleans(), st.sampled_from([UNBOUNDED, (0.0, 6.0)]),
    )  # fmt: skip
    def test_is_the_scaled_integer_sum(
        self,
        case: tuple[int, float, float],
        stride: int,
        padding: int,
        dilation: int,
        grouping: tuple[int, int],
        kernel: int,
        with_bias: bool,
        shared: bool,
        clamp: tuple[float, float],
    ) -> None:
        groups, channels = grouping
        x, seed = sample(case, 3, 4, 7, 8) * RANGES, case[0]
        weight = weights(seed, channels, 4 // groups, kernel, kernel)
        w_scale = normal(seed, 1 if shared else channels).abs() * 0.02 + 1e-5
        bias = normal(seed + 3, channels) * case[1] if with_bias else None
        geometry = (stride, padding, dilation, groups)
        exact, size = scaled(functional.conv2d, x, weight, w_scale, bias, geometry)
        lists = ([stride], [padding], [dilation], groups)
        actual = KERNELS.conv2d_dynamic(x, weight, w_scale, bias, *lists, *clamp)
        assert_close(actual, exact.clamp(*clamp), size)
        channels_last = x.to(memory_format=torch.channels_last)
        again = KERNELS.conv2d_dynamic(channels_last, weight, w_scale, bias, *lists, *clamp)
        assert torch.equal(again, actual)


class TestDynamicTransposed:
    @examples
    @given(
        float_inputs(), st.tuples(*[st.integers(1, 3)] * 2), st.tuples(*[st.integers(0, 1)] * 2),
        st.tuples(*[st.integers(1, 2)] * 2), st.sampled_from([(1, 3), (4, 4), (2, 6)]),
        st.tuples(*[st.integers(1, 3)] * 2), st.booleans(), st.booleans(),
        st.sampled_from([UNBOUNDED, (0.0, 6.0)]),
    )  # fmt: skip
    def test_is_the_scaled_integer_sum(
        self,
        case: tuple[int, float, float],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        grouping: tuple[int, int],
        kernel: tuple[int, int],
        with_bias: bool,
        shared: bool,
        clamp: tuple[float, float],
    ) -> None:
        groups, channels = grouping
        x, seed = sample(case, 3, 4, 5, 4) * RANGES, case[0]
        weight = weights(seed, 4, channels // groups, *kernel)
        w_scale = normal(seed, 1 if shared or groups > 1 else channels).abs() * 0.02 + 1e-5
        bias = normal(seed + 3, channels) * case[1] if with_bias else None
        extra = [step - 1 for step in stride]
        geometry = (list(stride), list(padding), extra, groups, list(dilation))
        transposed = functional.conv_transpose2d
        exact, size = scaled(transposed, x, weight, w_scale, bias, geometry)
        actual = KERNELS.conv_transpose2d_dynamic(x, weight, w_scale, bias, *geometry, *clamp)
        assert_close(actual, exact.clamp(*clamp), size)
        channels_last = x.to(memory_format=torch.channels_last)
        args = (weight, w_scale, bias, *geometry, *clamp)
        assert torch.equal(KERNELS.conv_transpose2d_dynamic(channels_last, *args), actual)


INTEGERS = int8(0, 1, 4, 5, 5)


def static_transposed(
    x: Tensor = INTEGERS, scales: int = 1, extra: int = 0, groups: int = 1
) -> None:
    constants = (weights(0, 4, 2, 3, 3), torch.ones(scales), None)
    geometry = ([2], [0], [extra], groups, [1])
    KERNELS.conv_transpose2d(x, 0.1, 3, *constants, *geometry, 0.1, 0, *FULL)


IMAGE = normal(0, 1, 4, 5, 5)
TWO = torch.ones(2)


def dynamic(x: Tensor = IMAGE, scales: Tensor = TWO, weight: Tensor | None = None) -> None:
    weight = weights(0, 2, 4, 3, 3) if weight is None else weight
    KERNELS.conv2d_dynamic(x, weight, scales, None, [1], [1], [1], 1, *UNBOUNDED)


def dynamic_transposed(
    x: Tensor = IMAGE,
    scales: Tensor = TWO,
    weight: Tensor | None = None,
    padding: int = 1,
    extra: int = 0,
    groups: int = 1,
) -> None:
    weight = weights(0, 4, 2, 3, 3) if weight is None else weight
    geometry = ([1], [padding], [extra], groups, [1])
    KERNELS.conv_transpose2d_dynamic(x, weight, scales, None, *geometry, *UNBOUNDED)


@pytest.mark.parametrize(
    ("call", "wrong", "found"),
    [
        (static_transposed, {"x": int8(0, 1, 3, 5, 5)}, r"conv_transpose2d: .*\(1, 3, 5, 5\)"),
        (static_transposed, {"extra": 2}, "conv_transpose2d: .*output_padding"),
        (static_transposed, {"scales": 2, "groups": 2}, "conv_transpose2d: .*scale"),
        (static_transposed, {"x": int8(0, 4, 5, 5)}, r"conv_transpose2d: .*\(4, 5, 5\)"),
        *(
            (call, wrong, f"{name}: .*{found}")
            for call, name in (
                (dynamic, "conv2d_dynamic"),
                (dynamic_transposed, "conv_transpose2d_dynamic"),
            )
            for wrong, found in (
                ({"scales": torch.ones(2, 1)}, "scales"),
                ({"x": normal(0, 1, 3, 5, 5)}, r"\(1, 3, 5, 5\)"),
                ({"x": normal(0, 4, 5, 5)}, r"\(4, 5, 5\)"),
            )
        ),
        (dynamic_transposed, {"extra": 1}, "output_padding"),
        (dynamic_transposed, {"padding": 4}, "empty"),
        (dynamic_transposed, {"scales": torch.ones(4), "groups": 2}, "scale"),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[..., None], wrong: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        call(**wrong)


@pytest.mark.parametrize("call", [dynamic, dynamic_transposed])
def test_float_weights_are_refused(call: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match="`weight`"):
        call(weight=torch.ones(4, 4, 3, 3))
