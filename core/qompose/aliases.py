# SPDX-License-Identifier: Apache-2.0
"""Writes in place: which values are changed under another name than the one they are read by.

A quantized tensor reaches its readers through copies, so a write to one of its names would be lost on the
others. `y.relu_()` whose result is read is harmless; `y[:, :2] = 0` with a later read of `y` is not, and
neither is a write to an input or a buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch.fx import Graph, Node


def unsafe_values(graph: Graph) -> frozenset[str]:
    """Return the names of values that share memory with one that is written and then read elsewhere."""
    families = _families(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    unsafe: set[str] = set()
    for root, members in families.items():
        writers = [node for node in members if _written(node)]
        stale = any(_reads_stale(writer, members, position) for writer in writers)
        if writers and (stale or root.op in ("placeholder", "get_attr")):
            unsafe.update(node.name for node in members)
    return frozenset(unsafe)


def written_buffers(graph: Graph) -> frozenset[str]:
    """Return the attribute paths of the buffers that a program writes to."""
    return frozenset(
        str(root.target)
        for root, members in _families(graph).items()
        if root.op == "get_attr" and any(_written(node) for node in members)
    )


def _families(graph: Graph) -> dict[Node, list[Node]]:
    """Group values by the memory they share: a root, its views, and what writes to them."""
    root_of: dict[Node, Node] = {}
    families: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        source = next((root_of[a] for a in _aliased(node) if a in root_of), node)
        root_of[node] = source
        families[source].append(node)
    return families


def _aliased(node: Node) -> Iterator[Node]:
    """Yield the arguments whose memory a call's value shares, or to which the call writes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return
    for i, argument in enumerate(schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(value, Node):
            yield value


def _written(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _reads_stale(writer: Node, members: list[Node], position: dict[Node, int]) -> bool:
    """Tell whether a value from before a write is read after it, other than by the write itself."""
    before = [node for node in members if position[node] < position[writer]]
    return any(position[user] > position[writer] for node in before for user in node.users)
