# SPDX-License-Identifier: Apache-2.0
"""Programs of odd forms compared: views of what is written, branches taken by one, channels with factors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.backend import OperatorPattern
from qompose.diagnosis.replay import repeatable
from qompose.diagnosis.value_comparison import unread_in
from qompose.program.rewrites import SCALAR_TO_TENSOR
from qompose.reporting.report_data import EQUAL, ROUNDING
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.core import toy as toys
from tests.core.toy import ADD, INT8, LINEAR, PER_TENSOR, export, prepare, randn, rule, seeded, toy

aten = torch.ops.aten
X = randn(16, 8)


def converted_of(program: Any, quantizer: Any, *batches: Tensor) -> Any:
    prepared = prepare(program, quantizer)
    for batch in batches or (X,):
        prepared(batch)
    return qompose.convert_pt2e(prepared)


class Viewed(nn.Module):
    """A view that is read after what it views was written."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).exp()
        z = y.view(-1)
        y.add_(100)
        return self.two((z * 2).view(16, 8) / 100)


def test_views_go_on_sharing_what_is_written() -> None:
    """Their readers read what was written, where values of the reference are put in their place."""
    program = export(seeded(Viewed()), X)
    found = qompose.compare(program, converted_of(program, toy(LINEAR)), [X])
    row = next(row for row in found if row.operator == "aten.mul.Tensor")
    assert row.own_sqnr == math.inf  # not so where the view is a copy, to which nobody adds


class ReadTwice(nn.Module):
    """One value for a quantized reader, one for a float reader as well."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        alone, both = x.exp(), x.cos()
        return self.one(alone) + self.two(both) * both.tan()


def test_only_what_all_readers_have_in_integers_is_on_a_grid() -> None:
    program = export(seeded(ReadTwice()), X)
    found = qompose.compare(program, converted_of(program, toy(LINEAR)), [X])
    assert found["exp"].clipping is not None
    assert found["exp"].cause == ROUNDING
    assert found["cos"].clipping is None
    assert found["cos"].sqnr == float("inf")


class Chooses(nn.Module):
    """A branch of two, by a bound: two of them are programs of one model that take different ones."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.one, self.two, self.bound = nn.Linear(8, 8), nn.Linear(8, 8), bound

    def forward(self, x: Tensor) -> Tensor:
        taken = x.sum() > self.bound
        y = torch.cond(taken, lambda x: self.one(x).sin(), lambda x: self.two(x), (x,))
        return y + 1


def test_branches_that_one_program_takes_alone_are_named() -> None:
    low, high = (export(seeded(Chooses(bound)), X.abs()) for bound in (0.0, 1e6))
    for one, other in ((low, high), (high, low)):
        found = qompose.compare(one, other, [X.abs()])
        assert any("aten.sin.default" in note for note in found.notes)
        assert any("two, false_graph_0" in note for note in found.notes)
        assert not any(row.operator == "aten.sin" for row in found)
    assert not qompose.compare(low, low, [X.abs()]).notes


class Heads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x).tanh()


def test_pieces_of_an_operator_that_was_taken_apart_are_paired() -> None:
    matmul = rule("matmul", OperatorPattern((aten.matmul.default,)), activations=("self", "other"))
    x = randn(2, 5, 8)
    program = export(Heads(), x)
    converted = converted_of(program, toy(matmul, rewrites=("split_attention",)), x)
    found = qompose.compare(program, converted, [x])
    assert found.unpaired == ()
    rows = {row.name: row.state for row in qompose.report(converted).rows}
    assert {row.name: row.state for row in found} == rows
    assert list(rows.values()).count("simulated (Q/DQ)") == 2


def test_a_program_without_what_was_folded_is_compared_all_the_same() -> None:
    """It was exported otherwise: with nothing where the other has a batch norm."""

    def net(norm: nn.Module) -> Any:
        return seeded(nn.Sequential(nn.Conv2d(2, 3, 1), norm, nn.Tanh()))

    image = randn(1, 2, 4, 4)
    program, other = export(net(nn.BatchNorm2d(3)), image), export(net(nn.Identity()), image)
    converted = converted_of(program, toy(toys.CONV), image)
    assert any("batch_norm" in line for line in qompose.report(converted).rewrites)
    assert {row.name for row in qompose.compare(other, converted, [image])} >= {"tanh"}


