# SPDX-License-Identifier: Apache-2.0
"""The call that replaces linears of float8 numbers."""

from __future__ import annotations

import torch
from qompose.backend import NotLowerable, Region
from torch.fx import Node

from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.linear_float8 import DTYPES

_OPS = getattr(torch.ops, NAMESPACE)


def linear(region: Region) -> Node:
    """Emit a linear of float8 numbers with one scale; the weight has one too, or one for each channel.

    Raises:
        NotLowerable: either arrives otherwise.
    """
    source, weight = region.quantized("input"), region.quantized("weight")
    if source.dtype not in DTYPES or not isinstance(source.scale, float):
        raise NotLowerable(f"{source.node.name} is not quantized per tensor to float8")
    channels = len(weight.tensor)
    scales = weight.scales.float().reshape(-1).expand(channels).clone()
    return region.call(
        _OPS.linear_float8.default,
        source.node,
        source.scale,
        weight.node,
        region.constant(f"{weight.node.target}_float8_scale", scales),
        region.argument("linear", "bias"),
    )
