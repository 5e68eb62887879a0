# SPDX-License-Identifier: Apache-2.0
"""The operator ``native_float_attention``, which compiled programs run in C++ of our own (float_attention.h).

``query``, ``key`` and ``value`` are float32 of four axes in any layout, (B, heads, L, E), (B, H, S, E) and
(B, H, S, V); ``mask`` broadcasts to (B, heads, L, S): booleans that are true where a key counts, or float32
that is added to the scores; where a boolean is false, the score becomes ``hidden``. The result is
(B, L, heads, V), contiguous. A row all of whose scores are -inf is 0 with ``safe_softmax``, and NaN without;
a row of no scores is 0.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qompose_x86_inductor.native import code
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.registration import register


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    hidden: float = -math.inf,
    safe_softmax: bool = True,
) -> Tensor:
    """Return what the operator computes, by torch's attention where that can."""
    if safe_softmax and hidden == -math.inf:
        shared = query.shape[1] != key.shape[1]
        means = F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=shared
        )
        return means.transpose(1, 2).contiguous()
    times = query.shape[1] // max(1, key.shape[1])
    scores = query @ key.repeat_interleave(times, 1).mT * scale
    if mask is not None:
        scores = torch.where(mask, scores, hidden) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -math.inf)
    weights = scores.softmax(-1)
    if safe_softmax:
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return (weights @ value.repeat_interleave(times, 1)).transpose(1, 2).contiguous()


def fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Return a result without values, of the shape that the operator's has."""
    batch, heads, length, _width = query.shape
    return query.new_empty((batch, length, heads, value.shape[3]))


register(
    NAMESPACE,
    {
        "native_float_attention": (
            "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, "
            "float hidden, bool safe_softmax) -> Tensor"
        )
    },
    {"native_float_attention": (code.uncompiled(reference), fake)},
)
ATTENTION: Final = torch.ops.qompose_x86.native_float_attention.default
DECLARATION: Final = code.declaration(
    "native_float_attention",
    *[code.HANDLE] * 3,
    code.OPTIONAL,
    "int32_t",
    "double",
    "double",
    "int32_t",
)
"""Its function of C, for what `products.shims` returns, whose header defines it."""
