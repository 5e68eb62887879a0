# SPDX-License-Identifier: Apache-2.0
"""A member that took nothing is named, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn

from tests.core.toy import (
    ADD,
    CAT,
    CONV,
    DYNAMIC,
    LINEAR,
    SIGMOID,
    Annotator,
    NullQuantizer,
    OperatorPattern,
    export,
    plan_of,
    prepare,
    randn,
    rule,
    seeded,
    toy,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.cat([x, torch.sigmoid(self.b(self.a(x)))], 1))


PROGRAM = export(seeded(Net()), randn(6, 3))


def notes(*members: Any) -> list[str]:
    plan = plan_of(prepare(PROGRAM, qompose.compose(*members)))
    return [note for note in plan.notes if "claims nothing" in note]


def float_twice() -> Any:
    return toy(LINEAR, name="b").set_module_name("a", None).set_module_name("b", None)


@pytest.mark.parametrize(
    ("member", "note"),
    [
        pytest.param(
            lambda: toy(LINEAR, config=DYNAMIC, name="b"),
            "all 2 regions that it wanted went to a",
            id="lost all",
        ),
        pytest.param(
            lambda: toy(LINEAR, name="b").set_module_name("a", None),
            "the only region that it wanted went to a; of 1 region: left in float by module name a",
            id="lost one, left one",
        ),
        pytest.param(
            float_twice,
            "of 1 region: left in float by module name a; of 1 region: left in float by module name b",
            id="selectors leave all in float",
        ),
        pytest.param(
            lambda: qompose.RuleQuantizer(toy(LINEAR, name="b").backend),
            "of 2 regions: no selector gives it a configuration (set_global gives one to all)",
            id="no selector",
        ),
        pytest.param(
            lambda: toy(CONV, ADD, name="b"),
            "no operator of its rules occurs in the program",
            id="nothing matches",
        ),
        pytest.param(
            lambda: NullQuantizer(), "it annotates nothing in this program", id="no annotation"
        ),
    ],
)
def test_why_a_member_claims_nothing(member: Any, note: str) -> None:
    second = member()
    assert notes(toy(LINEAR, name="a"), second) == [f"{second.name} claims nothing: {note}"]


def test_a_condition_that_never_comes_true() -> None:
    assert notes(toy(SIGMOID, name="a").set_global(None), toy(CAT, name="b")) == [
        "a claims nothing: of 1 region: left in float by global",
        "b claims nothing: of 1 region: its input is not quantized",
    ]


def test_a_member_with_the_settings_of_an_earlier_one_can_never_win() -> None:
    (note,) = notes(toy(LINEAR), toy(LINEAR))
    assert note == (
        "toy#2 claims nothing: all 2 regions that it wanted went to toy; its settings are those of toy, "
        "which comes first, so it can never win"
    )


def test_other_settings_or_functions_are_no_twins() -> None:
    """Two functions may decide alike; nobody can tell."""
    other = toy(LINEAR).set_module_name("a", DYNAMIC)
    filtered = [toy(LINEAR).set_filter_function(lambda node: True) for _ in range(2)]
    for pair in ((toy(LINEAR), other), filtered):
        (note,) = notes(*pair)
        assert "went to toy" in note
        assert "can never win" not in note


def test_a_member_that_claims_something_and_a_quantizer_alone_need_no_note() -> None:
    assert notes(toy(LINEAR), toy(SIGMOID, name="s")) == []
    assert notes(toy(CONV)) == []
    assert not any("claims nothing" in n for n in plan_of(prepare(PROGRAM, toy(CONV))).notes)


def test_a_quantizer_that_annotates_has_one_alone_too() -> None:
    """Rules leave their reasons at the operators; it has nowhere else to say that it was there."""
    assert notes(NullQuantizer()) == [
        "NullQuantizer claims nothing: it annotates nothing in this program"
    ]


def test_many_reasons_are_cut_and_counted() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in "abcde":
                setattr(self, name, nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            for name in "abcde":
                x = getattr(self, name)(x)
            return x

    member = toy(LINEAR, name="last")
    for name in "abcde":
        member.set_module_name(name, None)
    both = qompose.compose(toy(SIGMOID), member)
    notes = plan_of(prepare(export(seeded(Many()), randn(2, 3)), both)).notes
    (note,) = (note for note in notes if note.startswith("last"))
    assert note.count("left in float by module name") == 3
    assert note.endswith("and 2 other reasons, at the operators")


def test_a_member_whose_changes_were_undone_did_annotate() -> None:
    def remove(node: Any) -> None:
        node.meta.pop("quantization_annotation", None)

    both = qompose.compose(toy(LINEAR), Annotator(remove, "late"), on_conflict="first")
    (note,) = (n for n in plan_of(prepare(PROGRAM, both)).notes if "claims nothing" in n)
    undone = "it removed the annotation of toy, which was undone"
    assert note == f"late claims nothing: of 2 regions: {undone}"


def test_a_rule_that_got_further_with_the_same_operators_gives_the_reason() -> None:
    """The other one would only point at it."""
    view = [OperatorPattern((torch.ops.aten.tanh.default,))]
    facts: dict[str, Any] = {"activations": ("self",), "shares": True, "condition": "all"}
    waiting = rule("waiting", *view, **facts)
    pointing = rule("pointing", *view, **facts, guard=lambda match: "see rule waiting")
    for rules in ((waiting, pointing), (pointing, waiting)):
        plan = plan_of(prepare(PROGRAM, qompose.compose(toy(LINEAR), toy(*rules, name="b"))))
        (tanh,) = (o for o in plan.operators if o.name == "tanh")
        assert tanh.reason == "b: its input is not quantized"
        assert "b claims nothing: of 1 region: its input is not quantized" in plan.notes
