# SPDX-License-Identifier: Apache-2.0
"""A composition is its members: every hook reaches each of them, nothing of a program is kept."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import qompose
import torch
from qompose import ComposableQuantizer, Quantizer, UserError
from qompose.errors import ConfigError, MemberError
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec.claim import Claim
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import (
    INT8,
    LINEAR,
    SIGMOID,
    NullQuantizer,
    annotate,
    aten,
    claimed,
    export,
    graph_text,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)
from tests.zoo import by_name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(torch.sigmoid(self.body(x))))


X = randn(6, 4)
PROGRAM = export(seeded(Net()), X)

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


@pytest.mark.parametrize("name", [n for n in interface() if n not in OWN])
def test_a_composition_answers_for_its_members(name: str) -> None:
    """A name that is new to the interface must be forwarded, or said here not to be."""
    assert name in vars(ComposableQuantizer), f"ComposableQuantizer does not forward {name}"


def test_nothing_is_excused_that_is_not_there() -> None:
    assert set(OWN) <= set(interface())
    assert not set(OWN) - {"on_conflict"} & set(vars(ComposableQuantizer))


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


@pytest.mark.parametrize("name", ["bn_conv_skip", "cond_conv", "scalars"])
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
    both = qompose.compose(*members)
    claim = Claim(
        owner="b", rule="r", anchor="linear", nodes=("linear",), output="linear", specs=()
    )
    arguments: dict[str, tuple[Any, ...]] = {
        "objection_to_rewrite": (claim, []),
        "objection_to_spec": (claim, INT8),
        "quantization_capabilities": (),
    }
    getattr(both, name)(*arguments[name])
    asked = ["b"] if name.startswith("objection") else ["a", "b", "c"]
    assert [member.label for member in members if member.count(name)] == asked


def failing(hook: str) -> Quantizer:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("oops")

    return type("Failing", (NullQuantizer,), {hook: fail, "name": "failing"})()


HOOKS = ("annotate", "transform_for_annotation", "validate", "prepare_obs_or_fq_callback")


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "composed"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_member_that_raises_is_named(hook: str, alone: bool) -> None:
    member = failing(hook)
    quantizer = member if alone else qompose.compose(toy(LINEAR), member)
    with pytest.raises(MemberError, match=f"{hook} raised ZeroDivisionError: oops") as caught:
        prepare(PROGRAM, quantizer)
    assert alone or str(caught.value).startswith(f"failing: {hook}")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_member_that_annotates_a_copy_is_told_so() -> None:
    class Copying(NullQuantizer):
        def annotate(self, model: GraphModule) -> GraphModule:
            return GraphModule(model, model.graph)

    with pytest.raises(UserError, match=r"Copying: annotate must .* another GraphModule"):
        prepare(PROGRAM, qompose.compose(toy(LINEAR), Copying()))


def test_a_member_may_annotate_and_return_nothing() -> None:
    class Silent(NullQuantizer):
        def annotate(self, model: GraphModule) -> GraphModule:  # type: ignore[return]
            for node in model.graph.nodes:
                if node.target is aten.tanh.default:
                    annotate(node, {node.args[0]: INT8}, INT8)

    assert claimed(prepare(PROGRAM, qompose.compose(Silent(), toy(LINEAR)))) == {
        "annotation": ("tanh",), "linear": ("linear",), "linear'": ("linear_1",),
    }  # fmt: skip


@pytest.mark.parametrize("result", [None, "text"], ids=str)
def test_a_member_whose_transform_returns_no_module_is_named(result: Any) -> None:
    class Forgetful(NullQuantizer):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            return result

    with pytest.raises(UserError, match="Forgetful: transform_for_annotation returned"):
        prepare(PROGRAM, qompose.compose(toy(LINEAR), Forgetful()))


def test_a_member_may_return_another_module_from_its_transform() -> None:
    class Doubling(NullQuantizer):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            copied = GraphModule(model, model.graph)
            for node in copied.graph.nodes:
                if node.target is aten.tanh.default:
                    node.target = aten.sigmoid.default
            return copied

    prepared = prepare(PROGRAM, qompose.compose(Doubling(), toy(SIGMOID)))
    assert len(claimed(prepared)) == 2


class TestNesting:
    """Compositions of compositions."""

    def test_members_keep_their_order(self) -> None:
        a, b, c, d = (NullQuantizer() for _ in range(4))
        nested = qompose.compose(a, qompose.compose(b, qompose.compose(c)), d)
        assert nested.members == (a, b, c, d)

    def test_the_result_is_that_of_the_flat_one(self) -> None:
        def members() -> list[Quantizer]:
            return [toy(SIGMOID, name="s"), toy(LINEAR, name="l"), toy(name="rest")]

        one, two, three = members()
        nested = prepare(PROGRAM, qompose.compose(one, qompose.compose(two, three)))
        flat = prepare(PROGRAM, qompose.compose(*members()))
        assert graph_text(nested) == graph_text(flat)
        assert plan_of(nested) == plan_of(flat)

    @pytest.mark.parametrize(("inner", "outer"), [("first", "error"), ("error", "first")])
    def test_two_policies_are_refused(self, inner: str, outer: str) -> None:
        pair = qompose.compose(toy(LINEAR), NullQuantizer(), on_conflict=inner)
        with pytest.raises(
            ConfigError, match=rf"toy\+NullQuantizer .*on_conflict='{inner}'.*same one"
        ):
            qompose.compose(pair, NullQuantizer(), on_conflict=outer)
        assert qompose.compose(pair, NullQuantizer(), on_conflict=inner).on_conflict == inner

    def test_the_policy_of_a_composition_of_one_is_not_lost(self) -> None:
        alone = qompose.compose(toy(LINEAR), on_conflict="first")
        with pytest.raises(ConfigError, match=r"toy is a composition with on_conflict='first'"):
            qompose.compose(alone, NullQuantizer())
        assert qompose.compose(alone, NullQuantizer(), on_conflict="first").members[0].name == "toy"

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