class Normed(nn.Module):
    """A layer norm with large channels, one reader of which is no linear: a product divides them."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.alone = nn.LayerNorm(8), nn.Linear(8, 8), alone

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.linear(y).tanh() + (0 if self.alone else y.tan())


@pytest.mark.parametrize("alone", [True, False], ids=["by the layer norm", "by a product"])
def test_channels_with_factors_are_compared_as_what_they_stand_for(alone: bool) -> None:
    model = seeded(Normed(alone))
    with torch.no_grad():
        model.norm.weight[2] *= 100
        model.linear.weight[:, 2] /= 100
    x = randn(64, 8)
    program = export(model, x)
    balanced = replace(LINEAR, bias="bias", channels=(-1, -1))
    config = QuantizationConfig(INT8, None, PER_TENSOR.weight, repairs=("smooth_quant",))
    converted = converted_of(program, toy(balanced, config=config), x)
    assert any("smooth_quant of layer_norm" in line for line in qompose.report(converted).rewrites)
    found = qompose.compare(program, converted, [x])
    assert found.unpaired == ()
    assert found["layer_norm"].sqnr > 30
    assert found["layer_norm"].clipping is None  # each channel has a range of its own
    assert found["linear"].own_sqnr > 30
    # What a repair changed on purpose is no error: quantized parameters have rows, and no others.
    assert [row.value for row in found if row.operator == "parameter"] == [
        "linear.weight: parameter"
    ]


def test_what_is_done_for_its_effect_is_read() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("last", torch.zeros(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.last.copy_(self.linear(x))
            return x + 1

    program = export(seeded(Remembers()), X).module()
    assert "linear" not in {node.name for node in unread_in(program)}


def test_an_operator_draws_other_numbers_each_time_it_runs() -> None:
    program = export(nn.Dropout().train(), X).module()
    (node,) = (n for n in program.graph.nodes if "dropout" in str(n.target))
    draws = []
    for times in (1, 2, 1):
        with repeatable(node, times):
            draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


class Writes(Chooses):
    """Takes a branch, and writes to what it computed afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        z = x.exp()
        total = z * 2 + y
        return z.add_(100) + total


def test_a_program_that_is_ahead_shows_values_as_they_were_before_they_were_written() -> None:
    """It went on to look for a branch that it does not take."""
    low, high = (export(seeded(Writes(bound)), X.abs()) for bound in (0.0, 1e6))
    found = qompose.compare(low, high, [X.abs()])
    assert any("aten.sin.default" in note for note in found.notes)
    assert found["exp"].sqnr == math.inf


class Noisy(nn.Module):
    """The noise is much larger than what it is added to, and drawn for what a linear gives."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(y + 5 * torch.randn_like(y))


BATCHES = [randn(8, 6, seed=n) for n in range(3)]


@pytest.fixture
def prepared() -> GraphModule:
    return qompose.calibrate(
        qompose.prepare_pt2e(export(seeded(Noisy()), BATCHES[0]), toy()), BATCHES
    )


def test_noise_is_the_same_in_both_programs(prepared: GraphModule) -> None:
    program = export(seeded(Noisy()), BATCHES[0])
    before = torch.get_rng_state()
    found = qompose.compare(program, prepared, BATCHES)
    assert {row.cause for row in found} == {EQUAL}
    assert qompose.compare(program, prepared, BATCHES) == found
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_costs_nothing(prepared: GraphModule) -> None:
    before = torch.get_rng_state()
    ranking = qompose.sensitivity(prepared, BATCHES)
    assert ranking["one"].cost < ranking["two"].cost < 1e-3  # noise drawn anew: 1.7
    assert torch.equal(torch.get_rng_state(), before)


class Doubles(nn.Module):
    """A number in the body of a cond, of which a rewriting makes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            return self.linear(x) + 2

        def no(x: Tensor) -> Tensor:
            return self.linear(x)

        return torch.cond(x.sum() > 0, yes, no, (x,))


def test_a_number_in_a_body_is_paired() -> None:
    batches = [randn(8, 4, seed=n) for n in range(4)]
    program = export(seeded(Doubles()), batches[0])
    prepared = qompose.calibrate(
        qompose.prepare_pt2e(program, toy(LINEAR, ADD, rewrites=(SCALAR_TO_TENSOR,))), batches
    )
    found = qompose.compare(program, qompose.convert_pt2e(prepared), batches)
    assert not found.unpaired
