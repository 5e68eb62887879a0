# SPDX-License-Identifier: Apache-2.0
"""Operators that draw random numbers draw the same ones wherever programs are compared."""

from __future__ import annotations

import pytest
import qompose
import torch
from qompose.reporting.report_data import EQUAL
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import export, randn, seeded, toy


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
