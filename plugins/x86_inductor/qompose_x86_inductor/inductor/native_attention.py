# SPDX-License-Identifier: Apache-2.0
"""The replacement of attention, on integers and in float, by calls of our own C++.

In MiniLM, 16 texts of 64 tokens in a program of two threads, torch's attention in float32 takes 1.7 times as
long as `native.float_attention` (AVX-512). For a token that a cache precedes, torch's wants a copy of keys
and values for each head of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from qompose.backend import arguments_of
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qompose_x86_inductor import operators as _operators  # noqa: F401 - registers
from qompose_x86_inductor.inductor.shared_heads import without_copies
from qompose_x86_inductor.native import float_attention, processor
from qompose_x86_inductor.native.attention import ATTENTION, AttentionEnds, AttentionSizes
from qompose_x86_inductor.native.products import KINDS
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.attention import AttentionCall, laid_out, raised

OPERATOR: Final = getattr(torch.ops, NAMESPACE).attention.default
IN_FLOAT: Final = torch.ops.aten.scaled_dot_product_attention.default
FEWEST_QUERIES: Final = 48
"""Of attention in float whose keys the C++ arranges: with fewer, that takes longer than it gains.
Of a length that is open, that of the example counts."""
FEW_QUERIES: Final = 8
"""For at most so many the C++ arranges nothing (FEW_QUERIES of cache_attention.h)."""


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


def replace_in_float(node: fx.Node) -> None:
    """Let a call of `IN_FLOAT` for which `applies_in_float` compute the same in C++, in place."""
    arguments = arguments_of(node)
    query, mask, scale = (arguments[name] for name in ("query", "attn_mask", "scale"))
    width = query.meta["val"].shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else float(scale)
    tensors = (query, *_keys_and_values(node, arguments), mask)
    node.target, node.kwargs = attended_in_float, {}
    node.args = (*tensors, bool(arguments["is_causal"]), scale)


def applies_in_float(node: fx.Node) -> bool:
    """Return whether the C++ computes a call of `IN_FLOAT`."""
    if node.target is not IN_FLOAT or processor.isa() is None:
        return False
    arguments = arguments_of(node)
    if arguments["dropout_p"]:
        return False
    found = [_float32(arguments[name]) for name in ("query", "key", "value")]
    query, key, value = found
    if query is None or key is None or value is None:
        return False
    if type(query.shape[-1]) is not int or query.shape[-1] == 0:
        return False
    if is_few(query.shape[-2]) and not is_few(query.shape[-2], FEW_QUERIES + 1):
        return False
    return heads_fit(query, key, value, arguments["enable_gqa"]) and (
        arguments["attn_mask"] is None or fits(arguments["attn_mask"], query, key)
    )


def _keys_and_values(node: fx.Node, arguments: Mapping[str, Any]) -> tuple[fx.Node, fx.Node]:
    """Return the keys and values of a call, without copies for the heads of a group where both have them."""
    given = arguments["key"], arguments["value"]
    key, value = (without_copies(each, node) for each in given)
    same = key.meta["val"].shape[1:2] == value.meta["val"].shape[1:2]
    return (key, value) if same else given


def _float32(node: Any) -> Tensor | None:
    """Return the example of a float32 tensor of two to four axes on the CPU."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() not in (2, 3, 4):
        return None
    return value if value.dtype == torch.float32 and value.device.type == "cpu" else None


def is_few(queries: Any, bound: int = FEWEST_QUERIES) -> bool:
    """Return whether a number of queries is below a bound."""
    expected = queries if type(queries) is int else queries.node.hint
    return expected is None or expected < bound


def heads_fit(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    """Return whether heads and batches are as the C++ takes them: torch's attention lets them repeat."""
    if not query.dim() == key.dim() == value.dim():
        return False
    pairs = [(key.shape[:-1], value.shape[:-1]), (query.shape[-1:], key.shape[-1:])]
    pairs.append((query.shape[:-3], key.shape[:-3]))
    if query.dim() > 2 and not grouped:
        pairs.append((query.shape[-3:-2], key.shape[-3:-2]))
    return all(_equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def fits(mask: Any, query: Tensor, key: Tensor) -> bool:
    """Return whether a mask is of a type that the C++ reads, and broadcasts to the scores."""
    value = mask.meta.get("val") if isinstance(mask, fx.Node) else None
    if not isinstance(value, Tensor) or value.dtype not in (torch.bool, torch.float32):
        return False
    if value.device.type != "cpu" or value.dim() > query.dim():
        return False
    scores = (*query.shape[:-1], key.shape[-2])[query.dim() - value.dim() :]
    return all(_equal(a, 1) or _equal(a, b) for a, b in zip(value.shape, scores, strict=True))


def _equal(one: Any, other: Any) -> bool:
    return bool(statically_known_true(one == other))


def attended_in_float(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Compute attention in float of two to four axes; the result is as that of `attended`."""
    operands = (raised(query), raised(key), raised(value))
    return laid_out(float_attention.ATTENTION(*operands, mask, is_causal, scale), query.dim())
