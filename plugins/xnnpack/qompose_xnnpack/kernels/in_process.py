# SPDX-License-Identifier: Apache-2.0
"""The kernels of the ``torch`` target: integer operators within one step of what XNNPACK computes."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from qompose.backend import DynamicTensor, Kernel, NotLowerable, QuantizedTensor, Region, kit
from torch.fx import Node

from qompose_xnnpack import operators

_OPERATORS = getattr(torch.ops, operators.NAMESPACE)
_UNBOUNDED = (-math.inf, math.inf)


class Weighted:
    """Emits a static linear or convolution, with the padding before it and the activation behind it."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        source, weight = region.quantized("input"), region.quantized("weight")
        output = region.quantized("output")
        integers, geometry = source.node, list[Any]()
        if self.operator != "linear":
            found = kit.geometry_of(region)
            integers = kit.padded(region, integers, found, source.zero_point)
            geometry = found.arguments
        return region.call(
            getattr(_OPERATORS, self.operator).default,
            integers,
            *_parameters(source)[1:],
            weight.node,
            kit.channel_scales(region, weight, expand=False),
            region.argument("op", "bias"),
            *geometry,
            *_requantization(region, output),
            dtype=output.dtype,
        )


def dynamic_linear(region: Region) -> Node:
    """Emit a linear of floats, and the quantization of its input, which all linears of that tensor read."""
    source, weight = full_range(region.dynamic("input")), region.quantized("weight")
    quantize = _OPERATORS.quantize_dynamic.default
    made = region.shared_step("input", quantize, source.node, source.dims is None)
    return region.call(
        _OPERATORS.linear_dynamic.default,
        *(region.shared_step("input", operator.getitem, made, place) for place in range(3)),
        weight.node,
        kit.channel_scales(region, weight, expand=False),
        region.argument("op", "bias"),
        *_UNBOUNDED,
    )


class DynamicConvolution:
    """Emits a convolution of floats that quantizes each image, padded, at run time."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        source, weight = full_range(region.dynamic("input")), region.quantized("weight")
        found = kit.geometry_of(region)
        return region.call(
            getattr(_OPERATORS, f"{self.operator}_dynamic").default,
            kit.padded(region, source.node, found),
            weight.node,
            kit.channel_scales(region, weight, expand=False),
            region.argument("op", "bias"),
            *found.arguments,
            *_UNBOUNDED,
        )


def full_range(source: DynamicTensor) -> DynamicTensor:
    """Return `source` if it is quantized to all of int8, with a zero point. Raises `NotLowerable`."""
    if source.symmetric or (source.low, source.high, source.dtype) != (-128, 127, torch.int8):
        raise NotLowerable(f"{source.node.name} is not quantized to the full range of affine int8")
    return source


def weight_only_linear(region: Region) -> Node:
    """Emit a linear of floats by integer weights, which become floats a block at a time."""
    weight = region.quantized("weight")
    return region.call(
        _OPERATORS.linear_weight_only.default,
        region.inputs("input")[0],
        weight.node,
        kit.channel_scales(region, weight, expand=False),
        region.argument("op", "bias"),
    )


class Binary:
    """Emits an addition, subtraction or product of two quantized tensors."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        output = region.quantized("output")
        left, right = region.quantized_inputs("self")[0], region.quantized_inputs("other")[-1]
        return region.call(
            getattr(_OPERATORS, self.operator).default,
            *_parameters(left),
            *_parameters(right),
            *_requantization(region, output),
            dtype=output.dtype,
        )


class Pooling:
    """Emits a pooling of one quantized tensor: an average, a mean or a maximum.

    Args:
        operator: its name in the namespace of this package.
    """

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        literals = kit.pool_arguments(region)
        if self.operator == "max_pool2d":
            source, output = kit.kept(region)
            head, tail = [source.node], [output.low, output.high]
        else:
            source, output = region.quantized("self"), region.quantized("output")
            head, tail = _parameters(source), _requantization(region, output)
        target = getattr(_OPERATORS, self.operator).default
        return region.call(target, *head, *literals, *tail, dtype=output.dtype)


CLAMP = Kernel("clamp on integers", kit.ClampOnIntegers(operators.quantized_bound))
"""Runs a relu, hardtanh or clamp of one scale, with bounds rounded as XNNPACK rounds them."""


def _parameters(tensor: QuantizedTensor) -> list[Any]:
    if tensor.dtype is not torch.int8 or not isinstance(tensor.scale, float):
        raise NotLowerable(f"{tensor.node.name} is not quantized per tensor to int8")
    return [tensor.node, tensor.scale, tensor.zero_point]


def _requantization(region: Region, output: QuantizedTensor) -> list[Any]:
    """Return scale, zero point and clamp of the output; an activation behind it is such a clamp."""
    bounds = kit.integer_bounds(region, "act", operators.quantized_bound)
    return [output.scale, output.zero_point, *bounds]
