# SPDX-License-Identifier: Apache-2.0
"""The bounds within which an activation function keeps its output, as floats or as integers."""

from __future__ import annotations

import math

from qompose.backend import QuantizedTensor, Region

from qompose_xnnpack.operators import quantized_bound

_HALVES = {"clamp_min": ("min",), "clamp_max": ("max",)}


def integer_bounds(output: QuantizedTensor, region: Region, name: str) -> tuple[int, int]:
    """Return the integers within which the activation `name` of a region keeps the output."""
    low, high = float_bounds(region, name)

    def quantized(value: float, unbounded: int) -> int:
        if math.isinf(value):
            return unbounded
        return quantized_bound(value, output.scale, output.zero_point)

    return (
        min(max(output.low, quantized(low, output.low)), output.high),
        max(min(output.high, quantized(high, output.high)), output.low),
    )


def float_bounds(region: Region, name: str) -> tuple[float, float]:
    """Return the bounds within which the activation `name` of a region keeps floats."""
    operator = str(region.node(name).target).removeprefix("aten.").partition(".")[0].rstrip("_")
    if operator == "relu":
        return 0.0, math.inf
    if operator == "relu6":
        return 0.0, 6.0
    words = ("min_val", "max_val") if operator == "hardtanh" else ("min", "max")
    low, high = (
        region.argument(name, word)
        if operator not in _HALVES or word in _HALVES[operator]
        else None
        for word in words
    )
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)
