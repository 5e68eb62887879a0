# SPDX-License-Identifier: Apache-2.0
"""What replaces a claimed region in process: integer operators that agree with XNNPACK's to one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from qompose.backend import NotLowerable, QuantizedTensor, Region
from torch.fx import Node

from qompose_xnnpack import ops
from qompose_xnnpack.ops.requantization import quantized_bound

_OPS = getattr(torch.ops, ops.NAMESPACE)

GEOMETRY = ("stride", "padding", "dilation", "groups")
TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")


class Weighted:
    """Emits a linear or a convolution, with zeros around its input and an activation behind it, or not."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        source, weight = region.quantized("input"), region.quantized("weight")
        output = region.quantized("output")
        integers, geometry = placed(region, self.operator, source, weight)
        return region.call(
            getattr(_OPS, self.operator).default,
            integers,
            *_parameters(source)[1:],
            weight.node,
            scales(region, weight),
            region.argument("op", "bias"),
            *geometry,
            *_requantization(region, output),
            dtype=output.dtype,
        )


class Pairwise:
    """Emits an addition, subtraction or product of two quantized tensors."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        output = region.quantized("output")
        left, right = region.quantized_inputs("self")[0], region.quantized_inputs("other")[-1]
        return region.call(
            getattr(_OPS, self.operator).default,
            *_parameters(left),
            *_parameters(right),
            *_requantization(region, output),
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
        target = getattr(_OPS, self.operator).default
        return region.call(target, *head, *literals.values(), *tail, dtype=output.dtype)


def clamp(region: Region) -> Node:
    """Emit a relu, hardtanh or clamp that keeps its input's scale: its bounds become integers."""
    (source,), output = region.quantized_inputs("self"), region.quantized("output")
    check_same(source, output)
    low, high = clamped(output, region, "output")
    operator = torch.ops.aten.clamp.default
    return region.call(operator, source.node, low, high, dtype=output.dtype)


def placed(
    region: Region, operator: str, source: QuantizedTensor, weight: QuantizedTensor
) -> tuple[Node, list[Any]]:
    """Return the integers that a linear or convolution reads, and its geometry.

    Zeros that were put around the input, and those of padding="same" that are more on one side, are put
    around the integers: as the zero point.
    """
    if operator == "linear":
        return source.node, []
    geometry, around = geometry_of(region, weight.tensor.shape[2:])
    if region.has("pad"):
        pads = list(region.argument("pad", "pad"))
        pads += [0] * (len(around) - len(pads))
        around = [a + b for a, b in zip(around, pads, strict=True)]
    if not any(around):
        return source.node, geometry
    pad = torch.ops.aten.constant_pad_nd.default
    return region.step(pad, source.node, around, source.zero_point), geometry


def geometry_of(region: Region, kernel: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Return a convolution's geometry in numbers, and the zeros to put around its input besides."""
    transposed = "transpose" in str(region.node("op").target)
    names = TRANSPOSED if transposed else GEOMETRY
    geometry = {name: region.argument("op", name) for name in names}
    around = [0, 0] * len(kernel)
    if isinstance(geometry["padding"], str):
        around, geometry["padding"] = _named_padding(geometry, kernel), [0] * len(kernel)
        before, behind = around[::2], around[1::2]
        if before == behind:  # as many zeros on either side are the operator's own
            around, geometry["padding"] = [0, 0] * len(kernel), before[::-1]
    return list(geometry.values()), around


def _named_padding(geometry: dict[str, Any], kernel: Sequence[int]) -> list[int]:
    """Return how many zeros padding="same" or "valid" puts around, last dimension first."""
    if geometry["padding"] == "valid":
        return [0, 0] * len(kernel)
    dilation = list(geometry["dilation"])
    dilation = dilation * len(kernel) if len(dilation) == 1 else dilation
    totals = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]


def check_same(source: QuantizedTensor, output: QuantizedTensor) -> None:
    """Check that two tensors have one scale and zero point. Raises `NotLowerable`."""
    if source.qparams != output.qparams:
        raise NotLowerable("input and output differ in scale or zero point")


def scales(region: Region, weight: QuantizedTensor) -> Node:
    """Return the node that reads a weight's scales, `(1,)` per tensor."""
    if isinstance(weight.scale, Node):
        return weight.scale
    return region.constant(f"{weight.node.target}_scale", weight.scales)


def clamped(output: QuantizedTensor, region: Region, name: str) -> tuple[int, int]:
    """Return the integers within which an activation keeps the output."""
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
    """Return within what an activation, an operator of the region, keeps floats."""
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


_HALVES = {"clamp_min": ("min",), "clamp_max": ("max",)}


def _parameters(tensor: QuantizedTensor) -> list[Any]:
    if tensor.dtype is not torch.int8 or not isinstance(tensor.scale, float):
        raise NotLowerable(
            f"{tensor.node.name} is not int8 with one scale, and the kernel takes that"
        )
    return [tensor.node, tensor.scale, tensor.zero_point]


def _requantization(region: Region, output: QuantizedTensor) -> list[Any]:
    """Return scale, zero point and clamp of the output. An activation behind it is a clamp."""
    bounds = clamped(output, region, "act") if region.has("act") else (output.low, output.high)
    return [output.scale, output.zero_point, *bounds]


def unmoved(region: Region) -> Node:
    """Put the integers of its input in the place of an operator that changes no value, such as a copy."""
    (source,), output = (
        region.quantized_inputs(region.claim.operands[0].role),
        region.quantized("output"),
    )
    check_same(source, output)
    return source.node
