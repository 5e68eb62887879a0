# SPDX-License-Identifier: Apache-2.0
"""What replaces a region that is quantized when the model runs, or whose weight alone is quantized."""

from __future__ import annotations

from typing import Any

import torch
from qompose.backend import DynamicTensor, NotLowerable, Region
from torch.fx import Node

from qompose_x86_inductor import (
    ops,
    run_time_ops as _run_time_ops,  # noqa: F401 - registers
    weight_only_ops as _weight_only_ops,  # noqa: F401 - registers
)
from qompose_x86_inductor.kernels import Product, channel_scales
from qompose_x86_inductor.patterns import Activation

_OPS = getattr(torch.ops, ops.NAMESPACE)


class PerTensor(Product):
    """Emits a linear of floats that are quantized when it runs, with one scale for all of them."""

    def __init__(self, activation: Activation | None = None) -> None:
        super().__init__("linear", activation, add=False)

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`.

        Raises:
            NotLowerable: the input is not quantized to uint8 with one scale.
        """
        source = region.dynamic("input")
        if source.dims is not None or source.symmetric or source.dtype is not torch.uint8:
            raise NotLowerable(f"{source.node.name} is not uint8, affine, with one scale")
        return region.call(
            _OPS.linear_dynamic.default,
            *_constants(region, source),
            source.low,
            source.high,
            source.eps,
            *self.post_op(region),
        )


def per_token(region: Region) -> Node:
    """Emit a linear of floats that are quantized when it runs, each row by itself.

    Raises:
        NotLowerable: the rows are not quantized to the whole of int8.
    """
    source = region.dynamic("input")
    if source.dims != 1 or (source.low, source.high, source.dtype) != (-128, 127, torch.int8):
        raise NotLowerable(f"{source.node.name} is not quantized to the whole of int8 by row")
    operator = _OPS.linear_dynamic_per_token.default
    return region.call(operator, *_constants(region, source), source.symmetric)


def int8_weight(region: Region) -> Node:
    """Emit a linear of floats by an int8 weight with a scale for each output channel."""
    weight = region.quantized("weight")
    return _weight_only(region, "linear_int8_weight", weight.node, channel_scales(region, weight))


def int4_weight(region: Region) -> Node:
    """Emit a linear of floats by an int4 weight with a scale for each group of inputs."""
    weight = region.quantized("weight")
    return _weight_only(region, "linear_int4_weight", weight.node, weight.scale)


def float16_weight(region: Region) -> Node:
    """Emit a linear of floats by a weight that is stored as float16.

    Raises:
        NotLowerable: the weight is not stored so.
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


def _constants(region: Region, source: DynamicTensor) -> list[Any]:
    weight = region.quantized("weight")
    scales = channel_scales(region, weight)
    return [source.node, weight.node, scales, region.argument("linear", "bias")]
