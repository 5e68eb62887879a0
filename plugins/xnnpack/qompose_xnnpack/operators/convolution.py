# SPDX-License-Identifier: Apache-2.0
"""Convolution, plain or transposed, of an int8 input or of a float one that is quantized at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qompose_xnnpack.operators import integer_convolution
from qompose_xnnpack.operators.dynamic_quantization import quantize_rows
from qompose_xnnpack.operators.integer_matmul import WEIGHTS
from qompose_xnnpack.operators.requantization import StaticProduct
from qompose_xnnpack.operators.shapes import (
    conv_shape,
    conv_transpose_shape,
    mismatch,
    per_axis,
)


def conv2d(*arguments: Any) -> Tensor:
    """Int8 ``x: (N, C, H, W)``, ``weight: (O, C / groups, kh, kw)`` -> int8 ``(N, O, H', W')``."""
    product, (stride, padding, dilation, groups, *out) = StaticProduct.read(arguments)
    x, weight = product.x, product.weight
    _check_rank(x, weight)
    conv_shape(x, weight, stride, padding, dilation, groups)
    geometry: tuple[Any, ...] = (*per_axis(2, stride, padding, dilation), groups)
    total = integer_convolution.conv2d(x, product.x_zp, weight, *geometry)
    return product.finished(total, weight[0].numel(), out)


def conv1d(*arguments: Any) -> Tensor:
    """Int8 ``x: (N, C, L)``, ``weight: (O, C / groups, k)`` -> ``(N, O, L')``, as images of one row."""
    product, (stride, padding, dilation, groups, *out) = StaticProduct.read(arguments)
    conv_shape(product.x, product.weight, stride, padding, dilation, groups)
    flat = ((1, *stride), (0, *padding), (1, *dilation))
    return conv2d(*_as_images(product), *flat, groups, *out).squeeze(2)


_as_image = WEIGHTS.form(lambda weight: weight.unsqueeze(2).clone())


def _as_images(product: StaticProduct) -> StaticProduct:
    return product._replace(x=product.x.unsqueeze(2), weight=_as_image(product.weight))


def conv_output(*arguments: Any) -> Sequence[int]:
    """Return the shape of the output of ``conv1d`` or ``conv2d``."""
    product, rest = StaticProduct.read(arguments)
    return conv_shape(product.x, product.weight, *rest[:4])


def conv_transpose2d(*arguments: Any) -> Tensor:
    """Int8 ``x: (N, C, H, W)``, ``weight: (C, O / groups, kh, kw)`` -> int8 ``(N, O, H', W')``.

    ``w_scale``: ``(1,)``, or ``(O,)`` where ``groups`` is 1.
    """
    product, rest = StaticProduct.read(arguments)
    stride, padding, output_padding, groups, dilation, *out = rest
    x, weight = product.x, product.weight
    _check_rank(x, weight)
    conv_transpose_shape(x, weight, product.w_scale, *rest[:5])
    spatial = per_axis(2, stride, padding, output_padding)
    geometry: tuple[Any, ...] = (*spatial, groups, *per_axis(2, dilation))
    total = integer_convolution.conv_transpose2d(x, product.x_zp, weight, *geometry)
    return product.finished(total, integer_convolution.transposed_depth(weight, groups), out)


def conv_transpose1d(*arguments: Any) -> Tensor:
    """Int8 ``x: (N, C, L)``, ``weight: (C, O / groups, k)`` -> ``(N, O, L')``, as images of one row."""
    product, rest = StaticProduct.read(arguments)
    stride, padding, output_padding, groups, dilation, *out = rest
    conv_transpose_shape(product.x, product.weight, product.w_scale, *rest[:5])
    flat = ((1, *stride), (0, *padding), (0, *output_padding), groups, (1, *dilation))
    return conv_transpose2d(*_as_images(product), *flat, *out).squeeze(2)


def conv_transpose_output(*arguments: Any) -> Sequence[int]:
    """Return the shape of the output of ``conv_transpose1d`` or ``conv_transpose2d``."""
    product, rest = StaticProduct.read(arguments)
    return conv_transpose_shape(product.x, product.weight, product.w_scale, *rest[:5])


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
        raise mismatch("the input must be a batch of images (N, C, H, W)", input=x, weight=weight)


def _check_scales(weight: Tensor, w_scale: Tensor, channels: int) -> None:
    if tuple(w_scale.shape) not in ((1,), (channels,)):
        raise mismatch(
            f"the scales must have shape (1,) or ({channels},)", weight=weight, w_scale=w_scale
        )


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
