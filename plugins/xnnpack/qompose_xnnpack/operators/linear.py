# SPDX-License-Identifier: Apache-2.0
"""Linear with an int8 weight: of an int8 input, of integers quantized at run time, or of a float input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qompose_xnnpack.operators.integer_matmul import shifted_groups, shifted_matmul
from qompose_xnnpack.operators.requantization import StaticProduct
from qompose_xnnpack.operators.shapes import linear_shape, scaled_linear_shape

# Float values of the weight held at once, 4 MiB in float32.
BLOCK = 2**20


def linear(*arguments: Any) -> Tensor:
    """Int8 ``x: (..., K)``, ``weight: (O, K)``, ``bias: (O,)`` -> int8 ``(..., O)``."""
    product, out = StaticProduct.read(arguments)
    x, weight = product.x, product.weight
    shape = linear_shape(x, weight)
    total = shifted_matmul(x.reshape(-1, weight.shape[1]), product.x_zp, weight)
    return product.finished(total, weight.shape[1], out).view(shape)


def linear_output(*arguments: Any) -> list[int]:
    """Return the shape of the output of ``linear``."""
    product, _ = StaticProduct.read(arguments)
    return linear_shape(product.x, product.weight)


def linear_dynamic(
    x: Tensor,
    x_scale: Tensor,
    x_zp: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *clamp: float,
) -> Tensor:
    """Multiply ``x: (..., K)`` of ``quantize_dynamic``; ``weight: (O, K)``, ``bias: (O,)`` -> ``(..., O)``.

    ``w_scale``: ``(1,)``, ``(O,)``, or ``(O, G)`` for ``G`` groups of ``K / G`` neighbours in a row.
    Formula: ``x_scale * sum over groups of (w_scale * exact integer sum) + bias``, in float32.
    """
    shape = scaled_linear_shape(x, weight, w_scale)
    rows = x.reshape(-1, weight.shape[1])
    scales = w_scale.to(torch.float32).unsqueeze(-1).flatten(1).t().contiguous()
    total = torch.zeros((rows.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    sums = shifted_groups(rows, x_zp.reshape(-1, 1), weight, weight.shape[1] // scales.shape[0])
    for part, scale in zip(sums, scales, strict=True):
        total.addcmul_(part, scale)
    total.mul_(x_scale.reshape(-1, 1))
    if bias is not None:
        total.add_(bias)
    return total.clamp_(*clamp).view(shape)


def linear_dynamic_fake(
    x: Tensor, x_scale: Tensor, x_zp: Tensor, weight: Tensor, w_scale: Tensor, *_: Any
) -> Tensor:
    """Return the output of ``linear_dynamic`` without values."""
    return x_scale.new_empty(scaled_linear_shape(x, weight, w_scale))


def linear_weight_only(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Float ``x: (..., K)``, ``weight: (O, K)``, ``bias: (O,)`` -> ``(..., O)`` in the dtype of ``x``.

    ``w_scale``: ``(1,)``, ``(O,)``, or ``(O, G)`` for ``G`` groups of ``K / G`` neighbours in a row.
    The weight becomes float a block at a time.
    """
    shape = scaled_linear_shape(x, weight, w_scale)
    outputs, depth = weight.shape
    rows = x.reshape(-1, depth)
    total = rows.new_empty((rows.shape[0], outputs))
    scales = w_scale.unsqueeze(-1).flatten(1).expand(outputs, -1)
    height = max(1, BLOCK // max(1, depth))
    for start in range(0, outputs, height):
        part = slice(start, start + height)
        torch.mm(rows, _dequantize(weight[part], scales[part], x.dtype).t(), out=total[:, part])
    if bias is not None:
        total.add_(bias)
    return total.view(shape)


def _dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight: int8 (o, K)`` times ``scales: (o, G)``, computed in float32."""
    groups = weight.to(torch.float32).reshape(*scales.shape, -1)
    return groups.mul_(scales.to(torch.float32).unsqueeze(-1)).flatten(1).to(dtype)


def linear_float_output(x: Tensor, weight: Tensor, w_scale: Tensor, *_: Any) -> list[int]:
    """Return the shape of the output of a linear whose input is float."""
    return scaled_linear_shape(x, weight, w_scale)
