# SPDX-License-Identifier: Apache-2.0
"""The operators ``qompose_x86::*``: int8 arithmetic on plain tensors, most of it by oneDNN.

Weights stay as they are stored, so a graph that calls these operators can be deep-copied, saved,
exported and compiled; `packed_weights` makes oneDNN's form of them on first use. In every operator on
integers

* ``x``, ``other`` and an integer result mean ``(value - zero_point) * scale``, per tensor; the
  ``other`` of ``linear_add`` is float32, that of ``conv2d_add`` may be;
* ``weight`` is int8 and means ``value * w_scale`` with ``w_scale`` float32 (out channels,);
* ``bias`` is float32 (out channels,) in real units; arithmetic is done on exact integer sums;
* ``out_dtype`` is uint8, int8 or float32 (the default). float32 results are real values and need
  ``out_scale == 1`` and ``out_zp == 0``. Integer results round half to even and saturate;
* images are (N, C, H, W), in any memory format; resulting images are channels_last;
* no argument is written to, and no result shares memory with an argument.

oneDNN computes the post-op of a product (`POST_OPS`) in float32, except for gelu and leaky_relu after
a convolution, which it lacks: there its result is float32, and torch computes them and
quantizes. Where `exactness` finds that oneDNN would not be exact for a weight, float64 carries the
integer sums instead (exact below 2 ** 53): slow, but right.

The functions ``*_in_graph`` compute the same as the operators of their names, in operators that a
compiler traces and fuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.onednn.post_ops import POST_SCHEMA
from qompose_x86_inductor.operators import (
    attention,
    conv2d,
    elementwise,
    linear,
    linear_dynamic as _linear_dynamic,  # noqa: F401 - registers
    linear_float8 as _linear_float8,  # noqa: F401 - registers
    linear_packed as _linear_packed,  # noqa: F401 - registers
    linear_weight_only as _linear_weight_only,  # noqa: F401 - registers
    pooling,
    recurrent as _recurrent,  # noqa: F401 - registers
)
from qompose_x86_inductor.operators.registration import register

_X: Final = "Tensor x, float x_scale, int x_zp"
_WEIGHT: Final = "Tensor weight, Tensor w_scale, Tensor? bias"
_GEOMETRY: Final = "int[2] stride, int[2] padding, int[2] dilation, int groups"
_OUT: Final = "float out_scale=1.0, int out_zp=0, ScalarType? out_dtype=None"

SCHEMAS: Final[dict[str, str]] = {
    "linear": f"({_X}, {_WEIGHT}, {_OUT}, {POST_SCHEMA}) -> Tensor",
    "linear_add": f'({_X}, {_WEIGHT}, Tensor other, {_OUT}, str post_op="none") -> Tensor',
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
    "attention": (
        "(Tensor query, float q_scale, int q_zp, Tensor key, float k_scale, int k_zp,"
        " Tensor value, float v_scale, int v_zp, Tensor? mask, float scale, bool is_causal,"
        f" bool safe_softmax, {_OUT}) -> Tensor"
    ),
}

_IMPLEMENTATIONS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "linear": (linear.linear, linear.linear_fake),
    "linear_add": (linear.linear_add, linear.linear_add_fake),
    "conv2d": (conv2d.conv2d, conv2d.conv2d_fake),
    "conv2d_add": (conv2d.conv2d_add, conv2d.conv2d_add_fake),
    "max_pool2d": (pooling.max_pool2d, pooling.max_pool2d_in_float),
    "avg_pool2d": (pooling.avg_pool2d_in_graph,) * 2,
    "adaptive_avg_pool2d": (pooling.adaptive_avg_pool2d_in_graph,) * 2,
    "mean": (pooling.mean_in_graph,) * 2,
    "mul": (elementwise.mul_in_graph,) * 2,
    "attention": (attention.attention, attention.attention_fake),
}
"""What each operator computes, and its result without values."""

register(NAMESPACE, SCHEMAS, _IMPLEMENTATIONS)
