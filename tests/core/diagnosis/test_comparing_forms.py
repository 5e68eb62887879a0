# SPDX-License-Identifier: Apache-2.0
"""Programs of odd forms compared: views of what is written, branches taken by one, channels with factors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.backend import OperatorPattern
from qompose.diagnosis.value_comparison import unread_in
from qompose.program.rewrites import SCALAR_TO_TENSOR
from qompose.program.stepping import repeatable
from qompose.reporting.report_data import EQUAL, ROUNDING
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.core import toy as toys
from tests.core.toy import (
    ADD,
    INT8,
    LINEAR,
    PER_TENSOR,
    Model,
    convert,
    export,
    randn,
    rule,
    seeded,
    toy,
)

aten = torch.ops.aten
X = randn(16, 8)


def two_linears(function: Any) -> Any:
    return seeded(Model(function, one=nn.Linear(8, 8), two=nn.Linear(8, 8)))


def viewed(m: Any, x: Tensor) -> Tensor:
    """A view that is read after what it views was written."""
    y = m.one(x).exp()
    z = y.view(-1)
    y.add_(100)
    return m.two((z * 2).view(16, 8) / 100)


def test_views_go_on_sharing_what_is_written() -> None:
    """Their readers read what was written, where values of the reference are put in their place."""
    program = export(two_linears(viewed), X)
    found = qompose.compare(program, convert(program, toy(LINEAR), X), [X])
    row = next(row for row in found if row.operator == "aten.mul.Tensor")
    assert row.own_sqnr == math.inf  # not so where the view is a copy, to which nobody adds


def test_what_is_written_to_an_input_that_comes_again_is_there() -> None:
    """As in a loop over the program itself, and the user's tensor stays as it is."""
    counting = Model(lambda m, x, n: m.one(x) * n.add_(1), one=nn.Linear(8, 8))
    program, number = export(seeded(counting), X, torch.zeros(1)), torch.zeros(1)
    calls: list[Tensor] = []

    def looped(x: Tensor, n: Tensor) -> Tensor:
        calls.append(x)
        return counting.one(x) * len(calls)

    batches = [(X, number), (-X, number)]
    (row,) = qompose.compare(program, looped, batches).rows
    assert row.sqnr > 100
    converted = convert(program, toy(LINEAR), X, torch.zeros(1))
    found = qompose.compare(program, converted, batches)
    fresh = qompose.compare(program, converted, [(X, number), (-X, number + 1)])
    assert found["mul"].sqnr == fresh["mul"].sqnr
    assert number == 0


def read_twice(m: Any, x: Tensor) -> Tensor:
    """One value for a quantized reader, one for a float reader as well."""
    alone, both = x.exp(), x.cos()
    return m.one(alone) + m.two(both) * both.tan()


def test_only_what_all_readers_have_in_integers_is_on_a_grid() -> None:
    program = export(two_linears(read_twice), X)
    found = qompose.compare(program, convert(program, toy(LINEAR), X), [X])
    assert found["exp"].clipping is not None
    assert found["exp"].cause == ROUNDING
    assert found["cos"].clipping is None
    assert found["cos"].sqnr == float("inf")


def choosing(bound: float, write: bool = False) -> Any:
    """A branch of two, by a bound: two of them are programs of one model that take different ones."""

    def chooses(m: Any, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > bound, lambda x: m.one(x).sin(), lambda x: m.two(x), (x,)) + 1
        if not write:
            return y
        z = x.exp()
        total = z * 2 + y
        return z.add_(100) + total

    return export(two_linears(chooses), X.abs())


def test_branches_that_one_program_takes_alone_are_named() -> None:
    low, high = choosing(0.0), choosing(1e6)
    for one, other in ((low, high), (high, low)):
        found = qompose.compare(one, other, [X.abs()])
        assert any("aten.sin.default" in note for note in found.notes)
        assert any("two, false_graph_0" in note for note in found.notes)
        assert not any(row.operator == "aten.sin" for row in found)
    assert not qompose.compare(low, low, [X.abs()]).notes


