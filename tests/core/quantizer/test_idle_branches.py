# SPDX-License-Identifier: Apache-2.0
"""Branches and loops that calibration never came to, though their tensors share scales with others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import qompose
import torch
from torch import nn

from tests.core.toy import LINEAR, Model, export, prepare, randn, seeded, sqnr, toy
from tests.zoo import by_name

X = randn(6, 4).abs()


# Both branches read one tensor and give one: all scales of `yes` are scales of `no`.
LAYERS = {"yes": nn.Linear(4, 4), "no": nn.Linear(4, 4)}
LOUD = seeded(Model(lambda m, x: torch.cond(x.sum() > 0, m.yes, m.no, (x,)), **LAYERS))
with torch.no_grad():
    LAYERS["yes"].weight.mul_(100)
PROGRAM = export(LOUD, X)


def idle(prepared: Any) -> tuple[str, ...]:
    with pytest.raises(qompose.errors.UncalibratedError) as caught:
        qompose.convert_pt2e(prepared)
    return caught.value.tensors


def test_a_branch_that_never_ran_is_named_though_the_other_saw_its_tensors() -> None:
    prepared = prepare(PROGRAM, toy(LINEAR))
    qompose.calibrate(prepared, [-X])
    tensors = idle(prepared)
    places = [tensor.partition(" in ")[0] for tensor in tensors]
    assert places == ["true_graph_0_x -> true_graph_0_linear", "output of true_graph_0_linear"]
    assert all("in yes" in tensor and "toy" in tensor for tensor in tensors)
    qompose.calibrate(prepared, [X])
    assert sqnr(LOUD(X), qompose.convert_pt2e(prepared)(X)) > 30


def test_it_may_stay_in_float() -> None:
    prepared = prepare(PROGRAM, toy(LINEAR))
    qompose.calibrate(prepared, [-X])
    converted = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    rows = {r.module: r for r in qompose.report(converted).rows if r.operator == "aten.linear"}
    assert (rows["yes"].state, rows["no"].state) == ("float", "simulated (Q/DQ)")
    assert torch.equal(converted(X), LOUD(X))
    assert sqnr(LOUD(-X), converted(-X)) > 30


# torch 2.13 copies the argument tree of any exported module through a class that it deprecates
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_copies_know_what_ran() -> None:
    prepared = prepare(PROGRAM, toy(LINEAR))
    prepared(X)
    twin = copy.deepcopy(prepared)
    twin(-X)
    qompose.convert_pt2e(twin)
    assert any("false_graph_0" in tensor for tensor in idle(prepared))


def test_regions_inside_an_idle_branch_are_idle() -> None:
    model = by_name("mixed_regions")
    prepared = prepare(model.export(), toy(LINEAR))
    prepared(*model.inputs())
    tensors = idle(prepared)
    named = {tensor.split(" in ")[1] for tensor in tensors}
    assert named == {"frozen.before", "frozen.head", "frozen.frozen.first", "frozen.frozen.second"}
    assert all("true_graph_0_" in tensor for tensor in tensors)


def test_a_loop_without_an_iteration_is_idle() -> None:
    """The value before the loop has a layer's scale, which is also that of the body's input."""
    model = by_name("loop")
    prepared = prepare(model.export(), toy(LINEAR))
    x, times = model.inputs()
    prepared(x, torch.full_like(times, -1))
    where = "in body in while_loop_body_graph_0"
    assert [where in tensor for tensor in idle(prepared)] == [True] * 2
    prepared(x, times.clamp(min=1))
    qompose.convert_pt2e(prepared)
