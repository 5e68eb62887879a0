# SPDX-License-Identifier: Apache-2.0
"""Pooling of int8 images: averages, means over axes, maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from qompose.backend import kit
from torch import Tensor
from torch.nn import functional

from qompose_xnnpack.operators.shapes import per_axis


def _shifted_float(x: Tensor, x_zp: int, area: int) -> Tensor:
    """Return ``x - x_zp`` in a float type that sums ``area`` of its values exactly."""
    return x.to(torch.float32 if area * 255 < 2**24 else torch.float64) - x_zp


def avg_pool2d(
    x: Tensor, x_scale: float, x_zp: int, kernel_size: Sequence[int], *rest: Any
) -> Tensor:
    """Average the windows of ``x: (..., C, H, W)`` as ``aten.avg_pool2d``; padding counts as real zero."""
    *geometry, out_scale, out_zp, out_min, out_max = rest
    (kernel,) = per_axis(2, kernel_size)
    shifted = _shifted_float(x, x_zp, math.prod(kernel))
    total: Tensor = functional.avg_pool2d(shifted, kernel, *geometry)
    return kit.requantize(total, x_scale / out_scale, out_zp, out_min, out_max)


def adaptive_avg_pool2d(
    x: Tensor, x_scale: float, x_zp: int, output_size: Sequence[int], *out: Any
) -> Tensor:
    """Average ``x: (..., C, H, W)`` to ``(..., C, *output_size)``."""
    out_scale, *limits = out
    shifted = _shifted_float(x, x_zp, x.shape[-1] * x.shape[-2])
    height, width = output_size
    total = functional.adaptive_avg_pool2d(shifted, (height, width))
    return kit.requantize(total, x_scale / out_scale, *limits)


def adaptive_shape(
    x: Tensor, x_scale: float, x_zp: int, output_size: Sequence[int], *_: Any
) -> Sequence[int]:
    """Return the shape of an adaptive pooling, whatever the size of the image."""
    return (*x.shape[:-2], *output_size)


def mean(
    x: Tensor, x_scale: float, x_zp: int, dim: Sequence[int] | None, keepdim: bool, *out: Any
) -> Tensor:
    """Return the mean over ``dim``, or over every axis if it is None or empty.

    Raises ``ValueError`` for a mean of no values.
    """
    out_scale, *limits = out
    count = math.prod(x.shape[axis] for axis in dim or range(x.dim()))
    if count == 0:
        raise ValueError(f"input of shape {tuple(x.shape)} has no values to average over dim={dim}")
    total = _sum(x, dim, keepdim)
    return kit.requantize(total - count * x_zp, x_scale / (out_scale * count), *limits)


def mean_shape(
    x: Tensor, x_scale: float, x_zp: int, dim: Sequence[int] | None, keepdim: bool, *_: Any
) -> Sequence[int]:
    """Return the shape of a mean."""
    return _sum(x, dim, keepdim).shape


def _sum(x: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    return x.sum(dim=list(dim) if dim else None, keepdim=keepdim)


def max_pool2d(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    out_min: int,
    out_max: int,
) -> Tensor:
    """Return the maximum of each window of ``x: (..., C, H, W)``, in the scale and zero point of ``x``."""
    pooled = functional.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    return pooled.clamp_(out_min, out_max).contiguous()
