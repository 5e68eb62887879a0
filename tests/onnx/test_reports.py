# SPDX-License-Identifier: Apache-2.0
"""What reports say of the graph that a runtime executes."""

from __future__ import annotations

import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose_onnx import get_onnx_quantization_config as config
from torch import nn
from torch._higher_order_ops.scan import scan

from tests.onnx.models import sqnr

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("shape", [(4, 32), (2, 3, 32)], ids=str)
@pytest.mark.parametrize("group_size", [None, 32])
def test_a_linear_whose_bias_is_fused_with_it_is_traced(
    shape: tuple[int, ...], group_size: int | None
) -> None:
    """ONNX Runtime fuses MatMul and Add of two dimensions, and gives the result a name of its own."""
    x = torch.randn(shape)
    options = {"group_size": group_size} if group_size else {}
    quantizer = qompose.RuleQuantizer(load_backend("onnx"))
    quantizer.set_module_name("0", config(weight_only=True, **options))
    result = qompose.quantize(
        nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 4)).eval(), (x,), backends=quantizer,
        target="onnxruntime", strict=True, progress=False,
    )  # fmt: skip
    rows = result.report.rows
    assert [row.kernel for row in rows] == ["MatMulNBits", ""]
    assert "ONNX Runtime: Gemm" in rows[1].reason


@pytest.mark.parametrize("relu", [True, False], ids=["relu", "plain"])
@pytest.mark.parametrize(("shape", "bias"), [((4, 32), True), ((2, 3, 32), False)], ids=str)
def test_a_linear_that_is_quantized_and_read_in_float_is_fused(
    shape: tuple[int, ...], bias: bool, relu: bool
) -> None:
    """ONNX Runtime fuses one whose readers are all of one kind."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 16, bias=bias), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.first(x)
            return y, self.second(y.relu() if relu else y)

    x = torch.randn(shape)
    result = qompose.quantize(
        Both().eval(), (x,), backends=["onnx"], calibration=[(x,)], target="onnxruntime", strict=True,
        progress=False,
    )  # fmt: skip
    states = {row.name: row.state for row in result.report.rows if row.owner}
    assert states == {"linear": "int8 kernel", "linear_1": "int8 kernel"}
    with torch.no_grad():
        for found, wanted in zip(result.model(x), result.converted(x), strict=True):
            assert sqnr(wanted, found) > 60


def test_int8_linears_of_several_rows_are_fused() -> None:
    """On x86, ONNX Runtime makes uint8 of int8 where both operators, quantize and dequantize, are a pair."""
    x = torch.randn(2, 3, 32)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(config("int8"))
    result = qompose.quantize(
        model, (x,), backends=quantizer, calibration=[(x,)], target="onnxruntime", strict=True,
        progress=False,
    )  # fmt: skip
    assert {row.kernel for row in result.report.rows} == {"QGemm"}


@pytest.mark.parametrize(("shape", "bias"), [((4, 64), True), ((2, 3, 64), False)], ids=str)
@pytest.mark.parametrize("after", [nn.ReLU(), nn.ReLU6()], ids=["relu", "relu6"])
def test_weights_of_four_bits_before_a_relu_are_fused(
    shape: tuple[int, ...], bias: bool, after: nn.Module
) -> None:
    """ONNX Runtime looks behind a relu for an operator that quantizes."""
    x = torch.randn(shape)
    quantizer = qompose.RuleQuantizer(load_backend("onnx"))
    quantizer.set_global(config(weight_only=True, group_size=32))
    result = qompose.quantize(
        nn.Sequential(nn.Linear(64, 64, bias=bias), after, nn.Linear(64, 8)).eval(), (x,),
        backends=quantizer, target="onnxruntime", strict=True, progress=False,
    )  # fmt: skip
    assert [row.kernel for row in result.report.rows] == ["MatMulNBits", "", "MatMulNBits"]
    with torch.no_grad():
        assert sqnr(result.converted(x), result.model(x)) > 60


@pytest.mark.full
def test_what_openvino_computes_in_a_loop_in_float_is_not_counted_as_int8() -> None:
    pytest.importorskip("openvino")
    x = torch.randn(2, 3, 8, 8)
    result = qompose.quantize(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Conv2d(4, 4, 1)).eval(), (x,),
        backends=["onnx"], calibration=[(x,)], target="openvino", strict=True, progress=False,
    )  # fmt: skip
    rows = [(row.state, row.kernel) for row in result.report.rows]
    product = ("int8 kernel", "OpenVINO int8")
    assert rows == [product, ("float kernel on integers", "OpenVINO Subgraph"), product]


@pytest.mark.parametrize(
    ("runtime", "inner"), [("onnxruntime", "int8 kernel"), ("openvino", "simulated (Q/DQ)")]
)
@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # of what OpenVINO does not tell
def test_a_linear_of_a_loop_is_not_taken_for_one_outside(runtime: str, inner: str) -> None:
    """Both are called `linear` in their graphs. OpenVINO tells nothing of what is in a loop."""
    pytest.importorskip(runtime)

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                made = self.inner(carry + row).tanh()
                return made, carry * 1.0

            last, _ = scan(step, torch.zeros(3, 8), x)
            found: torch.Tensor = self.outer(last)
            return found

    x = torch.randn(5, 3, 8)
    result = qompose.quantize(
        Looped().eval(), (x,), backends=["onnx"], calibration=[(x,)], target=runtime, progress=False
    )
    states = {row.name: row.state for row in result.report.rows if "linear" in row.name}
    assert states == {"linear": "int8 kernel", "scan_combine_graph_0_linear": inner}


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # of what OpenVINO computes in float
def test_linears_that_openvino_makes_a_loop_of_are_not_counted_as_int8() -> None:
    """It does with one thread, as tox has it; with more, these are products of integers."""
    pytest.importorskip("openvino")
    x = torch.randn(2, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    result = qompose.quantize(
        model, (x,), backends=["onnx"], calibration=[(x,)], target="openvino", progress=False
    )
    executed = result.model.load().compiled.get_runtime_model().get_ordered_ops()
    kinds = {node.get_rt_info()["layerType"].astype(str) for node in executed}
    state = "int8 kernel" if "FullyConnected" in kinds else "simulated (Q/DQ)"
    assert {row.state for row in result.report.rows} == {state}
