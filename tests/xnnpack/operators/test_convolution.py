# SPDX-License-Identifier: Apache-2.0
"""Convolutions with int8 weights, static and dynamic, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from qompose_xnnpack.operators.dynamic_quantization import quantize_rows
from qompose_xnnpack.operators.shapes import conv_shape
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
    geometries,
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


def check_static(
    name: str, x: Tensor, zp: int, weight: Tensor, w_scale: Tensor, geometry: Any, out: Out
) -> None:
    """Also of an image in another layout."""
    transposed = "transpose" in name
    channels = weight.shape[1] * geometry[3] if transposed else weight.shape[0]
    # Whole units, since a bias is stored as an integer count of them.
    bias = torch.randint(-5000, 5000, (channels,)) * 0.03 * w_scale
    scales = w_scale.double().view((-1, 1, 1) if transposed else (-1, 1, 1, 1))
    function = getattr(functional, name)
    exact = function(real(x, 0.03, zp), weight.double() * scales, bias.double(), *geometry)
    rest = (0.03, zp, weight, w_scale, bias, *geometry, *out)
    actual = getattr(KERNELS, name)(x, *rest)
    assert_step(actual, grid(exact, out))
    again = getattr(KERNELS, name)(x.to(memory_format=torch.channels_last), *rest)
    assert torch.equal(again, actual)


class TestStatic:
    @examples
    @given(seeds, zero_points, outputs(), geometries())
    def test_conv2d(self, seed: int, zp: int, out: Out, case: Any) -> None:
        geometry, shape = case
        x, weight = int8(seed, 2, 4, 9, 11), weights(seed, *shape)
        check_static("conv2d", x, zp, weight, torch.rand(shape[0]) * 0.02 + 1e-4, geometry, out)

    @examples
    @given(seeds, zero_points, outputs(), geometries(transposed=True), st.booleans(), st.booleans())
    def test_conv_transpose2d(
        self, seed: int, zp: int, out: Out, case: Any, per_channel: bool, extreme: bool
    ) -> None:
        geometry, shape = case
        x, weight = int8(seed, 2, 4, 5, 6, extreme=extreme), weights(seed, *shape)
        w_scale = torch.rand(shape[1] if per_channel and geometry[3] == 1 else 1) * 0.02 + 1e-4
        check_static("conv_transpose2d", x, zp, weight, w_scale, geometry, out)

    def test_shapes_are_those_of_torch(self) -> None:
        x, weight = (torch.empty(s, device="meta") for s in ((1, 4, 9, 11), (6, 2, 3, 2)))
        geometry = ([2, 1], [2, 0], [1, 3], 2)
        shape = functional.conv2d(x, weight, None, *geometry).shape
        assert shape == conv_shape(x, weight, *geometry)

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


@pytest.mark.parametrize(
    ("name", "shape", "geometry"),
    [
        ("conv", (6, 2, 3), ([2], [1], [1], 2)),
        ("conv_transpose", (4, 3, 3), ([2], [1], [1], 2, [1])),
    ],
)
def test_a_line_is_an_image_of_one_row(name: str, shape: Any, geometry: Any) -> None:
    x, weight = int8(0, 2, 4, 15), weights(0, *shape)
    rest = (torch.full((1,), 0.01), torch.randn(6))
    line = getattr(KERNELS, f"{name}1d")(x, 0.03, 7, weight, *rest, *geometry, 0.1, 3, *FULL)
    # Stride, padding, then dilation, or output padding and dilation.
    both = zip(([1], [0], [1 if name == "conv" else 0], None, [1]), geometry, strict=False)
    geometry = [last if first is None else first + last for first, last in both]
    image = (x[:, :, None], 0.03, 7, weight[:, :, None])
    row = getattr(KERNELS, f"{name}2d")(*image, *rest, *geometry, 0.1, 3, *FULL)
    assert torch.equal(line, row[:, :, 0])


def scaled(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    geometry: Sequence[Any],
) -> tuple[Tensor, Tensor]:
    """What ``function`` makes of images that are quantized one by one, and the sum of magnitudes."""
    quantized, scale, zp = quantize_rows(x.flatten(1))
    unit = scale.double().view(-1, 1, 1, 1) * w_scale.double().view(-1, 1, 1)
    shifted = (quantized.double() - zp).view(x.shape)
    exact = function(shifted, weight.double(), None, *geometry) * unit
    added = torch.zeros(1, 1, 1) if bias is None else bias.double().view(-1, 1, 1)
    return exact + added, exact.abs() + added.abs()


# Images of different ranges have different scales and zero points.
RANGES = torch.tensor([1.0, 0.01, -30.0]).view(3, 1, 1, 1)


CLAMPS = st.sampled_from([UNBOUNDED, (0.0, 6.0)])


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
@examples
@given(st.data(), float_inputs(), st.booleans(), st.booleans(), CLAMPS)
def test_dynamic(
    name: str, data: Any, case: Any, with_bias: bool, shared: bool, clamp: Any
) -> None:
    """Also of an image in another layout."""
    transposed = name == "conv_transpose2d"
    geometry, shape = data.draw(geometries(transposed=transposed))
    seed, groups = case[0], geometry[3] if transposed else 1
    x = sample(case, 3, 4, *((6, 5) if transposed else (7, 8))) * RANGES
    weight = weights(seed, *shape)
    outputs = shape[1] if transposed else shape[0]
    w_scale = normal(seed, 1 if shared or groups > 1 else outputs).abs() * 0.02 + 1e-5
    bias = normal(seed + 3, groups * outputs) * case[1] if with_bias else None
    exact, size = scaled(getattr(functional, name), x, weight, w_scale, bias, geometry)
    kernel, rest = getattr(KERNELS, f"{name}_dynamic"), (weight, w_scale, bias, *geometry, *clamp)
    actual = kernel(x, *rest)
    assert_close(actual, exact.clamp(*clamp), size)
    assert torch.equal(kernel(x.to(memory_format=torch.channels_last), *rest), actual)


INTEGERS = int8(0, 1, 4, 5, 5)


def static(x: Tensor) -> None:
    constants = (weights(0, 2, 4, 3, 3), torch.ones(1), None)
    KERNELS.conv2d(x, 0.1, 3, *constants, [1], [0], [1], 1, 0.1, 0, *FULL)


def static_transposed(
    x: Tensor = INTEGERS, scales: int = 1, extra: int = 0, groups: int = 1
) -> None:
    constants = (weights(0, 4, 2, 3, 3), torch.ones(scales), None)
    geometry = ([2], [0], [extra], groups, [1])
    KERNELS.conv_transpose2d(x, 0.1, 3, *constants, *geometry, 0.1, 0, *FULL)


IMAGE = normal(0, 1, 4, 5, 5)
TWO, WEIGHT, TRANSPOSED = torch.ones(2), weights(0, 2, 4, 3, 3), weights(0, 4, 2, 3, 3)


def dynamic(x: Tensor = IMAGE, scales: Tensor = TWO, weight: Tensor = WEIGHT) -> None:
    KERNELS.conv2d_dynamic(x, weight, scales, None, [1], [1], [1], 1, *UNBOUNDED)


def dynamic_transposed(
    x: Tensor = IMAGE,
    scales: Tensor = TWO,
    weight: Tensor = TRANSPOSED,
    padding: int = 1,
    extra: int = 0,
    groups: int = 1,
) -> None:
    geometry = ([1], [padding], [extra], groups, [1])
    KERNELS.conv_transpose2d_dynamic(x, weight, scales, None, *geometry, *UNBOUNDED)


@pytest.mark.parametrize(
    ("call", "wrong", "found"),
    [
        (static_transposed, {"x": int8(0, 1, 3, 5, 5)}, r"conv_transpose2d: .*\(1, 3, 5, 5\)"),
        (static_transposed, {"extra": 2}, "conv_transpose2d: .*output_padding"),
        (static_transposed, {"scales": 2, "groups": 2}, "conv_transpose2d: .*scale"),
        (static_transposed, {"x": int8(0, 4, 5, 5)}, r"conv_transpose2d: .*\(4, 5, 5\).* batch"),
        (static, {"x": int8(0, 4, 5, 5)}, r"\(4, 5, 5\).* batch of images"),
        *(
            (call, wrong, f"{name}: .*{found}")
            for call, name in (
                (dynamic, "conv2d_dynamic"),
                (dynamic_transposed, "conv_transpose2d_dynamic"),
            )
            for wrong, found in (
                ({"scales": torch.ones(2, 1)}, "scales"),
                ({"x": normal(0, 1, 3, 5, 5)}, r"\(1, 3, 5, 5\)"),
                ({"x": normal(0, 4, 5, 5)}, r"\(4, 5, 5\).* batch"),
                ({"x": normal(0, 2, 5, 4, 5, 5)}, r"\(2, 5, 4, 5, 5\).* batch"),
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
