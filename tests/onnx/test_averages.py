# SPDX-License-Identifier: Apache-2.0
"""Averages with `ceil_mode`, which ONNX Runtime divides wrongly where padding counts."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.onnx.models import sqnr

pytest.importorskip("onnxruntime")


class Averaged(nn.Module):
    """Convolutions around an average."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.avg_pool2d(self.first(x), 3, 2, ceil_mode=True, **self.options))


@pytest.mark.parametrize(
    ("options", "states"),
    [
        ({}, ("int8 kernel", "simulated (Q/DQ)")),
        ({"padding": 1}, ("float", "float")),
        ({"padding": 1, "count_include_pad": False}, ("int8 kernel", "simulated (Q/DQ)")),
    ],
    ids=["no padding", "padding counts", "padding does not count"],
)
@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # of what OpenVINO averages in float
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_last_windows_are_divided_by_what_they_hold(
    options: dict[str, Any], states: tuple[str, str], runtime: str
) -> None:
    pytest.importorskip(runtime)
    torch.manual_seed(0)
    batches = [(torch.randn(2, 3, 8, 10) + 1,) for _ in range(3)]
    result = qompose.quantize(
        Averaged(**options).eval(), batches[0], backends=["onnx"], calibration=batches, target=runtime,
        progress=False,
    )  # fmt: skip
    (row,) = (row for row in result.report.rows if row.name == "avg_pool2d")
    assert row.state == states[runtime == "openvino"]
    with torch.no_grad():
        assert sqnr(result.converted(*batches[1]), result.model(*batches[1])) > 45
