# SPDX-License-Identifier: Apache-2.0
"""Who gets which region: order is priority, shorter rules keep what is left, conditions are awaited."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import compose
from qompose.backend import Kernel, OperatorPattern
from qompose.quantizer.arbitration import compose_claims
from qompose.spec import DerivedQuantizationSpec
from qompose.spec.claim import Claim, Composition, Conflict, Kind, Point, PointSpec, Proposal
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import bias_scale
from tests.core.toy import (
    ADD,
    CAT,
    CONV,
    CONV_ADD_RELU,
    CONV_RELU,
    INT8,
    LINEAR,
    RELU,
    STATIC,
    VIEW,
    Call,
    Model,
    aten,
    claimed,
    export,
    plan_of,
    prepare,
    randn,
    rule,
    seeded,
    toy,
)


@pytest.fixture(scope="module")
def model() -> GraphModule:
    """Six sigmoids in a row: sigmoid, sigmoid_1, ... sigmoid_5."""
    six = Call(lambda x: x.sigmoid().sigmoid().sigmoid().sigmoid().sigmoid().sigmoid())
    return export(six, randn(2, 3)).module(check_guards=False)


NAMES = ("sigmoid", *(f"sigmoid_{i}" for i in range(1, 6)))


def claim(
    rule: str, *nodes: int, needs: Sequence[int] = (), all_of: bool = True, **facts: Any
) -> Claim:
    """A claim on some of the nodes; its last one's output is quantized."""
    names = tuple(NAMES[node] for node in nodes)
    specs = (PointSpec(Point(names[-1]), INT8),) if facts.pop("output", True) else ()
    return Claim(
        owner="", rule=rule, anchor=names[0], nodes=names, output=names[-1], specs=specs,
        needs_quantized=tuple(NAMES[i] for i in needs), needs_all=all_of, **facts,
    )  # fmt: skip


def member(name: str, *claims: Claim) -> tuple[str, Callable[..., Proposal]]:
    return name, lambda model, taken, on_conflict: Proposal(list(claims))


def chosen(composition: Composition) -> list[str]:
    return [f"{claim.owner}.{claim.rule}" for claim in composition.chosen]


def test_earlier_members_win_and_the_loss_is_listed(model: GraphModule) -> None:
    first = member("first", claim("one", 0, 1))
    second = member("second", claim("two", 1, 2), claim("three", 2))
    result = compose_claims(model, [first, second])
    assert chosen(result) == ["first.one", "second.three"]
    assert result.conflicts == [Conflict("first", "one", "second", "two", ("sigmoid_1",))]
    result = compose_claims(model, [second, first])
    assert chosen(result) == ["second.two"]
    assert result.conflicts == [Conflict("second", "two", "first", "one", ("sigmoid_1",))]


def test_a_loss_to_a_later_member_says_what_the_earlier_one_waited_for(model: GraphModule) -> None:
    """The first wants what reads an operator once that is quantized, and the second quantizes both."""
    first = member("first", claim("view", 1, needs=(0,)))
    second = member("second", claim("all", 0), claim("too", 1))
    result = compose_claims(model, [first, second])
    assert chosen(result) == ["second.all", "second.too"]
    (conflict,) = result.conflicts
    assert (conflict.winner, conflict.loser) == ("second", "first")
    assert "sigmoid" in conflict.reason and "second" in conflict.reason
    (conflict,) = compose_claims(model, [second, first]).conflicts
    assert (conflict.winner, conflict.reason) == ("second", "")


def test_what_waited_in_vain_is_listed_though_a_later_member_has_the_operator(
    model: GraphModule,
) -> None:
    """Inside the second's region nothing is quantized, so it is no conflict."""
    first = member("first", claim("view", 1, needs=(0,)))
    result = compose_claims(model, [first, member("second", claim("both", 0, 1))])
    assert chosen(result) == ["second.both"]
    assert result.conflicts == []
    (waited,) = result.rejections
    assert (waited.owner, waited.rule, waited.kind) == ("first", "view", Kind.WAITED)
    own = member("first", claim("both", 0, 1), claim("view", 1, needs=(0,)))
    assert compose_claims(model, [own]).rejections == []


def test_a_claim_may_lose_to_several_and_does_not_conflict_with_those_of_its_member(
    model: GraphModule,
) -> None:
    twice = [claim("x", 0), claim("again", 0)]
    claims = {"a": twice, "b": [claim("y", 1)], "c": [claim("z", 0, 1)]}
    result = compose_claims(model, [member(name, *own) for name, own in claims.items()])
    assert chosen(result) == ["a.x", "b.y"]
    lost = [(conflict.winner, conflict.nodes) for conflict in result.conflicts]
    assert lost == [("a", ("sigmoid",)), ("b", ("sigmoid_1",))]


