# SPDX-License-Identifier: Apache-2.0
"""What the tests of the operators share: random integers, the real values they stand for, bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import settings, strategies as st
from qompose_xnnpack import operators
from torch import Tensor

KERNELS = getattr(torch.ops, operators.NAMESPACE)
FULL = (-128, 127)
UNBOUNDED = (-math.inf, math.inf)

Out = tuple[float, int, int, int]

scales = st.floats(1e-4, 4.0)
# From where float32 nearly underflows to where it nearly overflows.
extreme_scales = st.sampled_from([1e-30, 1e-12, 1e-6, 0.03, 1.0, 1e6, 1e12, 1e30])
zero_points = st.integers(-128, 127)
seeds = st.integers(0, 2**16)
examples = settings(max_examples=40, deadline=None)


def int8(seed: int, *shape: int, extreme: bool = False) -> Tensor:
    """Values over all of int8, or only its two ends."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return torch.where(values < 0, -128, 127).to(torch.int8) if extreme else values


def weights(seed: int, *shape: int, extreme: bool = False) -> Tensor:
    return int8(seed + 1, *shape, extreme=extreme).clamp_(min=-127)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_dynamic(x: Tensor, *rest: Any, per_tensor: bool = False) -> Tensor:
    """Quantize floats and multiply them; ``rest`` is what follows the integers."""
    quantized = KERNELS.quantize_dynamic(x, per_tensor)
    return KERNELS.linear_dynamic(*quantized, *rest)  # type: ignore[no-any-return]


def real(q: Tensor, scale: float, zp: int) -> Tensor:
    return (q.to(torch.float64) - zp) * scale


def grid(y: Tensor, out: Out) -> Tensor:
    """Steps of the output for real values, kept in float64."""
    scale, zp, low, high = out
    return (torch.round(y / scale) + zp).clamp(low, high)


def assert_step(actual: Tensor, expected: Tensor, steps: int = 1) -> None:
    assert actual.dtype == torch.int8
    assert actual.is_contiguous()
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max().item() <= steps


@st.composite
def outputs(draw: Any, scale: st.SearchStrategy[float] = scales) -> Out:
    """Scale, zero point and clamp of an output: none, a relu, an upper bound, or both."""
    zp = draw(zero_points)
    low, high = draw(st.sampled_from([-128, zp])), draw(st.sampled_from([127, 90]))
    return (draw(scale), zp, min(low, high), high)


@st.composite
def geometries(
    draw: Any, axes: Sequence[int] = (1, 2), transposed: bool = False
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Of a convolution of four channels: what operators take behind the bias, and the shape of a weight.

    `axes`: one number for both axes, or one for each.
    """
    number = draw(st.sampled_from(axes))

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=number, max_size=number))

    stride, padding, dilation = each(1, 3), each(0, 2 if transposed else 3), each(1, 2)
    kernel = draw(st.tuples(*[st.integers(1, 3)] * 2))
    groups, channels = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    if transposed:
        most = [max(pair) - 1 for pair in zip(stride, dilation, strict=True)]
        extra = [draw(st.integers(0, limit)) for limit in most]
        return (stride, padding, extra, groups, dilation), (4, channels, *kernel)
    return (stride, padding, dilation, groups), (groups * channels, 4 // groups, *kernel)


# Relative to the sum of magnitudes: float32 rounds each of a few additions and products.
_ROUNDING = 2.0**-21

magnitudes = st.sampled_from([1e-30, 1e-12, 1e-3, 1.0, 1e4, 1e12, 1e30])


@st.composite
def float_inputs(draw: st.DrawFn) -> tuple[int, float, float]:
    """Seed, magnitude and offset (in magnitudes) of a float input."""
    return draw(seeds), draw(magnitudes), draw(st.sampled_from([0.0, 0.5, 3.0, -100.0]))


def sample(case: tuple[int, float, float], *shape: int) -> Tensor:
    seed, magnitude, offset = case
    return (normal(seed, *shape) + offset) * magnitude


def assert_close(actual: Tensor, exact: Tensor, size: Tensor) -> None:
    """``size``: the sum of magnitudes whose rounding is allowed for."""
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= size * _ROUNDING + 1e-37).all()
