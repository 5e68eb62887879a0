# SPDX-License-Identifier: Apache-2.0
"""A gallery of quantizers that qompose does not know, alone, in pairs and in triples, in every order."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, Quantizer
from qompose.plan.plan import Plan
from torch.fx import GraphModule

from tests.core.quantizer.interop.gallery import (
    EXPECTED,
    GALLERY,
    PROGRAM,
    Modest,
    X,
    is_named,
    net,
)
from tests.core.toy import export, graph_text, plan_of, prepare, randn, sqnr
from tests.sampling import at_once

GALLERY_NAMES = tuple(GALLERY)
EXPORTED = {node.name for node in PROGRAM.graph.nodes}


def composed(*members: str) -> Quantizer:
    return qompose.compose(*(GALLERY[name]() for name in members))


@functools.cache
def alone(member: str) -> Plan:
    return plan_of(prepare(PROGRAM, composed(member)))


def labels(*members: str) -> list[str]:
    return [f"tests.{name}" for name in members]


def owners(plan: Plan) -> dict[str, str]:
    """Operator of the exported program -> who has it."""
    return {name: claim.owner for claim in plan.claims for name in claim.nodes}


def check_numbers(prepared: GraphModule) -> None:
    """Observers compute nothing: what differs from the program is what was rewritten, by rounding."""
    found = prepared(X)
    if plan_of(prepared).rewrites:
        torch.testing.assert_close(found, EXPECTED)
    else:
        assert torch.equal(found, EXPECTED)
    if plan_of(prepared).claims:
        assert sqnr(EXPECTED, qompose.convert_pt2e(prepared)(X)) > 20


def check_priorities(plan: Plan, members: tuple[str, ...]) -> None:
    """What a member claims alone is its own, unless one before it has it, or another one rewrote it."""
    expected: dict[str, str] = {}
    for label, member in zip(labels(*members), members, strict=True):
        rewritten = {name for r in plan.rewrites if r.member != label for name in r.nodes}
        for claim in alone(member).claims:
            nodes = {*claim.nodes}
            if expected.keys().isdisjoint(nodes) and rewritten.isdisjoint(nodes):
                expected.update(dict.fromkeys(EXPORTED & nodes, label))
    found = {name: owner for name, owner in owners(plan).items() if name in EXPORTED}
    assert found == expected


def check_nothing_is_silent(plan: Plan, members: tuple[str, ...]) -> None:
    """Who has nothing is named with a reason; what went to another member is listed with both names."""
    holding = set(owners(plan).values())
    for label in labels(*members):
        assert (label in plan.idle_owners) is (label not in holding)
        said = [note for note in plan.notes if note.startswith(f"{label} ")]
        assert said or label in holding
    for earlier, later in itertools.combinations(members, 2):
        first, second = owners(alone(earlier)), owners(alone(later))
        has = owners(plan)
        meeting = [n for n in first if n in second and has.get(n) in labels(earlier)]
        assert not meeting or is_named(plan, *labels(earlier, later))


PAIRS = [
    ((GALLERY_NAMES[i], GALLERY_NAMES[(i + step) % len(GALLERY)]),)
    for step in range(1, len(GALLERY))
    for i in range(len(GALLERY))
]
"""Rounds in which everybody is first once and second once, two of them for every run."""
SIX = ("Overwriting", "Modest", "Alone", "RebuildingInPieces", "Uncopyable", "Unspecific")
TRIPLES = [(three,) for three in itertools.permutations(SIX, 3)]


@pytest.mark.parametrize(
    "members",
    [
        *((name,) for name in GALLERY),
        *at_once(PAIRS, *PAIRS[: len(GALLERY)], *PAIRS[7 * len(GALLERY) : 8 * len(GALLERY)]),
        *at_once(TRIPLES, *TRIPLES[::15]),
    ],
    ids=" then ".join,
)
def test_alone_in_pairs_and_in_triples(members: tuple[str, ...]) -> None:
    prepared = prepare(PROGRAM, composed(*members))
    assert bool(plan_of(prepared).claims) == (members != ("Idle",))
    assert set(owners(plan_of(prepared)).values()) <= set(labels(*members))
    check_priorities(plan_of(prepared), members)
    check_nothing_is_silent(plan_of(prepared), members)
    check_numbers(prepared)


def test_who_shares_no_operator_gives_the_same_graph_in_any_order() -> None:
    disjoint = ("Overwriting", "Uncopyable", "Decomposing", "Idle")
    orders = list(itertools.permutations(disjoint))[::5]
    assert len({graph_text(prepare(PROGRAM, composed(*order))) for order in orders}) == 1


def test_a_member_that_does_nothing_leaves_no_trace() -> None:
    both = prepare(PROGRAM, composed("Modest", "Idle"))
    assert graph_text(both) == graph_text(prepare(PROGRAM, composed("Modest")))
    with pytest.warns(QomposeWarning):
        nothing = qompose.prepare_pt2e(PROGRAM, composed("Idle"))
    assert [n.format_node() for n in nothing.graph.nodes] == [
        n.format_node() for n in PROGRAM.module(check_guards=False).graph.nodes
    ]


@pytest.mark.parametrize("member", GALLERY)
def test_one_instance_serves_any_number_of_programs(member: str) -> None:
    """Names of the second program's operators are those of the first: who remembers them shows it."""
    quantizer = GALLERY[member]()
    before = {name: repr(value) for name, value in vars(quantizer).items()}
    first = prepare(PROGRAM, qompose.compose(quantizer))
    between = prepare(export(net(seed=1), randn(2, 4)), qompose.compose(quantizer))
    again = prepare(PROGRAM, qompose.compose(quantizer))
    assert graph_text(first) == graph_text(again) == graph_text(prepare(PROGRAM, composed(member)))
    assert plan_of(first).groups == plan_of(again).groups
    assert len(plan_of(between).claims) == len(plan_of(first).claims)
    after = {name: repr(value) for name, value in vars(quantizer).items()}
    assert after == before or member == "Uncopyable"


