# SPDX-License-Identifier: Apache-2.0
"""Flow: which values an operator reads, past nodes that only hand them on, and across borders of bodies.

What one pass of a loop leaves to the next is not followed: without it, nothing reads its own result.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qompose.nested import LAYOUTS, bodies_of, is_nested_call, nodes_in, operands_of

aten = torch.ops.aten

_SIZES = {
    aten.sym_size.int,
    aten.sym_stride.int,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
}
"""What reads the shape of a value, and none of its numbers."""


class Flow:
    """The values that the nodes of one program read."""

    def __init__(self, program: GraphModule) -> None:
        self._callers = {
            body.graph: call
            for call in nodes_in(program)
            if is_nested_call(call)
            for body in bodies_of(call)
        }

    def producers(self, reader: Node, ends: Callable[[Node], bool]) -> list[Node]:
        """Return the nodes nearest behind a reader for which `ends` holds, in the order of its arguments."""
        found: dict[Node, None] = {}
        seen: set[Node] = set()
        waiting = self._sources(reader)[::-1]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if ends(node):
                found[node] = None
            else:
                waiting += reversed(self._sources(node))
        return list(found)

    def _sources(self, node: Node) -> list[Node]:
        """Return the nodes whose values a node takes its own from."""
        if node.op == "placeholder":
            return self._operand(node)
        if is_nested_call(node):
            return _results(node, slice(None))
        source = node.args[0] if node.target is getitem else None
        if isinstance(source, Node) and is_nested_call(source):
            index: Any = node.args[1]
            return _results(source, slice(index, index + 1))
        return [] if node.target in _SIZES else node.all_input_nodes

    def _operand(self, placeholder: Node) -> list[Node]:
        """Return what the caller of a body passes for one of its placeholders."""
        call = self._callers.get(placeholder.graph)
        if call is None:
            return []
        operands = operands_of(call)
        flat = [*operands["carried"], *operands["slices"], *operands["whole"]]
        names = [node for node in placeholder.graph.nodes if node.op == "placeholder"]
        operand = flat[names.index(placeholder)]
        return [operand] if isinstance(operand, Node) else []


def _results(call: Node, which: slice) -> list[Node]:
    """Return what the bodies of a call, any of which may run, give for some of its results."""
    bodies = bodies_of(call)
    found: dict[Node, None] = {}
    for number in LAYOUTS[call.target].results:
        (outputs,) = bodies[number].graph.output_node().args
        listed = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        found.update((node, None) for node in listed[which] if isinstance(node, Node))
    return list(found)
