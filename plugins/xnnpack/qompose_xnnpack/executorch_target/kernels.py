# SPDX-License-Identifier: Apache-2.0
"""The kernels of the rule table for the ``executorch`` target: regions in the form that it can run.

Most regions stay as they are: XNNPACK's partitioner recognizes them between their Q/DQ operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from qompose.backend import Kernel, NotLowerable, Region, clear_origin, kit
from torch import Tensor
from torch.fx import Node

from qompose_xnnpack.executorch_target.executorch_imports import quiet
from qompose_xnnpack.kernels.in_process import full_range

aten = torch.ops.aten
quantized = torch.ops.quantized_decomposed

DELEGATE = Kernel("XNNPACK delegate")
"""Leaves a region as it is, for XNNPACK's partitioner to delegate."""


def padded(region: Region) -> None:
    """Merge the zeros that padding="same" adds into the padding operator before a convolution.

    Two paddings in a row make a program that cannot be loaded (executorch 1.5.1).
    """
    geometry = kit.geometry_of(region, pad=None)
    if not any(geometry.zeros):
        return
    pad, convolution = region.node("pad"), region.node("op")
    bias, total = region.argument("op", "bias"), kit.with_pad(region, geometry).zeros
    pad.target, pad.args = aten.constant_pad_nd.default, (pad.args[0], total)
    plain = aten.conv1d.default if len(total) == 2 else aten.conv2d.default
    convolution.target = plain
    convolution.args = (*convolution.args[:2], bias, *geometry.arguments)
    pad.kwargs = convolution.kwargs = {}


class Bounded:
    """Writes a clamp behind a product as a hardtanh, the one activation with bounds that XNNPACK fuses.

    Args:
        first: what the region is brought into form by besides.
    """

    def __init__(self, first: Callable[[Region], None] | None) -> None:
        self.first = first

    def __call__(self, region: Region) -> None:
        """Rewrite the region in place; see `qompose.backend.Kernel`."""
        if self.first is not None:
            self.first(region)
        activation = region.node("act")
        if activation.target in _CLAMPS:
            most = torch.finfo(torch.float32).max  # the serializer takes no infinity
            bounds = (min(max(bound, -most), most) for bound in kit.float_bounds(region, "act"))
            activation.target = aten.hardtanh.default
            activation.args, activation.kwargs = (activation.args[0], *bounds), {}


_CLAMPS = {op.default for op in (aten.clamp, aten.clamp_, aten.clip, aten.clip_)}


def mean(region: Region) -> Node | None:
    """Emit a mean over height and width as XNNPACK's, which keeps both dimensions, with a view behind it."""
    if region.argument("output", "keepdim"):
        return None
    sizes = _unknown_as_rest(region.node("output"))
    values = _dequantized(region, mean_of_window(region))
    return _quantized(region, region.step(aten.view.default, values, sizes))


def mean_of_window(region: Region) -> Node:
    """Emit the int8 mean over height and width, in the form that XNNPACK's partitioner recognizes."""
    return _quantized(region, region.step(aten.mean.dim, region.inputs("self")[0], [2, 3], True))


def view(region: Region) -> None:
    """Write the one unknown size of a view, reshape or flatten as -1, as XNNPACK requires."""
    node = region.node("output")
    sizes = _unknown_as_rest(node)
    if -1 in sizes:
        node.target, node.args, node.kwargs = aten.view.default, (node.args[0], sizes), {}


def cat(region: Region) -> None:
    """Leave a concatenation as it is; of a tensor with itself, let the second reading be a view.

    XNNPACK's partitioner takes no concatenation that has only one input (executorch 1.5.1).

    Raises:
        NotLowerable: there is only one, or several sizes of that tensor are known only at run time.
    """
    node, tensors = region.node("output"), region.inputs("tensors")
    if len(tensors) < 2:
        raise NotLowerable("XNNPACK only concatenates two or more tensors")
    if len(set(tensors)) < 2:
        tensor = tensors[0]
        viewed = region.step(aten.view.default, tensor, _unknown_as_rest(tensor))
        again = _dequantized(region, _quantized(region, viewed))
        node.update_arg(0, [tensor, *[again] * (len(tensors) - 1)])


def slice_of_known_size(region: Region) -> None:
    """Leave a slice of known size without gaps as it is. Raises `NotLowerable` for another."""
    sizes = (*region.inputs("self")[0].meta["val"].shape, *region.node("output").meta["val"].shape)
    if region.argument("output", "step") != 1 or not all(isinstance(n, int) for n in sizes):
        raise NotLowerable("XNNPACK only slices tensors of known size with a step of 1")


