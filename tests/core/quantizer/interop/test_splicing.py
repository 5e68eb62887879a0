# SPDX-License-Identifier: Apache-2.0
"""What comes into a program, and the order in which it stands there."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st
from qompose.errors import InternalError
from qompose.program.graph import copy_graph_module, value_of
from qompose.program.meta import tag_of
from qompose.quantizer.interop.splicing import put_in_order
from qompose.spec.claim import Change
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from tests.core.quantizer.interop import transforms
from tests.core.quantizer.interop.aligning import (
    X,
    aligned,
    applied,
    edges,
    exported_function,
    run,
)
from tests.core.quantizer.interop.programs import WIDTH
from tests.core.quantizer.interop.transforms import rebuild, sites

aten = torch.ops.aten


class TestApply:
    """What comes into the program."""

    def test_pieces_carry_what_exported_operators_carry(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            own = rebuild(transforms.split_gelu(own))
            for node in own.graph.nodes:
                node.meta.pop("val", None)
                node.meta.pop("nn_module_stack", None)
                node.meta["mark"] = "theirs"
            return own

        program = exported_function(lambda m, x: m.act(x.sin()), act=nn.GELU())
        alignment, _, _ = aligned(program, transform)
        working = applied(program, alignment, alignment.changes)
        mode = value_of(sites(working, aten.sin.default)[0]).fake_mode
        stack = sites(program, aten.gelu.default)[0].meta["nn_module_stack"]
        for name in alignment.changes[0].pieces:
            piece = next(node for node in working.graph.nodes if node.name == name)
            assert piece.meta["val"].shape == (4, WIDTH) and piece.meta["val"].fake_mode is mode
            assert piece.meta["nn_module_stack"] == stack and piece.meta["mark"] == "theirs"
            assert tag_of(piece, "stamp") is None and tag_of(piece, "source") == "gelu"
            assert tag_of(piece, "origin") == "aten.gelu.default"

    def test_later_edits_of_the_transformed_program_do_not_reach_it(self) -> None:
        program = exported_function(lambda m, x: F.gelu(x))
        alignment, before, after = aligned(program, transforms.split_gelu)
        for node in sites(after, aten.erf.default):
            node.target, node.meta["quantization_annotation"] = aten.sin.default, node
        working = applied(program, alignment, alignment.changes)
        torch.testing.assert_close(run(working, (X,)), run(before, (X,)))

    def test_annotations_stay_with_the_member(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            for node in transforms.split_gelu(own).graph.nodes:
                node.meta["quantization_annotation"] = node
            return own

        program = exported_function(lambda m, x: F.gelu(x))
        alignment, _, _ = aligned(program, transform)
        working = applied(program, alignment, alignment.changes)
        assert not any("quantization_annotation" in node.meta for node in working.graph.nodes)

    def test_changes_of_two_transforms(self) -> None:
        """Each stands on the program as it was; both are made in one."""
        program = exported_function(
            lambda m, x: F.gelu(m.linear(x)) + 2.0, linear=nn.Linear(WIDTH, WIDTH)
        )
        made = [
            aligned(program, transform)[0]
            for transform in (
                transforms.split_gelu,
                transforms.split_linear,
                transforms.scalars_to_constants,
            )
        ]
        expected = run(program, (X,))
        for order in itertools.permutations(made):
            working = copy_graph_module(program)
            for alignment in order:
                alignment.apply(working, alignment.changes)
            working.graph.lint()
            torch.testing.assert_close(run(working, (X,)), expected)
            assert edges(working)["gelu_mul"] == ("linear",)

    def test_a_change_of_another_alignment(self) -> None:
        program = exported_function(lambda m, x: F.gelu(x))
        alignment, _, _ = aligned(program, transforms.split_gelu)
        with pytest.raises(InternalError, match="no change of this transform"):
            alignment.apply(copy_graph_module(program), [Change(("gelu",), ())])

    def test_a_change_that_was_made(self) -> None:
        program = exported_function(lambda m, x: F.gelu(x).exp())
        alignment, _, _ = aligned(program, transforms.drop_identities)
        assert alignment.changes == ()
        alignment, _, _ = aligned(program, transforms.split_gelu)
        working = copy_graph_module(program)
        alignment.apply(working, alignment.changes)
        with pytest.raises(InternalError, match="called gelu_"):
            alignment.apply(working, alignment.changes)


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
