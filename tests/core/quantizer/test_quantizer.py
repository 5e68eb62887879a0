# SPDX-License-Identifier: Apache-2.0
"""A composition forwards the whole interface to every member, and its order is priority."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import qompose
import torch
from qompose import ComposableQuantizer, Quantizer, UserError
from qompose.errors import ConfigError
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import (
    LINEAR,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    NullQuantizer,
    convert,
    export,
    graph_text,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

X = randn(6, 3)


class Recorder(Quantizer):
    """Notes which of its methods are called."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.calls: list[str] = []

    @property
    def name(self) -> str:
        return self.label

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        self.calls.append("transform_for_annotation")
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        self.calls.append("annotate")
        return model

    def validate(self, model: GraphModule) -> None:
        self.calls.append("validate")

    def prepare_obs_or_fq_callback(self, model: GraphModule, edges: Any) -> None:
        self.calls.append("prepare_obs_or_fq_callback")

    def quantization_capabilities(self) -> Any:
        self.calls.append("quantization_capabilities")
        return super().quantization_capabilities()


HOOKS = {"transform_for_annotation", "annotate", "validate", "prepare_obs_or_fq_callback"}


def test_this_file_knows_the_whole_interface() -> None:
    methods = {name for name, _ in inspect.getmembers(Quantizer, inspect.isfunction)}
    public = {name for name in methods if not name.startswith("_")}
    assert public == HOOKS | {
        "start",
        "propose",
        "quantization_capabilities",
        "check_program",
        "objection_to_rewrite",
        "objection_to_spec",
        "bound",
        "to_dict",
        "to_json",
    }
    overridden = {name for name in public if name in vars(ComposableQuantizer)}
    own = {"to_json", "start"}  # the engine starts the members, as it asks them for their claims
    assert overridden == public - own, "a composition forwards every other method itself"


@pytest.mark.parametrize("nested", [False, True])
def test_every_hook_of_every_member_is_called(nested: bool) -> None:
    members = [Recorder("a"), Recorder("b"), Recorder("c")]
    inner = qompose.compose(*members[1:]) if nested else None
    composed = qompose.compose(members[0], inner) if inner else qompose.compose(*members)
    prepare(export(nn.Linear(3, 4), X), composed)
    composed.quantization_capabilities()
    for member in members:
        assert set(member.calls) == HOOKS | {"quantization_capabilities"}
        order = [member.calls.index(hook) for hook in (
            "transform_for_annotation", "annotate", "prepare_obs_or_fq_callback",
        )]  # fmt: skip
        assert order == sorted(order)


def test_a_member_alone_is_called_as_often_as_in_a_composition() -> None:
    alone, together = Recorder("alone"), Recorder("together")
    prepare(export(nn.Linear(3, 4), X), alone)
    prepare(export(nn.Linear(3, 4), X), qompose.compose(toy(LINEAR), together))
    assert alone.calls == together.calls


def test_a_transformation_is_seen_by_all_and_leaves_the_input_alone() -> None:
    class Double(NullQuantizer):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            (linear,) = (n for n in model.graph.nodes if "linear" in str(n.target))
            with model.graph.inserting_after(linear):
                twice = model.graph.call_function(torch.ops.aten.sigmoid.default, (linear,))
            twice.meta = dict(linear.meta)
            linear.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
            model.recompile()
            return model

    program = export(seeded(nn.Linear(3, 4)), X)
    prepared = prepare(program, qompose.compose(Double(), toy(SIGMOID)))
    assert [claim.rule for claim in plan_of(prepared).claims] == ["sigmoid"]
    assert torch.equal(prepared(X), torch.sigmoid(program.module()(X)))
    assert "sigmoid" not in graph_text(program.module())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x)) + torch.tanh(self.b(x)))


def only(path: str, config: Any, name: str) -> Quantizer:
    return toy(LINEAR, name=name).set_global(None).set_module_name(path, config)


def test_disjoint_members_give_the_same_graph_in_every_order() -> None:
    """Down to the names of nodes, although two of them read the input with different types."""
    program = export(seeded(Two()), X)
    members = [only("a", STATIC, "A"), only("b", STATIC_UINT8, "B"), only("c", STATIC, "C")]
    texts = {
        graph_text(convert(program, qompose.compose(*order), X))
        for order in itertools.permutations(members)
    }
    assert len(texts) == 1


def test_order_is_priority() -> None:
    program = export(seeded(Two()), X)
    first, second = toy(LINEAR, name="A"), toy(LINEAR, SIGMOID, name="B", config=STATIC_UINT8)
    for order in ((first, second), (second, first)):
        plan = plan_of(prepare(program, qompose.compose(*order)))
        assert {claim.owner for claim in plan.claims} == {order[0].name}
        assert {conflict.loser for conflict in plan.conflicts} == {order[1].name}


def test_a_null_member_changes_nothing() -> None:
    program = export(seeded(Two()), X)
    alone = convert(program, toy(LINEAR), X)
    for order in ((NullQuantizer(), toy(LINEAR)), (toy(LINEAR), NullQuantizer())):
        assert graph_text(convert(program, qompose.compose(*order), X)) == graph_text(alone)


def test_two_members_of_one_name_are_told_apart() -> None:
    program = export(seeded(Two()), X)
    both = qompose.compose(only("a", STATIC, "same"), only("b", STATIC_UINT8, "same"))
    prepared = prepare(program, both)
    assert sorted(claim.owner for claim in plan_of(prepared).claims) == ["same", "same#2"]
    prepared(X)
    lowered = qompose.lower(qompose.convert_pt2e(prepared))
    assert qompose.report(lowered).count("int8 kernel", "same#2") == 1


def test_capabilities_of_a_composition_are_those_of_its_members() -> None:
    first, second = toy(LINEAR, name="A"), toy(SIGMOID, name="B")
    both = qompose.compose(first, second, NullQuantizer()).quantization_capabilities()
    expected = [*first.quantization_capabilities(), *second.quantization_capabilities()]
    assert list(both) == expected
    assert {row.backend for row in both} == {"A", "B"}


def test_capability_rows_and_questions() -> None:
    rows = toy(LINEAR, SIGMOID).quantization_capabilities()
    assert [(row.pattern, row.mode) for row in rows] == [
        ("linear", "static"), ("linear", "dynamic"), ("linear", "weight-only"),
        ("sigmoid", "static"), ("sigmoid", "dynamic"),
    ]  # fmt: skip
    assert rows[0].targets == ("torch",)
    assert rows.supports("linear", STATIC_UINT8)
    refused = rows.supports("sigmoid", toy().backend.configs["weight-only"])
    assert not refused
    assert "leaves every role of rule sigmoid in float" in refused.reason
    unknown = rows.supports("lstm", STATIC)
    assert not unknown
    assert "no backend has a rule 'lstm'; known: linear, sigmoid" in unknown.reason
    assert [row["pattern"] for row in rows.to_dict()] == [row.pattern for row in rows]
    assert "toy linear" in str(rows)


@pytest.mark.parametrize("policy", ["last", "", None])
def test_unknown_policies(policy: Any) -> None:
    with pytest.raises(ConfigError, match="on_conflict must be"):
        ComposableQuantizer([NullQuantizer()], policy)


def test_a_composition_is_not_asked_for_claims_of_its_own() -> None:
    composed = qompose.compose(toy())
    with pytest.raises(UserError, match="members"):
        composed.propose(export(nn.Linear(3, 4), X).module(), ())


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["x", "x"], ["x", "x#2"]),
        (["x", "x#2", "x"], ["x", "x#2", "x#3"]),
        (["x", "x", "x#2"], ["x", "x#3", "x#2"]),
        (["x#2", "x", "x#2", "x"], ["x#2", "x", "x#2#2", "x#3"]),
    ],
)
def test_no_two_members_have_one_label(names: list[str], labels: list[str]) -> None:
    composed = qompose.compose(*(Recorder(name) for name in names))
    assert [label for label, _ in composed.labelled_members] == labels
