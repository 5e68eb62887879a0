# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions run as convolutions, with the same integers."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose_onnx import get_onnx_quantization_config as config
from torch import nn

pytest.importorskip("onnxruntime")
GEOMETRIES = (
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": (4, 3), "stride": (2, 3), "padding": (1, 0), "groups": 2},
    {"kernel_size": 2, "stride": 2, "padding": 0},
    {"kernel_size": 3, "stride": 3, "dilation": 2, "output_padding": 2},
    {"kernel_size": 3, "stride": 1, "padding": 2},
    {"kernel_size": 1, "stride": 3, "output_padding": 2},
)


@pytest.mark.parametrize(
    "geometry",
    [GEOMETRIES[0], *(pytest.param(g, marks=pytest.mark.full) for g in GEOMETRIES[1:])],
    ids=str,
)
def test_onnx_runtime_computes_them_in_int8(geometry: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 6)
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, **geometry), nn.ReLU()).eval()
    batch = torch.export.Dim("batch", min=2, max=16)
    result = qompose.quantize(
        model, (x,), backends=["onnx"], calibration=[(x,)], target="onnxruntime", strict=True,
        dynamic_shapes=({0: batch},), progress=False,
    )  # fmt: skip
    assert {row.kernel for row in result.report.rows} == {"QLinearConv"}
    for size in (3, 7):
        given = torch.randn(size, 4, 5, 6)
        with torch.no_grad():
            wanted, found = result.converted(given), result.model(given)
        step = wanted[wanted > 0].min()
        steps = ((wanted - found) / step).round().abs()
        assert steps.max() <= 1 and steps.count_nonzero() <= steps.numel() // 100


@pytest.mark.full
@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("activation", ["uint8", "int8"])
def test_of_other_dimensions_and_int8(dims: int, activation: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, *(4, 5, 6)[:dims])
    kind = getattr(nn, f"ConvTranspose{dims}d")
    model = nn.Sequential(kind(4, 6, 3, 2, 1, 1), nn.Flatten(), nn.LazyLinear(5)).eval()
    model(x)
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(config(activation))
    result = qompose.quantize(
        model, (x,), backends=quantizer, calibration=[(x,)], target="onnxruntime", strict=True,
        progress=False,
    )  # fmt: skip
    kernels = [row.kernel for row in result.report.rows]
    assert kernels == ["QLinearConv", "moves integers", "QGemm"]
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), result.converted(x), rtol=0, atol=1e-4)
