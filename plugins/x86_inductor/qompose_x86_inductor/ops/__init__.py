# SPDX-License-Identifier: Apache-2.0
"""The operators ``qompose_x86::*``: int8 arithmetic on plain tensors, most of it by oneDNN.

Weights stay as they are stored, so a graph that calls these operators can be deep-copied, saved,
exported and compiled; `packing` makes oneDNN's form of them on first use. In every operator

* ``x``, ``other`` and an integer result mean ``(value - zero_point) * scale``, per tensor; the
  ``other`` of ``linear_add`` is float32, that of ``conv2d_add`` may be;
* ``weight`` is int8 and means ``value * w_scale`` with ``w_scale`` float32 (out channels,);
* ``bias`` is float32 (out channels,) in real units; arithmetic is done on exact integer sums;
* ``out_dtype`` is uint8, int8 or float32 (the default). float32 results are real values and need
  ``out_scale == 1`` and ``out_zp == 0``. Integer results round half to even and saturate;
* images are (N, C, H, W), in any memory format; resulting images are channels_last;
* no argument is written to, and no result shares memory with an argument.

oneDNN computes what stands behind a product (`POST_OPS`) in float32, but for gelu and leaky_relu
behind a convolution, which it has not: there its result is float32, and torch computes them and
quantizes. Where `isa` finds that oneDNN would not be exact for a weight, float64 carries the
integer sums instead (exact below 2 ** 53): slow, but right.

The functions ``*_in_graph`` compute the same as the operators of their names in operators that a
compiler traces and fuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from qompose_x86_inductor.arguments import NAMESPACE, QUANTIZED
from qompose_x86_inductor.ops.images import (
    adaptive_avg_pool2d_in_graph,
    avg_pool2d_in_graph,
    max_pool2d,
    max_pool2d_in_float,
    mean_in_graph,
    mul_in_graph,
)
from qompose_x86_inductor.ops.outputs import FLOAT32, POST_OPS, POST_SCHEMA, Output, PostOp
from qompose_x86_inductor.ops.products import (
    conv2d,
    conv2d_add,
    conv2d_add_fake,
    conv2d_fake,
    conv2d_kernel,
    convolution,
    linear,
    linear_add,
    linear_add_fake,
    linear_add_in_graph,
    linear_add_kernel,
    linear_fake,
    linear_kernel,
)
from qompose_x86_inductor.registration import register

__all__ = [
    "FLOAT32",
    "NAMESPACE",
    "POST_OPS",
    "POST_SCHEMA",
    "QUANTIZED",
    "SCHEMAS",
    "Output",
    "PostOp",
    "adaptive_avg_pool2d_in_graph",
    "avg_pool2d_in_graph",
    "conv2d_kernel",
    "convolution",
    "linear_add_in_graph",
    "linear_add_kernel",
    "linear_kernel",
    "max_pool2d_in_float",
    "mean_in_graph",
    "mul_in_graph",
]

_X: Final = "Tensor x, float x_scale, int x_zp"
_WEIGHT: Final = "Tensor weight, Tensor w_scale, Tensor? bias"
_GEOMETRY: Final = "int[2] stride, int[2] padding, int[2] dilation, int groups"
_OUT: Final = "float out_scale=1.0, int out_zp=0, ScalarType? out_dtype=None"

SCHEMAS: Final[dict[str, str]] = {
    "linear": f"({_X}, {_WEIGHT}, {_OUT}, {POST_SCHEMA}) -> Tensor",
    "linear_add": (f'({_X}, {_WEIGHT}, Tensor other, {_OUT}, str post_op="none") -> Tensor'),
    "conv2d": f"({_X}, {_WEIGHT}, {_GEOMETRY}, {_OUT}, {POST_SCHEMA}) -> Tensor",
    "conv2d_add": (
        f"({_X}, {_WEIGHT}, {_GEOMETRY}, Tensor other, float other_scale, int other_zp, {_OUT},"
        ' str post_op="none") -> Tensor'
    ),
    "max_pool2d": (
        "(Tensor x, int[2] kernel_size, int[2] stride, int[2] padding=0, int[2] dilation=1,"
        " bool ceil_mode=False) -> Tensor"
    ),
    "avg_pool2d": (
        f"({_X}, int[2] kernel_size, int[2] stride, int[2] padding=0, bool ceil_mode=False,"
        f" bool count_include_pad=True, int? divisor_override=None, {_OUT}) -> Tensor"
    ),
    "adaptive_avg_pool2d": f"({_X}, SymInt[2] output_size, {_OUT}) -> Tensor",
    "mean": f"({_X}, int[] dim, bool keepdim=False, {_OUT}) -> Tensor",
    "mul": f"({_X}, Tensor other, float other_scale, int other_zp, {_OUT}) -> Tensor",
}

_IMPLEMENTATIONS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "linear": (linear, linear_fake),
    "linear_add": (linear_add, linear_add_fake),
    "conv2d": (conv2d, conv2d_fake),
    "conv2d_add": (conv2d_add, conv2d_add_fake),
    "max_pool2d": (max_pool2d, max_pool2d_in_float),
    "avg_pool2d": (avg_pool2d_in_graph, avg_pool2d_in_graph),
    "adaptive_avg_pool2d": (adaptive_avg_pool2d_in_graph, adaptive_avg_pool2d_in_graph),
    "mean": (mean_in_graph, mean_in_graph),
    "mul": (mul_in_graph, mul_in_graph),
}
"""What each operator computes, and its result without values."""


_LIBRARY: Final = register(NAMESPACE, SCHEMAS, _IMPLEMENTATIONS)
