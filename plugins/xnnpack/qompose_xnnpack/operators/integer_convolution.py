# SPDX-License-Identifier: Apache-2.0
"""Exact int8 convolutions, plain or transposed, accumulated in int32.

Nothing here depends on scales. A pixel beyond the border contributes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from qompose_xnnpack.operators.integer_matmul import (
    FLOAT_DEPTH,
    WEIGHTS,
    check_depth,
    matmul,
    row_sums,
)

# Bytes of gathered windows, or of products waiting to be scattered, held at once.
_BLOCK_BYTES = 64 * 2**20

_window_order = WEIGHTS.form(lambda weight: weight.permute(0, 2, 3, 1).flatten(1).clone())
_tap_order = WEIGHTS.form(lambda weight: weight.permute(2, 3, 1, 0).flatten(0, 2).clone())
_tap_sums = WEIGHTS.form(lambda weight: weight.sum(0, dtype=torch.int32))


def conv2d(
    x: Tensor,
    x_zp: int | Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve ``x - x_zp`` with ``weight`` exactly; padding counts as zero.

    ``x``: int8 ``(N, C, H, W)``; ``x_zp``: one for all, or int32 ``(N, 1, 1, 1)``; ``weight``: int8
    ``(O, C / groups, kh, kw)``; the rest in pixels. Returns int32 ``(N, O, H', W')``, usually in
    channels-last memory.
    """
    geometry = (stride, padding, dilation)
    if groups == 1:
        return _conv_by_matmul(x, x_zp, weight, *geometry)
    if weight[0].numel() <= FLOAT_DEPTH:
        return _in_float(functional.conv2d, x, x_zp, weight, *geometry, groups)
    parts = [
        _conv_by_matmul(part, x_zp, kernel, *geometry)
        for part, kernel in zip(x.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
    ]
    return torch.cat(parts, 1)


def conv_transpose2d(
    x: Tensor,
    x_zp: int | Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Tensor:
    """Spread ``x - x_zp`` by ``weight`` exactly, as ``aten.conv_transpose2d`` does.

    ``x``: int8 ``(N, C, H, W)``; ``x_zp``: one for all, or int32 ``(N, 1, 1, 1)``; ``weight``: int8
    ``(C, O / groups, kh, kw)``; the rest in pixels. Returns int32 ``(N, O, H', W')``.
    """
    depth = transposed_depth(weight, groups)
    check_depth(depth)
    if groups > 1 and depth <= FLOAT_DEPTH:
        geometry = (stride, padding, output_padding, groups, dilation)
        return _in_float(functional.conv_transpose2d, x, x_zp, weight, *geometry)
    kernel = weight.shape[2:]
    size = [
        transposed_length(*along)
        for along in zip(
            x.shape[2:], kernel, stride, padding, output_padding, dilation, strict=True
        )
    ]
    # A fresh part of a weight would be cached for nothing; the whole one is worth it.
    parts = weight.chunk(groups, 0) if groups > 1 else [weight]
    totals = [
        _spread(part, x_zp, kernel, size, stride, padding, dilation)
        for part, kernel in zip(x.chunk(groups, 1), parts, strict=True)
    ]
    return totals[0] if groups == 1 else torch.cat(totals, 1)


def _in_float(
    function: Callable[..., Tensor],
    x: Tensor,
    x_zp: int | Tensor,
    weight: Tensor,
    *geometry: object,
) -> Tensor:
    """Call a float operator on integers so few that float32 sums them exactly."""
    with torch.autocast(x.device.type, enabled=False):
        return function(x.float() - x_zp, weight.float(), None, *geometry).to(torch.int32)


def _conv_by_matmul(
    x: Tensor,
    x_zp: int | Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Convolve without groups, as a product of gathered windows with the flattened weight."""
    kernel = weight.shape[2:]
    # A one-pixel kernel needs no reordering, and must not be cached: it is a view of the weight.
    one_pixel = kernel.numel() == 1
    matrix = weight.flatten(1) if one_pixel else _window_order(weight)
    windows = _windows(_pad_channels_last(x, x_zp, padding), kernel, stride, dilation)
    images = max(1, _BLOCK_BYTES // max(1, windows[:1].numel()))
    totals = [
        matmul(windows[start : start + images].reshape(-1, matrix.shape[1]), matrix)
        for start in range(0, max(1, x.shape[0]), images)
    ]
    total = totals[0] if len(totals) == 1 else torch.cat(totals)
    total = total.view(*windows.shape[:3], weight.shape[0])
    return _shift(total, x_zp, row_sums(weight)).permute(0, 3, 1, 2)


def _shift(total: Tensor, x_zp: int | Tensor, sums: Tensor) -> Tensor:
    """Subtract zero points times ``sums`` of the weight from ``total``, in place."""
    if isinstance(x_zp, Tensor):
        return total.sub_(sums * x_zp)
    return total if x_zp == 0 else total.sub_(sums, alpha=x_zp)


def _pad_channels_last(x: Tensor, value: int | Tensor, padding: Sequence[int]) -> Tensor:
    """Return int8 ``(N, C, H, W)`` as contiguous ``(N, H + 2 ph, W + 2 pw, C)``, padded with ``value``."""
    moved = x.permute(0, 2, 3, 1)
    high, wide = padding
    if not high and not wide:
        return moved.contiguous()
    batch, height, width, channels = moved.shape
    padded = moved.new_empty((batch, height + 2 * high, width + 2 * wide, channels))
    padded.copy_(value) if isinstance(value, Tensor) else padded.fill_(value)
    padded[:, high : high + height, wide : wide + width].copy_(moved)
    return padded


def _windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """View ``x: (N, H, W, C)`` as ``(N, H', W', kh, kw, C)``: the pixels under each kernel."""
    batch, height, width, channels = x.shape
    out = [
        out_length(size, *geometry)
        for size, *geometry in zip((height, width), kernel, stride, dilation, strict=True)
    ]
    per_image, per_row, per_pixel, per_channel = x.stride()
    return x.as_strided(
        (batch, *out, *kernel, channels),
        (
            per_image,
            per_row * stride[0],
            per_pixel * stride[1],
            per_row * dilation[0],
            per_pixel * dilation[1],
            per_channel,
        ),
    )


def _spread(
    x: Tensor,
    x_zp: int | Tensor,
    weight: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Transposed convolution without groups to ``size`` pixels: one product, then a sum over the taps.

    Each pixel is multiplied by the whole kernel; every tap of the result then lands on a grid of
    ``stride`` pixels, ``dilation`` apart from the next tap's.
    """
    batch, _, height, width = x.shape
    channels, *kernel = weight.shape[1:]
    # The border that `padding` cuts off is summed with the rest and left out at the end.
    whole = [length + 2 * cut for length, cut in zip(size, padding, strict=True)]
    total = x.new_zeros((batch, *whole, channels), dtype=torch.int32)
    matrix, sums = _tap_order(weight), _tap_sums(weight).permute(1, 2, 0)
    images = max(1, _BLOCK_BYTES // max(1, 4 * height * width * matrix.shape[0]))
    for start in range(0, batch, images):
        pixels = x[start : start + images].permute(0, 2, 3, 1)
        products = matmul(pixels.reshape(-1, x.shape[1]), matrix)
        products = products.view(*pixels.shape[:3], *kernel, channels)
        _shift(products, _of_images(x_zp, start, images), sums)
        for row in range(kernel[0]):
            for column in range(kernel[1]):
                total[
                    start : start + images,
                    _grid(row * dilation[0], stride[0], height),
                    _grid(column * dilation[1], stride[1], width),
                ] += products[:, :, :, row, column]
    top, left = padding
    return total[:, top : top + size[0], left : left + size[1]].permute(0, 3, 1, 2)


def _of_images(x_zp: int | Tensor, start: int, images: int) -> int | Tensor:
    """Return what broadcasts over ``(images, H, W, kh, kw, O)``."""
    return x_zp[start : start + images, ..., None, None] if isinstance(x_zp, Tensor) else x_zp


def _grid(start: int, step: int, count: int) -> slice:
    return slice(start, start + (count - 1) * step + 1, step)


def transposed_depth(weight: Tensor, groups: int) -> int:
    """Return the most products that a pixel of a transposed convolution can be the sum of."""
    return weight.shape[0] // groups * math.prod(weight.shape[2:])


def out_length(padded: int, kernel: int, stride: int, dilation: int) -> int:
    """Return the output pixels of a convolution along one axis of ``padded`` pixels, padding included."""
    return (padded - dilation * (kernel - 1) - 1) // stride + 1


def transposed_length(
    pixels: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int
) -> int:
    """Return the output pixels of a transposed convolution along one axis of ``pixels``."""
    return (pixels - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1
