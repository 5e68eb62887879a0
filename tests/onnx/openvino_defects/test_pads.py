# SPDX-License-Identifier: Apache-2.0
"""Padding of one dimension, which OpenVINO is to read as padding of two."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.onnx.models import sqnr
from tests.onnx.openvino_defects.programs import X, lowered

pytest.importorskip("openvino")


class Padded(nn.Module):
    """Two convolutions with padding between them, of integers whose zero point is not 0."""

    def __init__(self, pads: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 1), nn.Conv2d(channels, 3, 1)
        self.pads = pads

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(F.pad(self.first(x), self.pads))


@pytest.mark.parametrize(
    ("pads", "channels"), [((2, 0), 4), ((0, 0, 1, 1), 4), ((0, 0, 0, 0, 1, 0), 5)], ids=str
)
def test_padding_of_one_dimension_pads_with_the_zero_point(
    pads: tuple[int, ...], channels: int
) -> None:
    torch.manual_seed(0)
    program, wanted = lowered(Padded(pads, channels), "openvino")
    found = program(*X)
    assert found.shape == wanted.shape
    assert sqnr(wanted, found) > 45
