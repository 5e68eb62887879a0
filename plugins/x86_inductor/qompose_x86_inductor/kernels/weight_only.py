# SPDX-License-Identifier: Apache-2.0
"""The calls that replace linears whose weight alone is quantized."""

from __future__ import annotations

import torch
from qompose.backend import NotLowerable, Region, kit
from torch.fx import Node

from qompose_x86_inductor.onednn.arguments import NAMESPACE

_OPS = getattr(torch.ops, NAMESPACE)


def int8_weight(region: Region) -> Node:
    """Emit a linear of floats by an int8 weight with a scale for each output channel."""
    weight = region.quantized("weight")
    return _weight_only(
        region, "linear_int8_weight", weight.node, kit.channel_scales(region, weight)
    )


def int4_weight(region: Region) -> Node:
    """Emit a linear of floats by an int4 weight with a scale, and maybe a zero point, for each group."""
    weight = region.quantized("weight")
    scale, zero_points = weight.scale, weight.zero_points
    if bool(zero_points.any()):
        both = torch.stack([weight.scales, -zero_points * weight.scales], -1)
        scale = region.constant(f"{weight.node.target}_scale_and_zero", both)
    return _weight_only(region, "linear_int4_weight", weight.node, scale)


def float16_weight(region: Region) -> Node:
    """Emit a linear of floats by a weight that is stored as float16.

    Raises:
        NotLowerable: the weight is stored otherwise.
    """
    read = region.inputs("weight")[0]
    stored = read.args[0] if read.target is torch.ops.aten.to.dtype else read
    if not isinstance(stored, Node) or stored.meta["val"].dtype is not torch.float16:
        raise NotLowerable(f"its weight {read.name} is not stored as float16")
    return _weight_only(region, "linear_float16_weight", stored)


def _weight_only(region: Region, operator: str, *weight: Node) -> Node:
    (source,) = region.inputs("input")
    target = getattr(_OPS, operator).default
    return region.call(target, source, *weight, region.argument("linear", "bias"))
