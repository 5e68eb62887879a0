# SPDX-License-Identifier: Apache-2.0
"""What it takes for nodes of two programs to be the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose.quantizer.interop.comparing import (
    Constants,
    difference,
    same_content,
    same_number,
    spelled,
)
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten


def node(target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call that reads a placeholder where an argument is "x"."""
    graph = Graph()
    x = graph.placeholder("x")
    swap = torch.fx.node.map_aggregate
    args, kwargs = swap((args, kwargs), lambda leaf: x if leaf == "x" else leaf)
    return graph.call_function(target, args, kwargs)


SAME = [
    ((aten.add.Tensor, ("x", "x"), {}), (aten.add.Tensor, ("x", "x"), {"alpha": 1})),
    ((aten.sum.dim_IntList, ("x", [1]), {}), (aten.sum.dim_IntList, ("x", (1,), False), {})),
    ((aten.softmax.int, ("x", 1), {}), (aten.softmax.int, (), {"self": "x", "dim": 1})),
    ((aten.mul.Scalar, ("x", float("nan")), {}), (aten.mul.Scalar, ("x", float("nan")), {})),
]
OTHERS = [
    ((aten.add.Tensor, ("x", "x"), {}), (aten.add.Tensor, ("x", "x"), {"alpha": 2})),
    ((aten.add.Tensor, ("x", "x"), {}), (aten.sub.Tensor, ("x", "x"), {})),
    ((aten.add.Tensor, ("x", 1), {}), (aten.add.Tensor, ("x", 1.0), {})),
    ((aten.add.Tensor, ("x", 1), {}), (aten.add.Tensor, ("x", True), {})),
    ((aten.add.Tensor, ("x", 1), {}), (aten.add.Tensor, ("x", "x"), {})),
    ((aten.cat.default, (["x", "x"],), {}), (aten.cat.default, (["x"],), {})),
    ((slice, ("x", slice(0, 1)), {}), (slice, ("x", slice(0, 2)), {})),
    ((slice, ("x", []), {}), (slice, ("x",), {})),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_call(one: Any, other: Any) -> None:
    first, second = (spelled(node(target, *args, **kw)) for target, args, kw in (one, other))
    assert first.key == second.key and len(first.operands) == len(second.operands)


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_another_call(one: Any, other: Any) -> None:
    first, second = (spelled(node(target, *args, **kw)) for target, args, kw in (one, other))
    assert first.key != second.key


def test_operands_are_in_the_order_of_their_places() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    call = graph.call_function(aten.add.Tensor, (), {"other": y, "self": x})
    assert spelled(call).operands == (x, y)


def body(target: Any, name: str = "x") -> GraphModule:
    graph = Graph()
    x = graph.placeholder(name)
    graph.output((graph.call_function(target, (x,)),))
    return GraphModule({}, graph)


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (ONES, ONES, True),
        (ONES, nn.Parameter(ONES), True),
        (ONES, ONES.clone(), True),
        (ONES, ONES * 2, False),
        (ONES, ONES.double(), False),
        (ONES, torch.ones(3, 2), False),
        (ONES * float("nan"), ONES * float("nan"), False),
        (body(aten.sin.default), body(aten.sin.default, "other"), True),
        (body(aten.sin.default), body(aten.cos.default), False),
        (ONES, body(aten.sin.default), False),
    ],
    ids=str,
)
def test_content(one: Any, other: Any, expected: bool) -> None:
    assert same_content(one, other) is expected


def test_constants_are_found_by_memory_first() -> None:
    """Two that are equal are two."""

    def reading(**stored: Tensor) -> GraphModule:
        graph = Graph()
        reads = [graph.get_attr(name) for name in stored]
        graph.output(tuple(reads))
        module = nn.Module()
        for name, value in stored.items():
            module.register_buffer(name, value)
        return GraphModule(module, graph)

    first, second = torch.zeros(3), torch.zeros(3)
    constants = Constants(reading(first=first, second=second))
    for stored, expected in (
        (first, "first"),
        (second, "second"),
        (torch.zeros(3), "first"),
        (torch.ones(3), None),
    ):
        read = next(iter(reading(read=stored).graph.nodes))
        found = constants.find(read)
        assert (found.target if found else None) == expected


def symbolic() -> tuple[Tensor, Tensor]:
    """Return examples of shape (s, 3) and (2 s,)."""

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat(2, 1).sum(1)

    batch = torch.export.Dim("batch")
    program = torch.export.export(Flat(), (torch.ones(4, 3),), dynamic_shapes=({0: batch},))
    nodes = list(program.graph.nodes)
    return nodes[0].meta["val"], nodes[-2].meta["val"]


def test_kinds_of_values() -> None:
    x, flat = symbolic()
    for one, other, change in (
        (ONES, torch.zeros(2, 3), None),
        (ONES, None, None),
        (x, x, None),
        (ONES, ONES.double(), "float32 of shape (2, 3) became float64 of shape (2, 3)"),
        (x, torch.ones(4, 3), f"float32 of shape ({x.shape[0]}, 3) became float32 of shape (4, 3)"),
        ((ONES, 1), (ONES, 2), None),
        ((ONES,), (ONES, ONES), "1 values became 2"),
        (1, ONES, "int became float32 of shape (2, 3)"),
        (x.shape[0], 4, None),
    ):
        assert difference(one, other) == change
    assert difference(x.sum(1), flat) is not None


def test_numbers_compare_by_their_expressions() -> None:
    x, flat = symbolic()
    assert same_number(x.shape[0] * 2, flat.shape[0]) and not same_number(x.shape[0], flat.shape[0])
    assert not same_number(4, 4), "what is no symbol is a literal"
