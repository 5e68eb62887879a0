# SPDX-License-Identifier: Apache-2.0
"""Annotate: claims on a program and its bodies, and only the rewrites that claims cover."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose import Quantizer
from qompose.backend import OperatorPattern
from qompose.preparation.annotate import annotate as annotate_bound_program
from qompose.program.control_flow import graphs_in, name_apart, nodes_in, sink_constants
from qompose.program.graph import copy_graph_module
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.toy import (
    ADD,
    CONV,
    CONV_RELU,
    INT8,
    LINEAR,
    LINEAR_RELU,
    RULES,
    STATIC,
    WEIGHT,
    Annotator,
    NullQuantizer,
    ToyBackend,
    annotate,
    export,
    graph_text,
    plan_of,
    prepare,
    randn,
    rule,
    seeded,
    toy,
)
from tests.zoo import ZooModel, by_name, tagged

aten = torch.ops.aten
X = randn(4, 4)


def annotate_program(exported: GraphModule, quantizer: Quantizer) -> Any:
    """As prepare calls it: with the quantizer bound to the program."""
    annotated = annotate_bound_program(exported, quantizer.bound(exported))
    return annotated.program, annotated.composition, annotated.rewrites


def ready(program: Any) -> GraphModule:
    """A program as `prepare_pt2e` hands it over."""
    module = copy_graph_module(program.module(check_guards=False))
    sink_constants(module)
    name_apart(module)
    return module


def texts(module: GraphModule) -> list[str]:
    return [graph_text(part) for part in graphs_in(module)]


@pytest.mark.parametrize("model", tagged(without="transformers")[::4], ids=str)
def test_the_program_is_left_alone(model: ZooModel) -> None:
    exported = ready(model.export())
    before, meta = texts(exported), [sorted(map(str, node.meta)) for node in nodes_in(exported)]
    working, composition, _ = annotate_program(exported, toy())
    assert texts(exported) == before
    assert [sorted(map(str, node.meta)) for node in nodes_in(exported)] == meta
    names = {node.name for node in nodes_in(working)}
    for claim in composition.chosen:
        assert set(claim.nodes) <= names
    taken = [name for claim in composition.chosen for name in claim.nodes]
    assert len(taken) == len(set(taken)), "no operator has two claims"


class BranchNorms(nn.Module):
    """A batch norm in each branch and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.outside, self.yes, self.no = (
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.yes, self.no, (self.outside(x),))


@pytest.mark.parametrize(
    ("left", "folded"),
    [((), 3), (("yes",), 2), (("yes", "no"), 1), (("outside", "no"), 1)],
    ids=str,
)
def test_rewrites_are_kept_where_claims_cover_them_in_bodies_too(
    left: tuple[str, ...], folded: int
) -> None:
    quantizer = toy(CONV)
    for path in left:
        quantizer.set_module_name(path, None)
    with torch.no_grad():  # with gradients, the export itself warns
        program = export(BranchNorms(), randn(1, 3, 4, 4))
    working, composition, rewrites = annotate_program(ready(program), quantizer)
    norms = [n for n in nodes_in(working) if n.target is aten.batch_norm.default]
    assert (len(rewrites), len(norms), len(composition.chosen)) == (folded, 3 - folded, folded)
    claimed = {name for claim in composition.chosen for name in claim.nodes}
    assert all(not claimed.isdisjoint(rewrite.pieces) for rewrite in rewrites)


def test_a_selector_on_half_of_a_rewrite_in_a_body_prevents_it_and_is_named() -> None:
    with torch.no_grad():
        program = export(BranchNorms(), randn(1, 3, 4, 4))
    quantizer = toy(CONV).set_module_name("yes.1", None)
    _, composition, rewrites = annotate_program(ready(program), quantizer)
    assert (len(rewrites), len(composition.chosen)) == (2, 3)
    (note,) = (note for note in composition.notes if "was not made" in note)
    assert "fold_batch_norm of true_graph_0_conv2d" in note


