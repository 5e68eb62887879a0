# SPDX-License-Identifier: Apache-2.0
"""Every hook of every member is called; what one raises or returns is named, and the process is as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
from qompose.errors import MemberError
from torch import nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import Foreign, aten, calls
from tests.core.quantizer.interop.gallery import GALLERY, PROGRAM, X
from tests.core.toy import graph_text, plan_of, prepare

HOOKS = ("transform_for_annotation", "annotate", "validate", "prepare_obs_or_fq_callback")


class Acting(Foreign):
    """Does something in one of its hooks, beside what it does otherwise."""

    def __init__(self, hook: str, act: Any) -> None:
        self.hook, self.act = hook, act

    def _do(self, hook: str) -> Any:
        return self.act() if hook == self.hook else None

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        self._do(HOOKS[0])
        return super().transform_for_annotation(model)

    def annotate(self, model: GraphModule) -> GraphModule:
        self._do(HOOKS[1])
        return super().annotate(model)

    def validate(self, model: GraphModule) -> None:
        return self._do(HOOKS[2])

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        self._do(HOOKS[3])


class Other(Foreign):
    targets = (aten.tanh.default,)


def arrangements(member: Any) -> list[list[Any]]:
    return [[member], [member, Other()], [Other(), member]]


class TestErrors:
    """An error of the member's own is a MemberError that says whose, and where."""

    @pytest.mark.parametrize("hook", HOOKS)
    @pytest.mark.parametrize(
        "error", [ValueError("why"), AssertionError(), KeyError("k"), StopIteration()]
    )
    def test_it_names_member_and_hook(self, hook: str, error: Exception) -> None:
        def act() -> None:
            raise error

        for chosen in arrangements(Acting(hook, act)):
            with pytest.raises(MemberError) as caught:
                prepare(PROGRAM, qompose.compose(*chosen))
            kind = type(error).__name__
            assert f"tests.Acting: {hook} raised {kind}" in str(caught.value)
            assert isinstance(caught.value.__cause__, type(error))

    @pytest.mark.parametrize("hook", HOOKS)
    def test_a_warning_arrives(self, hook: str) -> None:
        def act() -> None:
            warnings.warn("of the member", UserWarning, stacklevel=1)

        with pytest.warns(UserWarning, match="of the member"):
            qompose.prepare_pt2e(PROGRAM, qompose.compose(Acting(hook, act), Other()))

    @pytest.mark.parametrize("result", [None, 3, nn.Identity()], ids=repr)
    def test_a_transform_that_returns_no_program(self, result: Any) -> None:
        class Returning(Foreign):
            def transform_for_annotation(self, model: GraphModule) -> Any:
                return result

        for chosen in arrangements(Returning()):
            with pytest.raises(
                UserError, match=r"tests\.Returning: transform_for_annotation returned"
            ):
                prepare(PROGRAM, qompose.compose(*chosen))

    @pytest.mark.parametrize("which", ["a number", "a copy", "the graph"])
    def test_annotate_that_returns_another_object(self, which: str) -> None:
        class Returning(Foreign):
            def annotate(self, model: GraphModule) -> Any:
                super().annotate(model)
                others = {"a number": 3, "the graph": model.graph}
                return others.get(which, GraphModule(model, model.graph))

        for chosen in arrangements(Returning()):
            with pytest.raises(
                UserError, match=r"tests\.Returning: annotate must annotate the program"
            ):
                prepare(PROGRAM, qompose.compose(*chosen))

    @pytest.mark.parametrize("returned", [None, "the same"], ids=str)
    def test_annotate_may_return_nothing(self, returned: Any) -> None:
        class Returning(Foreign):
            def annotate(self, model: GraphModule) -> Any:
                super().annotate(model)
                return model if returned else None

        prepared = prepare(PROGRAM, qompose.compose(Returning()))
        assert graph_text(prepared) == graph_text(prepare(PROGRAM, qompose.compose(Foreign())))

    @pytest.mark.parametrize("answer", [True, None, False])
    def test_validate_may_answer(self, answer: Any) -> None:
        """Engines of this field ignore it; a no is said."""
        plan = plan_of(
            prepare(PROGRAM, qompose.compose(Acting("validate", lambda: answer), Other()))
        )
        assert len(plan.claims) == 3
        noted = [n for n in plan.notes if n.startswith("tests.Acting: validate returned False")]
        assert len(noted) == (answer is False)