def test_what_no_input_leads_to_is_not_paired() -> None:
    program = choosing(0.0)
    prepared = qompose.prepare_pt2e(program, toy(LINEAR))
    for x in (X.abs(), -X.abs()):
        prepared(x)
    other = qompose.convert_pt2e(prepared)
    for x, alone in ((X.abs(), "false_graph_0"), (-X.abs(), "true_graph_0")):
        unpaired = qompose.compare(program, other, [x]).unpaired
        assert len(unpaired) == 2 and all(alone in value for value in unpaired)


def test_pieces_of_an_operator_that_was_taken_apart_are_paired() -> None:
    matmul = rule("matmul", OperatorPattern((aten.matmul.default,)), activations=("self", "other"))
    x = randn(2, 5, 8)
    heads = Model(lambda m, x: F.scaled_dot_product_attention(x, x, x).tanh())
    program = export(heads, x)
    converted = convert(program, toy(matmul, rewrites=("split_attention",)), x)
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
    converted = convert(program, toy(toys.CONV), image)
    assert any("batch_norm" in line for line in qompose.report(converted).rewrites)
    assert {row.name for row in qompose.compare(other, converted, [image])} >= {"tanh"}


def normed(alone: bool) -> Any:
    """A layer norm with large channels, one reader of which is no linear: a product divides them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        return m.linear(y).tanh() + (0 if alone else y.tan())

    return seeded(Model(forward, norm=nn.LayerNorm(8), linear=nn.Linear(8, 8)))


@pytest.mark.parametrize("alone", [True, False], ids=["by the layer norm", "by a product"])
def test_channels_with_factors_are_compared_as_what_they_stand_for(alone: bool) -> None:
    model = normed(alone)
    with torch.no_grad():
        model.norm.weight[2] *= 100
        model.linear.weight[:, 2] /= 100
    x = randn(64, 8)
    program = export(model, x)
    balanced = replace(LINEAR, bias="bias", channels=(-1, -1))
    config = QuantizationConfig(INT8, None, PER_TENSOR.weight, algorithms=("smooth_quant",))
    converted = convert(program, toy(balanced, config=config), x)
    assert any("smooth_quant on layer_norm" in line for line in qompose.report(converted).rewrites)
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
    def remembers(m: Any, x: Tensor) -> Tensor:
        m.last.copy_(m.linear(x))
        return x + 1

    model = Model(remembers, linear=nn.Linear(8, 8), last=nn.Buffer(torch.zeros(16, 8)))
    program = export(seeded(model), X).module()
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


def test_a_program_that_is_ahead_shows_values_as_they_were_before_they_were_written() -> None:
    """It went on to look for a branch that it does not take."""
    low, high = choosing(0.0, write=True), choosing(1e6, write=True)
    found = qompose.compare(low, high, [X.abs()])
    assert any("aten.sin.default" in note for note in found.notes)
    assert found["exp"].sqnr == math.inf


def noisy() -> Any:
    """The noise is much larger than what it is added to, and drawn for what a linear gives."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.one(x)
        return m.two(y + 5 * torch.randn_like(y))

    return export(seeded(Model(forward, one=nn.Linear(6, 6), two=nn.Linear(6, 3))), BATCHES[0])


BATCHES = [randn(8, 6, seed=n) for n in range(3)]


@pytest.fixture
def prepared() -> GraphModule:
    return qompose.calibrate(qompose.prepare_pt2e(noisy(), toy()), BATCHES)


def test_noise_is_the_same_in_both_programs(prepared: GraphModule) -> None:
    program = noisy()
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


