# SPDX-License-Identifier: Apache-2.0
"""A bias that a kernel adds as an integer is that integer in the converted model too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose.program.graph import constant_of
from torch import nn
from torch.fx import GraphModule

from tests.core.toy import (
    DYNAMIC,
    LINEAR,
    PER_TENSOR,
    STATIC,
    Model,
    convert,
    export,
    nodes_calling,
    randn,
    seeded,
    sqnr,
    toy,
)

INTEGER = replace(LINEAR, bias="bias", integer_bias=True)
X = randn(16, 8)


def converted(
    model: nn.Module, config: Any = STATIC, rule: Any = INTEGER, x: torch.Tensor = X
) -> GraphModule:
    return convert(export(model, x), toy(rule, config=config), x)


def steps(model: GraphModule, node: torch.fx.Node) -> torch.Tensor:
    """The bias that a linear adds, in steps of input scale times weight scale."""
    source, weight, bias = node.args
    scale = weight.args[1]
    if isinstance(scale, torch.fx.Node):
        scale = model.get_buffer(str(scale.target))
    return constant_of(bias).detach() / (source.args[1] * scale)


@pytest.mark.parametrize("config", [STATIC, PER_TENSOR], ids=str)
def test_it_is_a_whole_number_of_steps(config: Any) -> None:
    model = seeded(nn.Linear(8, 4))
    result = converted(model, config)
    (node,) = nodes_calling(result, "linear")
    found = steps(result, node)
    assert torch.allclose(found, found.round(), atol=1e-3)
    plain = converted(model, config, replace(LINEAR, bias="bias"))
    (other,) = nodes_calling(plain, "linear")
    exact = steps(plain, other)
    assert not torch.allclose(exact, exact.round(), atol=1e-3)
    assert torch.equal(found.round(), exact.round())
    assert "bias" not in dict(result.named_parameters())


def test_each_operator_has_its_own_step() -> None:
    """One bias of two linears is two integers where their inputs differ in scale."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.bias = first.bias
    model = Model(lambda self, x: self.second(self.first(x) * 10), first=first, second=second)
    result = converted(seeded(model))
    for node in nodes_calling(result, "linear"):
        found = steps(result, node)
        assert torch.allclose(found, found.round(), atol=1e-3)


def test_floats_stay_where_scales_are_not_known() -> None:
    model = seeded(nn.Linear(8, 4))
    assert torch.equal(dict(converted(model, DYNAMIC).named_parameters())["bias"], model.bias)


@pytest.mark.parametrize("config", [STATIC, PER_TENSOR], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_it_fits_into_32_bits_however_small_the_inputs_are(size: float, config: Any) -> None:
    model, x = seeded(nn.Linear(8, 4)), X * size
    model.bias.data = torch.tensor([100.0, -100.0, 50.0, 0.0])
    result = converted(model, config, x=x)
    (node,) = nodes_calling(result, "linear")
    assert 2**28 < float(steps(result, node).abs().max()) < 2**30
    assert sqnr(model(x), result(x)) > 35
    (told,) = (note for note in qompose.report(result).notes if "fits into int32" in note)
    assert told.startswith("weight -> linear")


def test_inputs_of_zeros_do_not_widen_a_weight_that_others_read() -> None:
    """The first step of a recurrent layer reads a state of zeros by the weight of every step."""
    layer = nn.Linear(8, 4)
    model = seeded(Model(lambda self, x: self.layer(x) - self.layer(x * 0), layer=layer))
    layer.bias.data = torch.tensor([100.0, -100.0, 50.0, 0.0])
    result = converted(model)
    zeros = nodes_calling(result, "linear")[-1]
    assert float(steps(result, zeros).abs().max()) <= 2**29 * (1 + 1e-6)
    largest = layer.weight.detach().abs().amax(1) / 127
    torch.testing.assert_close(result.get_buffer("layer.weight_scale"), largest)
    notes = qompose.report(result).notes
    assert [note for note in notes if "always zero" in note]
    assert not [note for note in notes if "fits into int32" in note]


def test_scales_of_weights_that_have_room_stay() -> None:
    model = seeded(nn.Linear(8, 4))
    result = converted(model)
    largest = model.weight.detach().abs().amax(1) / 127
    torch.testing.assert_close(result.weight_scale, largest)
    assert not [note for note in qompose.report(result).notes if "int32" in note]
