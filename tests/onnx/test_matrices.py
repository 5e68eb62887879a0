# SPDX-License-Identifier: Apache-2.0
"""Products of linears stay matrices where all that reads them computes by elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.onnx.models import sqnr

pytest.importorskip("onnxruntime")


def scaled(x: Tensor) -> Tensor:
    return F.gelu(x) * torch.linspace(0.5, 2, 32) + 0.25


class Two(nn.Module):
    """Two linears with something between, which a third thing may read."""

    def __init__(self, between: Callable[[Tensor], Tensor], *, shown: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.between, self.shown = between, shown

    def forward(self, x: Tensor) -> Any:
        hidden = self.between(self.first(x))
        out = self.second(hidden)
        return (out, hidden.mean(1)) if self.shown else out


def lowered(model: nn.Module, target: str, *, is_open: bool = False) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    batches = [(torch.randn(3, 5, 16),) for _ in range(3)]
    dims = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=64)}
    result = qompose.quantize(
        model.eval(), batches[0], backends=["onnx"], calibration=batches, target=target,
        dynamic_shapes=(dims,) if is_open else None, progress=False,
    )  # fmt: skip
    given = torch.randn(4, 7, 16) if is_open else torch.randn(3, 5, 16)
    return result.model, result.converted, given


def nodes(program: Any) -> list[Any]:
    return [*program.model.graph]


def kinds(program: Any) -> list[str]:
    return [node.op_type for node in nodes(program)]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("between", [F.gelu, F.silu, torch.tanh, F.relu, scaled])
def test_nothing_is_laid_out_anew_between_linears(
    between: Callable[[Tensor], Tensor], is_open: bool
) -> None:
    program, converted, x = lowered(Two(between), "onnxruntime", is_open=is_open)
    assert kinds(program).count("Reshape") == 2  # before the first linear, and behind the second
    assert all(
        node.outputs[0].uses() or node.outputs[0].is_graph_output() for node in nodes(program)
    )
    with torch.no_grad():
        assert sqnr(converted(x), program(x)) > 45


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 1), (1, 5, 32)])
def test_constants_along_other_dimensions(shape: tuple[int, ...]) -> None:
    model = Two(lambda y: F.gelu(y) * model.given + 0.5)
    model.register_buffer("given", torch.linspace(0.5, 2, math.prod(shape)).reshape(shape))
    program, converted, x = lowered(model, "onnxruntime")
    with torch.no_grad():
        assert sqnr(converted(x), program(x)) > 45


def test_an_exponent_with_dimensions_of_one() -> None:
    model = Two(lambda y: F.gelu(y) ** model.given)
    model.register_buffer("given", torch.full((1, 1, 1), 2.0))
    program, converted, x = lowered(model, "onnxruntime")
    assert kinds(program).count("Reshape") == 2
    with torch.no_grad():
        assert sqnr(converted(x), program(x)) > 45


def test_what_is_quantized_at_once_stays_fused() -> None:
    program, converted, x = lowered(Two(lambda y: torch.sigmoid(y) * y), "onnxruntime")
    kernels = {row.name: row.kernel for row in qompose.report(program).rows}
    assert kernels["linear"] == kernels["linear_1"] == "QGemm"
    with torch.no_grad():
        assert sqnr(converted(x), program(x)) > 45


@pytest.mark.parametrize(
    "between", [lambda x: x.softmax(-1), lambda x: x + x.mean(1, keepdim=True)]
)
def test_what_computes_along_dimensions_keeps_them(between: Callable[[Tensor], Tensor]) -> None:
    program, converted, x = lowered(Two(between), "onnxruntime")
    assert kinds(program).count("Reshape") > 2
    with torch.no_grad():
        assert sqnr(converted(x), program(x)) > 45


def test_what_is_read_elsewhere_keeps_its_dimensions() -> None:
    program, converted, x = lowered(Two(F.gelu, shown=True), "onnxruntime")
    with torch.no_grad():
        for wanted, found in zip(converted(x), program(x), strict=True):
            assert wanted.shape == found.shape
            assert sqnr(wanted, found) > 45


def test_openvino_gives_integers_between_linears() -> None:
    pytest.importorskip("openvino")
    program, converted, x = lowered(Two(scaled), "openvino")
    given = {
        node.get_rt_info()["outputPrecisions"].astype(str)
        for node in program.load().compiled.get_runtime_model().get_ordered_ops()
        if node.get_rt_info()["layerType"].astype(str) == "FullyConnected"
    }
    assert given == {"u8", "f32"}  # of the first, and of the second
    with torch.no_grad():
        assert sqnr(converted(x), program(x)) > 45


def test_a_mask_that_hides_nothing_is_left_out() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
            return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)

    program, converted, x = lowered(Attention(), "onnxruntime")
    assert "Where" not in kinds(program)
    with torch.no_grad():
        assert sqnr(converted(x), program(x)) > 45


def test_a_mask_that_broadcasts_what_it_hides_nothing_of_stays() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.register_buffer("mask", torch.ones(4, 1, 1, 1, dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(self.mask, self.inner(x), 0.0)

    program, converted, x = lowered(Chosen(), "onnxruntime")
    with torch.no_grad():
        assert program(x).shape == converted(x).shape == (4, 3, 5, 16)
        assert sqnr(converted(x), program(x)) > 45
