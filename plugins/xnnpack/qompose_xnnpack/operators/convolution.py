# SPDX-License-Identifier: Apache-2.0
"""Convolution, plain or transposed, of an int8 input or of a float one that is quantized at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qompose_xnnpack.operators import integer_convolution
from qompose_xnnpack.operators.dynamic_quantization import quantize_rows
from qompose_xnnpack.operators.integer_matmul import WeightTable
from qompose_xnnpack.operators.requantization import accumulator_unit, requantize_channels
from qompose_xnnpack.operators.shapes import (
    conv_shape,
    conv_transpose_shape,
    mismatch,
    per_axis,
)


def conv2d(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *out: Any,
) -> Tensor:
    """Int8 ``x: (N, C, H, W)``, ``weight: (O, C / groups, kh, kw)`` -> int8 ``(N, O, H', W')``."""
    _check_rank(x, weight)
    conv_shape(x, weight, stride, padding, dilation, groups)
    stride, padding, dilation = per_axis(2, stride, padding, dilation)
    total = integer_convolution.conv2d(x, x_zp, weight, stride, padding, dilation, groups)
    unit = accumulator_unit(x_scale, w_scale)
    return requantize_channels(total, unit, bias, weight[0].numel(), out)


def conv1d(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> Tensor:
    """Int8 ``x: (N, C, L)``, ``weight: (O, C / groups, k)`` -> ``(N, O, L')``, as images of one row."""
    conv_shape(x, weight, *rest[:4])
    stride, padding, dilation, *out = rest
    flat = ((1, *stride), (0, *padding), (1, *dilation))
    image = conv2d(x.unsqueeze(2), x_scale, x_zp, _as_image(weight), w_scale, bias, *flat, *out)
    return image.squeeze(2)


# What is cached per weight is keyed by tensor object, for which a fresh view would not do.
_as_image = WeightTable(lambda weight: weight.unsqueeze(2).clone())


def conv_output(
    x: Tensor, x_scale: float, x_zp: int, weight: Tensor, w_scale: Tensor, bias: Any, *rest: Any
) -> Sequence[int]:
    """Return the shape of the output of ``conv1d`` or ``conv2d``."""
    return conv_shape(x, weight, *rest[:4])


def conv_transpose2d(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    *out: Any,
) -> Tensor:
    """Int8 ``x: (N, C, H, W)``, ``weight: (C, O / groups, kh, kw)`` -> int8 ``(N, O, H', W')``.

    ``w_scale``: ``(1,)``, or ``(O,)`` where ``groups`` is 1.
    """
    _check_rank(x, weight)
    spatial = (stride, padding, output_padding)
    conv_transpose_shape(x, weight, w_scale, *spatial, groups, dilation)
    geometry: tuple[Any, ...] = (*per_axis(2, *spatial), groups, *per_axis(2, dilation))
    total = integer_convolution.conv_transpose2d(x, x_zp, weight, *geometry)
    depth = integer_convolution.transposed_depth(weight, groups)
    return requantize_channels(total, accumulator_unit(x_scale, w_scale), bias, depth, out)


def conv_transpose1d(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> Tensor:
    """Int8 ``x: (N, C, L)``, ``weight: (C, O / groups, k)`` -> ``(N, O, L')``, as images of one row."""
    conv_transpose_shape(x, weight, w_scale, *rest[:5])
    stride, padding, output_padding, groups, dilation, *out = rest
    flat = ((1, *stride), (0, *padding), (0, *output_padding), groups, (1, *dilation))
    args: tuple[Any, ...] = (_as_image(weight), w_scale, bias, *flat, *out)
    return conv_transpose2d(x.unsqueeze(2), x_scale, x_zp, *args).squeeze(2)


def conv_transpose_output(
    x: Tensor, x_scale: float, x_zp: int, weight: Tensor, w_scale: Tensor, bias: Any, *rest: Any
) -> Sequence[int]:
    """Return the shape of the output of ``conv_transpose1d`` or ``conv_transpose2d``."""
    return conv_transpose_shape(x, weight, w_scale, *rest[:5])


def conv2d_dynamic(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *clamp: float,
) -> Tensor:
    """Float ``x: (N, C, H, W)``, quantized per image; ``weight: (O, C / groups, kh, kw)``.

    ``w_scale``: ``(O,)`` or ``(1,)``; ``bias: (O,)``. Returns float ``(N, O, H', W')``.
    """
    conv2d_dynamic_output(x, weight, w_scale, bias, stride, padding, dilation, groups)
    geometry = (*per_axis(2, stride, padding, dilation), groups)
    convolve = integer_convolution.conv2d
    return _per_image(convolve, x, weight, w_scale, bias, geometry, clamp)


def conv2d_dynamic_output(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Any, *rest: Any
) -> Sequence[int]:
    """Return the shape of the output of ``conv2d_dynamic``."""
    _check_rank(x, weight)
    _check_scales(weight, w_scale, weight.shape[0])
    return conv_shape(x, weight, *rest[:4])


def conv_transpose2d_dynamic(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    *clamp: float,
) -> Tensor:
    """Float ``x: (N, C, H, W)``, quantized per image; ``weight: (C, O / groups, kh, kw)``.

    ``w_scale``: ``(1,)``, or ``(O,)`` where ``groups`` is 1; ``bias: (O,)``. Returns float
    ``(N, O, H', W')``.
    """
    spatial = (stride, padding, output_padding)
    conv_transpose2d_dynamic_output(x, weight, w_scale, bias, *spatial, groups, dilation)
    geometry = (*per_axis(2, *spatial), groups, *per_axis(2, dilation))
    convolve = integer_convolution.conv_transpose2d
    return _per_image(convolve, x, weight, w_scale, bias, geometry, clamp)


def conv_transpose2d_dynamic_output(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Any, *rest: Any
) -> Sequence[int]:
    """Return the shape of the output of ``conv_transpose2d_dynamic``."""
    _check_rank(x, weight)
    _check_scales(weight, w_scale, weight.shape[1] * rest[3])
    return conv_transpose_shape(x, weight, w_scale, *rest[:5])


def _check_rank(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 4:
        raise mismatch("the input must be a batch of images", input=x, weight=weight)


def _check_scales(weight: Tensor, w_scale: Tensor, channels: int) -> None:
    if tuple(w_scale.shape) not in ((1,), (channels,)):
        raise mismatch(f"the scales must be (1,) or ({channels},)", weight=weight, w_scale=w_scale)


def _per_image(
    convolve: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    geometry: Sequence[Any],
    clamp: Sequence[float],
) -> Tensor:
    """Quantize each image, ``convolve(integers, zero points, weight, *geometry)``, and return floats."""
    images, x_scale, x_zp = quantize_rows(x.flatten(1))
    whole = convolve(images.view(x.shape), x_zp.view(-1, 1, 1, 1), weight, *geometry)
    total = whole.to(torch.float32).mul_(x_scale.view(-1, 1, 1, 1)).mul_(w_scale.view(-1, 1, 1))
    if bias is not None:
        total.add_(bias.view(-1, 1, 1))
    return total.clamp_(*clamp).contiguous()
