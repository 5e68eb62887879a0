# SPDX-License-Identifier: Apache-2.0
"""The replacement of attention in float by calls of our own C++.

In MiniLM, 16 texts of 64 tokens in a program of two threads, torch's attention in float32 takes 1.7 times as
long as `native.float_attention` (AVX-512). For a token that a cache precedes, torch's wants a copy of keys
and values for each head of a group.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qompose_x86_inductor.inductor import float_attention
from qompose_x86_inductor.inductor.float_attention import FloatAttention, Mask
from qompose_x86_inductor.inductor.graphs import value_of
from qompose_x86_inductor.inductor.shared_heads import without_copies
from qompose_x86_inductor.native import processor
from qompose_x86_inductor.native.float_attention import ATTENTION
from qompose_x86_inductor.operators.attention import laid_out, raised

aten = torch.ops.aten
FEWEST_QUERIES: Final = 48
"""Of attention in float whose keys the C++ arranges: with fewer, that takes longer than it gains.
Of a length that is open, that of the example counts."""
FEW_QUERIES: Final = 8
"""For at most so many the C++ arranges nothing (FEW_QUERIES of cache_attention.h)."""


def found(node: fx.Node) -> FloatAttention | None:
    """Return the attention in float that ends at a node, if the C++ computes it."""
    call = float_attention.read(node) if processor.isa() is not None else None
    return call if call is not None and _applies(call) else None


def replace(node: fx.Node, call: FloatAttention) -> None:
    """Let a node compute the attention that was `found` to end there in C++, in place."""
    with node.graph.inserting_before(node):
        key = _upright(call.key) if call.swapped else call.key
        mask = None if call.mask is None else _one_mask(call.mask)
    tensors = (call.query, *_keys_and_values(node, call, key), mask)
    hidden = -math.inf if call.mask is None else call.mask.hidden
    node.target, node.kwargs = attended, {}
    node.args = (*tensors, call.is_causal, call.scale, hidden, call.safe_softmax)
    for inner in call.inside:
        node.graph.erase_node(inner)


def attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *numbers: Any
) -> Tensor:
    """Compute attention in float of two to four axes; the result is one of (B, L, heads, V), axes moved."""
    operands = (raised(query), raised(key), raised(value))
    return laid_out(ATTENTION(*operands, mask, *numbers), query.dim())


def operands_fit(call: FloatAttention) -> bool:
    """Return whether dtypes, heads, batches and masks of a call are as the C++ takes them."""
    query, key, value = map(_float32, (call.query, call.key, call.value))
    if query is None or key is None or value is None:
        return False
    key = key.mT if call.swapped else key
    masks = () if call.mask is None else call.mask.nodes
    fit = _heads_fit(query, key, value, call.grouped)
    return fit and all(_fits(mask, query, key) for mask in masks)


def _applies(call: FloatAttention) -> bool:
    query = value_of(call.query)
    if query is None or not operands_fit(call):
        return False
    *_, queries, width = query.shape
    if type(width) is not int or width == 0:
        return False
    return not is_few(queries) or is_few(queries, FEW_QUERIES + 1)


def _one_mask(mask: Mask) -> fx.Node:
    """Return what is added to scores, or true where they stay."""
    first, *others = mask.nodes
    if mask.hides:
        return first.graph.call_function(aten.logical_not.default, (first,))
    for other in others:
        first = first.graph.call_function(aten.add.Tensor, (first, other))
    return first


def _upright(key: fx.Node) -> fx.Node:
    """Return keys (..., width, keys) with these axes swapped: what was swapped before, as it was."""
    given = value_of(key)
    assert given is not None  # it applies
    last = ({-1, -2}, {given.dim() - 1, given.dim() - 2})
    transposed = key.target is aten.transpose.int and {*key.args[1:]} in last
    if transposed or key.target is aten.mT.default:
        return key.args[0]  # type: ignore[return-value]
    swapped = key.graph.call_function(aten.transpose.int, (key, -2, -1))
    swapped.meta["val"] = given.mT
    return swapped


def _keys_and_values(
    node: fx.Node, call: FloatAttention, upright: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Return keys and values of a call, without copies for the heads of a group where both have them."""
    given = upright, call.value
    key, value = (without_copies(each, node, but=call.inside) for each in given)
    same = key.meta["val"].shape[1:2] == value.meta["val"].shape[1:2]
    return (key, value) if same else given


def _float32(node: Any) -> Tensor | None:
    """Return the example of a float32 tensor of two to four axes on the CPU."""
    value = value_of(node)
    if value is None or value.dim() not in (2, 3, 4):
        return None
    return value if value.dtype == torch.float32 and value.device.type == "cpu" else None


def is_few(queries: Any, bound: int = FEWEST_QUERIES) -> bool:
    """Return whether a number of queries is below a bound."""
    expected = queries if type(queries) is int else queries.node.hint
    return expected is None or expected < bound


def _heads_fit(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    """Return whether heads and batches are as the C++ takes them: torch's attention lets them repeat."""
    if not query.dim() == key.dim() == value.dim():
        return False
    pairs = [(key.shape[:-1], value.shape[:-1]), (query.shape[-1:], key.shape[-1:])]
    pairs.append((query.shape[:-3], key.shape[:-3]))
    if query.dim() > 2 and not grouped:
        pairs.append((query.shape[-3:-2], key.shape[-3:-2]))
    return all(_equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def _fits(mask: Any, query: Tensor, key: Tensor) -> bool:
    """Return whether a mask is of a type that the C++ reads, and broadcasts to the scores."""
    value = value_of(mask)
    if value is None or value.dtype not in (torch.bool, torch.float32):
        return False
    if value.device.type != "cpu" or value.dim() > query.dim():
        return False
    scores = (*query.shape[:-1], key.shape[-2])[query.dim() - value.dim() :]
    return all(_equal(a, 1) or _equal(a, b) for a, b in zip(value.shape, scores, strict=True))


def _equal(one: Any, other: Any) -> bool:
    return bool(statically_known_true(one == other))
