# SPDX-License-Identifier: Apache-2.0
"""Pools, means and products of quantized tensors against integer arithmetic."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from qompose_x86_inductor.operators import elementwise, pooling
from torch import Tensor

from tests.x86_inductor.integers import DTYPES, MODEST, OPS, QUANTIZED, assert_one_step, bounds


def integers(data: st.DataObject, shape: list[int]) -> tuple[Tensor, int]:
    """Random integers, or only the two ends of their type, in any layout, and a zero point."""
    dtype = data.draw(st.sampled_from(QUANTIZED))
    low, high = bounds(dtype)
    torch.manual_seed(data.draw(st.integers(0, 9999)))
    x = torch.randint(low, high + 1, shape, dtype=dtype)
    if data.draw(st.booleans()):
        x = torch.where(x > (low + high) // 2, high, low).to(dtype)
    if len(shape) == 4 and data.draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    return x, data.draw(st.integers(low, high))


def outputs(data: st.DataObject) -> tuple[float, int, torch.dtype]:
    dtype = data.draw(st.sampled_from(DTYPES))
    if dtype not in QUANTIZED:
        return 1.0, 0, dtype
    scale = data.draw(st.sampled_from([0.003, 0.037, 0.5]))
    return scale, data.draw(st.integers(*bounds(dtype))), dtype


def image(data: st.DataObject, least: tuple[int, int] = (1, 1)) -> list[int]:
    sizes = [data.draw(st.integers(low, 20)) for low in least]
    return [data.draw(st.integers(0, 3)), data.draw(st.integers(1, 9)), *sizes]


def window(data: st.DataObject) -> list[list[int]]:
    """Kernel, stride and padding."""
    kernel, stride = ([data.draw(st.integers(1, most)) for _ in range(2)] for most in (4, 3))
    return [kernel, stride, [data.draw(st.integers(0, k // 2)) for k in kernel]]


@MODEST
@given(st.data())
def test_max_pool2d_picks_the_largest_integer(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(QUANTIZED))
    kernel, stride, padding = window(data)
    shape = [data.draw(st.integers(0, 2)), *(data.draw(st.integers(1, n)) for n in (70, 40, 20))]
    shape[2:] = [max(s, k) for s, k in zip(shape[2:], kernel, strict=True)]
    torch.manual_seed(data.draw(st.integers(0, 9999)))
    low, high = bounds(dtype)
    x = torch.randint(low, high + 1, shape, dtype=dtype)
    arguments = (kernel, stride, padding, [1, 1], data.draw(st.booleans()))
    got = OPS.max_pool2d(x, *arguments)
    assert torch.equal(got.float(), F.max_pool2d(x.float(), *arguments))
    assert got.dtype == dtype and got.is_contiguous(memory_format=torch.channels_last)


@MODEST
@given(st.data())
def test_avg_pool2d(data: st.DataObject) -> None:
    kernel, stride, padding = window(data)
    ceil_mode, counts_padding = data.draw(st.booleans()), data.draw(st.booleans())
    divisor = data.draw(st.sampled_from([None, 1, 7]))
    options = (kernel, stride, padding, ceil_mode, counts_padding, divisor)
    x, zero_point = integers(data, image(data, (kernel[0], kernel[1])))
    out = outputs(data)
    got = OPS.avg_pool2d(x, 0.02, zero_point, *options, *out)
    expected = F.avg_pool2d(x.double() - zero_point, *options) * 0.02
    assert_one_step(got, expected, out)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pooling.avg_pool2d_in_graph(x, 0.02, zero_point, *options, *out), got)


@MODEST
@given(st.data())
def test_avg_pool2d_of_one_window(data: st.DataObject) -> None:
    """It covers the image, and may be far larger; then the compiled code must not visit all of it."""
    padding = [data.draw(st.integers(0, 2)) for _ in range(2)]
    x, zero_point = integers(data, image(data, (5, 5)))
    beyond = data.draw(st.sampled_from([0, 0, 1, 1000]))
    kernel = [side + 2 * pad + beyond for side, pad in zip(x.shape[2:], padding, strict=True)]
    counts_padding, divisor = data.draw(st.booleans()), data.draw(st.sampled_from([None, 7]))
    options = (kernel, [], padding, True, counts_padding, divisor)
    out = outputs(data)
    got = OPS.avg_pool2d(x, 0.02, zero_point, *options, *out)
    expected = F.avg_pool2d(x.double() - zero_point, *options) * 0.02
    assert_one_step(got, expected, out)
    assert got.is_contiguous(memory_format=torch.channels_last)
    called = torch.fx.experimental.proxy_tensor.make_fx(pooling.avg_pool2d_in_graph)(
        x, 0.02, zero_point, *options, *out
    )
    assert "avg_pool2d" not in called.code


@MODEST
@given(st.data())
def test_adaptive_avg_pool2d(data: st.DataObject) -> None:
    size = [data.draw(st.integers(1, 7)) for _ in range(2)]
    x, zero_point = integers(data, image(data))
    out = outputs(data)
    got = OPS.adaptive_avg_pool2d(x, 0.02, zero_point, size, *out)
    expected = F.adaptive_avg_pool2d(x.double() - zero_point, size) * 0.02
    assert_one_step(got, expected, out)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pooling.adaptive_avg_pool2d_in_graph(x, 0.02, zero_point, size, *out), got)


@MODEST
@given(st.data())
def test_mean(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    dims = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    dims = [dim - len(shape) if data.draw(st.booleans()) else dim for dim in dims]
    keepdim, out = data.draw(st.booleans()), outputs(data)
    x, zero_point = integers(data, shape)
    got = OPS.mean(x, 0.02, zero_point, dims, keepdim, *out)
    assert_one_step(got, (x.double() - zero_point).mean(dims, keepdim) * 0.02, out)
    assert torch.equal(pooling.mean_in_graph(x, 0.02, zero_point, dims, keepdim, *out), got)


def test_the_mean_of_many_extremes_is_exact() -> None:
    """Of more than fit into 32 bits too."""
    wide = torch.full((1, 1, 3000, 3000), 255, dtype=torch.uint8)
    for result in (OPS.mean(wide, 1.0, 0, [2, 3]), OPS.adaptive_avg_pool2d(wide, 1.0, 0, [1, 1])):
        assert result.flatten().tolist() == [255.0]
    x = torch.full((1, 2**22), 255, dtype=torch.uint8)
    assert OPS.mean(x, 1.0, 0, [1]).tolist() == [255.0]
    assert OPS.mean(x, 1.0, 255, [1], True).tolist() == [[0.0]]
    pooled = OPS.avg_pool2d(x.view(1, 1, 2048, 2048), 1.0, 0, [2048, 2048], [1, 1])
    assert pooled.tolist() == [[[[255.0]]]]


@MODEST
@given(st.data())
def test_mul(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
    narrow = [1 if data.draw(st.booleans()) else size for size in shape]
    shapes = [shape, narrow[data.draw(st.integers(0, len(narrow))) :]]
    (a, a_zp), (b, b_zp) = (integers(data, each) for each in data.draw(st.permutations(shapes)))
    out = outputs(data)
    arguments: tuple[Any, ...] = (a, 0.02, a_zp, b, 0.3, b_zp, *out)
    got = OPS.mul(*arguments)
    product = (a.long() - a_zp) * (b.long() - b_zp)
    assert_one_step(got, product.double() * (0.02 * 0.3), out)
    assert torch.equal(elementwise.mul_in_graph(*arguments), got)
    assert math.prod(product.shape) == got.numel()
