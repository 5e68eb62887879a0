# SPDX-License-Identifier: Apache-2.0
"""The calls that replace statically quantized regions: ``qompose_x86::*``, or torch's own on integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from qompose.backend import Kernel, NotLowerable, QuantizedTensor, Region, kit
from torch.fx import Node

from qompose_x86_inductor import operators as _operators  # noqa: F401 - registers
from qompose_x86_inductor.onednn import exactness
from qompose_x86_inductor.onednn.arguments import (
    NAMESPACE,
    QUANTIZED,
    Geometry,
    Output,
    Product,
    ProductCall,
    Summand,
)
from qompose_x86_inductor.patterns import Activation, anchor_of

aten = torch.ops.aten
_OPS = getattr(torch.ops, NAMESPACE)


class ProductEmitter:
    """Emits a matrix product or convolution with what is fused into it.

    Args:
        operator: the name of the product in `patterns.PRODUCTS`.
        add: whether another tensor is added: to a convolution a quantized one, to a linear a float one.
    """

    def __init__(self, operator: str, activation: Activation | None, *, add: bool) -> None:
        self.name = f"{operator.replace('1d', '2d')}{'_add' * add}"
        self.anchor, self.is_flat = anchor_of(operator), operator == "conv1d"
        self.activation, self.add = activation, add

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`.

        Raises:
            NotLowerable: an input arrives in float, or consumers want integers oneDNN does not make.
        """
        call = self._linear(region) if self.anchor == "linear" else self._convolution(region)
        dtype = region.output.dtype if region.output is not None else None
        target = getattr(_OPS, self.name).default
        if self.is_flat:
            image = region.step(target, *call.write())
            return bounded(region, region.call(aten.squeeze.dim, image, 2, dtype=dtype))
        return bounded(region, region.call(target, *call.write(), dtype=dtype))

    def _linear(self, region: Region) -> ProductCall:
        source, weight = region.quantized("input"), region.quantized("weight")
        scales, bias = kit.channel_scales(region, weight), region.argument("linear", "bias")
        arguments: list[Any] = [*_per_tensor(source), weight.node, scales, bias]
        summand = Summand(_summand(region)) if self.add else None
        return ProductCall(self.name, Product(*arguments), self._output(region), summand=summand)

    def _convolution(self, region: Region) -> ProductCall:
        source, weight = region.quantized("input"), region.quantized("weight")
        scales, bias = kit.channel_scales(region, weight), region.argument("conv", "bias")
        image, kernel, geometry = _as_image(region, source, weight)
        arguments: list[Any] = [image, *_per_tensor(source)[1:], kernel, scales, bias]
        summand = None
        if self.add:
            other, *qparams = _per_tensor(region.quantized("other"))
            summand = Summand(_unsqueezed(region, other) if self.is_flat else other, *qparams)
        return ProductCall(self.name, Product(*arguments), self._output(region), geometry, summand)

    def _output(self, region: Region) -> Output:
        """Return integers where consumers want them, else float32, with the post-op."""
        return Output(*requantization(region), *self.post_op(region))

    def post_op(self, region: Region) -> list[Any]:
        """Return name, numbers and algorithm of the function that is fused into the product."""
        return [] if self.activation is None else self.activation.write(region)


def product_kernel(
    name: str, emit: Callable[[Region], Node], *, float_output: bool = False
) -> Kernel:
    """Return the kernel of a product with an int8 weight, and the one for weights that oneDNN gets wrong.

    Both are one operator, which looks at the weight when it runs (`packed_weights`). So the choice is made
    here only for reports: such a weight is multiplied exactly, and slowly, where the model is lowered.
    """

    def exactly_by_onednn(region: Region) -> Node:
        if not exactness.admits(region.quantized("weight").tensor):
            raise NotLowerable(exactness.reason())
        return emit(region)

    full = f"qompose_x86.{name}"
    slow = Kernel(f"{full} in float64", emit, float_output, float_arithmetic=True)
    return Kernel(full, exactly_by_onednn, float_output, otherwise=slow)


