# SPDX-License-Identifier: Apache-2.0
"""Attention written with the operators that XNNPACK has."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from qompose.backend import arguments_of
from torch.fx import Graph, Node

from qompose_xnnpack.executorch_target.nodes import (
    add_before,
    has_known_sizes,
    keeps_strides,
    writes,
    written_by,
)

aten = torch.ops.aten
Call = Callable[..., Node]
Masks = dict[Any, tuple[Node | None, Node | None]]
"""By a mask, or the sizes of a causal one: what is added to scores, and the factor of results."""
_REPEATS = (aten.unsqueeze.default, aten.expand.default, aten.reshape.default)


def split_attention(graph: Graph) -> None:
    """Write float attention of known sizes as products, sums and a softmax, in place.

    torch's own decomposition asks in every layer which rows of the scores are masked throughout, and repeats
    the keys and values of a group for each of its heads: a dozen operators that XNNPACK does not have. Here
    a mask is looked at once, for all layers that share it, and the heads of a group are rows of one product.
    """
    masks: Masks = {}
    for node in list(graph.nodes):
        if (
            node.target is aten.scaled_dot_product_attention.default
            and _is_known(node)
            and not keeps_strides(node)
        ):
            _split(node, masks)


def _is_known(node: Node) -> bool:
    """Whether sizes are numbers, values are float32 in batches of heads, and nothing is dropped."""
    given = arguments_of(node)
    tensors = [given[name].meta["val"] for name in ("query", "key", "value")]
    mask = given["attn_mask"]
    if mask is not None:
        tensors.append(mask.meta["val"])
        if tensors[-1].dtype not in (torch.bool, torch.float32):
            return False
    query, key, value = tensors[:3]
    return (
        all(map(has_known_sizes, tensors))
        and all(tensor.dim() == 4 and tensor.dtype == torch.float32 for tensor in tensors[:3])
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1] == value.shape[1]
        and query.shape[1] % key.shape[1] == 0
        and given["dropout_p"] == 0
        and not isinstance(given["scale"], Node)
    )


def _split(node: Node, masks: Masks) -> None:
    given, call = arguments_of(node), partial(add_before, node)
    query = given["query"]
    key, value = (_without_repeats(given[name], node) for name in ("key", "value"))
    if key.meta["val"].shape[:3] != value.meta["val"].shape[:3]:
        key, value = given["key"], given["value"]
    batch, heads, length, width = query.meta["val"].shape
    _, groups, keys, _ = key.meta["val"].shape
    bias, alive = _mask(given, (length, keys), node, masks)
    scale = 1 / math.sqrt(width) if given["scale"] is None else given["scale"]
    parts, rows = batch * groups, heads // groups * length
    scaled = call(aten.mul.Tensor, query, scale)
    left = call(aten.view_copy.default, scaled, [parts, rows, width])
    right, values = (
        call(aten.view_copy.default, each, [parts, keys, each.meta["val"].shape[3]])
        for each in (key, value)
    )
    scores = call(aten.bmm.default, left, call(aten.permute_copy.default, right, [0, 2, 1]))
    scores = call(aten.view_copy.default, scores, [batch, heads, length, keys])
    if bias is not None:
        scores = call(aten.add.Tensor, scores, bias)
    weights = call(aten._softmax.default, scores, -1, False)
    weights = call(aten.view_copy.default, weights, [parts, rows, keys])
    result = call(aten.bmm.default, weights, values)
    result = call(aten.view_copy.default, result, list(node.meta["val"].shape))
    if alive is not None:
        result = call(aten.mul.Tensor, result, alive)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _mask(
    given: dict[str, Any], sizes: tuple[int, int], node: Node, masks: Masks
) -> tuple[Node | None, Node | None]:
    """Return what is added to scores, and the factor of results: 0 for rows that see nothing, as in torch.

    Nothing is added in such a row, since the softmax of infinities alone is NaN.
    """
    mask, call = given["attn_mask"], partial(add_before, node)
    place = mask or (sizes if given["is_causal"] else None)
    if place is None or place in masks:
        return masks.get(place, (None, None))
    if mask is None:  # the first key is never masked
        ones = call(aten.full.default, list(sizes), True, dtype=torch.bool)
        return masks.setdefault(sizes, (_bias(call, call(aten.tril.default, ones)), None))
    is_bool = mask.meta["val"].dtype == torch.bool
    seen = mask if is_bool else call(aten.ne.Scalar, mask, -math.inf)
    alive = call(aten.any.dim, seen, -1, True)
    if is_bool:
        blank = call(aten.logical_not.default, alive)
        bias = _bias(call, call(aten.logical_or.default, mask, blank))
    else:
        bias = call(aten.where.self, alive, mask, call(aten.full.default, [], 0.0))
    made = bias, call(aten.to.dtype, alive, torch.float32)
    if mask.meta["val"].dtype not in _written_types(node.graph):  # else it may change meanwhile
        masks[mask] = made
    return made


def _bias(call: Call, seen: Node) -> Node:
    zero, least = (call(aten.full.default, [], number) for number in (0.0, -math.inf))
    return call(aten.where.self, seen, zero, least)


def _written_types(graph: Graph) -> set[torch.dtype]:
    return {node.meta["val"].dtype for call in graph.nodes for node in written_by(call)}


def _without_repeats(node: Node, until: Node) -> Node:
    """Return the keys or values of which `node` is a copy for each head, as `repeat_kv` makes them.

    It is `node` where there is no such copy, or something is written before `until` reads it.
    """
    chain = [node]
    for operator in reversed(_REPEATS):
        if chain[-1].target is not operator:
            return node
        chain.append(chain[-1].all_input_nodes[0])
    _, expanded, unsqueezed, source = chain
    shape, wide = source.meta["val"].shape, expanded.meta["val"].shape
    if unsqueezed.args[1] != 2 or wide != (*shape[:2], wide[2], *shape[2:]):
        return node
    if node.meta["val"].shape != (shape[0], wide[1] * wide[2], *shape[2:]):
        return node
    return node if _writes_between(node, until) else source


def _writes_between(first: Node, last: Node) -> bool:
    node = first
    while node is not last:
        if writes(node):
            return True
        node = node.next
    return False
