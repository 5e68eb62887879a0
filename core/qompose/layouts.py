# SPDX-License-Identifier: Apache-2.0
"""Layouts in a lowered graph: a kernel may give its result another one than the operators it replaced.

Most operators ask for values alone, and views may take any layout. These depend on more: what a graph gives
back, whose strides its caller knows; `as_strided`, which counts elements in memory; and writes in place
through views, since a view that has to copy takes the write with it. For those, a tensor that a kernel has
touched gets the layout that it was exported with. Where it has that already, this costs nothing but a look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from qompose.aliases import aliased, written_values
from qompose.counting import KERNELS_TAG
from qompose.graph import call, tag_of, value_of
from qompose.strides import laid_out, order_of, same_layout

aten = torch.ops.aten

_OF_ANY_LAYOUT = {
    aten.view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
_OF_MEMORY = {aten.as_strided.default, aten.as_strided_.default, aten.view.dtype}
"""Operators that see a tensor as it lies in memory."""
MADE = "qompose_made_by_kernel"
"""Key in the meta of the calls that kernels insert: their example values have the exported layout."""


def allow_any(module: GraphModule) -> None:
    """Let a lowered graph compute the exported values in the exported layouts, in place."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = _OF_ANY_LAYOUT.get(node.target, node.target)
    made = _made(module.graph)
    roots = {root: None for node in _sensitive(module.graph) for root in _roots(node)}
    for root in roots:
        if root in made and not _as_exported(root, made[root]):
            _restore(root)


def _made(graph: Graph) -> dict[Node, Any]:
    """Return examples of what kernels make and of what is computed from it: layouts spread.

    None where there is none to be had.
    """
    made: dict[Node, Any] = {}
    for node in graph.nodes:
        by_kernel = tag_of(node, KERNELS_TAG) is not None or MADE in node.meta
        if by_kernel or not made.keys().isdisjoint(node.all_input_nodes):
            made[node] = _example(node, made)
    return made


def _example(node: Node, made: Mapping[Node, Any]) -> Any:
    """Run a call on examples of its arguments."""
    values = {other: made.get(other, value_of(other)) for other in node.all_input_nodes}
    mode = next((v.fake_mode for v in values.values() if hasattr(v, "fake_mode")), None)
    known = all(value is not None for value in values.values())
    if node.op != "call_function" or not known or mode is None:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        with mode, torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # a stranger's operator that cannot run on examples: its layout stays unknown
        return None


def _as_exported(node: Node, made: Any) -> bool:
    """Whether a value has the layout that it was exported with, as far as that is known."""
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
    if not isinstance(value, Tensor) or value.dim() < 2 or value.layout is not torch.strided:
        return
    order = order_of(value)
    if order is None:
        return
    users = list(node.users)
    last = node

    def insert(operator: Any, *args: Any) -> Node:
        nonlocal last
        with node.graph.inserting_after(last):
            example = operator(*map_arg(args, value_of))
            last = call(node.graph, operator, args, node, example)
        last.meta.pop("custom", None)  # it is no part of what the tags of `node` are about
        return last

    restored = laid_out(insert, node, order)
    for user in users:
        user.replace_input_with(node, restored)