@pytest.mark.parametrize(
    ("needs", "all_of", "stands"),
    [
        pytest.param((0,), True, True, id="its one input"),
        pytest.param((0, 1), True, True, id="all of two"),
        pytest.param((0, 2), True, False, id="all, and one is float"),
        pytest.param((0, 2), False, True, id="any, and one is float"),
        pytest.param((2, 4), False, False, id="any, and all are float"),
        pytest.param((2,), True, False, id="its one input is float"),
    ],
)
def test_conditions(model: GraphModule, needs: tuple[int, ...], all_of: bool, stands: bool) -> None:
    conditional = claim("conditional", 5, needs=needs, all_of=all_of)
    result = compose_claims(model, [member("a", conditional, claim("x", 0), claim("y", 1))])
    assert chosen(result) == ["a.x", "a.y", *(["a.conditional"] if stands else [])]
    refused = [(r.rule, r.nodes) for r in result.rejections]
    assert refused == ([] if stands else [("conditional", ("sigmoid_5",))])


def test_a_chain_of_conditional_claims_is_settled_in_graph_order(model: GraphModule) -> None:
    chain = [claim("start", 0), *(claim(f"view{i}", i, needs=[i - 1]) for i in (1, 2, 3))]
    for claims in itertools.permutations(chain):
        result = compose_claims(model, [member("a", *claims)])
        assert chosen(result) == ["a.start", "a.view1", "a.view2", "a.view3"]


@pytest.mark.parametrize(("owner", "stands"), [("a", True), ("b", False)])
def test_an_output_without_a_specification_is_quantized_for_its_owner_alone(
    model: GraphModule, owner: str, stands: bool
) -> None:
    """Its kernel may requantize, but nobody else can ask it to."""
    product = claim("product", 0, output=False)
    view = claim("view", 1, needs=[0])
    members = (
        [member("a", product, view)] if owner == "a" else [member("a", product), member("b", view)]
    )
    assert (f"{owner}.view" in chosen(compose_claims(model, members))) is stands


@pytest.mark.parametrize("mode", ["dynamic", "weight-only"])
def test_only_static_claims_quantize_their_output(model: GraphModule, mode: str) -> None:
    product = claim("product", 0, output=False, mode=mode)
    result = compose_claims(model, [member("a", product, claim("view", 1, needs=[0]))])
    assert chosen(result) == ["a.product"]


@pytest.mark.parametrize(("held", "stands"), [((0, 1), False), ((0,), True), ((), True)], ids=str)
def test_a_claim_on_an_input_falls_where_others_have_all_that_reads_it(
    held: tuple[int, ...], stands: bool
) -> None:
    model = export(Call(lambda x: (x.sigmoid(), x.sigmoid().sigmoid())), randn(2)).module()
    first = [claim(f"on{node}", node) for node in held]
    idle = replace(claim("idle", 0, output=False), nodes=("inputs_0",), output="inputs_0")
    members = [member("first", *first), member("second", idle, claim("own", 2))]
    result = compose_claims(model, members)
    assert ("second.idle" in chosen(result)) is stands
    assert [r.rule for r in result.rejections] == ([] if stands else ["idle", "idle"])
    lost = [Conflict("first", f"on{n}", "second", "idle", (NAMES[n],)) for n in held]
    assert result.conflicts == ([] if stands else lost)


