# SPDX-License-Identifier: Apache-2.0
"""Averages that count padding, which OpenVINO is to read behind a Pad."""

from __future__ import annotations

from pathlib import Path

import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose_onnx import ONNXProgram, get_onnx_quantization_config as config
from qompose_onnx.errors import ONNXTargetError
from torch import nn

from tests.onnx.models import sqnr
from tests.onnx.openvino_defects.programs import X

pytest.importorskip("openvino")


def _averaged(pool: nn.Module, target: str, **facts: object) -> qompose.QuantizedModel:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), pool).eval()
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(config(bits=7))
    return qompose.quantize(
        model,
        X[:1],
        backends=quantizer,
        calibration=[X[:1]],
        target=target,
        progress=False,
        **facts,
    )


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # OpenVINO averages in float then
@pytest.mark.parametrize(
    ("pool", "target"),
    [
        (nn.AvgPool2d(3, 2, 1), "openvino"),
        (nn.AvgPool2d(3, 2, 1), "onnx"),
        (nn.AvgPool2d(3, 2, 1, ceil_mode=True), "openvino"),
        (nn.AvgPool2d(3, 5, 1, ceil_mode=True), "openvino"),  # behind a Pad, a window more
    ],
)
def test_averages_that_count_padding_pad_with_the_zero_point(
    pool: nn.Module, target: str, tmp_path: Path
) -> None:
    """Of uint8 as well, where the zero point is not 0."""
    result = _averaged(pool, target)
    program = ONNXProgram.read(result.model.save(tmp_path / "model.onnx"), "openvino")
    with torch.no_grad():
        assert sqnr(result.converted(*X[:1]), program(*X[:1])) > 45


def test_an_average_whose_size_is_rounded_up_is_refused_where_that_is_dynamic() -> None:
    height = 2 * torch.export.Dim("half", max=32)
    pool = nn.AvgPool2d(3, 2, 1, ceil_mode=True)
    with pytest.raises(ONNXTargetError, match="ceil_mode"):
        _averaged(pool, "openvino", dynamic_shapes=({2: height},))
