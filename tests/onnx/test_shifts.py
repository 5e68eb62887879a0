# SPDX-License-Identifier: Apache-2.0
"""Shifts of bits are the same numbers in torch and in all runtimes, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose_embedding import get_embedding_quantization_config as rows_of
from qompose_onnx import ONNXProgram
from qompose_onnx.errors import ONNXTargetError
from torch import Tensor, nn

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Shifted(nn.Module):
    """A linear of integers that were taken from bytes, and all kinds of shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        high = x >> 4
        moved = (torch.bitwise_right_shift(x, 1), x >> 9, x >> 63, x << 3)
        return high, *moved, torch.bitwise_left_shift(x, 7), self.linear(high.float())


def lowered(model: nn.Module, x: Tensor, target: str) -> Any:
    with torch.no_grad():
        prepared = qompose.prepare_pt2e(
            torch.export.export(model.eval(), (x,)), qompose.compose("onnx")
        )
        prepared(x)
    return qompose.lower(qompose.convert_pt2e(prepared), target)


@pytest.mark.parametrize(
    ("runtime", "dtype"),
    [
        ("onnxruntime", torch.uint8),
        *(
            pytest.param(runtime, dtype, marks=pytest.mark.full)
            for runtime in ("onnxruntime", "openvino")
            for dtype in INTEGERS
        ),
    ],
)
def test_they_are_those_of_torch(runtime: str, dtype: torch.dtype) -> None:
    """OpenVINO's own are wrong for all of these types but int64, and torch's exporter's for uint8."""
    pytest.importorskip(runtime)
    low = 0 if dtype is torch.uint8 else -128
    x = torch.arange(low, low + 256).to(dtype)[None]
    model = Shifted()
    program: ONNXProgram = lowered(model, x, runtime)
    for found, wanted in zip(program(x)[:-1], model(x)[:-1], strict=True):
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)


class OfSizes(nn.Module):
    """A linear, and numbers that depend on how many rows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.shape[0]
        return self.linear(x), torch.full((2,), rows >> 1) + (rows << 3)


def test_shifts_of_sizes() -> None:
    pytest.importorskip("onnxruntime")
    model = OfSizes()
    result = qompose.quantize(
        model, (torch.ones(6, 4),), backends="onnx", target="onnxruntime", progress=False,
        calibration=[(torch.rand(6, 4),)], dynamic_shapes=({0: torch.export.Dim("rows")},),
    )  # fmt: skip
    for rows in (5, 6):
        x = torch.ones(rows, 4)
        assert torch.equal(result.model(x)[1], model(x)[1])


@pytest.mark.full
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_rows_of_packed_bytes_are_taken_apart_alike(runtime: str, bits: int) -> None:
    """Rows of 13 numbers fill their last byte in part."""
    pytest.importorskip(runtime)
    tables = qompose.RuleQuantizer(load_backend("embedding")).set_global(rows_of(bits))
    ids = torch.arange(20).view(4, 5)
    result = qompose.quantize(
        nn.Embedding(20, 13), (ids,), backends=[tables, "onnx"], target=runtime, strict=True,
        progress=False,
    )  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(result.model(ids), result.converted(ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize("by_its_name", [torch.fft.fftshift, torch.fft.ifftshift])
def test_what_shifts_no_bits_is_not_refused(by_its_name: Callable[[Tensor], Tensor]) -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Any:
            return by_its_name(self.linear(x))

    assert isinstance(lowered(Moved(), torch.arange(24.0).view(3, 8), "onnx"), ONNXProgram)


def test_a_shift_by_a_tensor_is_refused_by_name() -> None:
    class ByTensor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.linear((x >> (x & 3)).float())

    with pytest.raises(ONNXTargetError, match=r"rshift|right_shift"):
        lowered(ByTensor(), torch.arange(8)[None], "onnx")
