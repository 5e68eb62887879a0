# SPDX-License-Identifier: Apache-2.0
"""What kernels compute besides products: requantization, and scales that are chosen at run time.

The formulas of run time are those of torch's ``quantized_decomposed.choose_qparams*`` and ``quantize_per_*``,
which converted models hold, in float32 throughout and without reading a tensor's value, so that they also run
in a traced graph. Per tensor they give the same integers; per row torch computes in float64, and a value
within 2**-16 steps of the middle between two integers may become the other of them.

A range that is not finite gives a scale that is not finite, and integers that mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW, _HIGH = -128, 127
"""The integers of rows."""

_EPS = torch.finfo(torch.float32).eps
_LEAST_RANGE = 1e-5


def requantize(
    total: Tensor,
    multiplier: float | Tensor,
    zero_point: int,
    low: int,
    high: int,
    dtype: torch.dtype = torch.int8,
) -> Tensor:
    """Return `clamp(round(total * multiplier) + zero_point, low, high)`, ties to even, contiguous.

    Args:
        total: sums of any size, integers or floats.
        multiplier: steps of the output for each unit of `total`; a tensor must broadcast against it.
    """
    steps = total.to(torch.float32).mul(multiplier).round_().add_(zero_point)
    return steps.clamp_(low, high).to(dtype).contiguous()


def choose_qparams(x: Tensor, low: int, high: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return scale and zero point, float32 scalars, for all of a float32 `x` of any size that is not empty.

    Args:
        low, high: the bounds of the integers.
        eps: the least scale.
    """
    least, most = torch.aminmax(x)
    least, most = least.clamp(max=0.0), most.clamp(min=0.0)
    scale = ((most - least) / float(high - low)).clamp(min=eps)
    zero_point = (low - torch.round(least / scale)).clamp(low, high)
    # With this scale every result becomes NaN, whatever the integers are.
    return torch.where(scale.isfinite(), scale, torch.nan), zero_point.nan_to_num(low)


def quantize(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int,
    low: int,
    high: int,
    dtype: torch.dtype = torch.int8,
) -> Tensor:
    """Return integers for a float32 `x` of any size, with one scale, in the memory format of `x`."""
    steps = torch.round(x * (1.0 / scale)) + zero_point
    return steps.clamp(low, high).to(dtype)


def choose_qparams_per_row(rows: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Return int8 scales and zero points, float32 `(M, 1)`, of float32 `rows`, `(M, K)` with K above 0.

    There are no zero points if `symmetric`.
    """
    if symmetric:
        largest = rows.abs().amax(1, keepdim=True)
        return largest.clamp(min=_LEAST_RANGE) / _HIGH, None
    least = rows.amin(1, keepdim=True).clamp(max=0.0)
    most = rows.amax(1, keepdim=True).clamp(min=0.0)
    scale = ((most - least) / float(_HIGH - _LOW)).clamp(min=_EPS)
    steps_down, steps_up = least / scale, most / scale
    # The end of the range at which rounding the zero point costs less decides.
    from_low = (_LOW + steps_down) + (_HIGH + steps_up) > 0
    zero_point = torch.where(from_low, _LOW - steps_down, _HIGH - steps_up)
    return scale, zero_point.clamp(_LOW, _HIGH).round()


def quantize_rows(rows: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return int8 integers `(M, K)` of float32 rows of that shape, by what `choose_qparams_per_row` chose."""
    steps = rows * (1.0 / scale)
    steps = steps if zero_point is None else steps + zero_point
    return torch.round(steps).clamp(_LOW, _HIGH).to(torch.int8)
