# SPDX-License-Identifier: Apache-2.0
"""Reductions that drop dimensions, which OpenVINO is to read with a squeeze."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.onnx.models import sqnr
from tests.onnx.openvino_defects.programs import X, lowered

pytest.importorskip("openvino")


class Reduced(nn.Module):
    """Two linears, of which the second reads a reduction of the first, that has a scale per channel."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, bias=False), nn.Linear(8, 4)
        self.reduce = reduce

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.reduce(self.first(x)))


@pytest.mark.parametrize(
    "reduce", [lambda y: y.mean(1), lambda y: y.amax((0, 1)), lambda y: y.sum((1, 2)).relu()]
)
def test_scales_per_channel_go_through_reductions_in_their_places(
    reduce: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    program, wanted = lowered(Reduced(reduce), "openvino")
    found = program(*X)
    assert found.shape == wanted.shape
    assert sqnr(wanted, found) > 45
