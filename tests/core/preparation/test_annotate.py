# SPDX-License-Identifier: Apache-2.0
"""Annotate: claims on a program and its bodies, and only the rewrites that claims cover."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import qompose
import torch
from qompose import Quantizer
from qompose.errors import ConfigError
from qompose.plan.plan import Rewrite
from qompose.preparation.annotate import annotate as annotate_bound_program
from qompose.program.control_flow import graphs_in, name_apart, nodes_in, sink_constants
from qompose.program.graph import copy_graph_module
from qompose.quantizer.composition import ComposableQuantizer
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.preparation.test_zoo import of_each_kind
from tests.core.quantizer.interop.foreign import like, replace, silu_in_pieces
from tests.core.toy import (
    CONV,
    INT8,
    LINEAR,
    LINEAR_RELU,
    SIGMOID,
    STATIC,
    WEIGHT,
    Annotator,
    Model,
    NullQuantizer,
    annotate,
    convert,
    export,
    graph_text,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)
from tests.zoo import ZooModel, tagged

aten = torch.ops.aten
X = randn(4, 4)


def texts(module: GraphModule) -> list[str]:
    return [graph_text(part) for part in graphs_in(module)]


@pytest.mark.parametrize("model", of_each_kind(tagged(without="transformers")[::4]), ids=str)
def test_the_program_is_left_alone(model: ZooModel) -> None:
    exported = copy_graph_module(model.export().module(check_guards=False))
    sink_constants(exported)
    name_apart(exported)  # now it is as prepare hands it over
    before, meta = texts(exported), [sorted(map(str, node.meta)) for node in nodes_in(exported)]
    annotated = annotate_bound_program(exported, toy().bound(exported))
    assert texts(exported) == before
    assert [sorted(map(str, node.meta)) for node in nodes_in(exported)] == meta
    chosen = annotated.composition.chosen
    names = {node.name for node in nodes_in(annotated.program)}
    taken = [name for claim in chosen for name in claim.nodes]
    assert len(taken) == len(set(taken)) and set(taken) <= names, "no operator has two claims"


@pytest.fixture(scope="module")
def branch_norms() -> torch.export.ExportedProgram:
    """A batch norm in each branch and one outside."""
    layers = {
        name: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for name in ("out", "yes", "no")
    }
    model = Model(lambda m, x: torch.cond(x.sum() > 0, m.yes, m.no, (m.out(x),)), **layers)
    with torch.no_grad():  # with gradients, the export itself warns
        return export(model, randn(1, 3, 4, 4))


@pytest.mark.parametrize(
    ("left", "folded"), [((), 3), (("yes",), 2), (("yes", "no"), 1), (("out", "no"), 1)], ids=str
)
def test_rewrites_are_kept_where_claims_cover_them_in_bodies_too(
    branch_norms: torch.export.ExportedProgram, left: tuple[str, ...], folded: int
) -> None:
    quantizer = toy(CONV)
    for path in left:
        quantizer.set_module_name(path, None)
    prepared = prepare(branch_norms, quantizer)
    plan = plan_of(prepared)
    norms = [n for n in nodes_in(prepared) if n.target is aten.batch_norm.default]
    assert (len(plan.rewrites), len(norms), len(plan.claims)) == (folded, 3 - folded, folded)
    claimed = {name for claim in plan.claims for name in claim.nodes}
    for rewrite in plan.rewrites:
        assert not claimed.isdisjoint(rewrite.pieces)
        assert "batch_norm" in rewrite.nodes[1] and "batch_norm" not in "".join(rewrite.pieces)


def test_a_selector_on_half_of_a_rewrite_in_a_body_prevents_it_and_is_named(
    branch_norms: torch.export.ExportedProgram,
) -> None:
    plan = plan_of(prepare(branch_norms, toy(CONV).set_module_name("yes.1", None)))
    assert (len(plan.rewrites), len(plan.claims)) == (2, 3)
    (note,) = (note for note in plan.notes if "fold_batch_norm" in note)
    assert "true_graph_0_conv2d" in note


LAYERS = {"yes": nn.Linear(4, 4), "no": nn.Linear(4, 4)}
TWO_LAYERS = export(
    Model(lambda m, x: torch.cond(x.sum() > 0, lambda x: m.yes(x).relu(), m.no, (x,)), **LAYERS), X
)


def wants_linear(node: Node) -> None:
    if node.target is aten.linear.default:
        annotate(node, {node.args[0]: INT8, node.args[1]: WEIGHT}, INT8)  # type: ignore[dict-item]


def takes_all(node: Node) -> None:
    """Annotates what is annotated already, in another way."""
    if node.target is aten.linear.default:
        annotate(node, {node.args[0]: INT8}, None)  # type: ignore[dict-item]


def test_priority_is_that_of_the_members_in_bodies_too() -> None:
    layers, pairs = toy(LINEAR, name="layers"), toy(LINEAR_RELU, LINEAR, name="pairs")
    for members in ((layers, pairs), (pairs, layers)):
        plan = plan_of(prepare(TWO_LAYERS, qompose.compose(*members)))
        assert {claim.owner for claim in plan.claims} == {members[0].name}
        first, second = (member.name for member in members)
        assert all((c.winner, c.loser) == (first, second) for c in plan.conflicts)
        assert len(plan.conflicts) >= 2, "one in each branch"
        sizes = sorted(len(claim.nodes) for claim in plan.claims)
        assert sizes == ([1, 1] if members[0] is layers else [1, 2])


def test_an_overwritten_annotation_in_a_body_is_an_error_or_undone() -> None:
    members = Annotator(wants_linear, "earlier"), Annotator(takes_all, "later")
    with pytest.raises(qompose.errors.AnnotationConflictError) as caught:
        prepare(TWO_LAYERS, qompose.compose(*members))
    error = caught.value
    assert (error.earlier, error.later) == ("earlier", "later") and "graph_0_linear" in error.node
    plan = plan_of(prepare(TWO_LAYERS, qompose.compose(*members, on_conflict="first")))
    assert [claim.owner for claim in plan.claims] == ["earlier", "earlier"]


def test_what_is_said_of_every_body_is_listed_once() -> None:
    quantizer = toy(LINEAR).set_object_type(nn.Conv3d, None).set_module_name_regex("none.*", STATIC)
    notes = plan_of(prepare(TWO_LAYERS, quantizer)).notes
    assert len(notes) == len(set(notes)) == 2


def test_all_hooks_see_the_names_that_reports_use() -> None:
    """`validate` gets the program with its bodies annotated, under the names of claims."""
    names: set[str] = set()

    class Looking(Annotator):
        def validate(self, model: GraphModule) -> None:
            names.update(n.name for n in nodes_in(model) if "quantization_annotation" in n.meta)

    prepared = prepare(TWO_LAYERS, Looking(wants_linear, "looking"))
    assert names == {claim.anchor for claim in plan_of(prepared).claims}
    assert len(names) == 2


TRANSFORM = ": transform_for_annotation"


def transforming(
    edit: Callable[[GraphModule, dict[str, Node]], None], name: str = "Editing"
) -> Quantizer:
    """A quantizer that edits the program in place, and annotates nothing."""

    def transform_for_annotation(self: Any, model: GraphModule) -> GraphModule:
        edit(model, {node.name: node for node in model.graph.nodes})
        model.recompile()
        return model

    facts = {"transform_for_annotation": transform_for_annotation}
    return type(name, (NullQuantizer,), facts)()


def split(model: GraphModule, nodes: dict[str, Node]) -> None:
    node = nodes["linear"]
    x, weight, bias = node.args
    product = lambda: like(node, aten.linear.default, x, weight)  # noqa: E731
    replace(model, node, lambda: like(node, aten.add.Tensor, product(), bias))


def subtract(model: GraphModule, nodes: dict[str, Node]) -> None:
    node = nodes["add_tensor"]
    replace(model, node, lambda: like(node, aten.sub.Tensor, *node.args))


def retarget(model: GraphModule, nodes: dict[str, Node]) -> None:
    nodes["tanh"].target = aten.sigmoid.default


Split = partial(transforming, split, "Split")
Silu = partial(transforming, lambda model, nodes: silu_in_pieces(model), "Silu")
PROGRAM = export(
    seeded(Model(lambda m, x: torch.tanh(nn.functional.silu(m.a(x))), a=nn.Linear(4, 4))), X
)
RULES = (LINEAR, SIGMOID)


def test_what_was_made_is_listed_where_it_stands_and_what_is_gone_is_not() -> None:
    lowered = qompose.lower(convert(PROGRAM, qompose.compose(Split(), toy(LINEAR)), X))
    report = qompose.report(lowered)
    assert [(r.name, r.operator, r.module, r.macs, r.owner) for r in report.rows] == [
        ("linear_default", "aten.linear", "a", 64, "toy"),
        ("add_tensor", "aten.add.Tensor", "a", 0, ""),
        ("silu", "aten.silu", "", 0, ""),
        ("tanh", "aten.tanh", "", 0, ""),
    ]
    assert report.coverage() == 1.0
    qompose.assert_lowered(lowered)


def test_each_member_has_a_rewrite_and_a_note_of_its_own() -> None:
    rules = toy(*RULES).set_operator_type(torch.sigmoid, STATIC)  # all around it is in float
    plan = plan_of(prepare(PROGRAM, qompose.compose(Split(), rules, Silu(), NullQuantizer())))
    assert plan.rewrites == (
        Rewrite(f"Split{TRANSFORM}", ("linear",), ("linear_default", "add_tensor"), member="Split"),
        Rewrite(f"Silu{TRANSFORM}", ("silu",), ("sigmoid_default", "mul_tensor"), member="Silu"),
    )
    assert {o.name for o in plan.operators if o.claim is not None} == {
        "linear_default", "sigmoid_default",
    }  # fmt: skip


def test_two_members_of_one_name_are_told_apart() -> None:
    again = qompose.compose(transforming(subtract, "Split"))
    plan = plan_of(prepare(PROGRAM, qompose.compose(Split(), again, toy(LINEAR))))
    assert [(r.name, r.nodes) for r in plan.rewrites] == [
        ("Split: transform_for_annotation", ("linear",)),
        ("Split#2: transform_for_annotation", ("add_tensor",)),
    ]
    assert [o.name for o in plan.operators] == ["linear_default", "sub_tensor", "silu", "tanh"]


def test_a_composition_with_a_transform_of_its_own_is_one_step() -> None:
    class Own(ComposableQuantizer):
        transform_for_annotation = type(Split()).transform_for_annotation

    plan = plan_of(prepare(PROGRAM, Own((Silu(), toy(LINEAR)))))
    assert [r.name for r in plan.rewrites] == ["Silu+toy: transform_for_annotation"]


def test_an_operator_that_kept_its_name_is_listed_as_what_it_is_now() -> None:
    members = transforming(retarget, "Retarget"), toy(SIGMOID)
    plan = plan_of(prepare(PROGRAM, qompose.compose(*members)))
    assert plan.rewrites == (
        Rewrite(f"Retarget{TRANSFORM}", ("tanh",), ("tanh",), member="Retarget"),
    )
    (operator,) = (o for o in plan.operators if o.name == "tanh")
    assert (operator.operator, operator.claim) == ("aten.sigmoid", 0)


def test_can_quantize_answers_for_what_was_made_and_says_who_rewrote_what_is_gone() -> None:
    members = [Split(), toy(LINEAR)]
    made = ("Split", "linear_default", "add_tensor")
    assert qompose.can_quantize(PROGRAM, "linear_default", members)
    added = qompose.can_quantize(PROGRAM, "add_tensor", members)
    assert not added and "toy" in [who for who, _ in added.reasons]
    assert all(name in added.rewrites[0] for name in made)
    gone = qompose.can_quantize(PROGRAM, "linear", members)
    assert not gone and all(name in gone.reason for name in made)
    assert not qompose.can_quantize(PROGRAM, "linear", [Split()])
    assert qompose.can_quantize(PROGRAM, "linear", [toy(LINEAR)])
    for name, asked in (("linear_defaul", members), ("linear_default", [toy(LINEAR)])):
        with pytest.raises(ConfigError, match="linear_default"):
            qompose.can_quantize(PROGRAM, name, asked)


def two_values(m: Any, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two outputs of one shape, and integers."""
    return m.inner(x).relu(), m.inner(x).tanh(), k + 1


