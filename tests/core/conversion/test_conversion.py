# SPDX-License-Identifier: Apache-2.0
"""Conversion: which Q/DQ operators come where, what becomes of parameters, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.errors import UncalibratedError
from qompose.observers import MinMaxObserver
from qompose.spec import qdq
from qompose.spec.qparams import choose_qparams
from torch import Tensor, nn
from torch.export import ExportedProgram

from tests.core.toy import (
    ADD,
    DYNAMIC,
    LINEAR,
    PER_TENSOR,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    WEIGHT,
    WEIGHT_ONLY,
    convert,
    export,
    nodes_calling,
    operators,
    plan_of,
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


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(
            STATIC,
            {"quantize_per_tensor": 4, "dequantize_per_tensor": 4, "dequantize_per_channel": 2},
            id="static",
        ),
        pytest.param(
            PER_TENSOR, {"quantize_per_tensor": 4, "dequantize_per_tensor": 6}, id="per tensor"
        ),
        pytest.param(
            DYNAMIC,
            {
                "choose_qparams": 2,
                "getitem": 4,
                "quantize_per_tensor": 2,
                "dequantize_per_tensor": 2,
                "dequantize_per_channel": 2,
            },
            id="dynamic",
        ),
        pytest.param(WEIGHT_ONLY, {"dequantize_per_channel": 2}, id="weight-only"),
        pytest.param(None, {}, id="float"),
    ],
)
def test_operators(model: nn.Module, config: Any, expected: dict[str, int]) -> None:
    converted = convert(export(model, X), toy(LINEAR, config=config), X)
    found = operators(converted)
    found["getitem"] = found.pop("<built-in function getitem>", 0)
    assert found == Counter({"linear": 2, "tanh": 1, **expected})
    assert not [node for node in converted.graph.nodes if node.op == "call_module"]
    assert 30 < sqnr(model(X), converted(X)) < 80 or config is None


def test_weights_become_the_integers_of_the_formula_under_their_own_names(model: nn.Module) -> None:
    state = convert(export(model, X), toy(LINEAR), X).state_dict()
    assert {name: tensor.dtype for name, tensor in state.items() if "zero_point" not in name} == {
        "0.weight_q": torch.int8, "0.weight_scale": torch.float32, "0.bias": torch.float32,
        "2.weight_q": torch.int8, "2.weight_scale": torch.float32,
    }  # fmt: skip
    weight = model[0].weight.detach()
    scale, _ = choose_qparams(
        weight.amin(1), weight.amax(1), dtype=torch.int8, quant_min=-127, quant_max=127,
        qscheme=torch.per_channel_symmetric,
    )  # fmt: skip
    assert torch.equal(state["0.weight_scale"], scale)
    expected = torch.round(weight / scale.unsqueeze(1)).clamp(-127, 127).to(torch.int8)
    assert torch.equal(state["0.weight_q"], expected)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y) + self.c(y) + torch.tanh(y)


def test_every_user_has_a_dequantize_of_its_own() -> None:
    converted = convert(export(seeded(Fork()), X), toy(LINEAR), X)
    assert converted(X).dtype is torch.float32
    reads = [node for node in converted.graph.nodes if qdq.is_dequantize(node)]
    assert all(len(node.users) == 1 for node in reads)
    (tanh,) = nodes_calling(converted, "tanh")
    linears = nodes_calling(converted, "linear")
    sources = {node.args[0].args[0] for node in (tanh, *linears[1:])}
    assert len(sources) == 1, "all three read the integers of one quantize"
    assert qdq.is_quantize(next(iter(sources)))


def test_one_quantizer_step_between_two_configurations() -> None:
    """Where int8 meets uint8, the tensor is requantized, and the plan counts it."""
    model = seeded(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    quantizer = toy(LINEAR).set_module_name("1", STATIC_UINT8)
    converted = convert(export(model, X), quantizer, X)
    first, second = nodes_calling(converted, "linear")
    requantize = second.args[0].args[0]
    assert requantize.args[-1] is torch.uint8
    assert requantize.args[0].args[0].args[-1] is torch.int8
    assert requantize.args[0].args[0].args[0] is first
    assert len(plan_of(converted).requantizations()) == 1


class TwiceAndReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(self.linear(x))
        return y, self.linear.weight


def test_a_weight_that_is_read_twice_is_quantized_once_and_float_readers_keep_it() -> None:
    state = convert(export(seeded(TwiceAndReturned()), X), toy(LINEAR), X).state_dict()
    assert sorted(name for name in state if "weight" in name) == [
        "linear.weight", "linear.weight_q", "linear.weight_scale",
    ]  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True])
def test_the_prepared_model_is_left_alone_unless_asked(model: nn.Module, inplace: bool) -> None:
    prepared = prepare(export(model, X), toy(LINEAR))
    prepared(X)
    before = operators(prepared)
    converted = qompose.convert_pt2e(prepared, inplace=inplace)
    assert (converted is prepared) is inplace
    assert (operators(prepared) == before) is not inplace
    if not inplace:
        assert torch.equal(prepared(X), model(X))
        assert torch.equal(qompose.convert_pt2e(prepared)(X), converted(X))


def test_more_data_after_a_conversion_counts_in_the_next(model: nn.Module) -> None:
    prepared = prepare(export(model, X), toy(LINEAR))
    prepared(X)
    first = qompose.convert_pt2e(prepared)
    prepared(X * 10)
    second = qompose.convert_pt2e(prepared)
    scales = [nodes_calling(m, "quantize_per_tensor")[0].args[1] for m in (first, second)]
    assert scales[1] == pytest.approx(10 * scales[0], rel=1e-4)


X = randn(6, 3)


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


def test_float64_is_converted_or_left_in_float_with_a_reason(model: nn.Module) -> None:
    """The operators of torch quantize float32, bfloat16 and float16."""
    model, x = model.double(), X.double()
    converted = convert(export(model, x), toy(LINEAR), x)
    assert converted(x).dtype is torch.float64
    assert sqnr(model(x), converted(x)) > 25
    rows = [row for row in qompose.report(converted).rows if row.operator == "aten.linear"]
    assert all(row.state != "float" or "float64" in row.reason for row in rows)
