# SPDX-License-Identifier: Apache-2.0
"""The custom operators ``qompose_xnnpack::*``, which compute in process what XNNPACK's kernels compute.

A lowered graph holds plain int8 tensors and calls these operators, so it can be copied, saved, exported
and compiled like any other. Each accumulates in int32 and returns

* int8, by a float32 rescale rounded half to even (``add`` and ``sub`` alone rescale in fixed point) and
  ``clamp(q, out_min, out_max)``; a fused activation is such a clamp, with bounds from ``quantized_bound``;
* float32 in the ``*_dynamic`` operators. Convolutions quantize their float input with one scale per image,
  of any size; linears read what ``quantize_dynamic`` returns, once for all that read one tensor. The
  graph's Q/DQ operators differ where a row or image spans less than 255 * 2**-23, about 3e-5: torch allows
  no scale below 2**-23, so it rounds most of such a row to zero, and XNNPACK and these operators do not.

Names: ``x = x_scale * (q - x_zp)``. ``w_scale``: float32 ``(O,)`` or ``(1,)``, zero point 0.
Importing this package registers the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from qompose.backend import kit
from torch import Tensor

from qompose_xnnpack.operators import (
    convolution,
    dynamic_quantization,
    elementwise,
    linear,
    pooling,
)
from qompose_xnnpack.operators.requantization import quantized_bound

__all__ = ["NAMESPACE", "SCHEMAS", "quantized_bound"]

NAMESPACE = "qompose_xnnpack"

_OUT = "float out_scale, int out_zp, int out_min, int out_max"
_CONSTANTS = "Tensor weight, Tensor w_scale, Tensor? bias"
_WEIGHTED = f"Tensor x, float x_scale, int x_zp, {_CONSTANTS}"
_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups"
_TRANSPOSED = "int[] stride, int[] padding, int[] output_padding, int groups, int[] dilation"
_BINARY = "Tensor a, float a_scale, int a_zp, Tensor b, float b_scale, int b_zp"
_UNARY = "Tensor x, float x_scale, int x_zp"
_CLAMP = "float clamp_min, float clamp_max"

SCHEMAS: dict[str, str] = {
    "linear": f"({_WEIGHTED}, {_OUT}) -> Tensor",
    "conv1d": f"({_WEIGHTED}, {_GEOMETRY}, {_OUT}) -> Tensor",
    "conv2d": f"({_WEIGHTED}, {_GEOMETRY}, {_OUT}) -> Tensor",
    "conv_transpose1d": f"({_WEIGHTED}, {_TRANSPOSED}, {_OUT}) -> Tensor",
    "conv_transpose2d": f"({_WEIGHTED}, {_TRANSPOSED}, {_OUT}) -> Tensor",
    "add": f"({_BINARY}, {_OUT}) -> Tensor",
    "sub": f"({_BINARY}, {_OUT}) -> Tensor",
    "mul": f"({_BINARY}, {_OUT}) -> Tensor",
    "avg_pool2d": (
        f"({_UNARY}, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, "
        f"bool count_include_pad, int? divisor_override, {_OUT}) -> Tensor"
    ),
    "adaptive_avg_pool2d": f"({_UNARY}, int[] output_size, {_OUT}) -> Tensor",
    "mean": f"({_UNARY}, int[]? dim, bool keepdim, {_OUT}) -> Tensor",
    "max_pool2d": (
        "(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
        "bool ceil_mode, int out_min, int out_max) -> Tensor"
    ),
    "quantize_dynamic": "(Tensor x, bool per_tensor) -> (Tensor, Tensor, Tensor)",
    "linear_dynamic": f"(Tensor x, Tensor x_scale, Tensor x_zp, {_CONSTANTS}, {_CLAMP}) -> Tensor",
    "conv2d_dynamic": f"(Tensor x, {_CONSTANTS}, {_GEOMETRY}, {_CLAMP}) -> Tensor",
    "conv_transpose2d_dynamic": f"(Tensor x, {_CONSTANTS}, {_TRANSPOSED}, {_CLAMP}) -> Tensor",
    "linear_weight_only": f"(Tensor x, {_CONSTANTS}) -> Tensor",
}

Dtypes: TypeAlias = "Mapping[str, Sequence[torch.dtype]]"
Implementation: TypeAlias = (
    "tuple[Callable[..., Tensor | tuple[Tensor, ...]], Callable[..., Sequence[int]] | None, Dtypes]"
)
"""A kernel, what returns the shape of its output (None: itself), and the dtypes that it takes."""

_INT8, _FLOAT32 = (torch.int8,), (torch.float32,)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_STATIC = {"x": _INT8, "weight": _INT8}
_PAIR = {"a": _INT8, "b": _INT8}
_IMAGE = {"x": _INT8}
_DYNAMIC = {"x": _FLOAT32, "weight": _INT8}
_WEIGHT_ONLY = {"x": _FLOATS, "weight": _INT8}
_IMPLEMENTATIONS: dict[str, Implementation] = {
    "linear": (linear.linear, linear.linear_output, _STATIC),
    "conv1d": (convolution.conv1d, convolution.conv_output, _STATIC),
    "conv2d": (convolution.conv2d, convolution.conv_output, _STATIC),
    "conv_transpose1d": (convolution.conv_transpose1d, convolution.conv_transpose_output, _STATIC),
    "conv_transpose2d": (convolution.conv_transpose2d, convolution.conv_transpose_output, _STATIC),
    "add": (elementwise.add, elementwise.broadcast_shape, _PAIR),
    "sub": (elementwise.sub, elementwise.broadcast_shape, _PAIR),
    "mul": (elementwise.mul, elementwise.broadcast_shape, _PAIR),
    "avg_pool2d": (pooling.avg_pool2d, None, _IMAGE),
    "adaptive_avg_pool2d": (pooling.adaptive_avg_pool2d, pooling.adaptive_shape, _IMAGE),
    "mean": (pooling.mean, pooling.mean_shape, _IMAGE),
    "max_pool2d": (pooling.max_pool2d, None, _IMAGE),
    "quantize_dynamic": (dynamic_quantization.quantize_dynamic, None, {"x": _FLOAT32}),
    "conv2d_dynamic": (convolution.conv2d_dynamic, convolution.conv2d_dynamic_output, _DYNAMIC),
    "conv_transpose2d_dynamic": (
        convolution.conv_transpose2d_dynamic,
        convolution.conv_transpose2d_dynamic_output,
        _DYNAMIC,
    ),
    "linear_weight_only": (linear.linear_weight_only, linear.linear_float_output, _WEIGHT_ONLY),
}

for _name, (_kernel, _shape, _dtypes) in _IMPLEMENTATIONS.items():
    kit.register_operator(
        f"{NAMESPACE}::{_name}", SCHEMAS[_name], _kernel, shape=_shape, dtypes=_dtypes
    )

# The dtype of its result is not that of its first argument.
kit.register_operator(
    f"{NAMESPACE}::linear_dynamic",
    SCHEMAS["linear_dynamic"],
    linear.linear_dynamic,
    fake=linear.linear_dynamic_fake,
    dtypes={**_STATIC, "x_scale": _FLOAT32, "x_zp": (torch.int32,)},
)
