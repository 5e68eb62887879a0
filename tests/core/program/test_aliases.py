# SPDX-License-Identifier: Apache-2.0
"""Writes in place: what is read under an older name stays float; what is not, does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import qompose
import torch
from qompose.program.aliasing import unsafe_values, written_buffers
from torch import Tensor, nn

from tests.core.toy import ADD, LINEAR, export, prepare, toy


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
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("function", "unsafe"), CASES)
def test_unsafe_values(function: Callable[..., Tensor], unsafe: set[str]) -> None:
    graph = export(Layers(function), X.clone()).graph_module.graph
    module = export(Layers(function), X.clone()).module(check_guards=False)
    assert graph is not module.graph
    found = unsafe_values(module.graph)
    assert unsafe <= found if unsafe else not found


@pytest.mark.parametrize(("function", "unsafe"), CASES)
def test_the_converted_model_computes_the_same(
    function: Callable[..., Tensor], unsafe: set[str]
) -> None:
    torch.manual_seed(0)
    model = Layers(function).eval()
    program = export(model, X.clone())
    prepared = prepare(program, toy(LINEAR, ADD))
    prepared(X.clone())
    converted = qompose.convert_pt2e(prepared)
    expected, actual = program.module()(X.clone()), converted(X.clone())
    assert (expected - actual).norm() < 0.05 * expected.norm()


def test_buffers_that_a_program_writes_to() -> None:
    module = export(Layers(accumulate), X.clone()).module(check_guards=False)
    assert written_buffers(module.graph) == {"state"}
