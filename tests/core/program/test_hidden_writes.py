# SPDX-License-Identifier: Apache-2.0
"""Writes in place, whether a schema shows them or not: by views, in bodies, to memory of two names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import qompose
import torch
from qompose.program.aliasing import unsafe_values, written_buffers
from torch import Tensor, nn

from tests.core.toy import ADD, LINEAR, NullQuantizer, export, prepare, randn, seeded, sqnr, toy

X = randn(3, 4)


class Layers(nn.Module):
    """Two linears, a buffer, and a function of them."""

    def __init__(self, function: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function
        self.register_buffer("state", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def region(m: Layers, x: Tensor) -> Tensor:
    """Write to a value inside a region without gradients, and read it behind."""
    y = m.a(x)
    with torch.no_grad():
        y[:, :2] = 5.0
    return m.b(y)


def view_in_region(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    view = y.view(-1)
    with torch.no_grad():
        view.zero_()
    return m.b(y)


def autocast(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.mul_(3)
    return m.b(y)


def vmapped(m: Layers, x: Tensor) -> Tensor:
    """Calls that only have an effect."""
    return torch.vmap(lambda row: row - row.mean())(m.a(x))


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
@pytest.mark.parametrize("function", [region, view_in_region, autocast, vmapped])
@pytest.mark.parametrize("quantizer", [NullQuantizer(), toy()], ids=["null", "toy"])
def test_writes_in_regions_are_kept(
    function: Callable[..., Tensor], quantizer: qompose.Quantizer
) -> None:
    """What the region writes to stays in float; the rest may be quantized."""
    model = seeded(Layers(function))
    prepared = prepare(export(model, X), quantizer)
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    reference = qompose.convert_pt2e(prepared, use_reference_representation=True)
    least = 20 if isinstance(quantizer, qompose.RuleQuantizer) else 200
    with torch.no_grad():
        for made in (prepared, converted, reference, qompose.lower(converted)):
            assert sqnr(model(X), made(X)) > least


@torch.no_grad()
def fill(m: Layers, x: Tensor) -> Tensor:
    """As generation fills a cache."""
    m.state.copy_(m.a(x))
    return m.state.sum(0)


def count(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.state.add_(1)
    return x * 2


@pytest.mark.parametrize("function", [fill, count])
def test_calibration_fills_no_buffer_of_the_caller(function: Callable[..., Tensor]) -> None:
    model = seeded(Layers(function))
    program = export(model, X)
    prepared = prepare(program, NullQuantizer())
    for _ in range(3):
        prepared(X)
    converted = qompose.convert_pt2e(prepared)
    assert not program.state_dict["state"].any() and not model.get_buffer("state").any()
    assert not converted.get_buffer("state").any()
    lowered = qompose.lower(converted)
    lowered(X)
    assert lowered.get_buffer("state").any(), "lowering keeps the write"


class TwoNames(nn.Module):
    """One block of memory under two names, written by one and read by the other."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(2, 1, 3, 4)
        self.register_buffer("both", both)
        self.register_buffer("first", both[0])
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.first[:, :3].copy_(x)
        return self.out(self.both.sum((0, 2)))


@pytest.mark.parametrize("quantizer", [NullQuantizer(), toy()], ids=["null", "toy"])
def test_names_of_one_memory_stay_together(quantizer: qompose.Quantizer) -> None:
    model = seeded(TwoNames())
    expected = model(X)
    model.both.zero_()
    prepared = prepare(export(model, X), quantizer)
    with torch.no_grad():
        assert torch.equal(prepared(X), expected)
        converted = qompose.convert_pt2e(prepared)
        assert sqnr(expected, converted(X)) > 25


def slice_of(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :2] = 0
    return m.b(y)


def view_of(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    y.view(-1).clamp_(min=0)
    return m.b(y)


def result_only(m: Layers, x: Tensor) -> Tensor:
    return m.b(m.a(x).relu_())


def into_an_input(m: Layers, x: Tensor) -> Tensor:
    return x.add_(m.a(x))


def accumulate(m: Layers, x: Tensor) -> Tensor:
    m.state.add_(m.a(x))
    return m.state * 1


CASES = [
    pytest.param(slice_of, {"linear"}, id="a slice, read whole later"),
    pytest.param(view_of, {"linear"}, id="a view, read whole later"),
    pytest.param(result_only, set(), id="only the result is read"),
    pytest.param(into_an_input, {"x"}, id="an input"),
    pytest.param(accumulate, {"state"}, id="a buffer"),
]


@pytest.mark.parametrize(("function", "unsafe"), CASES)
def test_unsafe_values_stay_float_and_the_model_computes_the_same(
    function: Callable[..., Tensor], unsafe: set[str]
) -> None:
    torch.manual_seed(0)
    program = export(Layers(function), X.clone())
    module = program.module(check_guards=False)
    found = unsafe_values(module.graph)
    assert unsafe <= found if unsafe else not found
    assert written_buffers(module.graph) == ({"state"} if function is accumulate else set())
    prepared = prepare(program, toy(LINEAR, ADD))
    prepared(X.clone())
    converted = qompose.convert_pt2e(prepared)
    expected, actual = program.module()(X.clone()), converted(X.clone())
    assert (expected - actual).norm() < 0.05 * expected.norm()
