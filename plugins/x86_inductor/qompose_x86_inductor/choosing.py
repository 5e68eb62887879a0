# SPDX-License-Identifier: Apache-2.0
"""Scales and zero points chosen from a tensor when the model runs, as converted models choose them.

The formulas are those of torch's ``quantized_decomposed.choose_qparams*`` and ``quantize_per_*``, in
float32 throughout and without a read of a tensor's value, so that they also run in a traced graph. Per
tensor they give the same integers; per row torch computes in float64, and where a value lies within
2**-16 steps of the middle between two integers it may become the other of them.

A range that is not finite gives a scale that is not finite, and integers that mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW, HIGH = -128, 127
"""The integers of rows."""

_EPS = torch.finfo(torch.float32).eps
_LEAST_RANGE = 1e-5


def choose(x: Tensor, low: int, high: int, eps: float) -> tuple[Tensor, Tensor]:
    """Scale and zero point, float32 of no dimension, for all of a float32 ``x`` that is not empty.

    ``low`` and ``high`` bound the integers; ``eps`` is the least scale.
    """
    least, most = torch.aminmax(x)
    least, most = least.clamp(max=0.0), most.clamp(min=0.0)
    scale = ((most - least) / float(high - low)).clamp(min=eps)
    zero_point = (low - torch.round(least / scale)).clamp(low, high)
    # Whoever multiplies by the scale gets NaN, whatever the integers are.
    return torch.where(scale.isfinite(), scale, torch.nan), zero_point.nan_to_num(low)


def quantize(
    x: Tensor, scale: Tensor | float, zero_point: Tensor | int, low: int, high: int
) -> Tensor:
    """Integers, uint8, in any memory format that ``x`` has."""
    steps = torch.round(x * (1.0 / scale)) + zero_point
    return steps.clamp(low, high).to(torch.uint8)


def choose_rows(rows: Tensor, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points, float32 (M, 1), of float32 ``rows`` (M, K), K > 0.

    Without zero points where ``symmetric``.
    """
    if symmetric:
        largest = rows.abs().amax(1, keepdim=True)
        return largest.clamp(min=_LEAST_RANGE) / HIGH, None
    least = rows.amin(1, keepdim=True).clamp(max=0.0)
    most = rows.amax(1, keepdim=True).clamp(min=0.0)
    scale = ((most - least) / float(HIGH - LOW)).clamp(min=_EPS)
    steps_down, steps_up = least / scale, most / scale
    # Of both ends of the range, the one that keeps the rounding of the zero point smaller decides.
    from_low = (LOW + steps_down) + (HIGH + steps_up) > 0
    zero_point = torch.where(from_low, LOW - steps_down, HIGH - steps_up)
    return scale, zero_point.clamp(LOW, HIGH).round()


def quantize_rows(rows: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Integers, int8 (M, K)."""
    steps = rows * (1.0 / scale)
    steps = steps if zero_point is None else steps + zero_point
    return torch.round(steps).clamp(LOW, HIGH).to(torch.int8)
