# SPDX-License-Identifier: Apache-2.0
"""The operators ``linear_dynamic*``: float32 in, quantized when they run, float32 out.

The product is ``qompose_x86::linear``, exact sums of integers by oneDNN; scales and zero points are those
of `kit.choose_qparams`. ``x`` is float32 with any strides; ``weight``, ``w_scale`` and ``bias`` are as in
that operator. In an operator with one scale for the whole of ``x``, the integers are uint8 between ``low``
and ``high``, and a range that is not finite makes every result NaN, as it does in the converted model.
With a scale for each row, integers are the whole of int8, and only the rows concerned are not finite. oneDNN
gets them as uint8, 128 higher: its only code for int8 inputs on x86 is the reference, 5,000 times slower.

The functions ``*_in_graph`` compute the same in operators of torch alone, for compilers. They accept no
empty ``x``, and only weights that `exactness.admits`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from qompose.backend import kit
from torch import Tensor

from qompose_x86_inductor.onednn import calls
from qompose_x86_inductor.onednn.arguments import (
    FLOAT32,
    NAMESPACE,
    Output,
    Product,
    check_matrices,
    flip_sign_bit,
)
from qompose_x86_inductor.onednn.calls import Packed
from qompose_x86_inductor.onednn.packed_weights import cached
from qompose_x86_inductor.onednn.post_ops import POST_SCHEMA
from qompose_x86_inductor.operators.registration import register

_CONSTANTS: Final = "Tensor x, Tensor weight, Tensor w_scale, Tensor? bias"
_RANGE: Final = "int low, int high, float eps"

SCHEMAS: Final[dict[str, str]] = {
    "linear_dynamic": f"({_CONSTANTS}, {_RANGE}, {POST_SCHEMA}) -> Tensor",
    "linear_dynamic_per_token": f"({_CONSTANTS}, bool symmetric) -> Tensor",
}


_MIDDLE: Final = 128
"""The uint8 that stands for the int8 zero."""

_integers = functools.partial(kit.quantize, dtype=torch.uint8)

_HIDES_NAN: Final = ("relu", "hardtanh")
"""The post-ops that turn NaN into a number in oneDNN."""


def _checked(operator: str, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError on an ``x`` that would be misread; the rest is checked with the product."""
    if x.dtype != torch.float32:
        raise ValueError(f"{NAMESPACE}::{operator}: expected x float32, got {x.dtype}")
    check_matrices(operator, x, weight)


def _product(*arguments: Any) -> Tensor:
    result: Tensor = torch.ops.qompose_x86.linear.default(*arguments)
    return result


def _shape(x: Tensor, weight: Tensor) -> list[int]:
    return [*x.shape[:-1], weight.shape[0]]


# -- one scale for the whole tensor ------------------------------------------------------------


def _quantized(x: Tensor, low: int, high: int, eps: float) -> tuple[Tensor, float, int]:
    """Return integers, scale and zero point; an empty ``x`` has none to choose."""
    if x.numel() == 0:
        return x.to(torch.uint8), 1.0, 0
    scale, zero_point = kit.choose_qparams(x, low, high, eps)
    return _integers(x, scale, zero_point, low, high), float(scale), int(zero_point)


def _linear(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    _checked("linear_dynamic", x, weight)
    low, high, eps, *post = rest
    integers, scale, zero_point = _quantized(x, low, high, eps)
    if math.isnan(scale):
        return x.new_full(_shape(x, weight), math.nan)
    return _product(integers, scale, zero_point, weight, w_scale, bias, *Output()[:3], *post)


def _linear_fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    _checked("linear_dynamic", x, weight)
    return x.new_empty(_shape(x, weight))


def linear_in_graph(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    low: int,
    high: int,
    eps: float,
    *post: Any,
    zero_points: Tensor,
) -> Tensor:
    """Compute ``linear_dynamic``; ``zero_points`` are int32 zeros (out channels,)."""
    _checked("linear_dynamic", x, weight)
    out = Output(1.0, 0, None, *post).checked("linear")
    hides_nan = out.post_op in _HIDES_NAN
    scale, zero_point = kit.choose_qparams(x, low, high, eps)
    result: Tensor = torch.ops.onednn.qlinear_pointwise.tensor(
        _integers(x, scale, zero_point, low, high),
        scale,
        zero_point.to(torch.int32),
        calls.prepack_linear(weight),
        w_scale,
        zero_points,
        bias,
        *(FLOAT32 if hides_nan else out).fused(),
    )
    return out.finish(result) if hides_nan else result


# -- a scale for each row ----------------------------------------------------------------------


def _linear_per_token(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, symmetric: bool
) -> Tensor:
    _checked("linear_dynamic_per_token", x, weight)

    def sums(integers: Tensor) -> Tensor:
        return _product(flip_sign_bit(integers), 1.0, _MIDDLE, weight, w_scale, None)

    if x.numel() == 0:
        return sums(x.to(torch.int8)) + (0.0 if bias is None else bias)
    columns = None if symmetric else cached(weight, "columns", lambda: _columns(weight))
    return _by_row(x, sums, columns, w_scale, bias).view(_shape(x, weight))


def _columns(weight: Tensor) -> Tensor:
    """Return sums of an int8 weight's rows (out, in), float32 (out,): what a step of zero point adds."""
    return weight.sum(1, dtype=torch.int64).to(torch.float32)


def _by_row(
    x: Tensor,
    sums: Callable[[Tensor], Tensor],
    columns: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Quantize rows, multiply them, and bring the sums to real units: (M, out)."""
    rows = x.reshape(-1, x.shape[-1])
    scale, zero_point = kit.choose_qparams_per_row(rows, symmetric=columns is None)
    total = sums(kit.quantize_rows(rows, scale, zero_point))
    if zero_point is not None and columns is not None:
        total = torch.addcmul(total, zero_point, columns * w_scale, value=-1)
    return total * scale if bias is None else torch.addcmul(bias, total, scale)


def _linear_per_token_fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    _checked("linear_dynamic_per_token", x, weight)
    return x.new_empty(_shape(x, weight))


def linear_per_token_in_graph(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    symmetric: bool,
    *,
    zero_points: Tensor,
) -> Tensor:
    """Compute ``linear_dynamic_per_token``."""
    _checked("linear_dynamic_per_token", x, weight)

    def sums(integers: Tensor) -> Tensor:
        packed = Packed(calls.prepack_linear(weight), zero_points)
        product = Product(flip_sign_bit(integers), 1.0, _MIDDLE, weight, w_scale, None)
        return calls.linear(product, packed, Output().checked("linear"))

    columns = None if symmetric else _columns(weight)
    return _by_row(x, sums, columns, w_scale, bias).view(_shape(x, weight))


register(
    NAMESPACE,
    SCHEMAS,
    {
        "linear_dynamic": (_linear, _linear_fake),
        "linear_dynamic_per_token": (_linear_per_token, _linear_per_token_fake),
    },
)
