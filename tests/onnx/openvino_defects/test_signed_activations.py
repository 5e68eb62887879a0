# SPDX-License-Identifier: Apache-2.0
"""Signed activations, which OpenVINO is to read unsigned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose_onnx import ONNXProgram, get_onnx_quantization_config as config
from qompose_onnx.openvino_defects import settle
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


def _read(text: str) -> ir.Model:
    model = onnx.parser.parse_model(text)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def _types(model: ir.Model) -> dict[str, object]:
    """Return the types of what is quantized, by what is read."""
    found = (node for node in model.graph if node.op_type == "QuantizeLinear")
    return {str(node.inputs[0] and node.inputs[0].name): node.outputs[0].dtype for node in found}


WEIGHTS = """<ir_version: 9, opset_import: ["" : 20]>
product (float[2, 2] x) => (float[2, 2] y) <
    float scale = {0.1}, int8 zero = {0}, float[2, 2] w = {1, 2, 3, 4}, int64[2] order = {1, 0}
> {
    xq = QuantizeLinear(x, scale, zero)
    xd = DequantizeLinear(xq, scale, zero)
    moved = Transpose(w)
    wq = QuantizeLinear(moved, scale, zero)
    wd = DequantizeLinear(wq, scale, zero)
    y = MatMul(xd, wd)
}"""


def test_weights_that_a_file_quantizes_stay_signed() -> None:
    model = _read(WEIGHTS)
    assert settle(model)
    assert _types(model) == {"x": ir.DataType.UINT8, "moved": ir.DataType.INT8}


WITHOUT_ZEROS = """<ir_version: 10, opset_import: ["" : 21]>
rounded (float[2, 3] x) => (float[2, 3] y) <float[3] scale = {0.1, 0.2, 0.3}> {
    q = QuantizeLinear <axis = 1, output_dtype = 3> (x, scale)
    y = DequantizeLinear <axis = 1> (q, scale)
}"""


def test_zero_points_may_be_left_out(tmp_path: Path) -> None:
    """They are 0 then, one for each scale."""
    model = _read(WITHOUT_ZEROS)
    assert settle(model)
    assert _types(model) == {"x": ir.DataType.UINT8}
    ir.save(model, tmp_path / "model.onnx")
    import openvino

    compiled = openvino.Core().compile_model(tmp_path / "model.onnx", "CPU")
    x = np.asarray([[-30, 0.1, 0.5], [1, 20, 100]], np.float32)
    wanted = np.asarray([[-12.8, 0.2, 0.6], [1, 20, 38.1]], np.float32)
    wanted[0, 1] = 0  # 0.1 is half a step of 0.2, which goes to the even one
    np.testing.assert_allclose(compiled(x)[0], wanted, atol=1e-5)
