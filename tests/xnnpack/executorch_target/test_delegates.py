# SPDX-License-Identifier: Apache-2.0
"""The walk over delegates sees operators that compute in float between int8 tensors."""

from __future__ import annotations

import pytest
import torch
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor, nn
from torch.nn import functional

from tests.xnnpack.executorch_target.delegates import floats_between, handed_over
from tests.xnnpack.executorch_target.runtime import through

A = (0.05, 3)


def test_a_batch_norm_behind_a_transposed_convolution_with_groups() -> None:
    """Given to XNNPACK together, they end ExecuTorch's export: it takes the weight for one without groups."""
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
        *(nn.ConvTranspose2d(6, 4, 3), nn.BatchNorm2d(4)),
    ).eval()
    for norm in (model[1], model[3]):
        norm.running_mean.uniform_(-1, 1)
    x = torch.randn(1, 4, 5, 5)
    program = lower_to_executorch(torch.export.export(model, (x,)).module(), (x,))
    torch.testing.assert_close(program.run(x), model(x), rtol=1e-4, atol=1e-5)
    (left,) = program.delegation.portable
    assert left.module == "1" and left.reason


class Between(nn.Module):
    """Functions between int8 tensors; XNNPACK has one of them, a pool, for integers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        floats = through(functional.gelu(through(x, A)).tanh(), A)
        return floats, through(functional.max_pool2d(through(x, A), 2), A)


def test_floats_between_integers_are_seen() -> None:
    pytest.importorskip("executorch")
    inputs = (torch.randn(1, 4, 6, 6),)
    with handed_over() as graphs:
        lower_to_executorch(torch.export.export(Between(), inputs).module(), inputs)
    found = [name for graph in graphs for name in floats_between(graph)]
    assert [name for name in found if name not in ("XNNStaticTranspose", "XNNCopy")] == [
        *("XNNGelu", "XNNTanh")
    ]
