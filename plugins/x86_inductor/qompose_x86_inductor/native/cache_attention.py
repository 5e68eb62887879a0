# SPDX-License-Identifier: Apache-2.0
"""The operator ``native_cache_attention``, which compiled programs run in C++ of our own (cache_attention.h).

``query`` is float32 (B, heads, L, E); ``key`` and ``value`` are int8 (B, H, S, E) and (B, H, S, V), whose
columns lie side by side, with float32 scales (B, H, S, 1). All else is as for ``native_float_attention``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from qompose_x86_inductor.native import code, float_attention
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.registration import register


def reference(
    query: Tensor,
    key: Tensor,
    key_scales: Tensor,
    value: Tensor,
    value_scales: Tensor,
    *others: Any,
) -> Tensor:
    """Return what the operator computes, by torch's attention."""
    return float_attention.reference(query, key * key_scales, value * value_scales, *others)


def _fake(query: Tensor, key: Tensor, _: Tensor, value: Tensor, *others: Any) -> Tensor:
    return float_attention.fake(query, key, value)


register(
    NAMESPACE,
    {
        "native_cache_attention": (
            "(Tensor query, Tensor key, Tensor key_scales, Tensor value, Tensor value_scales, Tensor? mask,"
            " bool is_causal, float scale) -> Tensor"
        )
    },
    {"native_cache_attention": (code.uncompiled(reference), _fake)},
    torch.Tag.needs_contiguous_strides,
)
ATTENTION: Final = torch.ops.qompose_x86.native_cache_attention.default
DECLARATION: Final = code.declaration(
    "native_cache_attention", *[code.HANDLE] * 5, code.OPTIONAL, "int32_t", "double"
)
"""Its function of C, for what `products.shims` returns, whose header defines it."""
