# SPDX-License-Identifier: Apache-2.0
"""A composition is its members: each is asked, who takes nothing is named, and order is priority alone."""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import ComposableQuantizer, Quantizer, UserError
from qompose.backend import OperatorPattern
from qompose.errors import AnnotationConflictError, ConfigError, ContestedRegionError, MemberError
from qompose.program.meta import ANNOTATION_KEY
from qompose.quantizer.restriction import Restricted
from qompose.spec.claim import Claim
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop.foreign import Foreign
from tests.core.toy import (
    ADD,
    ADD_RELU,
    CAT,
    CONV,
    CONV_ADD_RELU,
    CONV_RELU,
    DYNAMIC,
    INT8,
    LINEAR,
    LINEAR_RELU,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    VIEW,
    Annotator,
    Model,
    NullQuantizer,
    annotate,
    aten,
    claimed,
    export,
    graph_text,
    plan_of,
    prepare,
    randn,
    rule,
    seeded,
    toy,
)
from tests.counting import check
from tests.zoo import by_name


def net() -> nn.Module:
    layers = {"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    return Model(lambda m, x: torch.tanh(m.head(torch.sigmoid(m.body(x)))), **layers)


X = randn(6, 4)
PROGRAM = export(seeded(net()), X)

# What a composition answers for itself, and why that is no hook of a member.
OWN = {
    "rewrites": "annotate joins those of all members",
    "expects_folded": "each member has its own",
    "start": "the engine starts the members, as it asks them for their claims",
    "labelled_members": "labels are for the members together",
    "on_conflict": "the policy is the composition's",
    "to_json": "written with to_dict",
}


def interface() -> list[str]:
    """The public names of the Quantizer interface."""
    return [name for name in dir(Quantizer) if not name.startswith("_")]


def test_a_composition_answers_for_its_members() -> None:
    """A name that is new to the interface must be forwarded, or said here not to be."""
    assert set(interface()) - set(vars(ComposableQuantizer)) == set(OWN)


class Recorder(Quantizer):
    """Notes which of its methods are called, with what."""

    def __init__(self, name: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.label = name

    @property
    def name(self) -> str:
        return self.label

    def annotate(self, model: GraphModule) -> GraphModule:
        return model

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)


def _recording(name: str) -> Any:
    original = getattr(Quantizer, name)

    def method(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((name, args))
        return original(self, *args, **kwargs)

    return method


METHODS = [n for n in interface() if inspect.isfunction(vars(Quantizer)[n])]
for _name in METHODS:
    if _name != "annotate":
        setattr(Recorder, _name, _recording(_name))

# Hooks that prepare_pt2e calls for each member; `annotate` is called by `propose`. The others are asked
# of a member where there is cause: about a rewrite, a tied weight, its capabilities, its settings.
CALLED = {
    "bound": 1, "check_program": 1, "propose": 1, "validate": 1, "prepare_obs_or_fq_callback": 1,
    "start": 1, "transform_for_annotation": 1,
}  # fmt: skip
ON_DEMAND = {"objection_to_rewrite", "objection_to_spec", "quantization_capabilities"}


def test_every_hook_of_every_member_is_called() -> None:
    members = [Recorder(name) for name in "abc"]
    prepared = prepare(PROGRAM, qompose.compose(members[0], toy(LINEAR), *members[1:]))
    for member in members:
        assert {name: member.count(name) for name in CALLED} == CALLED
    assert set(METHODS) - {"annotate", "to_dict", "to_json"} == set(CALLED) | ON_DEMAND
    (model,) = next(args for name, args in members[0].calls if name == "validate")
    annotated = {n.name for n in model.graph.nodes if ANNOTATION_KEY in n.meta}
    assert {"linear", "linear_1"} <= annotated  # by another member: it is the composed program
    _, places = next(a for n, a in members[1].calls if n == "prepare_obs_or_fq_callback")
    assert len(places) == len({p for g in plan_of(prepared).groups for p in g.points})
    prepare(PROGRAM, alone := Recorder("alone"))
    assert [name for name, _ in alone.calls] == [name for name, _ in members[1].calls]


@pytest.mark.parametrize("name", ["cond_conv", "scalars"])
def test_checks_are_called_once_however_many_drafts_there_are(name: str) -> None:
    """Rewrites that nobody covers, and bodies, make members be asked again; not here."""
    members = [Recorder("a"), Recorder("b")]
    both = qompose.compose(members[0], toy(rewrites=("scalar_to_tensor",)), members[1])
    prepare(by_name(name).export(), both)
    for member in members:
        assert member.count("propose") >= 1
        once = ("bound", "check_program", "validate", "prepare_obs_or_fq_callback")
        assert [member.count(hook) for hook in once] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", sorted(ON_DEMAND))
def test_questions_reach_the_members(name: str) -> None:
    members = [Recorder(label) for label in "abc"]
    claim = Claim(owner="b", rule="r", anchor="x", nodes=("x",), output="x", specs=())
    arguments = {"objection_to_rewrite": (claim, []), "objection_to_spec": (claim, INT8)}
    getattr(qompose.compose(*members), name)(*arguments.get(name, ()))
    asked = ["b"] if name.startswith("objection") else ["a", "b", "c"]
    assert [member.label for member in members if member.count(name)] == asked


HOOKS = ("annotate", "transform_for_annotation", "validate", "prepare_obs_or_fq_callback")


@pytest.mark.parametrize("place", ["alone", "composed", "restricted"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_member_that_raises_is_named(hook: str, place: str) -> None:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("oops")

    member = type("Failing", (NullQuantizer,), {hook: fail, "name": "failing"})()
    member = Restricted(member, []) if place == "restricted" else member
    with pytest.raises(MemberError, match=hook) as caught:
        prepare(PROGRAM, member if place == "alone" else qompose.compose(toy(LINEAR), member))
    assert place == "alone" or "failing" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def tanh(node: Node) -> None:
    if node.target is aten.tanh.default:
        annotate(node, {node.args[0]: INT8}, INT8)


def test_a_member_may_annotate_and_return_nothing() -> None:
    class Silent(Annotator):
        def annotate(self, model: GraphModule) -> GraphModule:  # type: ignore[return]
            super().annotate(model)

    assert claimed(prepare(PROGRAM, qompose.compose(Silent(tanh), toy(LINEAR)))) == {
        "annotation": ("tanh",), "linear": ("linear",), "linear'": ("linear_1",),
    }  # fmt: skip


class TestNesting:
    """Compositions of compositions."""

    def test_the_result_is_that_of_the_flat_one(self) -> None:
        def members() -> list[Quantizer]:
            return [toy(SIGMOID, name="s"), toy(LINEAR, name="l"), toy(name="rest")]

        one, two, three = members()
        composed = qompose.compose(one, qompose.compose(two, qompose.compose(three)))
        assert composed.members == (one, two, three)
        nested = prepare(PROGRAM, composed)
        flat = prepare(PROGRAM, qompose.compose(*members()))
        assert graph_text(nested) == graph_text(flat)
        assert plan_of(nested) == plan_of(flat)

    @pytest.mark.parametrize(("inner", "outer"), [("first", "error"), ("error", "first")])
    def test_two_policies_are_refused(self, inner: str, outer: str) -> None:
        for members, name in (
            ([toy(LINEAR), NullQuantizer()], r"toy\+NullQ.* "),
            ([toy(LINEAR)], ""),
        ):
            nested = qompose.compose(*members, on_conflict=inner)
            with pytest.raises(ConfigError, match=f"{name}.*'{inner}'"):
                qompose.compose(nested, NullQuantizer(), on_conflict=outer)
            composed = qompose.compose(nested, NullQuantizer(), on_conflict=inner)
            assert (composed.on_conflict, composed.members[0].name) == (inner, "toy")

    def test_hooks_of_a_nested_subclass_are_called(self) -> None:
        """It may check what its members cannot."""
        seen = []

        class Checking(ComposableQuantizer):
            def validate(self, model: GraphModule) -> None:
                super().validate(model)
                seen.append(model)

        inner = Recorder("inner")
        prepare(PROGRAM, qompose.compose(Checking([inner, toy(LINEAR)]), NullQuantizer()))
        assert len(seen) == 1
        assert inner.count("validate") == 1


@pytest.mark.parametrize("policy", ["last", "", None])
def test_unknown_policies(policy: Any) -> None:
    with pytest.raises(ConfigError, match=repr(policy)):
        ComposableQuantizer([NullQuantizer()], policy)


def test_members_that_are_no_quantizers_of_qompose() -> None:
    """`compose` adapts those of other engines; the class does not."""
    with pytest.raises(UserError, match="str"):
        ComposableQuantizer([NullQuantizer(), "text"])  # type: ignore[list-item]


def test_a_composition_is_not_asked_for_claims_of_its_own() -> None:
    with pytest.raises(UserError):
        qompose.compose(toy()).propose(PROGRAM.module(), ())


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


def test_one_backend_twice_has_two_labels() -> None:
    """A static body and a dynamic head: which is which can be read everywhere."""
    head = toy(LINEAR, config=None).set_module_name("head", DYNAMIC)
    report = qompose.report(prepare(PROGRAM, qompose.compose(head, toy(LINEAR, SIGMOID))))
    owners = {r.module: (r.owner, r.config, r.selector) for r in report.rows if r.macs}
    static, dynamic = ("toy#2", "static", "global"), ("toy", "dynamic", "module name head")
    assert owners == {"body": static, "head": dynamic}
    assert [(r[0], r[2], r[3]) for r in report.by_owner()] == [static, dynamic]


class TestState:
    """A quantizer is settings; what it saw is gone."""

    def members(self) -> list[Quantizer]:
        return [toy(LINEAR).set_module_name("head", STATIC), Annotator(tanh), NullQuantizer()]

    def test_no_graph_is_kept_alive(self) -> None:
        """Neither the program, nor the copies that members were shown, nor what came of it."""
        watched: list[weakref.ref[Any]] = []

        class Watching(NullQuantizer):
            def bound(self, exported: GraphModule) -> Quantizer:
                watched.append(weakref.ref(exported))
                return self

            def annotate(self, model: GraphModule) -> GraphModule:
                watched.append(weakref.ref(model))
                return model

            def validate(self, model: GraphModule) -> None:
                watched.append(weakref.ref(model))

        quantizer = qompose.compose(*self.members(), Watching())
        module = export(seeded(net()), X).module(check_guards=False)
        prepared = prepare(module, quantizer)
        assert len(watched) >= 3
        watched += map(weakref.ref, (module, module.graph, prepared, prepared.graph))
        del module, prepared
        gc.collect()
        assert [ref() for ref in watched] == [None] * len(watched)
        assert len(quantizer.members) == 4

    def test_reuse_is_as_good_as_new(self) -> None:
        other = Model(lambda m, x: torch.tanh(m.head(x)), head=nn.Linear(4, 4))
        programs = [PROGRAM, export(seeded(other), X), export(seeded(net(), seed=3), randn(2, 4))]
        used = qompose.compose(*self.members())
        for program in programs:
            again = prepare(program, used)
            fresh = prepare(program, qompose.compose(*self.members()))
            assert graph_text(again) == graph_text(fresh)
            assert plan_of(again) == plan_of(fresh)


class TestContests:
    """on_conflict="error": no two members may want the same operators."""

    OTHERS: ClassVar[dict[str, Callable[[], Any]]] = {
        "rules": lambda: toy(LINEAR, name="other"),
        "foreign": Foreign,
    }

    @pytest.mark.parametrize("other", OTHERS)
    def test_what_several_want_is_an_error(self, other: str) -> None:
        member = self.OTHERS[other]()
        composed = qompose.compose(toy(LINEAR, name="body"), member, on_conflict="error")
        with pytest.raises(ContestedRegionError) as caught:
            prepare(PROGRAM, composed)
        error = caught.value
        assert isinstance(error, AnnotationConflictError)
        assert (error.earlier, error.later, error.node) == (
            "body",
            composed.members[1].name,
            "linear",
        )
        assert {nodes for *_, nodes in error.contests} == {("linear",), ("linear_1",)}
        assert "linear_1" in str(error)
        assert (
            len(
                plan_of(
                    prepare(PROGRAM, qompose.compose(toy(LINEAR, name="body"), member))
                ).conflicts
            )
            == 2
        )

    @pytest.mark.parametrize("other", OTHERS)
    def test_what_one_of_them_leaves_alone_is_none(self, other: str) -> None:
        body = toy(LINEAR, name="body", config=None)
        composed = qompose.compose(body, self.OTHERS[other](), on_conflict="error")
        assert len(plan_of(prepare(PROGRAM, composed)).claims) == 2

    def test_two_rules_of_one_member_are_none(self) -> None:
        alone = qompose.compose(
            toy(LINEAR_RELU, LINEAR, replace(LINEAR, name="again")), on_conflict="error"
        )
        assert len(plan_of(prepare(PROGRAM, alone)).claims) == 2


def test_a_restricted_member_keeps_the_order_of_its_claims() -> None:
    member = toy(SIGMOID, LINEAR)
    (_, setting) = toy().set_module_name("head", None).selectors.settings
    proposals = [
        quantizer.bound(model := PROGRAM.module()).propose(model, ())
        for quantizer in (member, Restricted(member, [setting]))
    ]
    own, kept = ([claim.nodes for claim in proposal.claims] for proposal in proposals)
    assert own == [("sigmoid",), ("linear",), ("linear_1",)] and kept == own[:2]
    assert [refused.nodes for refused in proposals[1].rejections] == own[2:]


# Rules of two families never want the same operator, so that members of whole families are disjoint.
FAMILIES = (
    (CONV_ADD_RELU, CONV_RELU, CONV, ADD_RELU, ADD), (LINEAR_RELU, LINEAR), (SIGMOID,), (VIEW,), (CAT,),
)  # fmt: skip


def mixed(m: Any, x: Tensor) -> Tensor:
    """Every family, next to every other."""
    y = torch.relu(m.one(x))
    y = torch.relu(m.two(y) + y)
    z = torch.sigmoid(y.reshape(-1, 16))
    w = m.flat(z).relu()
    return m.last(torch.cat([w, torch.sigmoid(w)], 1)) + 1


def branches(m: Any, x: Tensor) -> Tensor:
    y = torch.cond(x.sum() > 0, lambda x: torch.sigmoid(m.yes(x)), lambda x: m.no(x).relu(), (x,))
    return torch.cat([y.view(-1, 2), y.view(-1, 2)], 1)


INPUTS = {mixed: randn(3, 2, 2, 2), branches: randn(3, 4)}
LAYERS = {
    mixed: lambda: {
        "one": nn.Conv2d(2, 4, 1), "two": nn.Conv2d(4, 4, 1),
        "flat": nn.Linear(16, 8), "last": nn.Linear(16, 3),
    },
    branches: lambda: {"yes": nn.Linear(4, 4), "no": nn.Linear(4, 4)},
}  # fmt: skip
Function = Callable[..., Tensor]


@cache
def program(kind: Function) -> torch.export.ExportedProgram:
    return export(seeded(Model(kind, **LAYERS[kind]())), INPUTS[kind])


def rows(model: GraphModule) -> list[tuple[Any, ...]]:
    """What became of every operator; who took it, or says why not, has a name of his own in each test."""
    left_out = ("owner", "reason")
    names = [n for n in qompose.reporting.Row.__dataclass_fields__ if n not in left_out]
    return [tuple(getattr(row, name) for name in names) for row in qompose.report(model).rows]


def results(kind: Function, members: list[Quantizer]) -> tuple[Any, ...]:
    """What a composition makes of a program: text of the graph, scales, rows, and who meets whom."""
    prepared = prepare(program(kind), qompose.compose(*members))
    with torch.no_grad():
        prepared(INPUTS[kind])
        prepared(-INPUTS[kind])
    converted = qompose.convert_pt2e(prepared)
    report = check(converted)
    assert not report.conflicts
    meetings = {(r.tensor, r.from_owner, r.to_owner) for r in report.requantizations}
    return graph_text(prepared), graph_text(converted), rows(prepared), rows(converted), meetings


PARTITIONS = st.lists(st.integers(0, 4), min_size=5, max_size=5)


@settings(max_examples=6)
@given(parts=PARTITIONS, order=st.permutations(range(5)), kind=st.sampled_from([mixed, branches]))
def test_rules_divided_among_members(parts: list[int], order: list[int], kind: Function) -> None:
    """Any division of the families, in any order, makes the graph that one quantizer makes."""
    members: list[Quantizer] = []
    for part in order:
        owned = [
            rule for family, p in zip(FAMILIES, parts, strict=True) if p == part for rule in family
        ]
        members += [toy(*owned, name=f"m{part}")] if owned else []
    alone = results(kind, [toy(*itertools.chain(*FAMILIES), name="alone")])
    assert results(kind, members) == alone


CONFIGS = {"static": STATIC, "unsigned": STATIC_UINT8, "dynamic": DYNAMIC, "float": None}


@settings(max_examples=6)
@given(
    words=st.lists(st.sampled_from(sorted(CONFIGS)), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    kind=st.just(mixed),
)
def test_modules_divided_among_members(words: list[str], order: list[int], kind: Function) -> None:
    """Members of one backend, each with a module of its own and a configuration of its own."""

    def members() -> list[Quantizer]:
        return [
            toy(config=None, name=name).set_module_name(name, CONFIGS[word])
            for name, word in zip(("one", "two", "flat", "last"), words, strict=True)
        ]

    made = members()
    assert results(kind, [made[i] for i in order]) == results(kind, members())


JOINED_MODEL = Model(
    lambda m, x: torch.tanh(torch.cat([x, torch.sigmoid(m.b(m.a(x)))], 1)),
    a=nn.Linear(3, 4),
    b=nn.Linear(4, 4),
)
JOINED = export(seeded(JOINED_MODEL), randn(6, 3))


def idle(*members: Any) -> dict[str, str]:
    """Who claims nothing -> the note on it."""
    plan = plan_of(prepare(JOINED, qompose.compose(*members)))
    found = {n: note for n in plan.idle_owners for note in plan.notes if note.startswith(f"{n} ")}
    assert set(found) == set(plan.idle_owners)
    return found


A = partial(toy, LINEAR, name="a")
B = partial(toy, LINEAR, name="b")
WHY: dict[str, tuple[Any, list[str]]] = {
    "lost all": (lambda: (A(), B(config=DYNAMIC)), ["2 regions", "lost", "to a"]),
    "lost one, left one": (
        lambda: (A(), B().set_module_name("a", None)), ["lost", "to a;", "1 region", "module name a"],
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
    assert not any(note.startswith("toy ") for note in plan_of(prepare(JOINED, toy(CONV))).notes)


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
    plan = plan_of(prepare(JOINED, both))
    assert plan.idle_owners == ("late",)
    assert any(note.startswith("late ") and "2 regions" in note for note in plan.notes)


def test_a_rule_that_got_further_with_the_same_operators_gives_the_reason() -> None:
    """The other one would only point at it."""
    view = [OperatorPattern((torch.ops.aten.tanh.default,))]
    facts: dict[str, Any] = {"activations": ("self",), "shares": True, "condition": "all"}
    waiting = rule("waiting", *view, **facts)
    pointing = rule("pointing", *view, **facts, guard=lambda match: "see rule waiting")
    for rules in ((waiting, pointing), (pointing, waiting)):
        plan = plan_of(prepare(JOINED, qompose.compose(toy(LINEAR), toy(*rules, name="b"))))
        (tanh,) = (o for o in plan.operators if o.name == "tanh")
        assert tanh.reason.startswith("b: ") and "waiting" not in tanh.reason
        assert any(tanh.reason.removeprefix("b: ") in note for note in plan.notes)
