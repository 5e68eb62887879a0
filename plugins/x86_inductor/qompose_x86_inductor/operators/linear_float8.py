# SPDX-License-Identifier: Apache-2.0
"""The operator ``linear_float8``: float8 numbers times a float8 weight, summed in float32.

``x`` (..., in) and ``weight`` (out, in) are float8_e4m3fn or float8_e5m2, each; ``x`` means ``x * x_scale``
and ``weight`` means ``weight * w_scale``, float32 (out,). The bias is float32 (out,), and so is the result
(..., out).

With AMX torch's ``_scaled_mm`` computes the sums. One scale of 1 is enough for it whatever scales there are:
its forms for scales by row differ between processors. Without AMX it makes float32 of both matrices on every
call, and multiplies these (torch 2.13): 80 times as slow as float at one row. There the weight becomes
float32 on first use, beside its bytes, and as a program is compiled, in their place.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qompose_x86_inductor.onednn.arguments import NAMESPACE, check_matrices
from qompose_x86_inductor.onednn.packed_weights import cached
from qompose_x86_inductor.operators.registration import register

DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)

SCHEMAS: Final[dict[str, str]] = {
    "linear_float8": (
        "(Tensor x, float x_scale, Tensor weight, Tensor w_scale, Tensor? bias) -> Tensor"
    ),
}


def float8_in_graph(
    x: Tensor,
    x_scale: float,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *,
    scaled_mm: bool,
) -> Tensor:
    """Compute ``linear_float8`` in operators of torch alone; ``scaled_mm``: see `has_scaled_mm`."""
    _check(x, weight, w_scale)
    sums = _by_torch(x, weight) if scaled_mm else F.linear(_widened(x), _widened(weight))
    return _real(sums, w_scale * x_scale, bias)


def _linear(
    x: Tensor, x_scale: float, weight: Tensor, w_scale: Tensor, bias: Tensor | None
) -> Tensor:
    if has_scaled_mm() and x.numel() > 0:
        return float8_in_graph(x, x_scale, weight, w_scale, bias, scaled_mm=True)
    _check(x, weight, w_scale)
    kept = cached(weight, "float32", lambda: _widened(weight))
    return _real(F.linear(_widened(x), kept), w_scale * x_scale, bias)


def has_scaled_mm() -> bool:
    """Return whether ``_scaled_mm`` multiplies float8 on this processor."""
    return bool(torch.cpu.get_capabilities().get("amx_int8", False))


def _by_torch(x: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones((), dtype=torch.float32, device=x.device)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    sums = torch._scaled_mm(rows, weight.t(), one, one, out_dtype=torch.float32)
    return sums.reshape(_shape(x, weight))


def _widened(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float32)


def _real(sums: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return sums * scales if bias is None else sums * scales + bias


def _fake(x: Tensor, x_scale: float, weight: Tensor, w_scale: Tensor, bias: Any) -> Tensor:
    _check(x, weight, w_scale)
    return x.new_empty(_shape(x, weight), dtype=torch.float32)


def _shape(x: Tensor, weight: Tensor) -> list[int]:
    return [*x.shape[:-1], weight.shape[0]]


def _check(x: Tensor, weight: Tensor, w_scale: Tensor) -> None:
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise ValueError(
            f"{NAMESPACE}::linear_float8: expected x and weight float8_e4m3fn or float8_e5m2, got "
            f"{x.dtype} and {weight.dtype}"
        )
    check_matrices("linear_float8", x, weight)
    if w_scale.dtype != torch.float32 or statically_known_true(w_scale.shape != weight.shape[:1]):
        raise ValueError(
            f"{NAMESPACE}::linear_float8: w_scale must be float32 {tuple(weight.shape[:1])}, got "
            f"{w_scale.dtype} {tuple(w_scale.shape)}"
        )


register(NAMESPACE, SCHEMAS, {"linear_float8": (_linear, _fake)})
