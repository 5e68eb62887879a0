# SPDX-License-Identifier: Apache-2.0
"""Quantizers that qompose does not know: a gallery of them together in every order, and hook by hook."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, Quantizer, UserError
from qompose.errors import MemberError
from qompose.plan.plan import Plan
from torch import nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import Foreign, Tanhs, acting, arrangements, aten, calls
from tests.core.quantizer.interop.gallery import (
    EXPECTED,
    GALLERY,
    PROGRAM,
    Modest,
    X,
    is_named,
    net,
)
from tests.core.toy import Model, export, graph_text, plan_of, prepare, randn, sqnr
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
    plan = plan_of(prepare(PROGRAM, qompose.compose(GALLERY["Uncopyable"]())))
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


HOOKS = ("transform_for_annotation", "annotate", "validate", "prepare_obs_or_fq_callback")


def _failing(*_: Any) -> None:
    """Fail in a function of torch, and do not say why."""
    torch._assert(False, "")


def _raising(error: Exception) -> Any:
    def act(*_: Any) -> None:
        raise error

    return act


ERRORS = (ValueError("why"), AssertionError(), KeyError("k"), StopIteration())


class TestErrors:
    """An error of the member's own is a MemberError that says whose, and where."""

    @pytest.mark.parametrize(("hook", "error"), list(zip(HOOKS, ERRORS, strict=True)))
    def test_it_names_member_and_hook(self, hook: str, error: Exception) -> None:
        for chosen in arrangements(acting(hook, _raising(error))):
            named = f"tests.Acting: {hook} .*{type(error).__name__}"
            with pytest.raises(MemberError, match=named) as caught:
                prepare(PROGRAM, qompose.compose(*chosen))
            assert caught.value.__cause__ is error or isinstance(error, StopIteration)

    @pytest.mark.parametrize("hook", HOOKS)
    def test_an_error_without_a_text_has_its_line(self, hook: str) -> None:
        place = f"interop/test_members.py:{_failing.__code__.co_firstlineno + 2}"
        with pytest.raises(MemberError, match=f"tests.Acting: {hook} .*AssertionError.*{place}$"):
            prepare(PROGRAM, qompose.compose(acting(hook, _failing), Tanhs()))

    def test_an_error_about_a_body_names_it(self) -> None:
        class Refusing(Foreign):
            def annotate(self, model: GraphModule) -> None:
                if calls(model, aten.neg.default):
                    raise ValueError("no neg here")

        class Silent(Refusing):
            def annotate(self, model: GraphModule) -> Any:
                return 3 if calls(model, aten.neg.default) else None

        program = export(
            Model(lambda m, x: torch.cond(x.sum() > 0, torch.tanh, torch.neg, (x,))), X
        )
        for member in (Refusing(), Silent()):
            with pytest.raises(UserError, match="false_graph_0 of cond"):
                prepare(program, qompose.compose(Tanhs(), member))

    @pytest.mark.parametrize("hook", HOOKS)
    def test_a_warning_arrives(self, hook: str) -> None:
        def act(*_: Any) -> None:
            warnings.warn("of the member", UserWarning, stacklevel=1)

        with pytest.warns(UserWarning, match="of the member"):
            qompose.prepare_pt2e(PROGRAM, qompose.compose(acting(hook, act), Tanhs()))

    @pytest.mark.parametrize(
        ("hook", "answer"),
        [
            *(("transform_for_annotation", lambda m, x=x: x) for x in (None, 3, nn.Identity())),
            ("annotate", lambda m: 3),
            ("annotate", lambda m: GraphModule(m, m.graph)),
            ("annotate", lambda m: m.graph),
            *(("__deepcopy__", lambda memo, x=x: x) for x in (None, "a text")),
        ],
    )
    def test_what_returns_another_thing_is_named(self, hook: str, answer: Any) -> None:
        member = type("Returning", (Foreign,), {hook: lambda self, given: answer(given)})
        for chosen in arrangements(member()):
            with pytest.raises(UserError, match=rf"tests\.Returning: (copy.*)?{hook}"):
                prepare(PROGRAM, qompose.compose(*chosen))

    @pytest.mark.parametrize("answer", [True, None, False])
    def test_validate_may_answer(self, answer: Any) -> None:
        """Engines of this field ignore it; a no is said."""
        member = acting("validate", lambda model: answer)
        plan = plan_of(prepare(PROGRAM, qompose.compose(member, Tanhs())))
        assert len(plan.claims) == 3
        noted = [n for n in plan.notes if n.startswith("tests.Acting: validate")]
        assert len(noted) == (answer is False)