def test_one_that_cannot_be_copied_is_used_itself_and_what_it_keeps_is_said() -> None:
    quantizer = GALLERY["Uncopyable"]()
    plan = plan_of(prepare(PROGRAM, qompose.compose(quantizer)))
    (note,) = (note for note in plan.notes if note.startswith("tests.Uncopyable"))
    assert "programs_seen" in note and "keys" not in note


class Bare:
    """Has nothing but slots, and what cannot be copied."""

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys = {}.keys()

    def annotate(self, model: GraphModule) -> None:
        Modest().annotate(model)

    def validate(self, model: GraphModule) -> None:
        """Accept everything."""


def refusing(error: type[Exception]) -> type:
    def refuse(self: Any, memo: Any) -> None:
        raise error("no")

    return type("Refusing", (Modest,), {"__deepcopy__": refuse})


@pytest.mark.parametrize(
    "kind",
    [
        *map(refusing, (RuntimeError, RecursionError, NotImplementedError, KeyError)),
        *(Bare, type("Slotted", (Modest,), {"__slots__": ("keys",), "__init__": Bare.__init__})),
    ],
)
def test_whatever_way_it_refuses_to_be_copied(kind: Any) -> None:
    assert len(plan_of(prepare(PROGRAM, qompose.compose(kind()))).claims) == 3


def test_everybody_at_once_leaves_the_users_program_alone() -> None:
    """All of them, in the order of the gallery and in the reverse."""
    module = PROGRAM.module(check_guards=False)

    def state() -> tuple[Any, ...]:
        return graph_text(module), [sorted(map(str, node.meta)) for node in module.graph.nodes]

    before = state()
    for members in (tuple(GALLERY), tuple(reversed(GALLERY))):
        prepared = prepare(module, composed(*members))
        check_priorities(plan_of(prepared), members)
        check_numbers(prepared)
        assert state() == before
    assert torch.equal(module(X), EXPECTED)
