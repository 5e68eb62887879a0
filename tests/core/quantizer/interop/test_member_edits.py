# SPDX-License-Identifier: Apache-2.0
"""Annotating is no place for changes: who makes them there gets an error that names the hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
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
@pytest.mark.parametrize(
    "act", [without_relu, neg_for_relu, one_more_relu], ids=lambda act: act.__name__
)
def test_a_change_in_another_hook_is_an_error(hook: str, act: Any) -> None:
    wrong = rf"tests\.Changing: {hook} changed the program at relu.*transform_for_annotation is for"
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

    with pytest.raises(UserError, match=r"tests\.Least: annotate changed the program at relu\b"):
        prepare(PROGRAM, qompose.compose(Least()))  # type: ignore[arg-type]


def test_what_a_transform_makes_is_made_and_listed() -> None:
    """It need not compute the same, nor be claimed."""
    for members in (
        [member(transform_for_annotation=neg_for_relu)],
        [Foreign(), member(transform_for_annotation=neg_for_relu)],
    ):
        prepared = prepare(PROGRAM, qompose.compose(*members))
        assert calls(prepared, aten.neg.default) and not calls(prepared, aten.relu.default)
        (rewrite,) = plan_of(prepared).rewrites
        assert (rewrite.member, rewrite.nodes, rewrite.pieces) == (
            "tests.Changing", ("relu",), ("relu",),
        )  # fmt: skip
        (line,) = qompose.report(prepared).rewrites
        assert line == "tests.Changing: transform_for_annotation: relu became relu"


@pytest.mark.parametrize("dtype", [None, "int8"], ids=str)
def test_a_specification_without_a_dtype(dtype: Any) -> None:
    wrong = Spec(dtype, INT8.observer_or_fake_quant_ctr, -128, 127, torch.per_tensor_affine)

    class Typeless(Foreign):
        def annotate(self, model: GraphModule) -> None:
            (linear,) = calls(model, aten.linear.default)
            put(linear, {linear.args[0]: wrong})

    for members in ([Typeless()], [Foreign(), Typeless()]):
        with pytest.raises(ConfigError, match=rf"tests\.Typeless: .*linear: dtype must.*{dtype!r}"):
            prepare(PROGRAM, qompose.compose(*members))
