# SPDX-License-Identifier: Apache-2.0
"""Conversion of what calibration did not see or must not quantize, at run time, and of other float types."""

from __future__ import annotations

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.errors import UncalibratedError
from qompose.observers import MinMaxObserver
from qompose.spec import qdq
from torch import Tensor, nn
from torch.export import ExportedProgram

from tests.core.toy import (
    ADD,
    DYNAMIC,
    LINEAR,
    PER_TENSOR,
    SIGMOID,
    STATIC,
    WEIGHT,
    WEIGHT_ONLY,
    convert,
    export,
    nodes_calling,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

X = randn(6, 3)


@pytest.fixture
def model() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(3, 3)
        self.inner = nn.Module()
        self.inner.unseen = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.seen(x), self.inner.unseen(y)


def any_rows(model: nn.Module) -> ExportedProgram:
    rows = {0: torch.export.Dim.DYNAMIC}
    return export(model, X, X.clone(), dynamic_shapes=(rows, rows))


def test_uncalibrated_tensors_are_listed_with_their_modules() -> None:
    prepared = prepare(any_rows(TwoInputs()), toy(LINEAR))
    with pytest.raises(UncalibratedError) as caught:
        qompose.convert_pt2e(prepared)
    assert len(caught.value.tensors) == 4
    prepared(X, X[:0])
    with pytest.raises(UncalibratedError) as caught:
        qompose.convert_pt2e(prepared)
    assert caught.value.tensors == (
        "y -> linear_1 in inner.unseen (toy, rule linear)",
        "output of linear_1 in inner.unseen (toy, rule linear)",
    )
    assert all(tensor in str(caught.value) for tensor in caught.value.tensors)
    assert "allow_uncalibrated=True" in str(caught.value)


def test_uncalibrated_regions_may_stay_in_float() -> None:
    model = seeded(TwoInputs())
    prepared = prepare(any_rows(model), toy(LINEAR))
    prepared(X, X[:0])
    converted = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    expected, actual = model(X, X), converted(X, X)
    assert torch.equal(expected[1], actual[1])
    assert 30 < sqnr(expected[0], actual[0]) < 80
    rows = {row.name: row for row in qompose.report(converted).rows}
    assert (rows["linear"].state, rows["linear_1"].state) == ("simulated (Q/DQ)", "float")
    assert "never saw calibration data" in rows["linear_1"].reason
    assert "inner.unseen.weight" in converted.state_dict()


@pytest.mark.parametrize("config", [DYNAMIC, WEIGHT_ONLY], ids=str)
def test_these_need_no_calibration(model: nn.Module, config: QuantizationConfig) -> None:
    converted = qompose.convert_pt2e(prepare(export(model, X), toy(LINEAR, config=config)))
    assert sqnr(model(X), converted(X)) > 30


def test_a_dynamic_tensor_needs_no_calibration_whatever_its_observer(model: nn.Module) -> None:
    """Some configurations of this field observe dynamic tensors by minimum and maximum."""
    activation = QuantizationSpec(
        torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine, is_dynamic=True
    )
    config = QuantizationConfig(activation, None, WEIGHT)
    converted = qompose.convert_pt2e(prepare(export(model, X), toy(LINEAR, config=config)))
    assert sqnr(model(X), converted(X)) > 30


@pytest.mark.parametrize("size", [0.1, 1.0, 1e3], ids=str)
def test_dynamic_parameters_follow_each_tensor(size: float) -> None:
    model = seeded(nn.Linear(3, 4, bias=False))
    converted = qompose.convert_pt2e(prepare(export(model, X), toy(LINEAR, config=DYNAMIC)))
    (node,) = nodes_calling(converted, "linear")
    assert node.args[0].target is qdq.dequantize_per_tensor_dynamic
    assert sqnr(model(X * size), converted(X * size)) > 30


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x + mask, -1), torch.sigmoid(x)


@pytest.mark.parametrize("value", [-float("inf"), torch.finfo(torch.float32).min], ids=str)
def test_masks_are_left_in_float(value: float) -> None:
    x, mask = randn(4, 4), torch.zeros(4, 4)
    mask[:, 2:] = value
    prepared = prepare(export(Masked(), x, mask), toy(ADD, SIGMOID))
    prepared(x, mask)
    converted = qompose.convert_pt2e(prepared)
    actual, other = converted(x, mask)
    assert torch.equal(actual, torch.softmax(x + mask, -1))
    assert not torch.equal(other, torch.sigmoid(x)), "the other region is still quantized"
    rows = {row.name: row for row in qompose.report(converted).rows}
    assert rows["add"].state == "float"
    assert "8 mask values" in rows["add"].reason
    assert "mask -> add" in rows["add"].reason or "output of add" in rows["add"].reason


@pytest.mark.parametrize("config", [STATIC, PER_TENSOR, DYNAMIC, WEIGHT_ONLY], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_models_float_type_is_kept(
    model: nn.Module, dtype: torch.dtype, config: QuantizationConfig
) -> None:
    model, x = model.to(dtype), X.to(dtype)
    converted = convert(export(model, x), toy(LINEAR, config=config), x)
    assert converted(x).dtype is dtype
    assert sqnr(model(x), converted(x)) > 25
    for node in converted.graph.nodes:
        if qdq.is_dequantize(node):
            assert node.meta["val"].dtype is dtype


def test_float64_is_converted_or_left_in_float_with_a_reason(model: nn.Module) -> None:
    """The operators of torch quantize float32, bfloat16 and float16."""
    model, x = model.double(), X.double()
    converted = convert(export(model, x), toy(LINEAR), x)
    assert converted(x).dtype is torch.float64
    assert sqnr(model(x), converted(x)) > 25
    rows = [row for row in qompose.report(converted).rows if row.operator == "aten.linear"]
    assert all(row.state != "float" or "float64" in row.reason for row in rows)
