# SPDX-License-Identifier: Apache-2.0
"""What a quantizer writes into nodes' meta besides annotations, for tools that come later.

Partitioners of several backends look for such entries on the operators that their quantizer annotated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.graph import CUSTOM_KEY, PROVENANCE
from qompose.specs import ANNOTATION_KEY

_OURS = {*PROVENANCE, ANNOTATION_KEY, "val", "tensor_meta"}


def marks_between(before: GraphModule, after: GraphModule) -> dict[str, dict[str, Any]]:
    """Return the entries that nodes of `after` have beyond those of the same name in `before`.

    Entries under "custom" are compared one by one. Those that hold nodes or graphs are left out: they
    would keep a copy of the program alive, and mean nothing in another one.
    """
    known = {node.name: node.meta for node in before.graph.nodes}
    pairs = ((node, known[node.name]) for node in after.graph.nodes if node.name in known)
    found = {node.name: dict(_entries(node.meta, meta)) for node, meta in pairs}
    return {name: entries for name, entries in found.items() if entries}


def _entries(meta: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in meta.items():
        if key not in earlier and key not in _OURS and _is_plain(value):
            yield key, value
    had = earlier.get("custom") or {}
    custom = {
        key: value
        for key, value in (meta.get("custom") or {}).items()
        if key not in had and key != CUSTOM_KEY and _is_plain(value)
    }
    if custom:
        yield "custom", custom


def _is_plain(value: object) -> bool:
    parts = [*pytree.tree_leaves(value), *getattr(value, "__dict__", {}).values()]
    return not any(isinstance(part, (Node, Graph, GraphModule)) for part in parts)
