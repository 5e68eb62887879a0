# SPDX-License-Identifier: Apache-2.0
"""Operators that only pass values on are taken where something quantized reads them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from qompose.backend import Kernel, OperatorPattern, Region
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import LINEAR, aten, claimed, export, plan_of, prepare, randn, rule, toy


def unmoved(region: Region) -> Node:
    return region.quantized_inputs("self")[0].node


CLONE = rule(
    "clone", OperatorPattern((aten.clone.default,)), activations=("self",), shares=True,
    condition="all", carries=True, kernels={"torch": Kernel("no operator", unmoved)},
)  # fmt: skip


class Layers(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        pytest.param(lambda m, x: m.second(m.first(x).clone()), 1, id="between products"),
        pytest.param(lambda m, x: m.second(m.first(x).clone().clone()), 2, id="a chain"),
        pytest.param(lambda m, x: m.first(x).clone().sigmoid(), 0, id="before a float operator"),
        pytest.param(lambda m, x: m.first(x).clone().clone().sigmoid(), 0, id="a chain to float"),
        pytest.param(lambda m, x: m.first(x).clone(), 0, id="at the end"),
        pytest.param(
            lambda m, x: (lambda y: m.second(y) + y.sigmoid())(m.first(x).clone()), 1, id="both"
        ),
    ],
)
def test_where_they_are_taken(function: Callable[[nn.Module, Tensor], Tensor], taken: int) -> None:
    prepared = prepare(export(Layers(function), randn(3, 8)), toy(LINEAR, CLONE))
    names = [name for name in claimed(prepared) if name.startswith("clone")]
    assert len(names) == taken
    left = [
        op for op in plan_of(prepared).operators if op.operator == "aten.clone" and not op.claim
    ]
    for operator in left:
        if operator.name not in names:
            assert operator.reason == "toy: it computes nothing, and nothing quantized reads it"


def test_capabilities_say_so() -> None:
    rows = toy(CLONE).quantization_capabilities()
    assert "only where something quantized reads its output" in rows[0].notes
    assert rows.to_dict()[0]["carries"] is True
