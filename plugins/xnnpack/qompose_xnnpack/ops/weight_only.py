# SPDX-License-Identifier: Apache-2.0
"""Linear of a float input with an int8 weight, which becomes float block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from qompose_xnnpack.ops.dynamic import linear_shape

# Float values of the weight held at once, 4 MiB in float32.
BLOCK = 2**20


def linear(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """``x: (..., K)``, ``weight: (O, K)``, ``bias: (O,)`` -> ``(..., O)`` in the dtype of ``x``.

    ``w_scale``: ``(1,)``, ``(O,)``, or ``(O, G)`` for ``G`` groups of ``K / G`` neighbours in a row.
    """
    shape = linear_shape(x, weight, w_scale)
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
