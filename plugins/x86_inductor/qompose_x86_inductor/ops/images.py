# SPDX-License-Identifier: Apache-2.0
"""Pooling, means and products of quantized tensors, in operators of torch that Inductor fuses.

Integers below 2 ** 24 are exact in float32, and all sums here are kept below that, or are made as
integers. oneDNN's own product, ``onednn::qmul``, takes uint8 alone and was wrong by many steps for
operands with zero points (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qompose_x86_inductor.arguments import NAMESPACE, QUANTIZED, flip_sign_bit
from qompose_x86_inductor.ops.outputs import Output
from qompose_x86_inductor.ops.products import laid_out


def max_pool2d(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Tensor:
    """Compute ``qompose_x86::max_pool2d``."""
    _check("max_pool2d", x, 4)
    # aten's max_pool2d refuses 8-bit images beyond 127 or 255 pixels; this one takes uint8 alone.
    pixels = x if x.dtype == torch.uint8 else flip_sign_bit(x)
    pooled = torch.ops.quantized.max_pool2d.default(
        pixels, kernel_size, stride, padding, dilation, ceil_mode
    )
    return laid_out(pooled if x.dtype == torch.uint8 else flip_sign_bit(pooled).view(torch.int8))


def max_pool2d_in_float(x: Tensor, *window: Any) -> Tensor:
    """The same through float32, which holds every 8-bit integer: for tracing.

    The metadata that quantized::max_pool2d gives of its result is laid out otherwise than the
    result (torch 2.13).
    """
    _check("max_pool2d", x, 4)
    # A dilated window may lie in the padding altogether, which float calls -inf.
    pooled = F.max_pool2d(x.to(torch.float32), *window).clamp(min=torch.iinfo(x.dtype).min)
    return laid_out(pooled.to(x.dtype))


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
    _check("avg_pool2d", x, 4)
    output = Output(*out).checked("avg_pool2d")
    exact = torch.float32 if math.prod(kernel_size) < 2**16 else torch.float64
    options: Any = (padding, ceil_mode, count_include_pad, divisor_override)
    pooled = F.avg_pool2d(x.to(exact) - x_zp, kernel_size, stride, *options)
    return laid_out(output.quantize(pooled * x_scale))


def adaptive_avg_pool2d_in_graph(
    x: Tensor, x_scale: float, x_zp: int, output_size: list[int], *out: Any
) -> Tensor:
    """Compute ``qompose_x86::adaptive_avg_pool2d``: (N, C, H, W) -> (N, C, *output_size)."""
    _check("adaptive_avg_pool2d", x, 4)
    if list(output_size) == [1, 1]:
        return laid_out(mean_in_graph(x, x_scale, x_zp, [2, 3], True, *out))
    output = Output(*out).checked("adaptive_avg_pool2d")
    pooled = torch.ops.aten.adaptive_avg_pool2d(x.to(torch.float64) - x_zp, output_size)
    return laid_out(output.quantize(pooled * x_scale))


def mean_in_graph(
    x: Tensor, x_scale: float, x_zp: int, dim: list[int], keepdim: bool = False, *out: Any
) -> Tensor:
    """Compute ``qompose_x86::mean`` over ``dim``."""
    _check("mean", x, None)
    output = Output(*out).checked("mean")
    count = math.prod([x.shape[axis] for axis in dim])
    # The sum and its zero points stay below 2 ** 31 each; more values are rare, and slower.
    few = statically_known_true(count < 2**23)
    total = x.sum(dim, keepdim=keepdim, dtype=torch.int32 if few else torch.int64) - x_zp * count
    return output.quantize(total * x_scale / count)


def mul_in_graph(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    other: Tensor,
    other_scale: float,
    other_zp: int,
    *out: Any,
) -> Tensor:
    """Compute ``qompose_x86::mul``, of any two shapes that broadcast."""
    _check("mul", x, None)
    _check("mul", other, None)
    output = Output(*out).checked("mul")
    product = (x.to(torch.float32) - x_zp) * (other.to(torch.float32) - other_zp)
    return output.quantize(product * (x_scale * other_scale))


def _check(operator: str, x: Tensor, rank: int | None) -> None:
    if x.dtype not in QUANTIZED or rank not in (None, x.dim()):
        wanted = "uint8 or int8" if rank is None else f"uint8 or int8 of rank {rank}"
        raise ValueError(
            f"{NAMESPACE}::{operator}: its tensors are {wanted}, not {x.dtype} of rank {x.dim()}"
        )
