# SPDX-License-Identifier: Apache-2.0
"""Biases that several operators read, on the real ExecuTorch runtime."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import qompose
import torch
from qompose_xnnpack.executorch_target.shared_biases import with_own_biases
from torch import Tensor, nn

from tests.sampling import at_once

pytest.importorskip("executorch")


class Model(nn.Module):
    """`forward(self, x)` over two layers, the second with the bias of the first."""

    def __init__(self, layers: list[nn.Module], forward: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = layers[0], layers[-1]
        self.b.bias = self.a.bias
        self.body = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def twice(model: Model, x: Tensor) -> Tensor:
    return model.b(model.a(x).relu() * 5)


def three_times(model: Model, x: Tensor) -> Tensor:
    return model.a(model.b(model.a(x).relu() * 5) * 0.1)


def beside_a_sum(model: Model, x: Tensor) -> Tensor:
    return model.a(x) + model.a.bias * 2


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def conv() -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1)


CASES = {
    "linear called twice": ([linear], twice, (3, 4)),
    "conv called twice": ([conv], twice, (1, 4, 5, 5)),
    "two linears tied": ([linear, linear], twice, (3, 4)),
    "two linears tied, three calls": ([linear, linear], three_times, (3, 4)),
    "two convs tied": ([conv, conv], twice, (1, 4, 5, 5)),
    "conv and depthwise conv tied": (
        [conv, lambda: nn.Conv2d(4, 4, 3, groups=4)], twice, (1, 4, 5, 5),
    ),
    "a sum reads it too": ([linear], beside_a_sum, (3, 4)),
}  # fmt: skip


def converted(name: str) -> tuple[torch.fx.GraphModule, Tensor]:
    makers, forward, shape = CASES[name]
    torch.manual_seed(0)
    model, x = Model([make() for make in makers], forward).eval(), torch.randn(shape)
    exported = torch.export.export(model, (x,))
    prepared = qompose.prepare_pt2e(exported, qompose.compose("xnnpack"))
    qompose.calibrate(prepared, [(x,)])
    return qompose.convert_pt2e(prepared), x


AT_ONCE = ("conv called twice", "two linears tied, three calls", "a sum reads it too")


@cache
def methods(at_once: bool) -> dict[str, tuple[torch.fx.GraphModule, Any, Tensor]]:
    """By case the converted model, its method of a program that has them all, and an input."""
    made = {name: converted(name) for name in CASES if (name in AT_ONCE) == at_once}
    names = {name: re.sub(r"\W", "_", name) for name in made}
    program = qompose.lower({names[name]: model for name, (model, _) in made.items()}, "executorch")
    return {n: (model, program.methods[names[n]], x) for n, (model, x) in made.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", at_once(CASES, *AT_ONCE))
def test_every_reader_adds_the_bias_in_its_own_steps(name: str) -> None:
    model, lowered, x = methods(name in AT_ONCE)[name]
    heavy = [row for row in qompose.report(lowered).rows if row.macs]
    assert {row.state for row in heavy} == {"int8 kernel"}
    step = 1.001 * float(lowered(x).unique().diff().abs().min())
    assert (lowered(x) - model(x)).abs().max().item() <= step


def with_one_bias(model: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph as it is written by hand: ours have a bias of its own for each operator."""
    first, *others = (
        n for n in model.graph.nodes if n.op == "get_attr" and "bias" in str(n.target)
    )
    for other in others:
        other.replace_all_uses_with(first)
        model.graph.erase_node(other)
    model.graph.lint()
    model.recompile()
    return model


def test_the_graph_is_left_alone_and_weights_stay_shared() -> None:
    model, x = converted("two linears tied, three calls")
    model = with_one_bias(model)
    before, names = str(model.graph), set(model.state_dict())
    result = with_own_biases(model)
    assert (str(model.graph), set(model.state_dict())) == (before, names)
    added = set(result.state_dict()) - names
    assert len(added) == 3
    for name in names & set(result.state_dict()):
        assert result.state_dict()[name].data_ptr() == model.state_dict()[name].data_ptr()
    assert torch.equal(result(x), model(x))


def test_a_graph_without_shared_biases_is_not_copied() -> None:
    model = torch.export.export(nn.Linear(4, 4).eval(), (torch.randn(3, 4),)).module()
    assert with_own_biases(model) is model
