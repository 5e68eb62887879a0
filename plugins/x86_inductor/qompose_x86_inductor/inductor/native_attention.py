# SPDX-License-Identifier: Apache-2.0
"""The replacement of attention on integers by calls of our own C++."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, fx

from qompose_x86_inductor import operators as _operators  # noqa: F401 - registers
from qompose_x86_inductor.native import processor
from qompose_x86_inductor.native.attention import ATTENTION, AttentionEnds, AttentionSizes
from qompose_x86_inductor.native.products import KINDS
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.attention import AttentionCall, laid_out, raised

OPERATOR: Final = getattr(torch.ops, NAMESPACE).attention.default


def applies() -> bool:
    """Return whether the C++ is for this machine."""
    return processor.isa() is processor.AVX512_VNNI


def replace(node: fx.Node, arguments: list[Any]) -> bool:
    """Let a call of `OPERATOR` compute the same in C++, in place; return False where that is not for it."""
    if not applies():
        return False
    call = AttentionCall.read(arguments)
    out, dtype = call.out, call.out.dtype or torch.float32
    low, high = -math.inf, math.inf
    if dtype != torch.float32:
        limits = torch.iinfo(dtype)
        low, high = float(limits.min - out.zero_point), float(limits.max - out.zero_point)
    sizes = AttentionSizes(
        call.query.zero_point,
        call.value.zero_point,
        int(call.is_causal),
        int(call.safe_softmax),
        out.zero_point,
        KINDS.index(dtype),
    )
    scale = call.scale * call.query.scale * call.key.scale
    ends = AttentionEnds(scale, call.value.scale / out.scale, low, high)
    tensors = (*(operand.tensor for operand in call[:3]), call.mask)
    node.target, node.args, node.kwargs = attended, (*tensors, [*sizes], [*ends]), {}
    return True


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sizes: list[int],
    ends: list[float],
) -> Tensor:
    """Compute attention of two to four axes; the result is one of (B, L, heads, V) with its axes moved."""
    operands = (raised(query), raised(key), raised(value))
    return laid_out(ATTENTION(*operands, mask, sizes, ends), query.dim())
