# SPDX-License-Identifier: Apache-2.0
"""What replacements ask of the nodes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx


def is_written_between(first: fx.Node, last: fx.Node, but: Sequence[fx.Node] = ()) -> bool:
    """Return whether an operator between two nodes of a graph, `but` some, may write to a tensor."""
    node = first
    while node is not last:
        schema = getattr(node.target, "_schema", None)
        reads = node.target is operator.getitem if schema is None else not schema.is_mutable
        if node.op == "call_function" and not reads and node not in but:
            return True
        node = node.next
    return False


def value_of(node: Any) -> Tensor | None:
    """Return the example of a node that is a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None