class TestCalls:
    """Which hooks are called, with what."""

    def members(self, seen: list[Any]) -> list[Any]:
        def logging_member(name: str, **facts: Any) -> Any:
            class Logging(Foreign):
                def __deepcopy__(self, memo: Any) -> Any:
                    return type(self)()

                def transform_for_annotation(self, model: GraphModule) -> GraphModule:
                    seen.append((name, HOOKS[0], id(self), model))
                    return model

                def annotate(self, model: GraphModule) -> GraphModule:
                    seen.append((name, HOOKS[1], id(self), model))
                    return super().annotate(model)

                def validate(self, model: GraphModule) -> None:
                    seen.append((name, HOOKS[2], id(self), model))

                def prepare_obs_or_fq_callback(self, model: GraphModule, observers: Any) -> None:
                    seen.append((name, HOOKS[3], id(self), (model, dict(observers))))

            return type(name, (Logging,), facts)()

        return [
            logging_member("First"),
            logging_member("Second", targets=(aten.tanh.default,)),
            logging_member("Third", targets=()),
        ]

    def test_all_hooks_of_all_members_in_order(self) -> None:
        seen: list[Any] = []
        prepare(PROGRAM, qompose.compose(*self.members(seen)))
        for name in ("First", "Second", "Third"):
            calls = [(hook, instance) for who, hook, instance, _ in seen if who == name]
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

        class Last(Looking):
            targets = (aten.tanh.default,)

        prepare(PROGRAM, qompose.compose(Foreign(), Looking(), Last(), Other()))
        assert {name for name, _ in seen} == {"Looking", "Last"}
        assert all(not foreign for _, foreign in seen)

    def test_nobody_sees_annotations_that_the_program_brings(self) -> None:
        """As one does that another engine was asked about before."""
        module = PROGRAM.module(check_guards=False)
        for node in calls(module):
            node.meta["quantization_annotation"] = Foreign().asked(node)
        prepared = prepare(module, qompose.compose(GALLERY["Alone"](), GALLERY["Nominal"]()))
        assert graph_text(prepared) == graph_text(
            prepare(PROGRAM, qompose.compose(GALLERY["Alone"]()))
        )

    def test_the_callback_gets_all_observers_and_may_replace_its_own(self) -> None:
        replaced = []

        class Replacing(Foreign):
            def prepare_obs_or_fq_callback(self, model: GraphModule, observers: Any) -> None:
                for place, observer in observers.items():
                    if isinstance(place, torch.fx.Node) and place.name == "linear":
                        made = type(observer)(dtype=torch.int8, quant_min=-128, quant_max=127)
                        observers[place] = made
                        replaced.append(made)

        prepared = prepare(PROGRAM, qompose.compose(Other(), Replacing()))
        assert replaced[0] in list(prepared.modules())

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

    def test_hooks_that_it_does_not_have(self) -> None:
        class Least:
            def annotate(self, model: GraphModule) -> None:
                Foreign().annotate(model)

            def validate(self, model: GraphModule) -> None:
                pass

        prepared = prepare(PROGRAM, qompose.compose(Least()))  # type: ignore[arg-type]
        assert {claim.owner for claim in plan_of(prepared).claims} == {"tests.Least"}

    def test_callers_of_annotate_get_what_prepare_would_use(self) -> None:
        """A composition can itself be a member of another engine's flow, which calls the hooks."""
        model = PROGRAM.module(check_guards=False)
        quantizer = qompose.compose(Foreign(), Other())
        annotated = quantizer.annotate(quantizer.transform_for_annotation(model))
        quantizer.validate(annotated)
        taken = [n.name for n in annotated.graph.nodes if "quantization_annotation" in n.meta]
        assert taken == ["linear", "linear_1", "tanh"]


class TestProcess:
    """Torch's random numbers, default dtype and grad mode are put back after each hook."""

    def settings(self) -> tuple[Any, ...]:
        state = torch.get_rng_state().sum().item()
        return torch.get_default_dtype(), torch.is_grad_enabled(), state

    def disturb(self) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.manual_seed(3)

    @pytest.mark.parametrize("hook", HOOKS)
    def test_of_every_hook(self, hook: str) -> None:
        before = self.settings()
        for chosen in arrangements(Acting(hook, self.disturb)):
            prepared = prepare(PROGRAM, qompose.compose(*chosen))
            assert self.settings() == before
            assert prepared(X).dtype is torch.float32

    @pytest.mark.parametrize("hook", HOOKS)
    def test_where_it_fails_too(self, hook: str) -> None:
        def act() -> None:
            self.disturb()
            raise ValueError("why")

        before = self.settings()
        with pytest.raises(MemberError):
            prepare(PROGRAM, qompose.compose(Other(), Acting(hook, act)))
        assert self.settings() == before
