# SPDX-License-Identifier: Apache-2.0
"""The operator ``native_attention``, which compiled programs run in C++ of our own (attention.h).

``query``, ``key`` and ``value`` are uint8 of four axes in any layout, (B, heads, L, E), (B, H, S, E) and
(B, H, S, V); ``mask`` broadcasts to (B, heads, L, S). The result is (B, L, heads, V), contiguous. What the
zero point of the keys adds to scores is equal for all of a row, and softmax is the same without it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qompose_x86_inductor.native import code
from qompose_x86_inductor.native.products import KINDS
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.attention import weighted_means
from qompose_x86_inductor.operators.registration import register


class AttentionSizes(NamedTuple):
    """The numbers of `enum AttentionSize` in attention.h, in its order."""

    q_zp: int
    v_zp: int
    is_causal: int
    safe_softmax: int
    zero_point: int
    kind: int


class AttentionEnds(NamedTuple):
    """The numbers of `enum AttentionEnd` there, in its order.

    ``scale`` is that of scores, ``v_scale`` that of values; the latter and the bounds are in steps of the
    result, of floats in units.
    """

    scale: float
    v_scale: float
    low: float
    high: float


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sizes: list[int],
    ends: list[float],
) -> Tensor:
    """Return what the operator computes from its arguments."""
    of, end = AttentionSizes(*sizes), AttentionEnds(*ends)
    centred = (query.float() - of.q_zp, key.float() - 128, value.float() - of.v_zp)
    causal, safe = bool(of.is_causal), bool(of.safe_softmax)
    means = weighted_means(*centred, mask, end.scale, causal, safe)
    real, kind = (means * end.v_scale).clamp(end.low, end.high), KINDS[of.kind]
    steps = real if kind == torch.float32 else torch.round(real) + of.zero_point
    return steps.to(kind).transpose(1, 2).contiguous()


def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Any, sizes: Any, ends: Any) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty((batch, length, heads, value.shape[3]), dtype=KINDS[sizes[-1]])


register(
    NAMESPACE,
    {
        "native_attention": (
            "(Tensor query, Tensor key, Tensor value, Tensor? mask, int[] sizes, float[] ends) -> Tensor"
        )
    },
    {"native_attention": (code.uncompiled(reference), _fake)},
)
ATTENTION: Final = torch.ops.qompose_x86.native_attention.default
DECLARATION: Final = code.declaration(
    "native_attention", *[code.HANDLE] * 3, code.OPTIONAL, code.INTEGERS, code.NUMBERS
)
"""Its function of C, for what `products.shims` returns, whose header defines it."""
