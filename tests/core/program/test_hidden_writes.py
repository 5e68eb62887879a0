# SPDX-License-Identifier: Apache-2.0
"""Writes in place, whether a schema shows them or not: by views, in bodies, to memory of two names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.program.aliasing import (
    inputs_written,
    read_before_written,
    unsafe_values,
    written_buffers,
)
from torch import Tensor, nn

from tests.core.toy import (
    ADD,
    LINEAR,
    Model,
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


def layers(function: Callable[..., Tensor]) -> Model:
    """Two linears, a buffer, and a function of them."""
    parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "state": nn.Buffer(torch.zeros(3, 4))}
    return Model(function, **parts)


def region(m: Any, x: Tensor) -> Tensor:
    """Write to a value inside a region without gradients, and read it behind."""
    y = m.a(x)
    with torch.no_grad():
        y[:, :2] = 5.0
    return m.b(y)


def view_in_region(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    view = y.view(-1)
    with torch.no_grad():
        view.zero_()
    return m.b(y)


def autocast(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.mul_(3)
    return m.b(y)


def vmapped(m: Any, x: Tensor) -> Tensor:
    """Calls that only have an effect."""
    return torch.vmap(lambda row: row - row.mean())(m.a(x))


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
@pytest.mark.parametrize("function", [region, view_in_region, autocast, vmapped])
@pytest.mark.parametrize("quantizer", [NullQuantizer(), toy()], ids=["null", "toy"])
def test_writes_in_regions_are_kept(
    function: Callable[..., Tensor], quantizer: qompose.Quantizer
) -> None:
    """What the region writes to stays in float; the rest may be quantized."""
    model = seeded(layers(function))
    prepared = prepare(export(model, X), quantizer)
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    reference = qompose.convert_pt2e(prepared, use_reference_representation=True)
    least = 20 if isinstance(quantizer, qompose.RuleQuantizer) else 200
    with torch.no_grad():
        for made in (prepared, converted, reference, qompose.lower(converted)):
            assert sqnr(model(X), made(X)) > least


@torch.no_grad()
def fill(m: Any, x: Tensor) -> Tensor:
    """As generation fills a cache."""
    m.state.copy_(m.a(x))
    return m.state.sum(0)


def count(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.state.add_(1)
    return x * 2


@pytest.mark.parametrize("function", [fill, count])
def test_calibration_fills_no_buffer_of_the_caller(function: Callable[..., Tensor]) -> None:
    model = seeded(layers(function))
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


def through_two_names(m: Any, x: Tensor) -> Tensor:
    """Write to memory by one of its names, and read it by the other."""
    m.first[:, :3].copy_(x)
    return m.out(m.both.sum((0, 2)))


@pytest.mark.parametrize("quantizer", [NullQuantizer(), toy()], ids=["null", "toy"])
def test_names_of_one_memory_stay_together(quantizer: qompose.Quantizer) -> None:
    both = torch.zeros(2, 1, 3, 4)
    names = {"both": nn.Buffer(both), "first": nn.Buffer(both[0])}
    model = seeded(Model(through_two_names, **names, out=nn.Linear(4, 4)))
    expected = model(X)
    model.both.zero_()
    prepared = prepare(export(model, X), quantizer)
    with torch.no_grad():
        assert torch.equal(prepared(X), expected)
        assert sqnr(expected, qompose.convert_pt2e(prepared)(X)) > 25


def slice_of(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :2] = 0
    return m.b(y)


def view_of(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.view(-1).clamp_(min=0)
    return m.b(y)


def accumulate(m: Any, x: Tensor) -> Tensor:
    m.state.add_(m.a(x))
    return m.state * 1


CASES = [
    pytest.param(slice_of, {"linear"}, id="a slice, read whole later"),
    pytest.param(view_of, {"linear"}, id="a view, read whole later"),
    pytest.param(lambda m, x: m.b(m.a(x).relu_()), set(), id="only the result is read"),
    pytest.param(lambda m, x: x.add_(m.a(x)), {"x"}, id="an input"),
    pytest.param(accumulate, {"state"}, id="a buffer"),
]


@pytest.mark.parametrize(("function", "unsafe"), CASES)
def test_unsafe_values_stay_float_and_the_model_computes_the_same(
    function: Callable[..., Tensor], unsafe: set[str]
) -> None:
    torch.manual_seed(0)
    program = export(layers(function), X.clone())
    module = program.module(check_guards=False)
    found = unsafe_values(module.graph)
    assert unsafe <= found if unsafe else not found
    assert written_buffers(module.graph) == ({"state"} if function is accumulate else set())
    prepared = prepare(program, toy(LINEAR, ADD))
    prepared(X.clone())
    converted = qompose.convert_pt2e(prepared)
    expected, actual = program.module()(X.clone()), converted(X.clone())
    assert (expected - actual).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (lambda m, x: m.state.copy_(x) + 1, False),
        (lambda m, x: m.state[:1].copy_(x[:1]).sum() + m.state, False),
        (lambda m, x: m.state + x, False),
        (lambda m, x: m.state.add_(1) + x, True),
        (lambda m, x: m.state.copy_(m.state + x), True),
        (lambda m, x: (m.state.sum(), m.state.copy_(x)), True),
        (lambda m, x: (m.state.clone()[0], m.state.copy_(x)), True),
    ],
    ids=["written", "a part", "only read", "counted", "added to", "read", "read as it is"],
)
def test_initial_values_that_count(function: Any, counts: bool) -> None:
    module = Model(function, state=nn.Buffer(torch.zeros(3)))
    graph = export(module, torch.ones(3)).module().graph
    assert read_before_written(graph) == ({"state"} if counts else set())


RETURNED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dropout": lambda y, x: nn.functional.dropout(y, 0.5, training=False),
    "type_as": lambda y, x: y.type_as(x),
    "broadcast_tensors": lambda y, x: torch.broadcast_tensors(y, x)[0],
    "einsum": lambda y, x: torch.einsum("ab->ab", y),
    "unsafe_chunk": lambda y, x: torch.unsafe_chunk(y, 1)[0],
}


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
@pytest.mark.parametrize("same", RETURNED.values(), ids=RETURNED)
def test_what_gives_back_its_argument_without_saying_so(
    same: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """The sum reads `y` after it was written by another name, and so does whoever gave it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        z = same(y, x).relu_()
        return m.b(y) + z

    model = seeded(layers(forward))
    converted = convert(export(model, X), toy(LINEAR, ADD), X)
    assert sqnr(model(X), converted(X)) > 30
    assert inputs_written(export(Model(lambda m, x: same(x, x).add_(1)), X.clone()).graph) == [0]


def test_type_as_gives_back_no_memory_of_the_other_tensor() -> None:
    model = layers(lambda m, x: m.a(x).type_as(x).add_(1))
    assert inputs_written(export(model, X.clone()).graph) == []
