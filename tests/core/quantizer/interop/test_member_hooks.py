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

from tests.core.quantizer.interop.foreign import Foreign, Tanhs, acting, arrangements, aten, calls
from tests.core.quantizer.interop.gallery import GALLERY, PROGRAM, X
from tests.core.toy import Model, export, graph_text, plan_of, prepare

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
        place = f"interop/test_member_hooks.py:{_failing.__code__.co_firstlineno + 2}"
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
