# SPDX-License-Identifier: Apache-2.0
"""Files for accelerators: TensorRT's form, which is checked, and activations of 16 bits."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose.errors import NotLoweredError
from qompose_onnx import get_onnx_quantization_config as config
from qompose_onnx.errors import ONNXTargetError
from qompose_onnx.names import TENSORRT_INT8
from qompose_onnx.tensorrt import faults

from tests.onnx.models import Images, images, sqnr

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def converted() -> Any:
    """By the name of a configuration, the converted model."""
    known: dict[str, Any] = {}

    def make(settings: qompose.QuantizationConfig) -> Any:
        if settings.name not in known:
            torch.manual_seed(0)
            quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(settings)
            program = torch.export.export(Images().eval(), images(1)[0])
            prepared = qompose.prepare_pt2e(program, quantizer)
            qompose.calibrate(prepared, images(3), progress=False)
            known[settings.name] = qompose.convert_pt2e(prepared)
        return known[settings.name]

    return make


def assert_close(converted: Any, lowered: Any, decibels: float) -> None:
    (x,) = images(7)[0]
    with torch.no_grad():
        for wanted, found in zip(converted(x), lowered(x), strict=True):
            assert sqnr(wanted, found) > decibels


def test_the_form_of_tensorrt(converted: Any) -> None:
    model = converted(config(tensorrt=True))
    lowered = qompose.lower(model, "tensorrt", strict=True)
    claimed = [row for row in qompose.report(lowered).rows if row.owner]
    assert {(row.state, row.kernel) for row in claimed} == {("unverified kernel", TENSORRT_INT8)}
    with pytest.raises(NotLoweredError):
        qompose.assert_lowered(lowered, 0.01)
    graph = lowered.model.graph
    zeros = [
        node.inputs[2].const_value.numpy()
        for node in graph.all_nodes()
        if node.op_type in ("QuantizeLinear", "DequantizeLinear")
    ]
    assert {z.dtype.name for z in zeros} == {"int8"} and not any(z.any() for z in zeros)
    biases = [n.inputs[2] for n in graph.all_nodes() if n.op_type == "Conv"]
    assert {bias.const_value.numpy().dtype.name for bias in biases} == {"float32"}
    assert_close(model, lowered, 60)


@pytest.mark.parametrize(
    ("settings", "said"),
    [(config(), "uint8"), (config("int8"), "zero point"), (config(is_dynamic=True), "Dynamic")],
    ids=["uint8", "zero points", "dynamic"],
)
@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
def test_what_tensorrt_would_refuse_is_refused(
    converted: Any, settings: qompose.QuantizationConfig, said: str
) -> None:
    with pytest.raises(ONNXTargetError, match=said):
        qompose.lower(converted(settings), "tensorrt")


def test_the_zero_point_that_is_not_zero_is_named() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 13]>
        graph (float[2, 1] x) => (float[2, 1] y)
        <int8[2, 1] w = {1, 2}, float[2] scales = {1.0, 1.0}, int8[2] zeros = {0, 3}> {
            read = DequantizeLinear <axis = 0> (w, scales, zeros)
            y = Add(x, read)
        }"""
    )
    ((_, reason),) = faults(model)
    assert "3" in reason


def test_sixteen_bits_are_computed_in_float_between_integers(converted: Any) -> None:
    model = converted(config("uint16"))
    lowered = qompose.lower(model, "onnxruntime", strict=True)
    assert lowered.model.opset_imports[""] == 21
    states = {row.state for row in qompose.report(lowered).rows if row.owner}
    assert states == {"float kernel on integers"}
    assert_close(model, lowered, 80)


@pytest.mark.full
def test_openvino_has_no_kernel_for_sixteen_bits(converted: Any) -> None:
    pytest.importorskip("openvino")
    model = converted(config("int16"))
    with pytest.warns(qompose.QomposeWarning):
        lowered = qompose.lower(model, "openvino")
    assert not [row for row in qompose.report(lowered).rows if row.state == "int8 kernel"]
    assert_close(model, lowered, 50)
