# SPDX-License-Identifier: Apache-2.0
"""The calls that replace statically quantized regions: ``qompose_x86::*``, or torch's own on integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from qompose.backend import Kernel, NotLowerable, QuantizedTensor, Region
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

# operator -> the bounds that it keeps values in: numbers, or names of its schema arguments
_CLAMPS: dict[str, tuple[float | str, float | str]] = {
    "relu": (0.0, math.inf),
    "relu6": (0.0, 6.0),
    "hardtanh": ("min_val", "max_val"),
    "clamp": ("min", "max"),
    "clip": ("min", "max"),
    "clamp_min": ("min", math.inf),
    "clamp_max": (-math.inf, "max"),
}


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
            return _bounded(region, region.call(aten.squeeze.dim, image, 2, dtype=dtype))
        return _bounded(region, region.call(target, *call.write(), dtype=dtype))

    def _linear(self, region: Region) -> ProductCall:
        source, weight = region.quantized("input"), region.quantized("weight")
        scales, bias = channel_scales(region, weight), region.argument("linear", "bias")
        arguments: list[Any] = [*_per_tensor(source), weight.node, scales, bias]
        summand = Summand(_summand(region)) if self.add else None
        return ProductCall(self.name, Product(*arguments), self._output(region), summand=summand)

    def _convolution(self, region: Region) -> ProductCall:
        source, weight = region.quantized("input"), region.quantized("weight")
        scales, bias = channel_scales(region, weight), region.argument("conv", "bias")
        image, kernel, geometry = _as_image(region, source, weight)
        arguments: list[Any] = [image, *_per_tensor(source)[1:], kernel, scales, bias]
        summand = None
        if self.add:
            other, *qparams = _per_tensor(region.quantized("other"))
            summand = Summand(_unsqueezed(region, other) if self.is_flat else other, *qparams)
        return ProductCall(self.name, Product(*arguments), self._output(region), geometry, summand)

    def _output(self, region: Region) -> Output:
        """Return integers where consumers want them, else float32, with the post-op."""
        return Output(*_requantization(region), *self.post_op(region))

    def post_op(self, region: Region) -> list[Any]:
        """Return name, numbers and algorithm of the function that is fused into the product."""
        activation = self.activation
        if activation is None:
            return []
        given = (float(region.argument("act", name)) for name in activation.arguments)
        algorithm = activation.algorithm and region.argument("act", activation.algorithm)
        numbers = [*activation.numbers, *given]
        return [activation.post_op, numbers, *([algorithm] if algorithm else [])]


def product_kernel(
    name: str, emit: Callable[[Region], Node], *, float_output: bool = False
) -> Kernel:
    """Return the kernel of a product with an int8 weight, and the one for weights that oneDNN gets wrong.

    Both are one operator, which looks at the weight when it runs (`packed_weights`). So the choice is made
    here only for reports: such a weight is multiplied exactly, and slowly, where the model is lowered.
    """

    def exactly_by_onednn(region: Region) -> Node:
        if not exactness.admits(region.quantized("weight").tensor):
            raise NotLowerable(f"{exactness.reason()}, and its weight has such values")
        return emit(region)

    full = f"qompose_x86.{name}"
    slow = Kernel(f"{full} in float64", emit, float_output, float_arithmetic=True)
    return Kernel(full, exactly_by_onednn, float_output, otherwise=slow)


class UnaryEmitter:
    """Emits an operator on one quantized image whose result has a scale of its own.

    Args:
        names: the schema arguments that are passed on.
    """

    def __init__(self, operator: str, names: tuple[str, ...]) -> None:
        self.operator, self.names = operator, names

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`."""
        literals = {name: region.argument("output", name) for name in self.names}
        if "stride" in literals:
            literals["stride"] = literals["stride"] or literals["kernel_size"]
        arguments = [*_per_tensor(region.quantized("self")), *literals.values()]
        return _called(region, self.operator, arguments)


def multiply(region: Region) -> Node:
    """Emit the product of two quantized tensors."""
    left, right = region.quantized_inputs("self")[0], region.quantized_inputs("other")[-1]
    return _called(region, "mul", [*_per_tensor(left), *_per_tensor(right)])


def max_pool(region: Region) -> Node:
    """Emit a max pool on integers, one over sequences as one over images of height 1.

    Raises:
        NotLowerable: input and output differ in scale or zero point.
    """
    source, output = _kept(region)
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    window = {name: region.argument("output", name) for name in names}
    window["stride"] = window["stride"] or window["kernel_size"]
    flat = "max_pool1d" in str(region.node("output").target)
    if not flat:
        sizes = [_sizes(window[name], 2) for name in names[:-1]]
        target = _OPS.max_pool2d.default
        arguments = [source.node, *sizes, window["ceil_mode"]]
        return region.call(target, *arguments, dtype=output.dtype)
    for name, around in zip(names, (1, 1, 0, 1), strict=False):
        window[name] = [around, *_sizes(window[name], 1)]
    image = _unsqueezed(region, source.node)
    pooled = region.step(_OPS.max_pool2d.default, image, *window.values())
    return region.call(aten.squeeze.dim, pooled, 2, dtype=output.dtype)


