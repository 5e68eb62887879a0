# SPDX-License-Identifier: Apache-2.0
"""Linears of float8 numbers, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose_x86_inductor.operators import linear_float8
from qompose_x86_inductor.operators.linear_float8 import DTYPES, float8_in_graph
from torch import Tensor, nn

OPS = torch.ops.qompose_x86
# Relative to the sum of magnitudes: float32 rounds each of a few thousand additions, some 1e-7 each.
ROUNDING = 2.0**-18


@pytest.fixture(params=[True, False], ids=["with AMX", "without"], autouse=True)
def has_scaled_mm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(linear_float8, "has_scaled_mm", lambda: request.param)
    return bool(request.param)


class InGraph(nn.Module):
    """As compilers see it."""

    def __init__(self, has_scaled_mm: bool, x_scale: float, *rest: Any) -> None:
        super().__init__()
        self.x_scale, self.rest, self.scaled_mm = x_scale, rest, has_scaled_mm

    def forward(self, x: Tensor) -> Tensor:
        return float8_in_graph(x, self.x_scale, *self.rest, scaled_mm=self.scaled_mm)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 70)])
def test_in_a_graph_it_is_the_same(shape: tuple[int, ...], has_scaled_mm: bool) -> None:
    x, *rest = operands(*shape)
    traced = torch.export.export(InGraph(has_scaled_mm, *rest), (x,), strict=True)
    assert torch.equal(traced.module()(x), OPS.linear_float8(x, *rest))


def operands(*shape: int, x: Any = DTYPES[0], weight: Any = DTYPES[0]) -> list[Any]:
    torch.manual_seed(0)
    rows, matrix = torch.randn(shape) * 30, torch.randn(6, shape[-1]) * 30
    return [rows.to(x), 0.03, matrix.to(weight), torch.rand(6) + 0.01, torch.randn(6)]


def exactly(x: Tensor, scale: float, weight: Tensor, scales: Tensor, bias: Any) -> list[Tensor]:
    """The real values, and the magnitudes whose rounding is allowed for."""
    x, weight, unit = x.double(), weight.double(), scales.double() * scale
    added = torch.zeros(1) if bias is None else bias.double()
    return [x @ weight.T * unit + added, x.abs() @ weight.T.abs() * unit + added.abs()]


@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize("x", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5,), (3, 64), (2, 3, 70), (2, 4096)])
def test_is_the_scaled_sum(shape: tuple[int, ...], x: Any, weight: Any) -> None:
    given = operands(*shape, x=x, weight=weight)
    for bias in (given[-1], None):
        actual = OPS.linear_float8(*given[:-1], bias)
        exact, size = exactly(*given[:-1], bias)
        assert actual.dtype is torch.float32 and actual.shape == exact.shape
        assert ((actual.double() - exact).abs() <= size * ROUNDING).all()


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (3, 0)])
def test_what_is_empty_gives_the_bias(shape: tuple[int, ...]) -> None:
    given = operands(*shape)
    assert torch.equal(OPS.linear_float8(*given), given[-1].expand(*shape[:-1], 6))
    assert not OPS.linear_float8(*given[:-1], None).any()


def test_layouts_change_nothing() -> None:
    x, *rest = operands(2, 5, 16)
    spread = torch.zeros(5, 2, 32).to(x.dtype)[..., ::2].transpose(0, 1).copy_(x)
    assert not spread.is_contiguous()
    assert torch.equal(OPS.linear_float8(spread, *rest), OPS.linear_float8(x, *rest))


def test_what_is_no_number_shows_in_its_row_alone() -> None:
    x, *rest = operands(3, 8)
    x[1, 2] = torch.nan
    found = OPS.linear_float8(x, *rest).isnan()
    assert found.any(1).tolist() == [False, True, False] and found[1].all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_inputs_are_named(device: str) -> None:
    x, scale, weight, scales, bias = operands(3, 8)
    for changed, said in (
        ((x.half(), scale, weight, scales), "float16"),
        ((x, scale, weight.half(), scales), "float16"),
        ((x[:, :7], scale, weight, scales), r"\(3, 7\)"),
        ((x, scale, weight, scales[:5]), r"\(5,\)"),
        ((x, scale, weight, scales.double()), "float64"),
    ):
        given = (v.to(device) if isinstance(v, Tensor) else v for v in (*changed, bias))
        with pytest.raises(ValueError, match=f"linear_float8.*{said}"):
            OPS.linear_float8(*given)


def test_torch_knows_it() -> None:
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    given = tuple(operands(2, 3, 8))  # test_schema cannot multiply float8
    torch.library.opcheck(OPS.linear_float8.default, given, test_utils=tests)
