# SPDX-License-Identifier: Apache-2.0
"""Concatenations of int8, averages, padding and reductions, which OpenVINO is to read in another form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose.backend import load_backend
from qompose_onnx import ONNXProgram, get_onnx_quantization_config as config
from qompose_onnx.errors import ONNXTargetError
from torch import Tensor, nn

from tests.onnx.models import sqnr

pytest.importorskip("openvino")

X = (torch.linspace(-1, 1, 64).reshape(2, 2, 4, 4), torch.linspace(-2, 0.5, 64).reshape(2, 2, 4, 4))


class Joined(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.out, self.factor = nn.Conv2d(4, 4, 3, padding=1), factor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([x, y], 1)
        return self.out(both if self.factor == 1 else both * self.factor)


def _made(model: nn.Module, target: str) -> tuple[ONNXProgram, Tensor]:
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(config("int8", bits=7))
    result = qompose.quantize(
        model.eval(), X, backends=quantizer, calibration=[X], target=target, progress=False
    )
    with torch.no_grad():
        return result.model, result.converted(*X)


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_openvino_computes_what_the_converted_model_does(factor: float) -> None:
    program, wanted = _made(Joined(factor), "openvino")
    assert sqnr(wanted, program(*X)) > 45


def test_a_file_for_others_is_read_unsigned_and_stays_as_it_is(tmp_path: Path) -> None:
    """Arm and TensorRT want int8."""
    made, wanted = _made(Joined(), "onnx")
    program = ONNXProgram.read(made.save(tmp_path / "model.onnx"), "openvino")
    assert sqnr(wanted, program(*X)) > 45
    written = {node.name for node in program.model.graph if node.op_type == "QuantizeLinear"}
    assert not any("uint8" in str(name) for name in written)


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


class Reduced(nn.Module):
    """Two linears, of which the second reads a reduction of the first, that has a scale per channel."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, bias=False), nn.Linear(8, 4)
        self.reduce = reduce

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.reduce(self.first(x)))


@pytest.mark.parametrize(
    "reduce", [lambda y: y.mean(1), lambda y: y.amax((0, 1)), lambda y: y.sum((1, 2)).relu()]
)
def test_scales_per_channel_go_through_reductions_in_their_places(
    reduce: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    program, wanted = _made(Reduced(reduce), "openvino")
    found = program(*X)
    assert found.shape == wanted.shape
    assert sqnr(wanted, found) > 45


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
    program, wanted = _made(Padded(pads, channels), "openvino")
    found = program(*X)
    assert found.shape == wanted.shape
    assert sqnr(wanted, found) > 45


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