def _unknown_as_rest(node: Node) -> list[int]:
    """Return the sizes of a tensor, -1 for one that is known only at run time.

    Raises:
        NotLowerable: there are several, of which XNNPACK can infer only one.
    """
    sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    if sizes.count(-1) > 1:
        raise NotLowerable("several of its sizes are known only at run time")
    return sizes


def _quantized(region: Region, value: Node) -> Node:
    return region.step(quantized.quantize_per_tensor.default, value, *_parameters(region))


def _dequantized(region: Region, integers: Node) -> Node:
    return region.step(quantized.dequantize_per_tensor.default, integers, *_parameters(region))


def _parameters(region: Region) -> tuple[Any, ...]:
    output = region.quantized("output")
    return output.scale, output.zero_point, output.low, output.high, output.dtype


def dynamic_convolution(region: Region) -> None:
    """Write the dynamic quantization of a convolution's input as XNNPACK's partitioner recognizes it.

    That is per tensor, whatever the batch (executorch 1.5.1): the runtime then computes a scale for each
    image, which is what the graph said before.
    """
    source, read = full_range(region.dynamic("input")), region.inputs("input")[0]
    convolution = region.node("op")
    geometry = kit.geometry_of(region)
    floats = kit.padded(region, source.node, geometry)
    bounds, eps = (-128, 127), torch.finfo(torch.float32).eps
    chosen = region.step(quantized.choose_qparams.tensor, floats, *bounds, eps, torch.int8)
    scale, zero_point = (region.step(operator.getitem, chosen, place) for place in (0, 1))
    parameters: tuple[Any, ...] = (scale, zero_point, *bounds, torch.int8)
    integers = region.step(quantized.quantize_per_tensor.tensor, floats, *parameters)
    values = region.step(quantized.dequantize_per_tensor.tensor, integers, *parameters)
    for node in (chosen, scale, zero_point, integers, values):
        clear_origin(node)  # none of them is an operator of the region
    convolution.replace_input_with(read, values)
    if floats is not source.node:  # padding="same" becomes numbers
        clear_origin(floats)
        convolution.target = aten.conv2d.default
        arguments = (
            values,
            convolution.args[1],
            region.argument("op", "bias"),
            *geometry.arguments,
        )
        convolution.args, convolution.kwargs = arguments, {}


def mixed_linear(region: Region) -> Node:
    """Emit ExecuTorch's portable linear of floats by integer weights, and the bias behind it."""
    weight, source = region.quantized("weight"), region.inputs("input")[0]
    rows, depth = weight.tensor.shape
    if weight.zero_points.any():
        raise NotLowerable("ExecuTorch's mixed_linear does not support zero points")
    scale = kit.channel_scales(region, weight)
    sizes = source.meta["val"].shape
    flat = source if len(sizes) == 2 else _as_rows(region, source, depth)
    product = region.step(_mixed_linear(), flat, weight.node, scale, None, None)
    if len(sizes) != 2:
        product = region.step(aten.reshape.default, product, [*_leading(region, source), rows])
    bias = region.argument("op", "bias")
    return product if bias is None else region.call(aten.add.Tensor, product, bias)


def _as_rows(region: Region, source: Node, depth: int) -> Node:
    """Return a tensor as a matrix, after a copy if sizes are known only at run time.

    Attention is decomposed later and then has a result of other strides than now, of which there may be no
    view (torch 2.13 copies if it knows all sizes).
    """
    if not all(isinstance(size, int) for size in source.meta["val"].shape):
        source = region.step(aten.clone.default, source)
        source.kwargs = {"memory_format": torch.contiguous_format}
    return region.step(aten.reshape.default, source, [-1, depth])


def _leading(region: Region, source: Node) -> list[Any]:
    """Return all sizes but the last, reading those known only at run time if there are several."""
    sizes = list(source.meta["val"].shape[:-1])
    unknown = [dim for dim, size in enumerate(sizes) if not isinstance(size, int)]
    if len(unknown) == 1:
        return [-1 if dim in unknown else size for dim, size in enumerate(sizes)]
    read = aten.sym_size.int
    return [region.step(read, source, d) if d in unknown else n for d, n in enumerate(sizes)]


def _mixed_linear() -> Any:
    """Return the operator. ExecuTorch (1.5.1) defines it without a function that gives its shapes."""
    with quiet():
        import executorch.exir  # noqa: F401

    mixed = quantized.mixed_linear.default
    name = "quantized_decomposed::mixed_linear"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
        torch.library.register_fake(name, _mixed_linear_shape)
    return mixed


def _mixed_linear_shape(
    input: Tensor, weight: Tensor, weight_scales: Tensor, weight_zero_points: Any, dtype: Any = None
) -> Tensor:
    return input.new_empty((input.shape[0], weight.shape[0]), dtype=dtype or input.dtype)
