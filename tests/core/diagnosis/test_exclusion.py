# SPDX-License-Identifier: Apache-2.0
"""Selectors that leave one operator in float, whatever it is fused with, and leave all others alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import TuningError
from torch import Tensor, nn

from tests.core.toy import (
    DYNAMIC,
    INT8,
    LINEAR,
    PER_TENSOR,
    RELU,
    RULES,
    STATIC,
    Annotator,
    annotate,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

aten = torch.ops.aten


class Chain(nn.Module):
    """Five linears, the relus between them are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


X = randn(8, 4)
PROGRAM = export(seeded(Chain()), X)


def tuned(quantizer: Any, drop: float, metric: Callable[[Any], float]) -> qompose.Tuning:
    return qompose.tune(PROGRAM, quantizer, [(X,)], metric, drop, progress=False)


class Fused(nn.Module):
    """A linear whose relu is a module of its own, one that is called twice, and bare functions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.one(x))
        x = self.act(self.two(x)) + self.two(x)
        x = nn.functional.linear(x, self.weight)
        x = nn.functional.linear(self.three(x), self.weight)
        return x.sigmoid() + x


FUSED, SMALL = seeded(Fused()), randn(16, 4)


@pytest.mark.parametrize("config", [PER_TENSOR, DYNAMIC], ids=lambda config: config.name)
def test_selectors_pick_one_operator(config: Any) -> None:
    """Each site of a program in turn: it is in float, and all others are quantized as before."""
    program = export(FUSED, SMALL)
    quantizer = toy(*RULES, RELU, config=config)
    prepared = qompose.calibrate(prepare(program, quantizer), [(SMALL,)])
    base = qompose.sensitivity(prepared, [(SMALL,)])
    for row in base:
        ranking = replace(base, rows=(replace(row, cost=1.0),))  # the others cost nothing
        metric = in_float(*row.operators)
        found = qompose.tune(program, quantizer, [(SMALL,)], metric, 0.5, ranking=ranking)
        assert len(found.attempts) == 2
        (site,) = found.excluded
        assert site.name == row.name
        plan = plan_of(prepare(program, found.quantizer))
        quantized = {o.name for o in plan.operators if o.claim is not None}
        before = {o.name for o in plan_of(prepared).operators if o.claim is not None}
        assert before - quantized == {*row.operators, *site.others}
        assert site.others == ()


def test_settings_of_single_calls_are_not_outdone() -> None:
    """A module's name would lose to a call that the user set."""
    quantizer = toy(config=PER_TENSOR).set_module_name_object_type_order(
        "layers.3", aten.linear.default, 0, STATIC
    )
    found = tuned(quantizer, drop=0.5, metric=modules_in_float("layers.3"))
    assert "layers.3" in {site.module for site in found.excluded}
    assert all(setting.level == "call" for setting in found.selectors)


def in_float(*operators: str) -> Callable[[Any], float]:
    """A metric that minds only how many of some operators are quantized."""
    return _quantized(lambda operator: operator.name, operators)


def modules_in_float(*modules: str) -> Callable[[Any], float]:
    """A metric that minds only how many of some modules are quantized."""
    return _quantized(lambda operator: operator.module, modules)


def _quantized(name: Callable[[Any], str], wanted: tuple[str, ...]) -> Callable[[Any], float]:
    def metric(model: Any) -> float:
        record = model.meta.get("qompose")
        operators = () if record is None else record.plan.operators
        taken = {name(operator) for operator in operators if operator.claim is not None}
        return -float(len(taken.intersection(wanted)))

    return metric


def test_other_members_do_not_take_over() -> None:
    quantizer = qompose.compose(toy(config=PER_TENSOR), toy(LINEAR, config=DYNAMIC, name="other"))
    found = tuned(quantizer, drop=0.5, metric=modules_in_float("layers.1", "layers.2"))
    assert {site.module for site in found.excluded} == {"layers.1", "layers.2"}
    for member in found.quantizer.members:
        assert {s.label for s in member.selectors.settings} >= {
            "module name layers.1",
            "module name layers.2",
        }


def test_members_without_selectors_are_named() -> None:
    def linears(node: Any) -> None:
        if node.target is aten.linear.default and "layers.1" in str(node.meta["nn_module_stack"]):
            annotate(node, {node.args[0]: INT8}, INT8)

    quantizer = qompose.compose(Annotator(linears), toy(config=PER_TENSOR))
    with pytest.raises(TuningError, match=r"linear_1 .* cannot be left in float: annotator has no"):
        tuned(quantizer, drop=0.5, metric=modules_in_float("layers.1"))
    found = tuned(quantizer, drop=1.5, metric=modules_in_float("layers.1", "layers.3"))
    assert {site.module for site in found.excluded} == {"layers.3"}
    assert found.written is None
    assert found.apply(quantizer).members[0] is quantizer.members[0]
