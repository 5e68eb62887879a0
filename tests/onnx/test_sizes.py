# SPDX-License-Identifier: Apache-2.0
"""Sizes that are open: whatever a model makes of them, products stay fused, and numbers stay right."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_onnx.errors import ONNXTargetError
from torch import Tensor, nn

from tests.onnx.models import sqnr

pytest.importorskip("onnxruntime")
Dim = torch.export.Dim
SIZES = (Dim(name, min=8, max=64) for name in ("height", "width"))
OPEN = ({0: Dim("batch", max=64), **dict(enumerate(SIZES, 2))},)


class Sized(nn.Module):
    """A convolution whose result is laid out by its own sizes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 4, 3, 2, 1)
        self.wide = nn.ConvTranspose2d(16, 4, (2, 4), (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        batch, _, height, width = y.shape
        if self.kind == "reshape":
            return y.view(batch, 2, 4, 2, height, width)
        if self.kind == "expand":
            return y.unsqueeze(1).expand(batch, 2, 16, height, width)
        if self.kind == "resize":
            return F.interpolate(y, size=(2 * height, 3 * width))
        return self.up(y) if self.kind == "up" else self.wide(y)


def converted(kind: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    batches = [(torch.randn(2, 3, 20, 24),) for _ in range(2)]
    program = torch.export.export(Sized(kind).eval(), batches[0], dynamic_shapes=OPEN)
    prepared = qompose.prepare_pt2e(program, qompose.compose("onnx"))
    qompose.calibrate(prepared, batches, progress=False)
    return qompose.convert_pt2e(prepared), torch.randn(3, 3, 14, 18)


@pytest.mark.parametrize("kind", ["reshape", "expand", "resize", "up", "wide"])
def test_products_stay_fused(kind: str) -> None:
    model, x = converted(kind)
    lowered = qompose.lower(model, "onnxruntime", strict=True)
    assert sqnr(model(x), lowered(x)) > 45
    if kind in ("expand", "up"):
        assert not any(node.op_type == "Shape" for node in lowered.model.graph)


class TestOpenVINO:
    @pytest.mark.parametrize("kind", ["expand", "up"])
    def test_sizes_that_constants_can_say_are_right(self, kind: str) -> None:
        pytest.importorskip("openvino")
        model, x = converted(kind)
        assert sqnr(model(x), qompose.lower(model, "openvino", strict=True)(x)) > 45

    def test_what_it_computes_wrongly_is_refused(self) -> None:
        pytest.importorskip("openvino")
        model, _ = converted("reshape")
        with pytest.raises(ONNXTargetError, match="conv2d"):
            qompose.lower(model, "openvino")
