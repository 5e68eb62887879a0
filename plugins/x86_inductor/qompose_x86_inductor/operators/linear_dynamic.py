# SPDX-License-Identifier: Apache-2.0
"""The operator ``linear_dynamic``: float32 in, quantized when it runs with one scale, float32 out.

The product is ``qompose_x86::linear``, exact sums of integers by oneDNN; scale and zero point are those of
`kit.choose_qparams`. ``x`` is float32 with any strides; ``weight``, ``w_scale`` and ``bias`` are as in that
operator. The integers are uint8 between ``low`` and ``high``, and a range that is not finite makes every
result NaN, as it does in the converted model.

`linear_in_graph` computes the same in operators of torch alone, for compilers. It accepts only weights that
`exactness.admits`.
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

_CONSTANTS: Final = "Tensor x, Tensor weight, Tensor w_scale, Tensor? bias"
_RANGE: Final = "int low, int high, float eps"

SCHEMAS: Final[dict[str, str]] = {
    "linear_dynamic": f"({_CONSTANTS}, {_RANGE}, {POST_SCHEMA}) -> Tensor",
}


_integers = functools.partial(kit.quantize, dtype=torch.uint8)

_HIDES_NAN: Final = ("relu", "hardtanh")
"""The post-ops that turn NaN into a number in oneDNN."""


def _checked(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError on an ``x`` that would be misread; the rest is checked with the product."""
    if x.dtype != torch.float32:
        raise ValueError(f"{NAMESPACE}::linear_dynamic: expected x float32, got {x.dtype}")
    check_matrices("linear_dynamic", x, weight)


def _product(*arguments: Any) -> Tensor:
    result: Tensor = torch.ops.qompose_x86.linear.default(*arguments)
    return result


def _shape(x: Tensor, weight: Tensor) -> list[int]:
    return [*x.shape[:-1], weight.shape[0]]


def _quantized(x: Tensor, low: int, high: int, eps: float) -> tuple[Tensor, float, int]:
    """Return integers, scale and zero point; an empty ``x`` has none to choose."""
    if x.numel() == 0:
        return x.to(torch.uint8), 1.0, 0
    scale, zero_point = kit.choose_qparams(x, low, high, eps)
    return _integers(x, scale, zero_point, low, high), float(scale), int(zero_point)


def _linear(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    _checked(x, weight)
    low, high, eps, *post = rest
    integers, scale, zero_point = _quantized(x, low, high, eps)
    if math.isnan(scale):
        return x.new_full(_shape(x, weight), math.nan)
    return _product(integers, scale, zero_point, weight, w_scale, bias, *Output()[:3], *post)


def _linear_fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    _checked(x, weight)
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
    _checked(x, weight)
    out = Output(1.0, 0, None, *post).checked("linear")
    hides_nan = out.post_op in _HIDES_NAN
    # Every range includes 0, and with one more there is a range where there are no rows.
    ranged = x if statically_known_true(x.numel() > 0) else F.pad(x.reshape(-1), (0, 1))
    scale, zero_point = kit.choose_qparams(ranged, low, high, eps)
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


register(NAMESPACE, SCHEMAS, {"linear_dynamic": (_linear, _linear_fake)})
