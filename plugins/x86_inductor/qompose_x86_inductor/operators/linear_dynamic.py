# SPDX-License-Identifier: Apache-2.0
"""Linears whose input is quantized when they run, with one scale: ``quantize_dynamic``, ``linear_dynamic``.

``quantize_dynamic`` returns integers of a float32 ``x`` with any strides, uint8 between ``low`` and ``high``,
and the scale and zero point of `kit.choose_qparams`, float32 scalars. ``linear_dynamic`` multiplies such
integers, and returns float32. Products of one tensor read one quantization of it.

The product is ``qompose_x86::linear``, exact sums of integers by oneDNN; ``weight``, ``w_scale`` and ``bias``
are as in that operator. A range that is not finite makes every result NaN, as it does in the converted model.

The functions ``*_in_graph`` compute the same in operators of torch alone, for compilers. That of the product
accepts only weights that `exactness.admits`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import torch
from qompose.backend import kit
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from qompose_x86_inductor.onednn import calls
from qompose_x86_inductor.onednn.arguments import (
    FLOAT32,
    NAMESPACE,
    Output,
    check_matrices,
)
from qompose_x86_inductor.onednn.post_ops import POST_SCHEMA
from qompose_x86_inductor.operators.registration import register

_X: Final = "Tensor x, Tensor x_scale, Tensor x_zp"
_CONSTANTS: Final = "Tensor weight, Tensor w_scale, Tensor? bias"

SCHEMAS: Final[dict[str, str]] = {
    "quantize_dynamic": "(Tensor x, int low, int high, float eps) -> (Tensor, Tensor, Tensor)",
    "linear_dynamic": f"({_X}, {_CONSTANTS}, {POST_SCHEMA}) -> Tensor",
}

Quantized = tuple[Tensor, Tensor, Tensor]
"""Integers, scale and zero point."""

_integers = functools.partial(kit.quantize, dtype=torch.uint8)

_HIDES_NAN: Final = ("relu", "hardtanh")
"""The post-ops that turn NaN into a number in oneDNN."""

_ROOM: Final = 2.0**24
"""oneDNN multiplies sums of up to 31 bits by the input's scale first, which may be 2**121: they can overflow,
and become NaN, where the result is finite. So the weight's scales take up this factor of the input's, a power
of two, which rounds nothing."""
_NEEDS_ROOM: Final = 2.0**96


def _check_dtype(operator: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError on an ``x`` that would be misread."""
    if x.dtype != dtype:
        raise ValueError(f"{NAMESPACE}::{operator}: expected x {dtype}, got {x.dtype}")


def _quantize_fake(x: Tensor, *_: Any) -> Quantized:
    _check_dtype("quantize_dynamic", x, torch.float32)
    return torch.empty_like(x, dtype=torch.uint8), x.new_empty(()), x.new_empty(())


def quantize_in_graph(x: Tensor, low: int, high: int, eps: float) -> Quantized:
    """Compute ``quantize_dynamic``."""
    _check_dtype("quantize_dynamic", x, torch.float32)
    # Every range includes 0, and with one more there is a range where there are no rows.
    ranged = x if statically_known_true(x.numel() > 0) else F.pad(x.reshape(-1), (0, 1))
    scale, zero_point = kit.choose_qparams(ranged, low, high, eps)
    return _integers(x, scale, zero_point, low, high), scale, zero_point


def _checked(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError on an ``x`` that would be misread; the rest is checked with the product."""
    _check_dtype("linear_dynamic", x, torch.uint8)
    check_matrices("linear_dynamic", x, weight)


def _product(*arguments: Any) -> Tensor:
    result: Tensor = torch.ops.qompose_x86.linear.default(*arguments)
    return result


def _shape(x: Tensor, weight: Tensor) -> list[int]:
    return [*x.shape[:-1], weight.shape[0]]


def _linear(x: Tensor, x_scale: Tensor, x_zp: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    _checked(x, weight)
    w_scale, bias, *post = rest
    scale = float(x_scale)
    if math.isnan(scale):
        return x_scale.new_full(_shape(x, weight), math.nan)
    if scale > _NEEDS_ROOM:
        scale, w_scale = scale / _ROOM, w_scale * _ROOM
    return _product(x, scale, int(x_zp), weight, w_scale, bias, *Output()[:3], *post)


def _linear_fake(x: Tensor, x_scale: Tensor, x_zp: Tensor, weight: Tensor, *_: Any) -> Tensor:
    _checked(x, weight)
    return x_scale.new_empty(_shape(x, weight))


def linear_in_graph(
    x: Tensor,
    x_scale: Tensor,
    x_zp: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *post: Any,
    zero_points: Tensor,
) -> Tensor:
    """Compute ``linear_dynamic``; ``zero_points`` are int32 zeros (out channels,).

    Scales of weights from 2**104 on become infinite, and those of inputs below 2**-102 lose digits.
    """
    _checked(x, weight)
    out = Output(1.0, 0, None, *post).checked("linear")
    hides_nan = out.post_op in _HIDES_NAN
    result: Tensor = torch.ops.onednn.qlinear_pointwise.tensor(
        x,
        x_scale / _ROOM,
        x_zp.to(torch.int32),
        calls.prepack_linear(weight),
        w_scale * _ROOM,  # folded where the weight is packed
        zero_points,
        bias,
        *(FLOAT32 if hides_nan else out).fused(),
    )
    return out.finish(result) if hides_nan else result


register(
    NAMESPACE,
    SCHEMAS,
    {
        "quantize_dynamic": (quantize_in_graph, _quantize_fake),
        "linear_dynamic": (_linear, _linear_fake),
    },
)
