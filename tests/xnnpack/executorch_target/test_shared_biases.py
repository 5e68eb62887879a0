# SPDX-License-Identifier: Apache-2.0
"""Biases that several operators read, on the real ExecuTorch runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import qompose
import torch
from qompose_xnnpack.executorch_target.shared_biases import with_own_biases
from torch import Tensor, nn

from tests.core.toy import Model
from tests.sampling import at_once
from tests.xnnpack.executorch_target.runtime import converted, in_two_programs

pytest.importorskip("executorch")


def twice(model: Any, x: Tensor) -> Tensor:
    return model.b(model.a(x).relu() * 5)


linear, conv = partial(nn.Linear, 4, 4), partial(nn.Conv2d, 4, 4, 3, padding=1)
CASES: dict[str, tuple[list[Callable[[], Any]], Callable[..., Tensor], tuple[int, ...]]] = {
    "linear called twice": ([linear], twice, (3, 4)),
    "conv called twice": ([conv], twice, (1, 4, 5, 5)),
    "two linears tied": ([linear, linear], twice, (3, 4)),
    "two linears tied, three calls": (
        [linear, linear], lambda m, x: m.a(m.b(m.a(x).relu() * 5) * 0.1), (3, 4),
    ),
    "two convs tied": ([conv, conv], twice, (1, 4, 5, 5)),
    "conv and depthwise conv tied": (
        [conv, lambda: nn.Conv2d(4, 4, 3, groups=4)], twice, (1, 4, 5, 5),
    ),
    "a sum reads it too": ([linear], lambda m, x: m.a(x) + m.a.bias * 2, (3, 4)),
}  # fmt: skip


def made(name: str) -> tuple[torch.fx.GraphModule, Tensor]:
    makers, forward, shape = CASES[name]
    torch.manual_seed(0)
    layers, x = [make() for make in makers], torch.randn(shape)
    layers[-1].bias = layers[0].bias
    return converted(Model(forward, a=layers[0], b=layers[-1]), x), x


AT_ONCE = ("conv called twice", "two linears tied, three calls", "a sum reads it too")


methods = in_two_programs(CASES, AT_ONCE, lambda name: made(name)[0])


@pytest.mark.full
@pytest.mark.parametrize("name", at_once(CASES, *AT_ONCE))
def test_every_reader_adds_the_bias_in_its_own_steps(name: str) -> None:
    (model, lowered), x = methods(name), torch.randn(CASES[name][2])
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
    model, x = made("two linears tied, three calls")
    model = with_one_bias(model)
    before, names = str(model.graph), set(model.state_dict())
    result = with_own_biases(model)
    assert (str(model.graph), set(model.state_dict())) == (before, names)
    added = set(result.state_dict()) - names
    assert len(added) == 3
    for name in names & set(result.state_dict()):
        assert result.state_dict()[name].data_ptr() == model.state_dict()[name].data_ptr()
    assert torch.equal(result(x), model(x))
    for name in added:
        result.get_buffer(name).add_(1.0)
    assert not torch.equal(result(x), model(x)), "its code reads what its graph reads"


@pytest.mark.parametrize("forward", [lambda m, x: m.a(x), twice], ids=["one call", "no bias"])
def test_a_graph_without_shared_biases_is_not_copied(forward: Any) -> None:
    layer = nn.Linear(4, 4, bias=forward is not twice)
    net = Model(forward, a=layer, b=layer).eval()
    model = torch.export.export(net, (torch.randn(3, 4),)).module()
    assert with_own_biases(model) is model
