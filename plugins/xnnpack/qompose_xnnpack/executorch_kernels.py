# SPDX-License-Identifier: Apache-2.0
"""Regions that are not delegated to XNNPACK as they stand: written anew, or given other kernels."""

from __future__ import annotations

from typing import Any

import torch
from qompose import NotLowerable, Region
from torch import Tensor
from torch.fx import Node

aten = torch.ops.aten
_IMAGE = [2, 3]


def mean_that_drops(region: Region) -> Node:
    """Emit the int8 mean over height and width, which keeps them in XNNPACK, and drop them behind it."""
    return region.call(aten.squeeze.dims, _mean(region), _IMAGE, dtype=_output_type(region))


def mean_of_window(region: Region) -> Node:
    """Emit the int8 mean over height and width for an average pooling whose window is the image."""
    return _mean(region)


def _mean(region: Region) -> Node:
    """Emit the form that ExecuTorch's partitioner knows as the global average pooling of integers."""
    output, decomposed = region.quantized("output"), torch.ops.quantized_decomposed
    mean = region.step(aten.mean.dim, region.inputs("self")[0], _IMAGE, True)
    return region.step(
        decomposed.quantize_per_tensor.default,
        mean,
        output.scale,
        output.zero_point,
        output.low,
        output.high,
        output.dtype,
    )


def _output_type(region: Region) -> torch.dtype:
    return region.quantized("output").dtype


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
    flat = source if len(sizes) == 2 else region.step(aten.reshape.default, source, [-1, depth])
    product = region.step(_operator(), flat, weight.node, scale, None, None)
    if len(sizes) != 2:
        product = region.step(aten.reshape.default, product, _sizes_behind(sizes, rows))
    bias = region.argument("op", "bias")
    return product if bias is None else region.call(aten.add.Tensor, product, bias)


def _sizes_behind(sizes: tuple[Any, ...], outputs: int) -> list[Any]:
    """Return the sizes of the output, of which one may be left to be found at run time."""
    before = [size if isinstance(size, int) else -1 for size in sizes[:-1]]
    if before.count(-1) > 1:
        raise NotLowerable("several of its sizes are known only at run time")
    return [*before, outputs]


def _operator() -> Any:
    """Return the operator. ExecuTorch (1.5.1) defines it without a function that gives its shapes."""
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
