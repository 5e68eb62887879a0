# SPDX-License-Identifier: Apache-2.0
"""A member that took nothing is named, with the reason."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import qompose
import torch
from torch import nn

from tests.core.toy import (
    ADD,
    CAT,
    CONV,
    DYNAMIC,
    LINEAR,
    SIGMOID,
    Annotator,
    Model,
    OperatorPattern,
    export,
    plan_of,
    prepare,
    randn,
    rule,
    seeded,
    toy,
)

MODEL = Model(
    lambda m, x: torch.tanh(torch.cat([x, torch.sigmoid(m.b(m.a(x)))], 1)),
    a=nn.Linear(3, 4),
    b=nn.Linear(4, 4),
)
PROGRAM = export(seeded(MODEL), randn(6, 3))


def idle(*members: Any) -> dict[str, str]:
    """Who claims nothing -> the note on it."""
    plan = plan_of(prepare(PROGRAM, qompose.compose(*members)))
    found = {n: note for n in plan.idle_owners for note in plan.notes if note.startswith(f"{n} ")}
    assert set(found) == set(plan.idle_owners)
    return found


A = functools.partial(toy, LINEAR, name="a")
B = functools.partial(toy, LINEAR, name="b")


WHY: dict[str, tuple[Any, list[str]]] = {
    "lost all": (lambda: (A(), B(config=DYNAMIC)), ["2 regions", "went to a"]),
    "lost one, left one": (
        lambda: (A(), B().set_module_name("a", None)), ["went to a;", "1 region", "module name a"],
    ),
    "selectors leave all in float": (
        lambda: (A(), B().set_module_name("a", None).set_module_name("b", None)),
        ["module name a", "module name b"],
    ),
    "no selector": (lambda: (A(), qompose.RuleQuantizer(B().backend)), ["2 regions", "set_global"]),
    "nothing matches": (lambda: (A(), toy(CONV, ADD, name="b")), ["rules"]),
    "no annotation": (lambda: (A(), Annotator(print, "b")), ["annotates"]),
    "alone, no annotation": (lambda: (Annotator(print, "b"),), ["annotates"]),
    "a condition that never comes true": (
        lambda: (toy(SIGMOID, name="a"), toy(CAT, name="b", config=None)), ["1 region"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("members", "named"), WHY.values(), ids=WHY)
def test_why_a_member_claims_nothing(members: Any, named: list[str]) -> None:
    """Rules alone leave their reasons at the operators; others have nowhere else to say it."""
    (note,) = idle(*members()).values()
    assert note.startswith("b ") and all(name in note for name in named)


def test_a_member_with_the_settings_of_an_earlier_one_can_never_win() -> None:
    """Other settings or functions are no twins: two functions may decide alike, and nobody can tell."""
    twin = idle(toy(LINEAR), toy(LINEAR))["toy#2"]
    other = idle(toy(LINEAR), toy(LINEAR).set_module_name("a", DYNAMIC))["toy#2"]
    filtered = idle(*(toy(LINEAR).set_filter_function(lambda node: True) for _ in "ab"))["toy#2"]
    assert other == filtered
    assert twin.startswith(filtered) and twin != filtered


def test_a_member_that_claims_something_and_a_quantizer_alone_need_no_note() -> None:
    assert idle(toy(LINEAR), toy(SIGMOID, name="s")) == {}
    assert not any(note.startswith("toy ") for note in plan_of(prepare(PROGRAM, toy(CONV))).notes)


def test_many_reasons_are_cut_and_counted() -> None:
    member, many = toy(LINEAR, name="last"), nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    for name, _ in many.named_children():
        member.set_module_name(name, None)
    both = qompose.compose(toy(SIGMOID), member)
    notes = plan_of(prepare(export(seeded(many), randn(2, 3)), both)).notes
    (note,) = (note for note in notes if note.startswith("last"))
    assert note.count("module name") == 3 and "2 other" in note


def test_a_member_whose_changes_were_undone_did_annotate() -> None:
    def remove(node: Any) -> None:
        node.meta.pop("quantization_annotation", None)

    both = qompose.compose(toy(LINEAR), Annotator(remove, "late"), on_conflict="first")
    plan = plan_of(prepare(PROGRAM, both))
    assert plan.idle_owners == ("late",)
    assert any(note.startswith("late ") and "2 regions" in note for note in plan.notes)


def test_a_rule_that_got_further_with_the_same_operators_gives_the_reason() -> None:
    """The other one would only point at it."""
    view = [OperatorPattern((torch.ops.aten.tanh.default,))]
    facts: dict[str, Any] = {"activations": ("self",), "shares": True, "condition": "all"}
    waiting = rule("waiting", *view, **facts)
    pointing = rule("pointing", *view, **facts, guard=lambda match: "see rule waiting")
    for rules in ((waiting, pointing), (pointing, waiting)):
        plan = plan_of(prepare(PROGRAM, qompose.compose(toy(LINEAR), toy(*rules, name="b"))))
        (tanh,) = (o for o in plan.operators if o.name == "tanh")
        assert tanh.reason.startswith("b: ") and "waiting" not in tanh.reason
        assert any(tanh.reason.removeprefix("b: ") in note for note in plan.notes)
