# SPDX-License-Identifier: Apache-2.0
"""Layouts of what kernels make: those that a program was exported with, wherever they can be seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from qompose.program.aliasing import aliased, written_values
from qompose.program.decompositions import laid_out, order_of, same_layout
from qompose.program.graph import call, result_of, result_on, value_of
from qompose.program.meta import KERNELS_TAG, MADE, tag_of

aten = torch.ops.aten
_OF_ANY_LAYOUT = {
    aten.view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
_OF_MEMORY = {aten.as_strided.default, aten.as_strided_.default, aten.view.dtype}
"""Operators that see a tensor as it lies in memory."""


def allow_any(module: GraphModule) -> Mapping[Node, Any]:
    """Let a lowered graph compute the exported values in the exported layouts, in place.

    A kernel may give its result another layout than the operators that it replaced. Most operators ask for
    values alone, and views may take any layout. These depend on more: what a graph gives back, whose strides
    its caller knows; `as_strided`, which counts elements in memory; and writes in place through views, since
    a view that has to copy takes the write with it. For those, a tensor that a kernel has touched gets the
    layout that it was exported with. Where it has that already, this costs nothing but a look.

    Returns:
        `made_by_kernels` of the graph.
    """
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = _OF_ANY_LAYOUT.get(node.target, node.target)
    made = made_by_kernels(module.graph)
    roots = {root: None for node in _sensitive(module.graph) for root in _roots(node)}
    for root in roots:
        if root in made and not _as_exported(root, made[root]):
            _restore(root)
    return made


def made_by_kernels(graph: Graph) -> dict[Node, Any]:
    """Return examples of what kernels make and of what is computed from it: layouts spread.

    None where there is none to be had.
    """
    made: dict[Node, Any] = {}
    for node in graph.nodes:
        by_kernel = tag_of(node, KERNELS_TAG) is not None or MADE in node.meta
        if by_kernel or not made.keys().isdisjoint(node.all_input_nodes):
            values = {other: made.get(other, value_of(other)) for other in node.all_input_nodes}
            faked = any(hasattr(value, "fake_mode") for value in pytree.tree_leaves(values))
            with torch.no_grad():
                made[node] = (
                    result_on(node, values) if node.op == "call_function" and faked else None
                )
    return made


def _as_exported(node: Node, made: Any) -> bool:
    """Tell whether a value has the layout that it was exported with, as far as that is known."""
    value = value_of(node)
    if (
        not isinstance(value, Tensor)
        or not isinstance(made, Tensor)
        or free_unbacked_symbols(value)
    ):
        return False
    return value.shape == made.shape and same_layout(value, made)


def _sensitive(graph: Graph) -> Iterator[Node]:
    """Yield the values whose layout is seen from elsewhere."""
    written = written_values(graph)
    for node in graph.nodes:
        if node.op == "output" or node.target in _OF_MEMORY:
            yield from node.all_input_nodes
        if node.name in written:
            yield node


def _roots(node: Node) -> list[Node]:
    """Return the tensors of whose memory a value is, before any view of the program's own."""
    if tag_of(node, KERNELS_TAG) is not None:
        return [node]
    above = [root for other in aliased(node) for root in _roots(other)]
    return [root for root in above if isinstance(value_of(root), Tensor)] or [node]


def _restore(node: Node) -> None:
    """Let the readers of a tensor have it in the layout that it was exported with."""
    value = value_of(node)
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return
    order = order_of(value)
    if order is None:
        return
    users = list(node.users)
    last = node

    def insert(operator: Any, *args: Any) -> Node:
        nonlocal last
        with node.graph.inserting_after(last):
            example = result_of(operator, *map_arg(args, value_of))
            last = call(node.graph, operator, args, node, example)
        last.meta.pop("custom", None)  # the tags of `node` are not about it
        return last

    restored = laid_out(insert, node, order)
    for user in users:
        user.replace_input_with(node, restored)
