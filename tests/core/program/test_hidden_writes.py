# SPDX-License-Identifier: Apache-2.0
"""Writes in place, whether a schema shows them or not: by views, in bodies, to memory of two names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import qompose
import torch
from qompose.program.aliasing import unsafe_values, written_buffers
from torch import Tensor, nn

from tests.core.toy import (
    ADD,
    LINEAR,
    NullQuantizer,
    convert,
    export,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

X = randn(3, 4)


class Region(nn.Module):
    """Writes to a value inside a region without gradients, and reads it behind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            y[:, :2] = 5.0
        return self.b(y)


class View(Region):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        view = y.view(-1)
        with torch.no_grad():
            view.zero_()
        return self.b(y)


class Autocast(Region):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y.mul_(3)
        return self.b(y)


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
@pytest.mark.parametrize("kind", [Region, View, Autocast])
@pytest.mark.parametrize("quantizer", [NullQuantizer(), toy()], ids=["null", "toy"])
def test_writes_in_regions_are_kept(kind: type[nn.Module], quantizer: qompose.Quantizer) -> None:
    """What the region writes to stays in float; the rest may be quantized."""
    model = seeded(kind())
    prepared = prepare(export(model, X), quantizer)
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    reference = qompose.convert_pt2e(prepared, use_reference_representation=True)
    least = 20 if isinstance(quantizer, qompose.RuleQuantizer) else 200
    with torch.no_grad():
        for made in (prepared, converted, reference, qompose.lower(converted)):
            assert sqnr(model(X), made(X)) > least


class Cache(nn.Module):
    """A cache that is filled without gradients, as generation does."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(3, 4))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.cache.copy_(self.key(x))
        return self.cache.sum(0)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        return x * 2


@pytest.mark.parametrize(
    ("kind", "name"), [(Cache, "cache"), (Counting, "seen")], ids=["cache", "counter"]
)
def test_calibration_fills_no_buffer_of_the_caller(kind: type[nn.Module], name: str) -> None:
    model = seeded(kind())
    program = export(model, X)
    prepared = prepare(program, NullQuantizer())
    for _ in range(3):
        prepared(X)
    converted = qompose.convert_pt2e(prepared)
    assert not program.state_dict[name].any() and not dict(model.named_buffers())[name].any()
    assert not dict(converted.named_buffers())[name].any()
    lowered = qompose.lower(converted)
    lowered(X)
    assert dict(lowered.named_buffers())[name].any(), "lowering keeps the write"


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


class Vmapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row - row.mean())(self.a(x))


def test_calls_that_only_have_an_effect_survive_lowering() -> None:
    model = seeded(Vmapped())
    lowered = qompose.lower(convert(export(model, X), toy(), X))
    with torch.no_grad():
        assert sqnr(model(X), lowered(X)) > 25


class Layers(nn.Module):
    """Two linears, a buffer, and a function of them."""

    def __init__(self, function: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function
        self.register_buffer("state", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


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
