# SPDX-License-Identifier: Apache-2.0
"""What replaces a region that is quantized when the model runs, or whose weights alone are quantized."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from qompose.backend import DynamicTensor, NotLowerable, QuantizedTensor, Region, clear_origin
from torch.fx import Node

from qompose_xnnpack import ops
from qompose_xnnpack.kernels import geometry_of, scales

_OPS = getattr(torch.ops, ops.NAMESPACE)
_UNBOUNDED = (-math.inf, math.inf)


class Dynamic:
    """Emits a linear or convolution of floats that quantizes each token or image by itself."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        source, weight = _checked(region.dynamic("input")), region.quantized("weight")
        suffix = "_per_tensor" if source.dims is None else ""
        values, geometry = source.node, list[Any]()
        if self.operator != "linear":
            values, geometry = _padded(region, source, weight)
        return region.call(
            getattr(_OPS, f"{self.operator}_dynamic{suffix}").default,
            values,
            weight.node,
            scales(region, weight),
            region.argument("op", "bias"),
            *geometry,
            *_UNBOUNDED,
        )


def _padded(
    region: Region, source: DynamicTensor, weight: QuantizedTensor
) -> tuple[Node, list[Any]]:
    """Return the floats that a convolution reads, and its geometry. Zeros are in every range."""
    geometry, around = geometry_of(region, weight.tensor.shape[2:])
    pad = torch.ops.aten.constant_pad_nd.default
    return region.step(pad, source.node, around) if any(around) else source.node, geometry


def _checked(source: DynamicTensor) -> DynamicTensor:
    if source.symmetric or (source.low, source.high, source.dtype) != (-128, 127, torch.int8):
        raise NotLowerable(f"{source.node.name} is not quantized to the whole of int8, affine")
    return source


def as_runtime_reads(region: Region) -> None:
    """Write a region's dynamic quantization in the form that ExecuTorch's partitioner knows.

    For an image of a convolution that is per tensor (executorch 1.5.1), whatever the batch: the runtime
    then computes a scale for each image, which is what the graph said before.
    """
    source, read = _checked(region.dynamic("input")), region.inputs("input")[0]
    convolution, weight = region.node("op"), region.quantized("weight")
    floats, geometry = _padded(region, source, weight)
    decomposed, bounds = torch.ops.quantized_decomposed, (-128, 127)
    eps = torch.finfo(torch.float32).eps
    chosen = region.step(decomposed.choose_qparams.tensor, floats, *bounds, eps, torch.int8)
    scale, zero_point = (region.step(operator.getitem, chosen, place) for place in (0, 1))
    parameters: tuple[Any, ...] = (scale, zero_point, *bounds, torch.int8)
    quantized = region.step(decomposed.quantize_per_tensor.tensor, floats, *parameters)
    values = region.step(decomposed.dequantize_per_tensor.tensor, quantized, *parameters)
    for node in (chosen, scale, zero_point, quantized, values):
        clear_origin(node)  # none of them is an operator of the region
    convolution.replace_input_with(read, values)
    if floats is not source.node:  # padding that has no number becomes numbers
        clear_origin(floats)
        convolution.target = torch.ops.aten.conv2d.default
        arguments = (values, convolution.args[1], region.argument("op", "bias"), *geometry)
        convolution.args, convolution.kwargs = arguments, {}


def weight_only(region: Region) -> Node:
    """Emit a linear of floats by integer weights, which become floats a block at a time."""
    weight = region.quantized("weight")
    return region.call(
        _OPS.linear_weight_only.default,
        region.inputs("input")[0],
        weight.node,
        scales(region, weight),
        region.argument("op", "bias"),
    )