class Wish(NullQuantizer):
    """Makes an addition of every subtraction, and annotates additions."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=aten.sub.Tensor):
            self.seen.append(node.name)
            with model.graph.inserting_before(node):
                made = model.graph.call_function(aten.add.Tensor, node.args)
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            model.graph.erase_node(node)
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            annotate(node, {node.args[0]: INT8}, INT8)
        return model


class Subtracts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x - x.cos(), lambda x: x - x.sin(), (x,))
        return y - y.exp()


def test_a_quantizers_own_transform_sees_every_body_once() -> None:
    wish, program = Wish(), export(Subtracts(), X)
    working, composition, _ = annotate_program(ready(program), wish)
    assert len(wish.seen) == len(set(wish.seen)) == 3
    assert len(composition.chosen) == 3
    assert not [n for n in nodes_in(working) if n.target is aten.sub.Tensor]
    names = [node.name for node in nodes_in(working)]
    assert len(names) == len(set(names)), "of what was made in several bodies too"
    assert [n for n in nodes_in(ready(program)) if n.target is aten.sub.Tensor], (
        "a copy was changed"
    )


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.yes(x).relu(), self.no, (x,))


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
        plan = plan_of(prepare(export(TwoLayers(), X), qompose.compose(*members)))
        assert {claim.owner for claim in plan.claims} == {members[0].name}
        first, second = (member.name for member in members)
        assert all((c.winner, c.loser) == (first, second) for c in plan.conflicts)
        assert len(plan.conflicts) >= 2, "one in each branch"
        sizes = sorted(len(claim.nodes) for claim in plan.claims)
        assert sizes == ([1, 1] if members[0] is layers else [1, 2])


def test_an_overwritten_annotation_in_a_body_is_an_error_that_names_the_node() -> None:
    both = qompose.compose(Annotator(wants_linear, "earlier"), Annotator(takes_all, "later"))
    with pytest.raises(qompose.errors.AnnotationConflictError, match=r"graph_0_linear") as caught:
        prepare(export(TwoLayers(), X), both)
    assert "earlier" in str(caught.value) and "later" in str(caught.value)


def test_an_overwritten_annotation_in_a_body_may_be_undone() -> None:
    members = (Annotator(wants_linear, "earlier"), Annotator(takes_all, "later"))
    plan = plan_of(prepare(export(TwoLayers(), X), qompose.compose(*members, on_conflict="first")))
    assert {claim.owner for claim in plan.claims} == {"earlier"}
    assert len(plan.claims) == 2


def test_what_is_said_of_every_body_is_listed_once() -> None:
    quantizer = toy(LINEAR).set_object_type(nn.Conv3d, None).set_module_name_regex("none.*", STATIC)
    notes = plan_of(prepare(export(TwoLayers(), X), quantizer)).notes
    assert len(notes) == len(set(notes)) == 2


def test_all_hooks_see_the_names_that_reports_use() -> None:
    """`validate` gets the program with its bodies annotated, under the names of claims."""
    names: set[str] = set()

    class Looking(Annotator):
        def validate(self, model: GraphModule) -> None:
            names.update(n.name for n in nodes_in(model) if "quantization_annotation" in n.meta)

    prepared = prepare(export(TwoLayers(), X), Looking(wants_linear, "looking"))
    assert names == {claim.anchor for claim in plan_of(prepared).claims}
    assert len(names) == 2


def test_a_model_of_each_kind_settles() -> None:
    """Rewrites that one round leaves out may make others useless in the next; it ends all the same."""
    quantizer = toy(CONV_RELU, CONV, ADD, name="some")
    for name in ("cond_conv", "resnet18", "conv_bn_relu"):
        exported = ready(by_name(name).export())
        _, composition, rewrites = annotate_program(exported, quantizer)
        claimed = {node for claim in composition.chosen for node in claim.nodes}
        assert all(not claimed.isdisjoint(rewrite.pieces) for rewrite in rewrites)
        assert len(rewrites) > 0


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = nn.functional.scaled_dot_product_attention
        return torch.cond(q.sum() > 0, attend, lambda q, k, v: q + k * v, (q, k, v))


@pytest.mark.parametrize("whole", [False, True], ids=["pieces are claimed", "taken whole"])
def test_attention_in_a_branch_is_taken_apart_only_for_who_wants_its_pieces(whole: bool) -> None:
    pieces = rule("product", OperatorPattern((aten.matmul.default,)), activations=("self", "other"))
    attention = rule(
        "attention",
        OperatorPattern((aten.scaled_dot_product_attention.default,)),
        activations=("query", "key", "value"),
    )
    rules = (attention, pieces) if whole else (pieces,)
    backend = ToyBackend(rules, rewrites=("split_attention",))
    quantizer = qompose.RuleQuantizer(backend).set_global(STATIC)
    program = export(Attends(), *(randn(1, 2, 4, 8, seed=i) for i in range(3)))
    working, composition, rewrites = annotate_program(ready(program), quantizer)
    found = [n for n in nodes_in(working) if n.target is aten.scaled_dot_product_attention.default]
    assert len(found) == (1 if whole else 0)
    assert len(rewrites) == (0 if whole else 1)
    assert {claim.rule for claim in composition.chosen} == {"attention" if whole else "product"}


def test_bodies_of_all_models_are_annotated_as_those_outside() -> None:
    """The same layers under control flow and without it get the same claims."""

    class Plain(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return self.yes(x).relu() + self.no(x)

    rules = [r for r in RULES if r.name in ("linear", "linear_relu")]
    inside, outside = (
        sorted((claim.rule, len(claim.nodes)) for claim in plan_of(prepare(p, toy(*rules))).claims)
        for p in (export(seeded(TwoLayers()), X), export(seeded(Plain()), X))
    )
    assert inside == outside == [("linear", 1), ("linear_relu", 2)]
