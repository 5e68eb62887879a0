# SPDX-License-Identifier: Apache-2.0
"""The quantization of a float input at run time, as XNNPACK rounds it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

LOW, HIGH = -128, 127
# A narrower span than this has no finite number of steps per unit: its values count as zero.
_NARROWEST = 7.5e-37


def quantize_dynamic(x: Tensor, per_tensor: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize float32 ``x: (..., K)``: each row by itself or, which XNNPACK cannot, all as if one row.

    Returns int8 ``(..., K)``, float32 scales and int32 zero points, ``(..., 1)`` or ``(1, 1)``.
    """
    if not per_tensor:
        return quantize_rows(x)
    row = x.reshape(1, -1)
    # Every range includes 0, and with one more there is a range where there are no values.
    ranged = row if statically_known_true(x.numel() > 0) else functional.pad(row, (0, 1))
    quantized, scale, zero_point = quantize_rows(ranged)
    return quantized[:, : x.numel()].reshape(x.shape), scale, zero_point


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each row of float32 ``x: (..., K)`` to int8 over its own range, zero included.

    Returns int8 ``(..., K)``, float32 scales ``(..., 1)`` and int32 zero points ``(..., 1)``. Formula: that
    of ``quantized_decomposed.choose_qparams_per_token_asymmetric``, computed as XNNPACK does, that
    is by products with steps per unit and without a least scale: where all of a row is below 3e-5,
    torch's operator rounds most of it away and XNNPACK does not.
    """
    low = x.amin(-1, keepdim=True).clamp_(max=0)
    high = x.amax(-1, keepdim=True).clamp_(min=0)
    span = high - low
    narrow = span < _NARROWEST
    steps = torch.where(narrow, 1.0, (HIGH - LOW) / span)
    low, high = low * steps, high * steps
    # Of both ends of the range, the one that keeps the rounding of the zero point smaller decides.
    at_low = (LOW + low) + (HIGH + high) > 0
    zero_point = torch.where(at_low, LOW - low, HIGH - high).clamp_(LOW, HIGH).round_()
    quantized = x.mul(steps).round_().add_(zero_point).clamp_(LOW, HIGH).to(torch.int8)
    scale = torch.where(narrow, 1.0, span / (HIGH - LOW))
    return quantized, scale, zero_point.to(torch.int32)