class UnaryEmitter:
    """Emits an operator on one quantized image whose result has a scale of its own."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        source = _per_tensor(region.quantized("self"))
        return _called(region, self.operator, [*source, *kit.pool_arguments(region)])


def multiply(region: Region) -> Node:
    """Emit the product of two quantized tensors."""
    left, right = region.quantized_inputs("self")[0], region.quantized_inputs("other")[-1]
    return _called(region, "mul", [*_per_tensor(left), *_per_tensor(right)])


def max_pool(region: Region) -> Node:
    """Emit a max pool on integers, one over sequences as one over images of height 1.

    Raises:
        NotLowerable: input and output differ in scale or zero point.
    """
    source, output = kit.kept(region)
    *window, ceil_mode = kit.pool_arguments(region)
    target = _OPS.max_pool2d.default
    if "max_pool1d" not in str(region.node("output").target):
        both = [kit.sizes(given, 2) for given in window]
        return region.call(target, source.node, *both, ceil_mode, dtype=output.dtype)
    flat = [[one, *kit.sizes(g, 1)] for one, g in zip((1, 1, 0, 1), window, strict=True)]
    pooled = region.step(target, _unsqueezed(region, source.node), *flat, ceil_mode)
    return region.call(aten.squeeze.dim, pooled, 2, dtype=output.dtype)


def _summand(region: Region) -> Any:
    """Return what is added to a linear, in float."""
    first, second = (region.argument("add", name) for name in ("self", "other"))
    product = region.node("drop" if region.has("drop") else "linear")
    return second if first is product else first


def _as_image(
    region: Region, source: QuantizedTensor, weight: QuantizedTensor
) -> tuple[Node, Node, Geometry]:
    """Return image, weight and geometry of a convolution, one over sequences as one over images of height 1.

    Zeros of padding="same" that are more on one side are put around the integers, as the zero point.
    """
    found, weight_node = kit.geometry_of(region, "conv"), weight.node
    image = kit.padded(region, source.node, found, source.zero_point)
    stride, padding, dilation = found.stride, found.padding, found.dilation
    if len(found.stride) == 1:
        image = _unsqueezed(region, image)
        path = f"{weight.node.target}_as_image"
        weight_node = region.constant(path, weight.tensor.unsqueeze(2))
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    return image, weight_node, Geometry(stride, padding, dilation, found.groups)


def _unsqueezed(region: Region, sequence: Node) -> Any:
    """Return a sequence as an image of height 1."""
    return region.step(aten.unsqueeze.default, sequence, 2)


def _per_tensor(quantized: QuantizedTensor) -> list[Any]:
    return [quantized.node, quantized.scale, quantized.zero_point]


def requantization(region: Region) -> list[Any]:
    """Return scale, zero point and dtype of the result: float32 where consumers read that."""
    output = region.output
    if output is None:
        return [1.0, 0, None]
    if output.dtype not in QUANTIZED:
        raise NotLowerable(f"its readers expect {output.dtype}, which the kernel cannot return")
    return [output.scale, output.zero_point, output.dtype]


def _called(region: Region, operator: str, arguments: list[Any]) -> Node:
    """Insert a call of an operator that ends with scale, zero point and dtype."""
    target = getattr(_OPS, operator).default
    dtype = region.output.dtype if region.output is not None else None
    call = region.call(target, *arguments, *requantization(region), dtype=dtype)
    return bounded(region, call)


def bounded(region: Region, result: Node) -> Node:
    """Keep integers in the bounds that consumers want, where those are narrower than their type."""
    output = region.output
    if output is None:
        return result
    bounds = torch.iinfo(output.dtype)
    if (output.low, output.high) == (bounds.min, bounds.max):
        return result
    return region.call(aten.clamp.default, result, output.low, output.high, dtype=output.dtype)
