# SPDX-License-Identifier: Apache-2.0
"""Signed activations, which OpenVINO is to read unsigned."""

from __future__ import annotations

from pathlib import Path

import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose_onnx import ONNXProgram, get_onnx_quantization_config as config
from torch import Tensor, nn

from tests.onnx.models import sqnr
from tests.onnx.openvino_defects.programs import X, lowered

pytest.importorskip("openvino")


class Joined(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.out, self.factor = nn.Conv2d(4, 4, 3, padding=1), factor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([x, y], 1)
        return self.out(both if self.factor == 1 else both * self.factor)


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_openvino_computes_what_the_converted_model_does(factor: float) -> None:
    program, wanted = lowered(Joined(factor), "openvino")
    assert sqnr(wanted, program(*X)) > 45


def test_a_file_for_others_is_read_unsigned_and_stays_as_it_is(tmp_path: Path) -> None:
    """Arm and TensorRT want int8."""
    made, wanted = lowered(Joined(), "onnx")
    program = ONNXProgram.read(made.save(tmp_path / "model.onnx"), "openvino")
    assert sqnr(wanted, program(*X)) > 45
    written = {node.name for node in program.model.graph if node.op_type == "QuantizeLinear"}
    assert not any("uint8" in str(name) for name in written)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell = nn.Conv1d(2, 8, 3), nn.GRU(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cell(self.first(x).transpose(1, 2))[0]
        return states


def test_signed_integers_of_open_sizes_lose_nothing_of_the_weights() -> None:
    torch.manual_seed(0)
    x = (X[0].flatten(2),)
    quantizer = qompose.RuleQuantizer(load_backend("onnx"))
    quantizer.set_global(config("int8", symmetric_activations=True, bits=7))
    result = qompose.quantize(
        Recurrent().eval(), x, backends=quantizer, calibration=[x], target="openvino",
        progress=False, dynamic_shapes=({0: torch.export.Dim("batch", max=64)},),
    )  # fmt: skip
    with torch.no_grad():
        assert sqnr(result.converted(*x), result.model(*x)) > 60
