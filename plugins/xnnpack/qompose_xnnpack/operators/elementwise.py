# SPDX-License-Identifier: Apache-2.0
"""Elementwise arithmetic on two int8 tensors of any scales, which broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from qompose.backend import kit
from torch import Tensor

# Bits kept of the larger of the two multipliers, and the largest shift that int32 has room for.
_FACTOR_BITS = 20
_MAX_SHIFT = 30


def add(
    a: Tensor, a_scale: float, a_zp: int, b: Tensor, b_scale: float, b_zp: int, *out: Any
) -> Tensor:
    """Return the sum ``a + b``."""
    return _weighted_sum((a, a_scale, a_zp), (b, b_scale, b_zp), 1, *out)


def sub(
    a: Tensor, a_scale: float, a_zp: int, b: Tensor, b_scale: float, b_zp: int, *out: Any
) -> Tensor:
    """Return the difference ``a - b``."""
    return _weighted_sum((a, a_scale, a_zp), (b, b_scale, b_zp), -1, *out)


def _weighted_sum(
    a: tuple[Tensor, float, int],
    b: tuple[Tensor, float, int],
    sign: int,
    out_scale: float,
    out_zp: int,
    out_min: int,
    out_max: int,
) -> Tensor:
    """Return ``a + sign * b`` in XNNPACK's fixed point: multipliers below 2**21, one rounding shift.

    Formula: ``(a - a_zp) * round(a_scale / out_scale * 2**s) + (same for sign * b) + 2**(s - 1)``,
    shifted right by ``s``. XNNPACK's difference is its sum with the second multiplier negated: on
    executorch 1.5.1 both agreed bit for bit on all pairs of int8 values.
    """
    ratios = [min(scale / out_scale, 2.0**_FACTOR_BITS) for _, scale, _ in (a, b)]
    exponent = math.frexp(max(ratios))[1] - 1
    shift = max(1, min(_MAX_SHIFT, _FACTOR_BITS - exponent))
    factors = [round(ratio * 2.0**shift) for ratio in ratios]
    factors[1] *= sign
    offset = (1 << (shift - 1)) - factors[0] * a[2] - factors[1] * b[2]
    total = a[0].to(torch.int32) * factors[0] + (b[0].to(torch.int32) * factors[1] + offset)
    steps: Tensor = total.bitwise_right_shift_(shift).add_(out_zp)
    return steps.clamp_(out_min, out_max).to(torch.int8).contiguous()


def mul(
    a: Tensor, a_scale: float, a_zp: int, b: Tensor, b_scale: float, b_zp: int, *out: Any
) -> Tensor:
    """Return the product ``a * b``."""
    out_scale, *limits = out
    total = (a.to(torch.int32) - a_zp) * (b.to(torch.int32) - b_zp)
    return kit.requantize(total, a_scale * b_scale / out_scale, *limits)


def broadcast_shape(a: Tensor, a_scale: float, a_zp: int, b: Tensor, *_: Any) -> Sequence[int]:
    """Return the common shape of both operands."""
    return (a + b).shape