def test_a_number_in_a_body_is_paired() -> None:
    """A rewriting makes a tensor of it."""
    batches = [randn(8, 4, seed=n) for n in range(4)]
    doubles = Model(
        lambda m, x: torch.cond(
            x.sum() > 0, lambda x: m.linear(x) + 2, lambda x: m.linear(x), (x,)
        ),
        linear=nn.Linear(4, 4),
    )
    program = export(seeded(doubles), batches[0])
    prepared = qompose.calibrate(
        qompose.prepare_pt2e(program, toy(LINEAR, ADD, rewrites=(SCALAR_TO_TENSOR,))), batches
    )
    assert not qompose.compare(program, qompose.convert_pt2e(prepared), batches).unpaired


@pytest.mark.parametrize("times", [1, 2], ids=["two parts", "one part twice"])
def test_parts_that_were_quantized_before_are_paired_each_with_itself(times: int) -> None:
    """Exported again with `strict=True`, each part has ids of its own, which are those of the other too."""
    parts = [nn.Sequential(nn.Linear(8, 8)) for _ in range(3 - times)]
    quantized = [convert(export(seeded(part), X), toy(LINEAR), X) for part in parts] * times
    model = Model(lambda m, x: m.last(m.two(m.one(x).tanh())), last=nn.Linear(8, 8))
    model.one, model.two = quantized
    program = export(seeded(model), X, strict=True)
    found = qompose.compare(program, convert(program, toy(LINEAR), X), [X])
    causes = [(row.module, row.cause) for row in found if row.operator == "aten.linear"]
    second = "two.0" if times == 1 else "one.0"
    assert sorted(causes) == [("last", ROUNDING), ("one.0", EQUAL), (second, EQUAL)]


def test_what_was_lowered_and_exported_again_is_compared_by_its_own_ids() -> None:
    converted = convert(export(two_linears(lambda m, x: m.two(m.one(x))), X), toy(LINEAR), X)
    again = export(qompose.lower(converted), X, strict=True)
    found = qompose.compare(converted, again, [X])
    assert [row.operator for row in found] == ["aten.linear"] * 2


@cache
def part() -> nn.Module:
    """Layers 0, 1 and 2."""
    return seeded(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))


@cache
def quantized_part() -> GraphModule:
    return convert(export(part(), X), toy(LINEAR), X)


def of_products(reference: Any, other: Any) -> dict[str, float]:
    """The SQNR of each, by its module in the reference."""
    found = qompose.compare(reference, other, [X])
    return {row.module: row.sqnr for row in found if row.operator == "aten.linear"}


def test_a_part_quantized_before_beside_the_whole_in_float() -> None:
    """Layer 2 of the part is not the third of the whole."""
    first, last = seeded(nn.Linear(8, 8), 2), seeded(nn.Linear(8, 8), 3)
    program = export(nn.Sequential(first, part(), last), X)
    again = export(nn.Sequential(first, quantized_part(), last), X, strict=True)
    for other in (again, convert(again, toy(LINEAR), X)):
        rows = of_products(program, other)
        assert rows.keys() == {"0", "1.0", "1.2", "2"}
        run = other.module() if isinstance(other, ExportedProgram) else other
        whole = toys.sqnr(program.module()(X), run(X))
        assert rows["2"] == pytest.approx(whole, abs=0.01)


@pytest.mark.parametrize("stage", ["float", "converted", "wrapped in float"])
def test_a_part_quantized_before_beside_what_it_was_made_from(stage: str) -> None:
    """Its values have ids of the part, and others as values of the whole: those count that both have."""
    again = export(nn.Sequential(quantized_part(), nn.Softmax(-1)), X, strict=True)
    others: dict[str, tuple[Any, str]] = {
        "float": (export(part(), X), ""),
        "converted": (quantized_part(), ""),
        "wrapped in float": (export(nn.Sequential(part(), nn.Softmax(-1)), X), "0."),
    }
    reference, place = others[stage]
    rows = of_products(reference, again)
    assert rows.keys() == {f"{place}0", f"{place}2"}
    assert min(rows.values()) > 30
