# SPDX-License-Identifier: Apache-2.0
"""The nodes of a graph with those of the bodies of its control flow."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node


def nodes_in(graph: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of all bodies inside it."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes
