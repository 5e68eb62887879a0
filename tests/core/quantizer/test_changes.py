# SPDX-License-Identifier: Apache-2.0
"""Changes of the program that a member's claims stand on: made where one is chosen, and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from qompose.quantizer.arbitration import compose_claims
from qompose.quantizer.interop.isolated_view import Apart
from qompose.spec.claim import Change, Claim, Conflict, Point, PointSpec, Proposal
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import INT8, export, randn

aten = torch.ops.aten


class Twice(nn.Module):
    """x -> sigmoid, and x -> tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) + torch.tanh(x)


class Line(nn.Module):
    """sigmoid -> tanh -> relu -> exp."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(torch.relu(torch.tanh(torch.sigmoid(x))))


@pytest.fixture
def model() -> GraphModule:
    return export(Line(), randn(2, 3)).module(check_guards=False)


def claim(rule: str, *nodes: str) -> Claim:
    specs = (PointSpec(Point(nodes[-1]), INT8),)
    return Claim(owner="", rule=rule, anchor=nodes[0], nodes=nodes, output=nodes[-1], specs=specs)


TANH = Change(("tanh",), ("tanh_neg", "tanh"))
EXP = Change(("exp",), ("exp_neg", "exp"))


def twice_negated(
    model: GraphModule, changes: Collection[Change], called: Mapping[str, str]
) -> None:
    """Put two operators in place of each change's one, whose value keeps its name."""
    nodes = {node.name: node for node in model.graph.nodes}
    for change in changes:
        (name,) = change.nodes
        with model.graph.inserting_before(nodes[name]):
            first = model.graph.call_function(aten.neg.default, nodes[name].args)
            last = model.graph.call_function(aten.neg.default, (first,))
        first.meta, last.meta = dict(nodes[name].meta), dict(nodes[name].meta)
        nodes[name].replace_all_uses_with(last)
        model.graph.erase_node(nodes[name])
        first._rename(change.pieces[0])
        last.name = change.pieces[1]  # which a graph does not give twice


class Foreign:
    """A member that works apart, and always says the same."""

    works_apart = True

    def __init__(self, proposal: Proposal) -> None:
        self.proposal, self.seen = proposal, []

    def propose(self, model: GraphModule, taken: Any, on_conflict: str) -> Proposal:
        self.seen.append(names(model))
        return self.proposal


def changing(name: str, *claims: Claim, marks: Any = None) -> tuple[str, Any]:
    proposal = Proposal(list(claims), changes=(TANH, EXP), apply=twice_negated, marks=marks or {})
    return name, Foreign(proposal).propose


def plain(name: str, *claims: Claim) -> tuple[str, Any]:
    return name, lambda model, taken, on_conflict: Proposal(list(claims))


def names(model: GraphModule) -> list[str]:
    return [node.name for node in model.graph.nodes if node.op == "call_function"]


ALL = ["sigmoid", "tanh", "relu", "exp"]


def test_no_change_is_made_that_no_claim_stands_on(model: GraphModule) -> None:
    result = compose_claims(model, [changing("a", claim("one", "sigmoid"), claim("two", "relu"))])
    assert names(model) == ALL
    assert result.changes == []
    assert [c.instead_of for c in result.chosen] == [(), ()]


def test_those_are_made_that_claims_stand_on(model: GraphModule) -> None:
    result = compose_claims(model, [changing("a", claim("one", "tanh_neg"))])
    assert names(model) == ["sigmoid", "tanh_neg", "tanh", "relu", "exp"]
    assert result.changes == [("a", TANH)]
    (chosen,) = result.chosen
    assert chosen.instead_of == ("tanh",)
    assert chosen.territory == {"tanh_neg", "tanh"}


def test_claims_of_one_member_share_a_change(model: GraphModule) -> None:
    result = compose_claims(
        model, [changing("a", claim("one", "tanh_neg"), claim("two", "tanh", "relu"))]
    )
    assert [c.rule for c in result.chosen] == ["one", "two"]
    assert result.conflicts == []


@pytest.mark.parametrize("held", ["tanh", "relu"])
def test_an_earlier_member_keeps_what_it_has_as_it_is(model: GraphModule, held: str) -> None:
    """The later one's claim on a piece, and on what it is fused with, falls, and the change with it."""
    members = [
        plain("first", claim("whole", held)),
        changing("a", claim("two", "tanh_neg", "tanh", "relu")),
    ]
    result = compose_claims(model, members)
    assert [c.rule for c in result.chosen] == ["whole"]
    assert names(model) == ALL
    assert result.conflicts == [Conflict("first", "whole", "a", "two", (held,))]
    (rejection,) = result.rejections
    assert rejection.reason == f"its rule two lost {held} to first"


def test_a_claim_elsewhere_stands_though_another_change_is_impossible(model: GraphModule) -> None:
    members = [
        plain("first", claim("whole", "tanh")),
        changing("a", claim("one", "tanh_neg"), claim("two", "exp_neg"), claim("three", "relu")),
    ]
    result = compose_claims(model, members)
    assert [c.rule for c in result.chosen] == ["whole", "two", "three"]
    assert names(model) == ["sigmoid", "tanh", "relu", "exp_neg", "exp"]


def test_a_later_member_sees_the_program_as_it_is_then(model: GraphModule) -> None:
    seen: list[list[str]] = []

    def later(model: GraphModule, taken: Any, on_conflict: str) -> Proposal:
        seen.append(names(model))
        return Proposal([claim("piece", "tanh"), claim("other", "exp")])

    result = compose_claims(model, [changing("a", claim("one", "tanh_neg")), ("b", later)])
    assert seen[0] == ["sigmoid", "tanh_neg", "tanh", "relu", "exp"]
    assert [f"{c.owner}.{c.rule}" for c in result.chosen] == ["a.one", "b.piece", "b.other"]
    assert result.conflicts == []


def test_what_a_later_member_would_have_taken_is_listed(model: GraphModule) -> None:
    """It is asked about the program as it was, too: a pattern of it may have been there."""
    seen: list[list[str]] = []

    def later(model: GraphModule, taken: Any, on_conflict: str) -> Proposal:
        seen.append(names(model))
        whole = "tanh_neg" not in seen[-1]
        return Proposal([claim("pair", "sigmoid", "tanh"), claim("other", "exp")] if whole else [])

    result = compose_claims(model, [changing("a", claim("one", "tanh_neg")), ("b", later)])
    assert seen[1] == ALL
    assert [f"{c.owner}.{c.rule}" for c in result.chosen] == ["a.one"]
    assert result.conflicts == [Conflict("a", "one", "b", "pair", ("tanh",))]


@pytest.mark.parametrize("order", list(itertools.permutations("ab")), ids="".join)
def test_disjoint_changes_are_made_in_any_order(model: GraphModule, order: tuple[str, ...]) -> None:
    wanted = {"a": claim("one", "tanh_neg"), "b": claim("two", "exp_neg")}
    result = compose_claims(model, [changing(name, wanted[name]) for name in order])
    assert names(model) == ["sigmoid", "tanh_neg", "tanh", "relu", "exp_neg", "exp"]
    assert sorted(result.changes) == [("a", TANH), ("b", EXP)]


def test_marks_go_with_the_claims(model: GraphModule) -> None:
    nodes = {node.name: node for node in model.graph.nodes}
    nodes["relu"].meta["custom"] = {"other": 1}
    marks = {"relu": {"custom": {"arm": 2}, "seen": 3}, "sigmoid": {"custom": {"arm": 4}}}
    compose_claims(
        model,
        [
            plain("first", claim("x", "sigmoid")),
            changing("a", claim("y", "sigmoid"), claim("z", "relu"), marks=marks),
        ],
    )
    assert nodes["relu"].meta["custom"] == {"other": 1, "arm": 2}
    assert nodes["relu"].meta["seen"] == 3
    assert "arm" not in (nodes["sigmoid"].meta.get("custom") or {})


def test_a_claim_that_waited_loses_what_was_changed_meanwhile(model: GraphModule) -> None:
    waiting = replace(claim("view", "tanh"), needs_quantized=("sigmoid",))
    members = [
        plain("first", waiting),
        changing("a", claim("one", "sigmoid"), claim("two", "tanh_neg")),
    ]
    result = compose_claims(model, members)
    assert [c.rule for c in result.chosen] == ["one", "two"]
    assert result.conflicts == [Conflict("a", "two", "first", "view", ("tanh",))]


@pytest.mark.parametrize(
    ("taken", "own", "stands"),
    [
        pytest.param((), (), True, id="nobody reads it quantized"),
        pytest.param(("sigmoid",), (), True, id="one reader is float"),
        pytest.param(("sigmoid", "tanh"), (), False, id="all readers are another's"),
        pytest.param(("sigmoid",), ("tanh",), True, id="one reader is its own"),
    ],
)
def test_a_claim_on_an_input_goes_with_its_readers(
    taken: tuple[str, ...], own: tuple[str, ...], stands: bool
) -> None:
    model = export(Twice(), randn(2, 3)).module(check_guards=False)
    members = [
        plain("first", *(claim(name, name) for name in taken)),
        plain("second", claim("input", "x"), *(claim(name, name) for name in own)),
    ]
    result = compose_claims(model, members)
    rules = [c.rule for c in result.chosen if c.owner == "second"]
    assert rules == [*own, *(["input"] if stands else [])]
    losses = [(c.winner, c.loser_rule, c.nodes) for c in result.conflicts]
    assert losses == ([] if stands else [("first", "input", (name,)) for name in taken])


def test_who_works_apart_sees_no_change_of_others(model: GraphModule) -> None:
    """What it wants in place of an operator that is another one now is lost to who changed it."""
    (_, first), (_, second) = (
        changing("a", claim("one", "tanh_neg")),
        changing("b", claim("whole", "tanh"), claim("pieces", "exp_neg")),
    )
    result = compose_claims(model, [("a", first), ("b", second)])
    assert second.__self__.seen == [ALL]
    assert [f"{c.owner}.{c.rule}" for c in result.chosen] == ["a.one", "b.pieces"]
    assert result.conflicts == [Conflict("a", "one", "b", "whole", ("tanh",))]


def test_names_of_the_common_program(model: GraphModule) -> None:
    """A program whose batch norms are folded calls the value of one after the operator before it."""
    shown = export(Line(), randn(2, 3)).module(check_guards=False)
    reading = replace(claim("reader", "exp"), specs=(PointSpec(Point("tanh", "exp"), INT8),))
    foreign = Foreign(Proposal([reading, claim("folded", "tanh")]))
    result = compose_claims(model, [("a", foreign.propose)], apart=Apart(shown, {"tanh": "relu"}))
    (chosen,) = result.chosen
    assert chosen.specs[0].point == Point("relu", "exp")
    (rejection,) = result.rejections
    assert rejection.reason == ("tanh is not the operator here that it wants: relu gives its value")


def test_who_lost_all_gives_up_its_inputs() -> None:
    model = export(Twice(), randn(2, 3)).module(check_guards=False)
    members = [
        plain("first", claim("a", "add")),
        plain("second", claim("input", "x"), claim("b", "add")),
    ]
    result = compose_claims(model, members)
    assert [c.rule for c in result.chosen] == ["a"]
    assert result.conflicts[-1] == Conflict("first", "a", "second", "input", ("x",))
