# SPDX-License-Identifier: Apache-2.0
"""The replacement of attention to caches of integers by a call of our own C++ that reads them as they are.

It is made when a model is lowered, so uncompiled ones have it too. Torch's attention wants floats, and for
groups of heads a copy of keys and values for each: with 4,096 of them that is most of what a token takes. The
C++ is for few queries: each reads all of the bytes again.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from qompose.backend import stand_for
from torch import fx

from qompose_x86_inductor.inductor import float_attention, native_float_attention
from qompose_x86_inductor.inductor.float_attention import FloatAttention
from qompose_x86_inductor.inductor.graphs import value_of
from qompose_x86_inductor.inductor.shared_heads import behind_copies, repeats_heads
from qompose_x86_inductor.native import cache_attention, processor

aten = torch.ops.aten
TOO_MANY_QUERIES: Final = 9
"""With 32 of them and 4,096 keys, a prompt took 1.3 times as long as with torch's attention of floats."""


class Rows(NamedTuple):
    """Rows of integers in a graph, (B, H, S, columns), and their scales."""

    integers: fx.Node
    scales: fx.Node


def found(node: fx.Node) -> tuple[FloatAttention, Rows, Rows] | None:
    """Return a call of torch's attention that the C++ computes, with its keys and values; else None."""
    if node.target is not float_attention.OPERATOR or processor.isa() is None:
        return None
    call = float_attention.read(node)
    if call is None or (keys := _rows(call.key)) is None or (values := _rows(call.value)) is None:
        return None
    query = value_of(call.query)
    if query is None or query.dim() != 4 or not native_float_attention.operands_fit(call):
        return None
    if keys.integers.meta["val"].shape[1] != values.integers.meta["val"].shape[1]:
        return None
    few = native_float_attention.is_few(query.shape[-2], TOO_MANY_QUERIES)
    return (call, keys, values) if few else None


def read_integers(gm: fx.GraphModule) -> None:
    """Let attention read caches of integers in C++, in a lowered graph and in place, where it can."""
    for node in gm.graph.find_nodes(op="call_function", target=float_attention.OPERATOR):
        if (parts := found(node)) is not None:
            _replace(node, *parts)


def _replace(node: fx.Node, given: FloatAttention, keys: Rows, values: Rows) -> None:
    """Let a call that was `found` compute the same in C++; what only it read is gone."""
    mask = None if given.mask is None else given.mask.nodes[0]
    others = (mask, given.is_causal, given.scale)
    with node.graph.inserting_before(node):
        call = node.graph.call_function(
            cache_attention.ATTENTION, (given.query, *keys, *values, *others)
        )
    with node.meta["val"].fake_mode:
        call.meta["val"] = node.meta["val"].transpose(1, 2).contiguous()
    node.target, node.args, node.kwargs = aten.transpose.int, (call, 1, 2), {}
    _drop([given.key, given.value], call)


def _drop(ends: list[Any], call: fx.Node) -> None:
    """Erase what gave floats to attention and to nothing else, from its ends to the integers."""
    gone: set[fx.Node] = set()
    while ends:
        node: fx.Node = ends.pop()
        if node in gone or node.users or node.op != "call_function":
            continue
        ends.append(node.args[0])
        stand_for(call, node)
        node.graph.erase_node(node)
        gone.add(node)


def _rows(node: Any) -> Rows | None:
    """Return the integers behind keys or values (B, heads, S, columns), which their heads may share."""
    given, (node, chain) = value_of(node), behind_copies(node)
    if given is None or not isinstance(node, fx.Node) or node.target is not aten.mul_.Tensor:
        return None
    converted, scale = node.args
    if not isinstance(converted, fx.Node) or converted.target is not aten.to.dtype:
        return None
    rows = Rows(converted.args[0], scale)  # type: ignore[arg-type]
    integers, scales = map(value_of, rows)
    if integers is None or scales is None or integers.dim() != 4:
        return None
    if integers.dtype != torch.int8 or scales.shape != (*integers.shape[:-1], 1):
        return None
    if not repeats_heads(integers, chain, given):
        return None
    return rows
