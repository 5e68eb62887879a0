# SPDX-License-Identifier: Apache-2.0
"""The operator ``linear_float16_weight``: floats multiplied by a weight that is stored as float16.

``x`` is float32 (..., in), ``weight`` float16 (out, in), the bias float32 (out,); the result is float32
(..., out), and so is the arithmetic.

`float16_weight_in_graph` computes the same in operators of torch alone, for compilers: the packing that it
holds depends on the weight alone, so that freezing folds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from qompose_x86_inductor.onednn.arguments import NAMESPACE, check_matrices
from qompose_x86_inductor.onednn.packed_weights import cached
from qompose_x86_inductor.operators.registration import register

SCHEMAS: Final[dict[str, str]] = {
    "linear_float16_weight": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
}


def float16_weight_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear_float16_weight``."""
    return _float16(x, weight, _pack_float16, bias)


def _float16_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _float16(x, weight, lambda w: cached(w, "float16", lambda: _pack_float16(w)), bias)


def _pack_float16(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.linear_prepack_fp16.default(weight.contiguous(), None)
    return packed


def _float16(
    x: Tensor, weight: Tensor, pack: Callable[[Tensor], Tensor], bias: Tensor | None
) -> Tensor:
    _check(x, weight)
    shape = (*x.shape[:-1], weight.shape[0])
    if weight.shape[1] == 0:  # oneDNN refuses it
        zeros = x.new_zeros(shape)
        return zeros if bias is None else zeros + bias
    product = torch.ops.onednn.linear_dynamic_fp16.default
    result: Tensor = product(x.reshape(-1, x.shape[-1]).contiguous(), pack(weight), bias)
    return result.view(shape)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != torch.float32 or weight.dtype != torch.float16:
        raise ValueError(
            f"{NAMESPACE}::linear_float16_weight: expected x float32 and weight float16, got {x.dtype} and "
            f"{weight.dtype}"
        )
    check_matrices("linear_float16_weight", x, weight)


def _like_x(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


register(NAMESPACE, SCHEMAS, {"linear_float16_weight": (_float16_weight, _like_x)})
