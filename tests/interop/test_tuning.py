# SPDX-License-Identifier: Apache-2.0
"""Quantizers of other engines have no selectors of this kind, and are tuned all the same."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from torch import nn

from tests.interop.peers import THEIR_WARNINGS, executorch_xnnpack, torchao_x86

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)

FACTOR = 300.0


def planted() -> nn.Module:
    """Four layers; one channel between the second and the third is much larger than the others."""
    torch.manual_seed(0)
    parts = [
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
    ]
    model: Any = nn.Sequential(*parts, nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[2].weight[3] *= FACTOR
        model[2].bias[3] *= FACTOR
        model[4].weight[:, 3] /= FACTOR
    return model


@pytest.mark.full
@pytest.mark.parametrize(
    "make", [executorch_xnnpack, pytest.param(torchao_x86, marks=pytest.mark.full)]
)
def test_operators_of_another_engine_are_left_in_float(make: Any) -> None:
    x, model = torch.randn(64, 8), planted()
    program = torch.export.export(model, (x,))

    def metric(candidate: Any) -> float:
        with torch.no_grad():
            wanted = model(x)
            return -float((candidate(x) - wanted).square().mean() / wanted.square().mean())

    found = qompose.tune(program, make(), [x], metric, 0.01, progress=False)
    assert found.quantized_score < -0.01 <= found.score
    assert 0 < found.float_macs < found.macs
    report = qompose.report(qompose.prepare_pt2e(program, found.apply(make())))
    for site in found.excluded:
        (row,) = report.why(site.name)
        assert "left in float by " in row.reason
    assert report.count("observed") > 0
