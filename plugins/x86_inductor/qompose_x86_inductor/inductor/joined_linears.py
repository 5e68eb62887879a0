# SPDX-License-Identifier: Apache-2.0
"""The joining of packed linears that read the same few rows, such as queries, keys and values of a token.

One call quantizes the rows once, and is long enough for several threads where each linear alone is not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch
from torch import fx

from qompose_x86_inductor.operators.linear_packed import OPERATOR, SEVERAL, LinearSizes

MOST_ROWS: Final = 8
"""Of more, each linear is long enough, and readers may want results that lie together."""


def join(gm: fx.GraphModule) -> None:
    """Let linears of the same rows be one call, in place; its results are slices of one tensor.

    Rows that are written to between two linears have two names, and are not quantized.
    """
    found = dict[Hashable, list[fx.Node]]()
    for node in gm.graph.nodes:
        if node.target is OPERATOR and _has_few_rows(node.args[0]) and not _is_result(node):
            found.setdefault(_rows_of(node), []).append(node)
    for linears in found.values():
        if len(linears) > 1:
            _join(gm.graph, linears)


def _has_few_rows(x: Any) -> bool:
    value = x.meta.get("val")
    sizes = () if value is None else value.shape[:-1]
    return (
        value is not None
        and all(type(size) is int for size in sizes)
        and math.prod(sizes) <= MOST_ROWS
    )


def _is_result(node: fx.Node) -> bool:
    """Return whether the program's caller gets it, who would keep the others' memory with a slice."""
    return any(user.op == "output" for user in node.users)


def _rows_of(node: fx.Node) -> Hashable:
    """Return what linears of one call have in common: the rows, and how these are multiplied."""
    *_, sizes = node.args
    source: Any = node.args[0]
    cast = source.target is torch.ops.aten.to.dtype
    return (*(source.args if cast else [source]), LinearSizes(*sizes)._replace(channels=0))  # type: ignore[misc]


def _join(graph: fx.Graph, linears: Sequence[fx.Node]) -> None:
    first = linears[0]
    x, constants, sizes = first.args[0], list[Any](), list[int]()
    for node in linears:
        _, *tensors, numbers = node.args
        constants += tensors
        sizes += numbers  # type: ignore[arg-type]
        for tensor in tensors:
            if isinstance(tensor, fx.Node):
                _bring(tensor, first)
    with graph.inserting_before(first):
        joined = graph.call_function(SEVERAL, (x, constants, sizes))
        start: Any = 0
        for node in linears:
            end = start + node.args[-1][0]  # type: ignore[index]
            part = graph.call_function(torch.ops.aten.slice.Tensor, (joined, -1, start, end))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
            start = end
    for node in linears:
        graph.erase_node(node)


def _bring(constant: fx.Node, place: fx.Node) -> None:
    """Move a constant, and what a cast of it reads, before a node."""
    if place < constant:
        for read in constant.all_input_nodes:
            _bring(read, place)
        place.prepend(constant)