def clamp(region: Region) -> Node:
    """Emit a relu, hardtanh or clamp on integers, whose bounds become integers.

    Raises:
        NotLowerable: input and output differ in scale or zero point.
    """
    source, output = _kept(region)
    operator = str(region.node("output").target).removeprefix("aten.").partition(".")[0]
    low, high = (
        _integer(
            region.argument("output", bound) if isinstance(bound, str) else bound, output, side
        )
        for bound, side in zip(
            _CLAMPS[operator.rstrip("_")], (output.low, output.high), strict=True
        )
    )
    return region.call(aten.clamp.default, source.node, low, high, dtype=output.dtype)


def unmoved(region: Region) -> Node:
    """Put the integers of its input in the place of an operator that changes no value.

    Raises:
        NotLowerable: input and output differ in scale or zero point.
    """
    return _kept(region)[0].node


def _kept(region: Region) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return the region's only input and its output, of one scale. Raises `NotLowerable`."""
    (source,) = region.quantized_inputs(region.claim.operands[0].role)
    output = region.quantized("output")
    if source.qparams != output.qparams:
        raise NotLowerable("input and output differ in scale or zero point")
    return source, output


def _integer(bound: float | None, output: QuantizedTensor, side: int) -> int:
    """Return the integer that a bound becomes; `side` is the one where there is no bound."""
    if bound is None or math.isinf(bound):
        return side
    steps = int(round(bound / output.scale) + output.zero_point)
    return min(max(steps, output.low), output.high)


def _summand(region: Region) -> Any:
    """Return what is added to a linear, in float."""
    first, second = (region.argument("add", name) for name in ("self", "other"))
    product = region.node("drop" if region.has("drop") else "linear")
    return second if first is product else first


def _as_image(
    region: Region, source: QuantizedTensor, weight: QuantizedTensor
) -> tuple[Node, Node, Geometry]:
    """Return the integers that a convolution reads, its weight and geometry, all of an image.

    Zeros of padding="same" that are more on one side are put around the integers, as the zero point.
    """
    kernel, image, weight_node = list(weight.tensor.shape[2:]), source.node, weight.node
    stride, padding, dilation, groups = (region.argument("conv", name) for name in Geometry._fields)
    stride, dilation = (_sizes(given, len(kernel)) for given in (stride, dilation))
    if isinstance(padding, str):
        totals = [gap * (taps - 1) for gap, taps in zip(dilation, kernel, strict=True)]
        totals = [0] * len(kernel) if padding == "valid" else totals
        padding = [total // 2 for total in totals]
        if any(total % 2 for total in totals):
            sides = [side for t in reversed(totals) for side in (t // 2, t - t // 2)]
            pad = aten.constant_pad_nd.default
            image = region.step(pad, image, sides, source.zero_point)
            padding = [0] * len(kernel)
    geometry: list[Any] = [stride, _sizes(padding, len(kernel)), dilation, groups]
    if len(kernel) == 1:
        image = _unsqueezed(region, image)
        path = f"{weight.node.target}_as_image"
        weight_node = region.constant(path, weight.tensor.unsqueeze(2))
        for at, one in enumerate((1, 0, 1)):
            geometry[at] = [one, *geometry[at]]
    return image, weight_node, Geometry(*geometry)


def _unsqueezed(region: Region, sequence: Node) -> Any:
    """Return a sequence as an image of height 1."""
    return region.step(aten.unsqueeze.default, sequence, 2)


def _sizes(given: Any, count: int) -> list[Any]:
    """Return a size for each axis, from one for each or one for all."""
    sizes: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given]
    return [*sizes] * (count if len(sizes) == 1 else 1)


def _per_tensor(quantized: QuantizedTensor) -> list[Any]:
    return [quantized.node, quantized.scale, quantized.zero_point]


def channel_scales(region: Region, weight: QuantizedTensor) -> Node:
    """Return a node of one scale per output channel."""
    if isinstance(weight.scale, Node):
        return weight.scale
    channels = weight.tensor.shape[0]
    return region.constant(f"{weight.node.target}_scale", weight.scales.expand(channels).clone())


def _requantization(region: Region) -> list[Any]:
    """Return scale, zero point and dtype of the result: float32 where consumers read that."""
    output = region.output
    if output is None:
        return [1.0, 0, None]
    if output.dtype not in QUANTIZED:
        raise NotLowerable(f"consumers want {output.dtype}, which the kernel does not make")
    return [output.scale, output.zero_point, output.dtype]


def _called(region: Region, operator: str, arguments: list[Any]) -> Node:
    """Insert a call of an operator that ends with scale, zero point and dtype."""
    target = getattr(_OPS, operator).default
    dtype = region.output.dtype if region.output is not None else None
    call = region.call(target, *arguments, *_requantization(region), dtype=dtype)
    return _bounded(region, call)


def _bounded(region: Region, result: Node) -> Node:
    """Keep integers in the bounds that consumers want, where those are narrower than their type."""
    output = region.output
    if output is None:
        return result
    bounds = torch.iinfo(output.dtype)
    if (output.low, output.high) == (bounds.min, bounds.max):
        return result
    return region.call(aten.clamp.default, result, output.low, output.high, dtype=output.dtype)
