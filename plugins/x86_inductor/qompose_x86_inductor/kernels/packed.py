# SPDX-License-Identifier: Apache-2.0
"""The call that replaces linears by weights of four or eight bits, of floats or of quantized rows."""

from __future__ import annotations

from typing import Any

import torch
from qompose.backend import NotLowerable, QuantizedTensor, Region, kit
from torch import Tensor
from torch.fx import Node

from qompose_x86_inductor.operators.linear_packed import (
    FOUR_BITS,
    OPERATOR,
    UNIT,
    LinearSizes,
    Rows,
    pack,
)

_to = torch.ops.aten.to.dtype


def weight_only(region: Region) -> Node:
    """Emit a linear of floats."""
    (source,) = region.inputs("input")
    return _call(region, source, Rows.FLOATS)


def per_token(region: Region) -> Node:
    """Emit a linear of rows that are quantized when it runs, each with a scale of its own.

    Raises:
        NotLowerable: the rows are not quantized to the whole of int8, or sums would leave 32 bits.
    """
    source = region.dynamic("input")
    if source.dims != 1 or (source.low, source.high, source.dtype) != (-128, 127, torch.int8):
        raise NotLowerable(f"{source.node.name} is not quantized per row over the full int8 range")
    depth = region.quantized("weight").tensor.shape[1]
    if depth > kit.MAX_DEPTH:
        raise NotLowerable(f"a sum of {depth} products may overflow int32")
    return _call(region, source.node, Rows.SYMMETRIC if source.symmetric else Rows.AFFINE)


def _call(region: Region, source: Node, rows: Rows) -> Node:
    weight = region.quantized("weight")
    values = weight.tensor
    scales, zero_points = _by_channel(weight, len(values))
    bits = 4 if FOUR_BITS[0] <= weight.low and weight.high <= FOUR_BITS[1] else 8
    packed = pack(values, scales, zero_points, bits)
    columns = _columns(values, scales, zero_points) if rows == Rows.AFFINE else None
    names = ("packed", "packed_scales", "packed_zero_points", "columns")
    constants = [
        None if value is None else region.constant(f"{weight.node.target}_{name}", value)
        for name, value in zip(names, (*packed, columns), strict=True)
    ]
    depth = -(-values.shape[1] // UNIT) * UNIT
    sizes = LinearSizes(
        len(values), depth, weight.group or depth, bits, int(rows), inputs=values.shape[1]
    )
    bias = region.argument("linear", "bias")
    bias = bias if bias is None else _in_float32(region, bias)
    arguments = (_in_float32(region, source), *constants, bias, [*sizes])
    dtype = source.meta["val"].dtype
    if dtype is torch.float32:
        return region.call(OPERATOR, *arguments)
    return region.call(_to, region.step(OPERATOR, *arguments), dtype)


def _by_channel(weight: QuantizedTensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points (out, groups)."""
    both = (weight.scales.float(), weight.zero_points)
    scales, zero_points = (v.view(len(v), -1).expand(channels, -1) for v in both)
    return scales.contiguous(), zero_points.expand(scales.shape)


def _columns(values: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    """Return the sum of each channel's weights, float32 (out,): what a step of a row's zero point adds."""
    size = values.shape[1] // scales.shape[1]
    sums = (
        values.reshape(*scales.shape, size).sum(-1, dtype=torch.int64) - zero_points.long() * size
    )
    return (sums * scales.double()).sum(1).float()


def _in_float32(region: Region, value: Any) -> Node:
    float32 = value.meta["val"].dtype is torch.float32
    return value if float32 else region.step(_to, value, torch.float32)
