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
from tests.core.toy import Model, export, graph_text, plan_of, prepare

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


def _failing() -> None:
    """Fail in a function of torch, and do not say why."""
    torch._assert(False, "")


def _raising(error: Exception) -> Any:
    def act() -> None:
        raise error

    return act


ERRORS = (ValueError("why"), AssertionError(), KeyError("k"), StopIteration())


class TestErrors:
    """An error of the member's own is a MemberError that says whose, and where."""

    @pytest.mark.parametrize(
        ("hook", "error"),
        list(zip(HOOKS, ERRORS, strict=True)),
    )
    def test_it_names_member_and_hook(self, hook: str, error: Exception) -> None:
        for chosen in arrangements(Acting(hook, _raising(error))):
            with pytest.raises(
                MemberError, match=f"tests.Acting: {hook} .*{type(error).__name__}"
            ) as caught:
                prepare(PROGRAM, qompose.compose(*chosen))
            assert caught.value.__cause__ is error or isinstance(error, StopIteration)

    @pytest.mark.parametrize("hook", HOOKS)
    def test_an_error_without_a_text_has_its_line(self, hook: str) -> None:
        place = f"interop/test_member_hooks.py:{_failing.__code__.co_firstlineno + 2}"
        with pytest.raises(MemberError, match=f"tests.Acting: {hook} .*AssertionError.*{place}$"):
            prepare(PROGRAM, qompose.compose(Acting(hook, _failing), Other()))

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
                prepare(program, qompose.compose(Other(), member))

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
            with pytest.raises(UserError, match=r"tests\.Returning: transform_for_annotation"):
                prepare(PROGRAM, qompose.compose(*chosen))

    @pytest.mark.parametrize("which", ["a number", "a copy", "the graph"])
    def test_annotate_that_returns_another_object(self, which: str) -> None:
        class Returning(Foreign):
            def annotate(self, model: GraphModule) -> Any:
                super().annotate(model)
                others = {"a number": 3, "the graph": model.graph}
                return others.get(which, GraphModule(model, model.graph))

        for chosen in arrangements(Returning()):
            with pytest.raises(UserError, match=r"tests\.Returning: annotate"):
                prepare(PROGRAM, qompose.compose(*chosen))

    @pytest.mark.parametrize("copied", [None, "a text"], ids=str)
    def test_a_copy_that_is_no_quantizer(self, copied: Any) -> None:
        class Lost(Foreign):
            def __deepcopy__(self, memo: Any) -> Any:
                return copied

        for chosen in arrangements(Lost()):
            with pytest.raises(UserError, match=r"tests\.Lost.*__deepcopy__"):
                prepare(PROGRAM, qompose.compose(*chosen))

    @pytest.mark.parametrize("answer", [True, None, False])
    def test_validate_may_answer(self, answer: Any) -> None:
        """Engines of this field ignore it; a no is said."""
        plan = plan_of(
            prepare(PROGRAM, qompose.compose(Acting("validate", lambda: answer), Other()))
        )
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

    def test_hooks_that_it_does_not_have(self) -> None:
        class Least:
            def annotate(self, model: GraphModule) -> None:
                Foreign().annotate(model)

            def validate(self, model: GraphModule) -> None:
                pass

        prepared = prepare(PROGRAM, qompose.compose(Least()))  # type: ignore[arg-type]
        assert {claim.owner for claim in plan_of(prepared).claims} == {"tests.Least"}


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
    def test_of_every_hook_and_where_it_fails_too(self, hook: str) -> None:
        def fail() -> None:
            self.disturb()
            raise ValueError("why")

        before = self.settings()
        for chosen in arrangements(Acting(hook, self.disturb)):
            prepared = prepare(PROGRAM, qompose.compose(*chosen))
            assert self.settings() == before
            assert prepared(X).dtype is torch.float32
        with pytest.raises(MemberError):
            prepare(PROGRAM, qompose.compose(Other(), Acting(hook, fail)))
        assert self.settings() == before
