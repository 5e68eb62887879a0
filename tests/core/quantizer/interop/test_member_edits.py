# SPDX-License-Identifier: Apache-2.0
"""Annotating is no place for changes: who makes them there is told so, by the hook's name.

What a transform makes need not compute the same; but it is said that nobody could show it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, UserError
from qompose.errors import ConfigError
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import INT8, Foreign, Spec, aten, calls, put
from tests.core.toy import export, plan_of, prepare, randn, seeded

X = randn(6, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x.clone()))


PROGRAM = export(seeded(Net()), X)
EXPECTED = PROGRAM.module()(X)


def without_relu(model: GraphModule) -> None:
    for node in calls(model, aten.relu.default):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        model.graph.erase_node(node)
    model.recompile()


def neg_for_relu(model: GraphModule) -> None:
    for node in calls(model, aten.relu.default):
        node.target = aten.neg.default
    model.recompile()


def one_more_relu(model: GraphModule) -> None:
    """Which computes the same."""
    for node in calls(model, aten.relu.default):
        with model.graph.inserting_before(node):
            made = model.graph.call_function(aten.relu.default, node.args)
        made.meta = dict(node.meta)
        node.args = (made,)
    model.recompile()


def member(**acts: Callable[[GraphModule], None]) -> Any:
    """A quantizer of linear, relu and neg that does something to the program in some of its hooks."""

    class Changing(Foreign):
        targets = (aten.linear.default, aten.relu.default, aten.neg.default)

    def hooked(name: str, act: Callable[[GraphModule], None]) -> Any:
        def hook(self: Any, model: GraphModule) -> Any:
            act(model)
            return getattr(Foreign, name)(self, model)

        return hook

    for name, act in acts.items():
        setattr(Changing, name, hooked(name, act))
    return Changing()


@pytest.mark.parametrize("hook", ["annotate", "validate"])
@pytest.mark.parametrize("act", [without_relu, neg_for_relu], ids=lambda act: act.__name__)
def test_a_change_that_computes_something_else_is_refused(hook: str, act: Any) -> None:
    wrong = (
        rf"tests\.Changing changed the program in {hook} \(relu.*transform_for_annotation is for"
    )
    for members in ([member(**{hook: act})], [Foreign(), member(**{hook: act})]):
        with pytest.raises(UserError, match=wrong):
            prepare(PROGRAM, qompose.compose(*members))
    assert torch.equal(PROGRAM.module()(X), EXPECTED)


def test_a_quantizer_without_a_transform() -> None:
    class Least:
        def annotate(self, model: GraphModule) -> None:
            neg_for_relu(model)
            Foreign().annotate(model)

        def validate(self, model: GraphModule) -> None:
            pass

    with pytest.raises(UserError, match=r"tests\.Least changed the program in annotate \(relu\)"):
        prepare(PROGRAM, qompose.compose(Least()))  # type: ignore[arg-type]


def test_where_both_change_something_each_answers_for_its_own() -> None:
    """What the transform makes is taken on trust, also where annotate changes something harmless."""
    both = member(transform_for_annotation=neg_for_relu, annotate=one_more_clone)
    with pytest.warns(QomposeWarning, match="transform_for_annotation makes of relu"):
        prepared = qompose.prepare_pt2e(PROGRAM, qompose.compose(both))
    assert any("changed the program in annotate" in note for note in plan_of(prepared).notes)


def one_more_clone(model: GraphModule) -> None:
    for node in calls(model, aten.clone.default):
        with model.graph.inserting_before(node):
            made = model.graph.call_function(aten.clone.default, node.args)
        made.meta = dict(node.meta)
        node.args = (made,)
    model.recompile()


def test_a_change_that_computes_the_same_is_a_note() -> None:
    prepared = prepare(PROGRAM, qompose.compose(member(annotate=one_more_relu)))
    torch.testing.assert_close(prepared(X), EXPECTED)
    (note,) = (n for n in plan_of(prepared).notes if "changed the program" in n)
    assert note.startswith("tests.Changing changed the program in annotate (relu")
    assert "computes the same" in note


class TestTransforms:
    """What a transform makes and nobody can show to compute the same."""

    NOTE = (
        "tests.Changing: what its transform_for_annotation makes of relu could not be shown to compute the "
        "same, and is taken on trust where a claim stands on it"
    )

    def test_it_is_made_with_a_warning_and_a_note(self) -> None:
        quantizer = qompose.compose(member(transform_for_annotation=neg_for_relu))
        with pytest.warns(QomposeWarning) as caught:
            prepared = qompose.prepare_pt2e(PROGRAM, quantizer)
        assert [str(w.message) for w in caught] == [self.NOTE], "once"
        assert self.NOTE in plan_of(prepared).notes
        assert calls(prepared, aten.neg.default)

    def test_where_it_is_not_made_there_is_no_warning(self) -> None:
        class Relu(Foreign):
            targets = (aten.relu.default,)

        changing = member(transform_for_annotation=neg_for_relu)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepared = qompose.prepare_pt2e(PROGRAM, qompose.compose(Relu(), changing))
        assert torch.equal(prepared(X), EXPECTED)
        assert self.NOTE in plan_of(prepared).notes


@pytest.mark.parametrize("dtype", [None, "int8"], ids=str)
def test_a_specification_without_a_dtype(dtype: Any) -> None:
    wrong = Spec(dtype, INT8.observer_or_fake_quant_ctr, -128, 127, torch.per_tensor_affine)

    class Typeless(Foreign):
        def annotate(self, model: GraphModule) -> None:
            (linear,) = calls(model, aten.linear.default)
            put(linear, {linear.args[0]: wrong})

    for members in ([Typeless()], [Foreign(), Typeless()]):
        with pytest.raises(ConfigError, match=rf"tests\.Typeless: .*linear: dtype={dtype!r} is no"):
            prepare(PROGRAM, qompose.compose(*members))
