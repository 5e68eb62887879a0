# SPDX-License-Identifier: Apache-2.0
"""Specifications that refer to reads of constants, after a transform gave every reader one of its own."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose.program.graph import get_attribute
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from tests.core.quantizer.interop.foreign import (
    INT8,
    KEY,
    WEIGHT,
    Annotation,
    Derived,
    Foreign,
    Shared,
    aten,
    calls,
)
from tests.core.toy import export, groups_of, plan_of, prepare, randn, seeded

X = randn(6, 4)


def bias_scale(observers: list[Any]) -> tuple[Tensor, Tensor]:
    """The product of the scales of what is multiplied, and zero."""
    (first, _), (second, _) = (observer.calculate_qparams() for observer in observers)
    return first * second, torch.zeros_like(second, dtype=torch.int32)


class Biased(Foreign):
    """Asks for 32 bit biases, with scales computed from those of what is multiplied."""

    def asked(self, node: Node) -> Any:
        x, weight, *bias = node.args
        spec = Derived(
            [(x, node), (weight, node)], bias_scale, torch.int32, -(2**31), 2**31 - 1,
            torch.per_channel_symmetric, 0,
        )  # fmt: skip
        return Annotation({x: INT8, weight: WEIGHT, **dict.fromkeys(bias, spec)}, INT8)


class EachItsOwn(Biased):
    """Its transform gives every reader of a parameter a read of its own, under a path of its own."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in [node for node in model.graph.nodes if node.op == "get_attr"]:
            for number, user in enumerate(list(node.users)[1:]):
                path = f"_own_{node.name}_{number}"
                model.register_parameter(path, get_attribute(model, str(node.target)))
                with model.graph.inserting_before(user):
                    user.replace_input_with(node, model.graph.get_attr(path))
        model.graph.eliminate_dead_code()
        model.recompile()
        return model


class Tied(nn.Module):
    """Two linears with one weight; export lists it under both names, and reads it under one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Reused(nn.Module):
    """One weight that two operators of the program read by one node."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.a(x)), self.a.weight, self.a.bias)


@pytest.mark.parametrize("model", [Tied, Reused])
def test_a_derived_bias_follows_its_weight(model: type[nn.Module]) -> None:
    program = export(seeded(model()), X)
    reads = [n for n in program.module().graph.nodes if n.op == "get_attr"]
    assert any(len(node.users) > 1 for node in reads)
    prepared = prepare(program, qompose.compose(EachItsOwn()))
    assert groups_of(prepared) == groups_of(prepare(program, qompose.compose(Biased())))
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    error = (converted(X) - program.module()(X)).norm() / program.module()(X).norm()
    assert error < 0.05
    assert len([c for c in plan_of(prepared).claims if "linear" in c.nodes[0]]) == 2


class Whole(EachItsOwn):
    """Its transform also puts one new constant into two operators."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        first, second = calls(model, aten.linear.default)
        weight = get_attribute(model, str(first.args[1].target))  # type: ignore[union-attr]
        model.register_buffer("_new", weight.detach() + 1e-6)
        with model.graph.inserting_before(first):
            new = model.graph.get_attr("_new")
        for node in (first, second):
            node.update_arg(1, new)
        model.graph.eliminate_dead_code()
        model.recompile()
        return model


def test_it_follows_a_new_constant_of_two_operators() -> None:
    program = export(seeded(Tied()), X)
    prepared = prepare(program, qompose.compose(Whole()))
    points = {str(point) for group in plan_of(prepared).groups for point in group.points}
    assert {"a_bias -> linear", "b_bias -> linear_1"} <= points
    assert len({point for point in points if "new ->" in point}) == 2


class Marked(EachItsOwn):
    """Says what it wants of a weight at its read, and lets the bias and the next weight refer to that."""

    def asked(self, node: Node) -> Any:
        x, weight, *_ = node.args
        weight.meta[KEY] = Annotation({}, WEIGHT)  # type: ignore[union-attr]
        return Annotation({x: INT8, weight: Shared(weight)}, INT8)


def test_what_is_said_of_a_read_stays_said() -> None:
    program = export(seeded(Tied()), X)
    points = {
        str(point)
        for group in plan_of(prepare(program, qompose.compose(Marked()))).groups
        for point in group.points
    }
    assert {"output of b_weight", "b_weight -> linear", "b_weight -> linear_1"} <= points
