# SPDX-License-Identifier: Apache-2.0
"""Regions that are not delegated to XNNPACK as they stand: written anew, or given other kernels."""

from __future__ import annotations

from typing import Any

import torch
from qompose.backend import NotLowerable, Region
from torch import Tensor
from torch.fx import Node

from qompose_xnnpack.executorch_api import quiet
from qompose_xnnpack.kernels import geometry_of

aten = torch.ops.aten


def padded(region: Region) -> None:
    """Leave a convolution with zeros around its input to XNNPACK; zeros that padding="same" adds join them.

    Two paddings in a row make a program that cannot be loaded (executorch 1.5.1).
    """
    geometry, around = geometry_of(region, region.quantized("weight").tensor.shape[2:])
    if not any(around):
        return
    pad, convolution = region.node("pad"), region.node("op")
    pads = list(region.argument("pad", "pad"))
    pads += [0] * (len(around) - len(pads))
    total = [a + b for a, b in zip(around, pads, strict=True)]
    bias = region.argument("op", "bias")
    pad.target, pad.args = aten.constant_pad_nd.default, (pad.args[0], total)
    plain = aten.conv1d.default if len(around) == 2 else aten.conv2d.default
    convolution.target, convolution.args = plain, (*convolution.args[:2], bias, *geometry)
    pad.kwargs = convolution.kwargs = {}


def mean(region: Region) -> Node | None:
    """Leave a mean over height and width to XNNPACK, which keeps them; dropping them is a view behind it."""
    if region.argument("output", "keepdim"):
        return None
    sizes = _unknown_as_rest(region.node("output"))
    values = _dequantized(region, mean_of_window(region))
    return _quantized(region, region.step(aten.view.default, values, sizes))


def mean_of_window(region: Region) -> Node:
    """Emit the int8 mean over height and width, in the form that ExecuTorch's partitioner knows."""
    return _quantized(region, region.step(aten.mean.dim, region.inputs("self")[0], [2, 3], True))


def view(region: Region) -> None:
    """Write a view, reshape or flatten of which one size is unknown as XNNPACK takes it: as the rest."""
    node = region.node("output")
    sizes = _unknown_as_rest(node)
    if -1 in sizes:
        node.target, node.args, node.kwargs = aten.view.default, (node.args[0], sizes), {}


def cat(region: Region) -> None:
    """Leave a concatenation to ExecuTorch's partitioner, which counts the different tensors."""
    if len(set(region.inputs("tensors"))) < 2:
        raise NotLowerable("XNNPACK concatenates two or more different tensors")


def slice_of_known_size(region: Region) -> None:
    """Leave a slice to XNNPACK, which takes those of known size and without gaps."""
    sizes = (*region.inputs("self")[0].meta["val"].shape, *region.node("output").meta["val"].shape)
    if region.argument("output", "step") != 1 or not all(isinstance(n, int) for n in sizes):
        raise NotLowerable("XNNPACK slices tensors of known size, without gaps")


def _unknown_as_rest(node: Node) -> list[int]:
    """Return the sizes of a tensor, -1 for one that is known only at run time.

    Raises:
        NotLowerable: there are several, and XNNPACK finds one.
    """
    sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    if sizes.count(-1) > 1:
        raise NotLowerable("several of its sizes are known only at run time")
    return sizes


def _quantized(region: Region, value: Node) -> Node:
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    return region.step(quantize, value, *_parameters(region))


def _dequantized(region: Region, integers: Node) -> Node:
    dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    return region.step(dequantize, integers, *_parameters(region))


def _parameters(region: Region) -> tuple[Any, ...]:
    output = region.quantized("output")
    return output.scale, output.zero_point, output.low, output.high, output.dtype


def mixed_linear(region: Region) -> Node:
    """Emit ExecuTorch's portable linear of floats by integer weights, and the bias behind it."""
    weight, source = region.quantized("weight"), region.inputs("input")[0]
    rows, depth = weight.tensor.shape
    if weight.zero_points.any():
        raise NotLowerable("ExecuTorch's mixed_linear takes no zero points")
    scale: Any = weight.scale
    if not isinstance(scale, Node):
        scale = region.constant(f"{weight.node.target}_scale", weight.scales.expand(rows).clone())
    sizes = source.meta["val"].shape
    flat = source if len(sizes) == 2 else _as_rows(region, source, depth)
    product = region.step(_operator(), flat, weight.node, scale, None, None)
    if len(sizes) != 2:
        product = region.step(aten.reshape.default, product, [*_leading(region, source), rows])
    bias = region.argument("op", "bias")
    return product if bias is None else region.call(aten.add.Tensor, product, bias)


def _as_rows(region: Region, source: Node, depth: int) -> Node:
    """Return a tensor as a matrix. Where sizes are open, it is one of a copy.

    Attention is taken apart behind this, and gives its result in other strides than it has now, of which
    there may be no view (torch 2.13 copies where it knows all sizes).
    """
    if not all(isinstance(size, int) for size in source.meta["val"].shape):
        source = region.step(aten.clone.default, source)
        source.kwargs = {"memory_format": torch.contiguous_format}
    return region.step(aten.reshape.default, source, [-1, depth])


def _leading(region: Region, source: Node) -> list[Any]:
    """Return all sizes but the last; several that are known only at run time are read then."""
    sizes = list(source.meta["val"].shape[:-1])
    unknown = [dim for dim, size in enumerate(sizes) if not isinstance(size, int)]
    if len(unknown) == 1:
        return [-1 if dim in unknown else size for dim, size in enumerate(sizes)]
    read = aten.sym_size.int
    return [region.step(read, source, d) if d in unknown else n for d, n in enumerate(sizes)]


def _operator() -> Any:
    """Return the operator. ExecuTorch (1.5.1) defines it without a function that gives its shapes."""
    with quiet():
        import executorch.exir  # noqa: F401

    operator = torch.ops.quantized_decomposed.mixed_linear.default
    name = "quantized_decomposed::mixed_linear"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
        torch.library.register_fake(name, _mixed_linear_shape)
    return operator


def _mixed_linear_shape(
    input: Tensor, weight: Tensor, weight_scales: Tensor, weight_zero_points: Any, dtype: Any = None
) -> Tensor:
    return input.new_empty((input.shape[0], weight.shape[0]), dtype=dtype or input.dtype)
