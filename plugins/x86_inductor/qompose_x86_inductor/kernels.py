# SPDX-License-Identifier: Apache-2.0
"""What replaces a claimed region: one operator of `qompose_x86`, with the activation fused."""

from __future__ import annotations

from typing import Any

import torch
from qompose import NotLowerable, QuantizedTensor, Region
from torch.fx import Node

from qompose_x86_inductor import ops
from qompose_x86_inductor.patterns import Activation

_OPS = getattr(torch.ops, ops.NAMESPACE)


class Product:
    """Emits a matrix product or convolution with what is fused behind it.

    Args:
        operator: the operator's name in `qompose_x86`.
        name: the name of the product in the pattern.
        geometry: names of the schema arguments that a convolution passes on.
    """

    def __init__(
        self,
        operator: str,
        name: str,
        activation: Activation | None,
        geometry: tuple[str, ...] = (),
    ) -> None:
        self.operator, self.name = operator, name
        self.activation, self.geometry = activation, geometry

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.Kernel`.

        Raises:
            NotLowerable: an input arrives in float, or consumers want integers oneDNN does not make.
        """
        weight = region.quantized("weight")
        arguments = [
            *_per_tensor(region.quantized("input")),
            weight.node,
            _channel_scales(region, weight),
            region.argument(self.name, "bias"),
            *(region.argument(self.name, name) for name in self.geometry),
        ]
        if self.operator == "conv2d_add":
            arguments += _per_tensor(region.quantized("other"))
        return _finish(
            region, getattr(_OPS, self.operator).default, arguments, self._post_op(region)
        )

    def _post_op(self, region: Region) -> list[Any]:
        activation = self.activation
        if activation is None:
            return []
        numbers = [float(region.argument("act", name)) for name in activation.arguments]
        if self.operator == "conv2d_add":
            return [activation.post_op]
        algorithm = activation.algorithm and region.argument("act", activation.algorithm)
        return [activation.post_op, numbers, *([algorithm] if algorithm else [])]


def _per_tensor(quantized: QuantizedTensor) -> list[Any]:
    return [quantized.node, quantized.scale, quantized.zero_point]


def _channel_scales(region: Region, weight: QuantizedTensor) -> Node:
    """Return a node of one scale per output channel."""
    if isinstance(weight.scale, Node):
        return weight.scale
    channels = weight.tensor.shape[0]
    return region.constant(f"{weight.node.target}_scale", weight.scales.expand(channels).clone())


def _finish(region: Region, operator: Any, arguments: list[Any], post_op: list[Any]) -> Node:
    """Insert the call so that it gives integers where consumers want them, else float32."""
    output = region.output
    if output is None:
        return region.call(operator, *arguments, 1.0, 0, None, *post_op)
    if output.dtype not in ops.QUANTIZED:
        raise NotLowerable(f"consumers want {output.dtype}, which oneDNN does not make")
    result = region.call(
        operator,
        *arguments,
        output.scale,
        output.zero_point,
        output.dtype,
        *post_op,
        dtype=output.dtype,
    )
    bounds = torch.iinfo(output.dtype)
    if (output.low, output.high) != (bounds.min, bounds.max):
        clamp = torch.ops.aten.clamp.default
        result = region.call(clamp, result, output.low, output.high, dtype=output.dtype)
    return result


def max_pool(region: Region) -> Node:
    """Emit a max pool on integers.

    Raises:
        NotLowerable: input and output differ in scale or zero point.
    """
    source, output = region.quantized("self"), region.output
    if output is None or source.qparams != output.qparams:
        raise NotLowerable("input and output differ in scale or zero point")
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    kernel, stride, *rest = (region.argument("output", name) for name in names)
    return region.call(
        _OPS.max_pool2d.default, source.node, kernel, stride or kernel, *rest, dtype=output.dtype
    )
