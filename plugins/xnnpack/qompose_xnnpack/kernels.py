# SPDX-License-Identifier: Apache-2.0
"""What replaces a claimed region in process: integer operators that agree with XNNPACK's to one step."""

from __future__ import annotations

from typing import Any

import torch
from qompose import NotLowerable, QuantizedTensor, Region
from torch.fx import Node

from qompose_xnnpack import ops

_OPS = getattr(torch.ops, ops.NAMESPACE)

GEOMETRY = ("stride", "padding", "dilation", "groups")


class Weighted:
    """Emits a linear or a convolution, with a relu behind it or nothing."""

    def __init__(self, operator: str, *, relu: bool) -> None:
        self.operator, self.relu = operator, relu

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.Kernel`."""
        source, weight, output = (
            region.quantized("input"),
            region.quantized("weight"),
            region.quantized("output"),
        )
        names = () if self.operator == "linear" else GEOMETRY
        return region.call(
            getattr(_OPS, self.operator).default,
            *_per_tensor(source),
            weight.node,
            _scales(region, weight),
            region.argument("op", "bias"),
            *(region.argument("op", name) for name in names),
            *_requantization(output, relu=self.relu),
            dtype=output.dtype,
        )


class Pairwise:
    """Emits an addition or a product of two quantized tensors."""

    def __init__(self, operator: str, *, relu: bool) -> None:
        self.operator, self.relu = operator, relu

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.Kernel`."""
        output = region.quantized("output")
        left, right = region.quantized_inputs("self")[0], region.quantized_inputs("other")[-1]
        return region.call(
            getattr(_OPS, self.operator).default,
            *_per_tensor(left),
            *_per_tensor(right),
            *_requantization(output, relu=self.relu),
            dtype=output.dtype,
        )


class Reduction:
    """Emits an operator on one quantized tensor that keeps its scale, such as a pooling.

    Args:
        names: the schema arguments that are passed on.
    """

    def __init__(self, operator: str, names: tuple[str, ...]) -> None:
        self.operator, self.names = operator, names

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.Kernel`."""
        (source,), output = region.quantized_inputs(_first_role(region)), region.quantized("output")
        literals = {name: region.argument("output", name) for name in self.names}
        if "stride" in literals:
            literals["stride"] = literals["stride"] or literals["kernel_size"]
        if self.operator == "max_pool2d":
            _check_same(source, output)
            head, tail = [source.node], [output.low, output.high]
        else:
            head, tail = _per_tensor(source), _requantization(output, relu=False)
        target = getattr(_OPS, self.operator).default
        return region.call(target, *head, *literals.values(), *tail, dtype=output.dtype)


def relu(region: Region) -> Node:
    """Emit a relu that keeps its input's scale: integers below the zero point become the zero point."""
    (source,), output = region.quantized_inputs("self"), region.quantized("output")
    _check_same(source, output)
    clamp = torch.ops.aten.clamp.default
    return region.call(clamp, source.node, output.zero_point, output.high, dtype=output.dtype)


def _first_role(region: Region) -> str:
    return region.claim.operands[0].role


def _check_same(source: QuantizedTensor, output: QuantizedTensor) -> None:
    if source.qparams != output.qparams:
        raise NotLowerable("input and output differ in scale or zero point")


def _per_tensor(tensor: QuantizedTensor) -> list[Any]:
    if tensor.dtype is not torch.int8:
        raise NotLowerable(f"{tensor.node.name} is {tensor.dtype}, and the kernel takes int8")
    return [tensor.node, tensor.scale, tensor.zero_point]


def _scales(region: Region, weight: QuantizedTensor) -> Node:
    if isinstance(weight.scale, Node):
        return weight.scale
    return region.constant(f"{weight.node.target}_scale", weight.scales)


def _requantization(output: QuantizedTensor, *, relu: bool) -> list[Any]:
    """Return scale, zero point and clamp of the output. A relu is a clamp at the zero point."""
    low = max(output.low, output.zero_point) if relu else output.low
    return [output.scale, output.zero_point, low, output.high]
