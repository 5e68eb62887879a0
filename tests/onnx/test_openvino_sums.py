# SPDX-License-Identifier: Apache-2.0
"""Where OpenVINO differs from the converted model on purpose: it adds to a convolution before it rounds.

It makes one operator of a convolution and a sum behind it, without the rounding between them. With that
left out of the converted model, too, both agree to over 300 dB. The sum is nearer to the float model's.
"""

from __future__ import annotations

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose.backend import load_backend
from qompose_onnx import get_onnx_quantization_config as config
from torch import Tensor, nn

from tests.onnx.models import sqnr

pytest.importorskip("openvino")


class Summed(nn.Module):
    """A sum of two convolutions, behind which integers go to a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.first(x) + self.second(x), 2)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_sum_is_within_one_step_and_no_farther_from_float(symmetric: bool) -> None:
    torch.manual_seed(0)
    model, x = Summed().eval(), (torch.randn(2, 3, 32, 32),)
    quantizer = qompose.RuleQuantizer(load_backend("onnx"))
    quantizer.set_global(config("int8", symmetric_activations=symmetric, bits=7))
    result = qompose.quantize(
        model, x, backends=quantizer, calibration=[x], target="openvino", progress=False
    )
    with torch.no_grad():
        exact, wanted, found = model(*x), result.converted(*x), result.model(*x)
    step = wanted.unique().diff().min()
    difference = (wanted - found).abs() / step
    assert difference.max() < 1.01
    assert 0 < (difference > 0.5).double().mean() < 0.5
    assert sqnr(exact, found) > sqnr(exact, wanted) - 0.1