TWO_VALUES = seeded(Model(two_values, inner=nn.Linear(4, 4)))
INPUTS = (randn(4, 4), torch.arange(4))


def swap(model: GraphModule, nodes: dict[str, Node]) -> None:
    first, second, third = nodes["output"].args[0]  # type: ignore[misc]
    nodes["output"].args = ((second, first, third),)


def widen(model: GraphModule, nodes: dict[str, Node]) -> None:
    with model.graph.inserting_after(nodes["relu"]):
        wide = model.graph.call_function(aten.to.dtype, (nodes["relu"], torch.float64))
    _, second, third = nodes["output"].args[0]  # type: ignore[misc]
    nodes["output"].args = ((wide, second, third),)


def test_a_transform_that_returns_other_values_is_refused() -> None:
    with pytest.raises(qompose.UserError, match="Editing: transform_for_annotation"):
        prepare(export(TWO_VALUES, *INPUTS), transforming(swap))


def divide(model: GraphModule, nodes: dict[str, Node]) -> None:
    nodes["add"].target, nodes["add"].args = aten.div.Tensor, (nodes["k"], 2)


def cast_inside(model: GraphModule, nodes: dict[str, Node]) -> None:
    with model.graph.inserting_before(nodes["relu"]):
        wide = model.graph.call_function(aten.to.dtype, (nodes["linear"], torch.float64))
    nodes["relu"].args = (wide,)


@pytest.mark.parametrize(
    ("edit", "name"), [(divide, "add"), (cast_inside, "relu"), (widen, "relu")]
)
def test_a_value_of_another_dtype_is_undone(edit: Any, name: str) -> None:
    prepared = prepare(export(TWO_VALUES, *INPUTS), transforming(edit))
    for expected, actual in zip(TWO_VALUES(*INPUTS), prepared(*INPUTS), strict=True):
        assert torch.equal(expected, actual)
    assert any("Editing" in n and name in n for n in plan_of(prepared).notes)


def test_annotate_may_remove_what_no_result_depends_on() -> None:
    def unused(m: Any, x: Tensor) -> Tensor:
        found = m.inner(x)
        m.pooler(found).tanh()
        return found.relu()

    class Tidy:
        def annotate(self, model: GraphModule) -> GraphModule:
            model.graph.eliminate_dead_code()
            return model

        def validate(self, model: GraphModule) -> None: ...

    model = seeded(Model(unused, inner=nn.Linear(4, 4), pooler=nn.Linear(4, 4)))
    prepared = prepare(export(model, X), qompose.compose(Tidy(), toy(LINEAR)))
    assert torch.equal(prepared(X), model(X))