class TestCalls:
    """Which hooks are called, with what."""

    def test_all_hooks_of_all_members_in_order(self) -> None:
        seen: list[tuple[str, str, int]] = []

        def noting(hook: str) -> Any:
            def call(self: Any, model: GraphModule, *others: Any) -> Any:
                seen.append((type(self).__name__, hook, id(self)))
                return model if hook in HOOKS[:2] else None

            return call

        names = ("First", "Second", "Third")
        kinds = [type(name, (Foreign,), {hook: noting(hook) for hook in HOOKS}) for name in names]
        prepare(PROGRAM, qompose.compose(*(kind() for kind in kinds), Foreign()))
        for name in names:
            calls = [(hook, instance) for who, hook, instance in seen if who == name]
            assert [hook for hook, _ in calls] == list(HOOKS), name
            assert len({instance for _, instance in calls}) == 1, "one copy hears everything"

    def test_nobody_sees_anothers_annotations(self) -> None:
        seen: list[Any] = []

        class Looking(Foreign):
            def transform_for_annotation(self, model: GraphModule) -> GraphModule:
                return self.look(model, set())

            def annotate(self, model: GraphModule) -> GraphModule:
                return super().annotate(self.look(model, set()))

            def validate(self, model: GraphModule) -> None:
                self.look(model, {node.name for node in self.wanted(model)})

            def look(self, model: GraphModule, own: set[str]) -> GraphModule:
                found = {n.name for n in model.graph.nodes if "quantization_annotation" in n.meta}
                seen.append((type(self).__name__, found - own))
                return model

        last = type("Last", (Looking,), {"targets": (aten.tanh.default,)})
        prepare(PROGRAM, qompose.compose(Foreign(), Looking(), last(), Tanhs()))
        assert {name for name, _ in seen} == {"Looking", "Last"}
        assert all(not foreign for _, foreign in seen)

    def test_nobody_sees_annotations_that_the_program_brings(self) -> None:
        """As one does that another engine was asked about before."""
        module = PROGRAM.module(check_guards=False)
        for node in calls(module):
            node.meta["quantization_annotation"] = Foreign().asked(node)
        prepared = prepare(module, qompose.compose(GALLERY["Alone"](), GALLERY["Overwriting"]()))
        assert graph_text(prepared) == graph_text(
            prepare(PROGRAM, qompose.compose(GALLERY["Alone"]()))
        )

    def test_guards_are_gone_and_sources_are_there(self) -> None:
        class Looking(Foreign):
            def annotate(self, model: GraphModule) -> GraphModule:
                assert not [n for n in model.graph.nodes if n.op == "call_module"]
                for node in calls(model):
                    ((_, kind),) = node.meta["source_fn_stack"][-1:]
                    assert kind is not None
                return super().annotate(model)

        for program in (PROGRAM, PROGRAM.module(), PROGRAM.module(check_guards=False)):
            assert len(plan_of(prepare(program, qompose.compose(Looking()))).claims) == 2


class TestProcess:
    """Torch's random numbers, default dtype and grad mode are put back after each hook."""

    def settings(self) -> tuple[Any, ...]:
        state = torch.get_rng_state().sum().item()
        return torch.get_default_dtype(), torch.is_grad_enabled(), state

    def disturb(self, *_: Any) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.manual_seed(3)

    @pytest.mark.parametrize("hook", HOOKS)
    def test_of_every_hook_and_where_it_fails_too(self, hook: str) -> None:
        def fail(*_: Any) -> None:
            self.disturb()
            raise ValueError("why")

        before = self.settings()
        for chosen in arrangements(acting(hook, self.disturb)):
            prepared = prepare(PROGRAM, qompose.compose(*chosen))
            assert self.settings() == before
            assert prepared(X).dtype is torch.float32
        with pytest.raises(MemberError):
            prepare(PROGRAM, qompose.compose(Tanhs(), acting(hook, fail)))
        assert self.settings() == before


def test_a_weight_that_is_computed_from_parameters_is_stored_as_integers() -> None:
    """As its own engine does: it is computed once, and the model holds its integers alone."""
    weight = nn.Parameter(randn(4, 3))
    model = Model(lambda m, x: nn.functional.linear(x, m.weight.t() * 2), weight=weight)
    x = randn(8, 4)
    prepared = qompose.prepare_pt2e(export(model, x), Foreign())
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    targets = [node.target for node in converted.graph.nodes if node.op == "call_function"]
    assert aten.t.default not in targets and aten.mul.Tensor not in targets
    assert not any(
        b.dtype is torch.float32 and b.dim() == 2 for b in converted.state_dict().values()
    )
    assert sqnr(model(x), converted(x)) > 30
