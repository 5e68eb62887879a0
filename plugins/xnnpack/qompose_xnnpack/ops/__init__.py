# SPDX-License-Identifier: Apache-2.0
"""The kernels of the ``torch`` target, as custom operators ``qompose_xnnpack::*``.

A lowered graph holds plain int8 tensors and calls these, so it copies, saves, exports and compiles
like any other. They compute what XNNPACK's kernels compute: int32 accumulation, then

* for int8 outputs a float32 rescale rounded half to even (``add`` and ``sub`` alone rescale in fixed
  point) and ``clamp(q, out_min, out_max)``; a fused activation is such a clamp, with bounds from
  ``quantized_bound``;
* for the ``*_dynamic`` operators, which quantize their float input at run time, a float32 output.
  A linear has a scale per row, a convolution one per image, of any size. The graph's Q/DQ operators
  differ where a row or image spans less than 255 * 2**-23, about 3e-5: torch lets no scale be less
  than 2**-23 and rounds most of it away, XNNPACK and these operators do not.

Names: ``x = x_scale * (q - x_zp)``. ``w_scale``: float32 ``(O,)`` or ``(1,)``, zero point 0.
Importing this package registers the operators.
"""

from __future__ import annotations

from qompose_xnnpack.ops import dynamic, pairs, pools, weight_only, weighted
from qompose_xnnpack.ops.registration import FLOAT32, FLOATS, INT8, NAMESPACE, Operator, register
from qompose_xnnpack.ops.requantization import quantized_bound

__all__ = ["NAMESPACE", "SCHEMAS", "quantized_bound"]

_OUT = "float out_scale, int out_zp, int out_min, int out_max"
_CONSTANTS = "Tensor weight, Tensor w_scale, Tensor? bias"
_WEIGHTED = f"Tensor x, float x_scale, int x_zp, {_CONSTANTS}"
_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups"
_TRANSPOSED = "int[] stride, int[] padding, int[] output_padding, int groups, int[] dilation"
_PAIR = "Tensor a, float a_scale, int a_zp, Tensor b, float b_scale, int b_zp"
_UNARY = "Tensor x, float x_scale, int x_zp"
_CLAMP = "float clamp_min, float clamp_max"

SCHEMAS: dict[str, str] = {
    "linear": f"({_WEIGHTED}, {_OUT}) -> Tensor",
    "conv1d": f"({_WEIGHTED}, {_GEOMETRY}, {_OUT}) -> Tensor",
    "conv2d": f"({_WEIGHTED}, {_GEOMETRY}, {_OUT}) -> Tensor",
    "conv_transpose1d": f"({_WEIGHTED}, {_TRANSPOSED}, {_OUT}) -> Tensor",
    "conv_transpose2d": f"({_WEIGHTED}, {_TRANSPOSED}, {_OUT}) -> Tensor",
    "add": f"({_PAIR}, {_OUT}) -> Tensor",
    "sub": f"({_PAIR}, {_OUT}) -> Tensor",
    "mul": f"({_PAIR}, {_OUT}) -> Tensor",
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
    "linear_dynamic": f"(Tensor x, {_CONSTANTS}, {_CLAMP}) -> Tensor",
    "linear_dynamic_per_tensor": f"(Tensor x, {_CONSTANTS}, {_CLAMP}) -> Tensor",
    "conv2d_dynamic": f"(Tensor x, {_CONSTANTS}, {_GEOMETRY}, {_CLAMP}) -> Tensor",
    "conv_transpose2d_dynamic": f"(Tensor x, {_CONSTANTS}, {_TRANSPOSED}, {_CLAMP}) -> Tensor",
    "linear_weight_only": f"(Tensor x, {_CONSTANTS}) -> Tensor",
}

_STATIC = {0: INT8, 3: INT8}
_IMAGE = {0: INT8}
_MIXED = {0: FLOAT32, 1: INT8}
_OPERATORS: dict[str, Operator] = {
    "linear": Operator(weighted.linear, weighted.linear_shape, _STATIC),
    "conv1d": Operator(weighted.conv1d, weighted.conv_shape, _STATIC),
    "conv2d": Operator(weighted.conv2d, weighted.conv_shape, _STATIC),
    "conv_transpose1d": Operator(weighted.conv_transpose1d, weighted.transposed_shape, _STATIC),
    "conv_transpose2d": Operator(weighted.conv_transpose2d, weighted.transposed_shape, _STATIC),
    "add": Operator(pairs.add, pairs.shape, _STATIC),
    "sub": Operator(pairs.sub, pairs.shape, _STATIC),
    "mul": Operator(pairs.mul, pairs.shape, _STATIC),
    "avg_pool2d": Operator(pools.avg_pool2d, None, _IMAGE),
    "adaptive_avg_pool2d": Operator(pools.adaptive_avg_pool2d, pools.adaptive_shape, _IMAGE),
    "mean": Operator(pools.mean, pools.mean_shape, _IMAGE),
    "max_pool2d": Operator(pools.max_pool2d, None, _IMAGE),
    "linear_dynamic": Operator(dynamic.linear, dynamic.linear_shape, _MIXED),
    "linear_dynamic_per_tensor": Operator(dynamic.linear_per_tensor, dynamic.linear_shape, _MIXED),
    "conv2d_dynamic": Operator(dynamic.conv2d, dynamic.conv_shape, _MIXED),
    "conv_transpose2d_dynamic": Operator(
        dynamic.conv_transpose2d, dynamic.transposed_shape, _MIXED
    ),
    "linear_weight_only": Operator(weight_only.linear, dynamic.linear_shape, {0: FLOATS, 1: INT8}),
}

for _name, _schema in SCHEMAS.items():
    register(_name, _schema, _OPERATORS[_name])
