# SPDX-License-Identifier: Apache-2.0
"""Pooling of quantized images, means included, in operators of torch that Inductor fuses.

Integers below 2 ** 24 are exact in float32, and all sums here are kept below that, or are made as
integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qompose_x86_inductor.onednn.arguments import (
    Output,
    channels_last,
    check_quantized,
    flip_sign_bit,
)


def max_pool2d(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Tensor:
    """Compute ``qompose_x86::max_pool2d``."""
    check_quantized("max_pool2d", x, 4)
    # aten's max_pool2d refuses 8-bit images beyond 127 or 255 pixels; this one takes uint8 alone.
    pixels = x if x.dtype == torch.uint8 else flip_sign_bit(x)
    pooled = torch.ops.quantized.max_pool2d.default(
        pixels, kernel_size, stride, padding, dilation, ceil_mode
    )
    return channels_last(
        pooled if x.dtype == torch.uint8 else flip_sign_bit(pooled).view(torch.int8)
    )


def max_pool2d_in_float(x: Tensor, *window: Any) -> Tensor:
    """Compute the same through float32, which holds every 8-bit integer: for tracing.

    quantized::max_pool2d gives its result another memory layout than its metadata says (torch 2.13).
    """
    check_quantized("max_pool2d", x, 4)
    # A dilated window may lie in the padding altogether, which float calls -inf.
    pooled = F.max_pool2d(x.to(torch.float32), *window).clamp(min=torch.iinfo(x.dtype).min)
    return channels_last(pooled.to(x.dtype))


def avg_pool2d_in_graph(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    kernel_size: list[int],
    stride: list[int],
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *out: Any,
) -> Tensor:
    """Compute ``qompose_x86::avg_pool2d``; zeros around the image are real zeros."""
    check_quantized("avg_pool2d", x, 4)
    output = Output(*out).checked("avg_pool2d")
    window = [
        (sizes[0], sizes[-1]) for sizes in (kernel_size, stride or kernel_size, padding)
    ]  # one number is for both sides
    if divisor_override != 0 and all(map(_is_alone, x.shape[2:], *window, [ceil_mode] * 2)):
        sides = [
            side + 2 * pad * count_include_pad
            for side, pad in zip(x.shape[2:], window[2], strict=True)
        ]
        return channels_last(
            _means(x, x_scale, x_zp, [2, 3], True, divisor_override or math.prod(sides), output)
        )
    exact = torch.float32 if math.prod(window[0]) < 2**16 else torch.float64
    options: Any = (padding, ceil_mode, count_include_pad, divisor_override)
    pooled = F.avg_pool2d(x.to(exact) - x_zp, kernel_size, stride, *options)
    return channels_last(output.quantize(pooled * x_scale))


def _is_alone(side: Any, window: int, stride: int, padding: int, ceil_mode: bool) -> bool:
    """Return whether one window covers a side of an image, and there is no other.

    Loops that Inductor writes are as long as a window, and some models pool 7 x 7 pixels by windows of
    1280 x 1280.
    """
    room = side + 2 * padding - window
    return type(side) is int and (room == 0 or (ceil_mode and -stride < room < 0))


def adaptive_avg_pool2d_in_graph(
    x: Tensor, x_scale: float, x_zp: int, output_size: list[int], *out: Any
) -> Tensor:
    """Compute ``qompose_x86::adaptive_avg_pool2d``: (N, C, H, W) -> (N, C, *output_size)."""
    check_quantized("adaptive_avg_pool2d", x, 4)
    if list(output_size) == [1, 1]:
        return channels_last(mean_in_graph(x, x_scale, x_zp, [2, 3], True, *out))
    output = Output(*out).checked("adaptive_avg_pool2d")
    pooled = torch.ops.aten.adaptive_avg_pool2d(x.to(torch.float64) - x_zp, output_size)
    return channels_last(output.quantize(pooled * x_scale))


def mean_in_graph(
    x: Tensor, x_scale: float, x_zp: int, dim: list[int], keepdim: bool = False, *out: Any
) -> Tensor:
    """Compute ``qompose_x86::mean`` over ``dim``."""
    check_quantized("mean", x, None)
    output = Output(*out).checked("mean")
    return _means(x, x_scale, x_zp, dim, keepdim, math.prod([x.shape[i] for i in dim]), output)


def _means(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    dim: list[int],
    keepdim: bool,
    divisor: int,
    output: Output,
) -> Tensor:
    """Return sums of real values over ``dim``, divided."""
    count = math.prod([x.shape[axis] for axis in dim])
    # The sum and its zero points stay below 2 ** 31 each; more values are rare, and slower.
    few = statically_known_true(count < 2**23)
    total = x.sum(dim, keepdim=keepdim, dtype=torch.int32 if few else torch.int64) - x_zp * count
    return output.quantize(total * x_scale / divisor)
