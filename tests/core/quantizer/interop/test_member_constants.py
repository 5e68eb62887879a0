# SPDX-License-Identifier: Apache-2.0
"""What a program returns, where a member's transform makes another value of it than an operator's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import qompose
import torch
from qompose.program.graph import get_attribute
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from tests.core.quantizer.interop.foreign import (
    INT8,
    KEY,
    WEIGHT,
    Annotation,
    Foreign,
    Shared,
    aten,
    calls,
    derived_bias,
    put,
)
from tests.core.toy import Model, export, groups_of, plan_of, points_of, prepare, randn, seeded

X = randn(6, 4)


# Returns what depends on its parameters alone, beside what depends on its input.
NET = Model(lambda m, x: (m.a(x), m.a.weight + 1), a=nn.Linear(4, 4))
PROGRAM = export(seeded(NET), X)


class Folding(Foreign):
    """Makes a constant of an addition to a parameter, and annotates the edges to the end."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in calls(model, aten.add.Tensor):
            weight = get_attribute(model, str(node.args[0].target))  # type: ignore[union-attr]
            model.register_buffer("_frozen_param0", weight.detach() + node.args[1])
            with model.graph.inserting_before(node):
                node.replace_all_uses_with(model.graph.get_attr("_frozen_param0"))
            model.graph.erase_node(node)
        model.recompile()
        return model

    def annotate(self, model: GraphModule) -> None:
        super().annotate(model)
        end = model.graph.output_node()
        end.meta[KEY] = Annotation(dict.fromkeys(end.all_input_nodes, INT8))


class AtTheRead(Folding):
    """Says the same of the read of the constant."""

    def annotate(self, model: GraphModule) -> None:
        Foreign.annotate(self, model)
        for node in model.graph.output_node().all_input_nodes:
            if node.op == "get_attr":
                put(node, output=INT8)


@pytest.mark.parametrize(
    ("kind", "place"),
    [(Folding, "_frozen_param0 -> output"), (AtTheRead, "output of _frozen_param0")],
)
def test_a_constant_that_a_transform_puts_there_is_quantized(kind: Any, place: str) -> None:
    prepared = prepare(PROGRAM, qompose.compose(kind()))
    assert place in points_of(prepared)
    (rewrite,) = plan_of(prepared).rewrites
    assert (rewrite.nodes, rewrite.pieces) == (("add",), ())
    prepared(X)
    _, made = qompose.convert_pt2e(prepared)(X)
    _, expected = PROGRAM.module()(X)
    assert 0 < (made - expected).norm() < 0.01 * expected.norm()


def test_it_is_there_where_no_claim_reads_it() -> None:
    nowhere = type("Nowhere", (Folding,), {"annotate": Foreign.annotate})
    prepared = prepare(PROGRAM, qompose.compose(nowhere()))
    assert [rewrite.nodes for rewrite in plan_of(prepared).rewrites] == [("add",)]
    assert not calls(prepared, aten.add.Tensor)


class Behind(Folding):
    """Puts an operator behind what is returned, and annotates nothing but the edge from it to the end."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        end = model.graph.output_node()
        first, *others = end.args[0]  # type: ignore[misc]
        with model.graph.inserting_before(end):
            last = model.graph.call_function(aten.clone.default, (first,))
        last.meta = {"val": first.meta["val"]}  # type: ignore[union-attr]
        end.args = ((last, *others),)
        model.recompile()
        return model

    def wanted(self, model: GraphModule) -> list[Node]:
        return []


def test_an_operator_that_only_the_end_reads() -> None:
    prepared = prepare(PROGRAM, qompose.compose(Behind()))
    assert "clone_default -> output" in points_of(prepared)
    assert [rewrite.pieces for rewrite in plan_of(prepared).rewrites] == [("clone_default",)]
    assert all(torch.equal(*pair) for pair in zip(prepared(X), PROGRAM.module()(X), strict=True))


class Biased(Foreign):
    """Asks for 32 bit biases, with scales computed from those of what is multiplied."""

    def asked(self, node: Node) -> Any:
        x, weight, bias = node.args
        return Annotation({x: INT8, weight: WEIGHT, bias: derived_bias(node)}, INT8)


class EachItsOwn(Biased):
    """Its transform gives every reader of a parameter a read of its own, under a path of its own."""

    same_path = False

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in [node for node in model.graph.nodes if node.op == "get_attr"]:
            for number, user in enumerate(list(node.users)[1:]):
                path = str(node.target) if self.same_path else f"_own_{node.name}_{number}"
                if not self.same_path:
                    model.register_parameter(path, get_attribute(model, str(node.target)))
                with model.graph.inserting_before(user):
                    user.replace_input_with(node, model.graph.get_attr(path))
        model.graph.eliminate_dead_code()
        model.recompile()
        return model


class ReadsAgain(EachItsOwn):
    """Under the path that it has, as passes do that trace a program anew."""

    same_path = True


# Two linears with one weight: export lists it under both names, and reads it under one.
TIED = seeded(nn.Sequential(OrderedDict(a=nn.Linear(4, 4), tanh=nn.Tanh(), b=nn.Linear(4, 4))))
TIED.b.weight = TIED.a.weight
# One weight that two operators of the program read by one node.
REUSED = seeded(
    Model(lambda m, x: F.linear(torch.tanh(m.a(x)), m.a.weight, m.a.bias), a=nn.Linear(4, 4))
)


@pytest.mark.parametrize(
    ("model", "kind"), [(TIED, EachItsOwn), (REUSED, EachItsOwn), (REUSED, ReadsAgain)]
)
def test_a_derived_bias_follows_its_weight(model: nn.Module, kind: type[Biased]) -> None:
    program = export(model, X)
    reads = [n for n in program.module().graph.nodes if n.op == "get_attr"]
    assert any(len(node.users) > 1 for node in reads)
    prepared = prepare(program, qompose.compose(kind()))
    assert groups_of(prepared) == groups_of(prepare(program, qompose.compose(Biased())))
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    error = (converted(X) - program.module()(X)).norm() / program.module()(X).norm()
    assert error < 0.05
    assert len([c for c in plan_of(prepared).claims if "linear" in c.nodes[0]]) == 2


class Whole(EachItsOwn):
    """Its transform also puts one new constant into two operators."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        first, second = calls(model, aten.linear.default)
        weight = get_attribute(model, str(first.args[1].target))  # type: ignore[union-attr]
        model.register_buffer("_new", weight.detach() + 1e-6)
        with model.graph.inserting_before(first):
            new = model.graph.get_attr("_new")
        for node in (first, second):
            node.update_arg(1, new)
        model.graph.eliminate_dead_code()
        model.recompile()
        return model


def test_it_follows_a_new_constant_of_two_operators() -> None:
    prepared = prepare(export(TIED, X), qompose.compose(Whole()))
    points = points_of(prepared)
    assert {"a_bias -> linear", "b_bias -> linear_1"} <= points
    assert len({point for point in points if "new ->" in point}) == 2


class Marked(EachItsOwn):
    """Says what it wants of a weight at its read, and lets the bias and the next weight refer to that."""

    def asked(self, node: Node) -> Any:
        x, weight, *_ = node.args
        weight.meta[KEY] = Annotation({}, WEIGHT)  # type: ignore[union-attr]
        return Annotation({x: INT8, weight: Shared(weight)}, INT8)


def test_what_is_said_of_a_read_stays_said() -> None:
    points = points_of(prepare(export(TIED, X), qompose.compose(Marked())))
    assert {"output of b_weight", "b_weight -> linear", "b_weight -> linear_1"} <= points