def test_a_claim_that_falls_with_another_is_refused_once(model: GraphModule) -> None:
    spec = DerivedQuantizationSpec([], bias_scale, torch.int8)
    needy = PointSpec(Point(NAMES[2]), spec, (Point(NAMES[1]),))
    members = [
        member("winner", claim("one", 0)),
        member("loser", claim("two", 0, 1)),
        member("needy", replace(claim("three", 2), specs=(needy,))),
    ]
    result = compose_claims(model, members)
    assert chosen(result) == ["winner.one"]
    assert [(r.rule, r.kind) for r in result.rejections] == [
        ("two", Kind.LOST), ("three", Kind.REFUSED),
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    owners=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    conditional=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_the_order_of_disjoint_members_does_not_matter(
    model: GraphModule, owners: list[int], conditional: list[bool]
) -> None:
    """Each node belongs to one member; a conditional claim needs the node before it, whose ever it is."""
    claims = [claim(f"rule{i}", i, needs=[i - 1] if i and conditional[i] else []) for i in range(6)]
    members = [
        member(f"m{owner}", *(c for c, o in zip(claims, owners, strict=True) if o == owner))
        for owner in range(3)
    ]
    results = [compose_claims(model, order) for order in itertools.permutations(members)]
    expected = {f"m{owner}.rule{i}" for i, owner in enumerate(owners)}
    assert all(set(chosen(result)) == expected for result in results)
    assert all(not result.conflicts for result in results)


RESIDUAL = export(
    seeded(Model(lambda m, x: torch.relu(m.conv(torch.tanh(x)) + x), conv=nn.Conv2d(3, 3, 1))),
    randn(1, 3, 4, 4),
)
CONV_RULES = (CONV_ADD_RELU, CONV_RELU, CONV)
REMAINING = {
    "a shorter one where the add is taken": (
        [toy(ADD, name="sums"), toy(*CONV_RULES)], {"add": ("add",), "conv": ("conv2d",)},
    ),
    "a shorter one where the relu is taken": (
        [
            toy(RELU, name="relus").set_operator_type(torch.relu, STATIC),  # else it is an island
            toy(*CONV_RULES),
        ],
        {"relu": ("relu",), "conv": ("conv2d",)},
    ),
    "nothing is left for the second": (
        [toy(*CONV_RULES), toy(ADD, RELU, name="sums")],
        {"conv_add_relu": ("conv2d", "add", "relu")},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("members", "expected"), REMAINING.values(), ids=REMAINING)
def test_what_remains_goes_to_a_shorter_rule(members: Any, expected: Any) -> None:
    assert claimed(prepare(RESIDUAL, compose(*members))) == expected


def _views(m: nn.Module, x: Tensor) -> Tensor:
    y = m.linear(x).view(-1, 2, 3).permute(0, 2, 1).reshape(-1, 6)
    return torch.cat([y, x.view(-1, 4)], dim=1)


def test_views_follow_a_quantized_tensor_and_only_that() -> None:
    program = export(seeded(Model(_views, linear=nn.Linear(4, 6))), randn(5, 4))
    assert set(claimed(prepare(program, toy(VIEW, CAT)))) == set()
    prepared = prepare(program, toy(VIEW, CAT, LINEAR))
    assert claimed(prepared) == {
        "linear": ("linear",), "view": ("view",), "view'": ("permute",), "view''": ("reshape",),
        "cat": ("cat",),
    }  # fmt: skip


CLONE = rule(
    "clone", OperatorPattern((aten.clone.default,)), activations=("self",), shares=True,
    condition="all", carries=True,
    kernels={"torch": Kernel("no operator", lambda r: r.quantized_inputs("self")[0].node)},
)  # fmt: skip


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        pytest.param(lambda m, x: m.second(m.first(x).clone()), 1, id="between products"),
        pytest.param(lambda m, x: m.second(m.first(x).clone().clone()), 2, id="a chain"),
        pytest.param(lambda m, x: m.first(x).clone().sigmoid(), 0, id="before a float operator"),
        pytest.param(lambda m, x: m.first(x).clone().clone().sigmoid(), 0, id="a chain to float"),
        pytest.param(lambda m, x: m.first(x).clone(), 0, id="at the end"),
        pytest.param(
            lambda m, x: (lambda y: m.second(y) + y.sigmoid())(m.first(x).clone()), 1, id="both"
        ),
    ],
)
def test_where_they_are_taken(function: Callable[[nn.Module, Tensor], Tensor], taken: int) -> None:
    model = seeded(Model(function, first=nn.Linear(8, 8), second=nn.Linear(8, 8)))
    prepared = prepare(export(model, randn(3, 8)), toy(LINEAR, CLONE))
    clones = [o for o in plan_of(prepared).operators if o.operator == "aten.clone"]
    assert len([o for o in clones if o.claim is not None]) == taken
    assert all(o.reason.startswith("toy: ") for o in clones if o.claim is None)


def test_who_lost_to_what_nobody_reads_gets_its_turn() -> None:
    """The claim of the first member falls after the second's lost to it."""
    first, second = replace(RELU, carries=True), replace(RELU, name="relu of another")
    model = seeded(Model(lambda m, x: m.one(x).relu().tanh(), one=nn.Linear(8, 8)))
    program = export(model, randn(3, 8))
    prepared = prepare(program, compose(toy(LINEAR, first), toy(second, name="other")))
    assert claimed(prepared) == {"linear": ("linear",), "relu of another": ("relu",)}
    assert not plan_of(prepared).conflicts
    reasons = [row.reason for row in qompose.report(prepared).rows if "relu" in row.operator]
    assert not any("lost" in reason for reason in reasons)


def test_capabilities_say_so() -> None:
    assert toy(CLONE).quantization_capabilities().to_dict()["rows"][0]["carries"] is True
