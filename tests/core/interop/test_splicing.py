# SPDX-License-Identifier: Apache-2.0
"""The order of a program's nodes after pieces were put into it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qompose.errors import InternalError
from qompose.interop.splicing import put_in_order
from torch import nn
from torch.fx import Graph, GraphModule, Node

CAT = torch.ops.aten.cat.default


def program(edges: list[list[int]], order: list[int]) -> GraphModule:
    """A program whose i-th operator reads the operators `edges[i]`; its nodes stand in `order`."""
    graph = Graph()
    x = graph.placeholder("x")
    nodes: list[Node] = []
    for number, sources in enumerate(edges):
        operands = [x, *(nodes[source] for source in sources)]
        nodes.append(graph.create_node("call_function", CAT, (operands,), name=f"n{number}"))
    output = graph.output(tuple(nodes))
    for number in order:
        output.prepend(nodes[number])
    return GraphModule(nn.Module(), graph)


def names(module: GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


@given(st.data(), st.integers(1, 8))
def test_operators_stand_behind_what_they_read(data: st.DataObject, count: int) -> None:
    edges = [
        data.draw(st.lists(st.integers(0, i - 1), unique=True)) if i else [] for i in range(count)
    ]
    module = program(edges, data.draw(st.permutations(range(count))))
    was_in_order = names(module)
    put_in_order(module)
    module.graph.lint()
    position = {name: i for i, name in enumerate(names(module))}
    assert all(position[f"n{s}"] < position[f"n{i}"] for i, ends in enumerate(edges) for s in ends)
    again = names(module)
    put_in_order(module)
    assert names(module) == again
    if all(
        was_in_order.index(f"n{s}") < was_in_order.index(f"n{i}")
        for i, e in enumerate(edges)
        for s in e
    ):
        assert names(module) == was_in_order


def test_what_need_not_move_stays() -> None:
    module = program([[], [], [1], [], []], [0, 2, 3, 1, 4])
    put_in_order(module)
    assert names(module) == ["n0", "n3", "n1", "n2", "n4"]


def test_a_circle_has_no_order() -> None:
    module = program([[], [0]], [0, 1])
    first, second = (node for node in module.graph.nodes if node.op == "call_function")
    first.args = ([second],)
    with pytest.raises(InternalError, match="the program has no order"):
        put_in_order(module)
