# SPDX-License-Identifier: Apache-2.0
"""The kernels of the ``torch`` target: integer operators within one step of what XNNPACK computes."""

from __future__ import annotations

import math
from typing import Any

import torch
from qompose.backend import DynamicTensor, NotLowerable, QuantizedTensor, Region
from torch.fx import Node

from qompose_xnnpack import operators
from qompose_xnnpack.kernels.activation_bounds import integer_bounds
from qompose_xnnpack.kernels.convolution_geometry import padded_input

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
            integers, geometry = padded_input(region, integers, weight, source.zero_point)
        return region.call(
            getattr(_OPERATORS, self.operator).default,
            integers,
            *_parameters(source)[1:],
            weight.node,
            scales(region, weight),
            region.argument("op", "bias"),
            *geometry,
            *_requantization(region, output),
            dtype=output.dtype,
        )


class DynamicWeighted:
    """Emits a linear or convolution of floats that quantizes each token or image at run time."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        source, weight = full_range(region.dynamic("input")), region.quantized("weight")
        suffix = "_per_tensor" if source.dims is None else ""
        values, geometry = source.node, list[Any]()
        if self.operator != "linear":
            values, geometry = padded_input(region, values, weight)
        return region.call(
            getattr(_OPERATORS, f"{self.operator}_dynamic{suffix}").default,
            values,
            weight.node,
            scales(region, weight),
            region.argument("op", "bias"),
            *geometry,
            *_UNBOUNDED,
        )


def full_range(source: DynamicTensor) -> DynamicTensor:
    """Return `source` if it is quantized to all of int8, with a zero point. Raises `NotLowerable`."""
    if source.symmetric or (source.low, source.high, source.dtype) != (-128, 127, torch.int8):
        raise NotLowerable(f"{source.node.name} is not quantized to the whole of int8, affine")
    return source


def weight_only_linear(region: Region) -> Node:
    """Emit a linear of floats by integer weights, which become floats a block at a time."""
    weight = region.quantized("weight")
    return region.call(
        _OPERATORS.linear_weight_only.default,
        region.inputs("input")[0],
        weight.node,
        scales(region, weight),
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
        names: the schema arguments that are passed on.
    """

    def __init__(self, operator: str, names: tuple[str, ...]) -> None:
        self.operator, self.names = operator, names

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        (source,), output = region.quantized_inputs("self"), region.quantized("output")
        literals = {name: region.argument("output", name) for name in self.names}
        if "stride" in literals:
            literals["stride"] = literals["stride"] or literals["kernel_size"]
        if self.operator == "max_pool2d":
            check_same(source, output)
            head, tail = [source.node], [output.low, output.high]
        else:
            head, tail = _parameters(source), _requantization(region, output)
        target = getattr(_OPERATORS, self.operator).default
        return region.call(target, *head, *literals.values(), *tail, dtype=output.dtype)


def clamp(region: Region) -> Node:
    """Emit a relu, hardtanh or clamp whose output has its input's scale, as a clamp of integers."""
    (source,), output = region.quantized_inputs("self"), region.quantized("output")
    check_same(source, output)
    low, high = integer_bounds(output, region, "output")
    operator = torch.ops.aten.clamp.default
    return region.call(operator, source.node, low, high, dtype=output.dtype)


def identity(region: Region) -> Node:
    """Put the integers of its input in the place of an operator that changes no value, such as a copy."""
    role = region.claim.operands[0].role
    (source,), output = region.quantized_inputs(role), region.quantized("output")
    check_same(source, output)
    return source.node


def check_same(source: QuantizedTensor, output: QuantizedTensor) -> None:
    """Check that two tensors have one scale and zero point. Raises `NotLowerable`."""
    if source.qparams != output.qparams:
        raise NotLowerable("input and output differ in scale or zero point")


def scales(region: Region, weight: QuantizedTensor) -> Node:
    """Return the node that reads a weight's scales, `(1,)` per tensor."""
    if isinstance(weight.scale, Node):
        return weight.scale
    return region.constant(f"{weight.node.target}_scale", weight.scales)


def _parameters(tensor: QuantizedTensor) -> list[Any]:
    if tensor.dtype is not torch.int8 or not isinstance(tensor.scale, float):
        raise NotLowerable(
            f"{tensor.node.name} is not int8 with one scale, which the kernel requires"
        )
    return [tensor.node, tensor.scale, tensor.zero_point]


def _requantization(region: Region, output: QuantizedTensor) -> list[Any]:
    """Return scale, zero point and clamp of the output; an activation behind it is such a clamp."""
    fused = region.has("act")
    bounds = integer_bounds(output, region, "act") if fused else (output.low, output.high)
    return [output.scale, output.zero_point, *bounds]
