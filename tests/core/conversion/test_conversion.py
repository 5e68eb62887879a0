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
from qompose.spec import SharedQuantizationSpec, qdq
from qompose.spec.qparams import choose_qparams
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from tests.core.toy import (
    DYNAMIC,
    INT8,
    LINEAR,
    PER_TENSOR,
    STATIC,
    STATIC_UINT8,
    WEIGHT,
    WEIGHT_ONLY,
    Annotator,
    Model,
    annotate,
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
        (STATIC, {"quantize_per_tensor": 4, "dequantize_per_tensor": 4, "dequantize_per_channel": 2}),
        (PER_TENSOR, {"quantize_per_tensor": 4, "dequantize_per_tensor": 6}),
        (DYNAMIC, {"choose_qparams": 2, "getitem": 4, "quantize_per_tensor": 2,
                   "dequantize_per_tensor": 2, "dequantize_per_channel": 2}),
        (WEIGHT_ONLY, {"dequantize_per_channel": 2}),
        (None, {}),
    ],
    ids=str,
)  # fmt: skip
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


def fork(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.b(y) + self.c(y) + torch.tanh(y)


def test_every_user_has_a_dequantize_of_its_own() -> None:
    model = Model(fork, a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 3))
    converted = convert(export(seeded(model), X), toy(LINEAR), X)
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
    converted = convert(export(model, X), toy(LINEAR).set_module_name("1", STATIC_UINT8), X)
    first, second = nodes_calling(converted, "linear")
    requantize = second.args[0].args[0]
    assert requantize.args[-1] is torch.uint8
    assert requantize.args[0].args[0].args[-1] is torch.int8
    assert requantize.args[0].args[0].args[0] is first
    assert len(plan_of(converted).requantizations()) == 1


def test_a_weight_that_is_read_twice_is_quantized_once_and_float_readers_keep_it() -> None:
    model = Model(
        lambda self, x: (self.linear(self.linear(x)), self.linear.weight), linear=nn.Linear(3, 3)
    )
    state = convert(export(seeded(model), X), toy(LINEAR), X).state_dict()
    assert sorted(name for name in state if "weight" in name) == [
        "linear.weight", "linear.weight_q", "linear.weight_scale",
    ]  # fmt: skip


def test_parameters_of_one_range_keep_integers_of_their_own() -> None:
    def shared(node: Node) -> None:
        if node.target is torch.ops.aten.linear.default:
            first = next(n for n in node.graph.nodes if n.target is node.target)
            asked = INT8 if node is first else SharedQuantizationSpec((first.args[1], first))
            annotate(node, {node.args[1]: asked})

    model = seeded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    converted = convert(export(model, X), Annotator(shared), X)
    assert sqnr(model(X), converted(X)) > 25


def test_more_data_after_a_conversion_counts_in_the_next(model: nn.Module) -> None:
    prepared = prepare(export(model, X), toy(LINEAR))
    prepared(X)
    first = qompose.convert_pt2e(prepared)
    prepared(X * 10)
    second = qompose.convert_pt2e(prepared)
    scales = [nodes_calling(m, "quantize_per_tensor")[0].args[1] for m in (first, second)]
    assert scales[1] == pytest.approx(10 * scales[0], rel=1e-4)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.inner = nn.Linear(3, 3), nn.ModuleDict({"unseen": nn.Linear(3, 3)})

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.seen(x), self.inner["unseen"](y)


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
    program = any_rows(model)
    converted = convert(program, toy(LINEAR), X, X[:0], allow_uncalibrated=True)
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


def test_float64_is_converted_or_left_in_float_with_a_reason(model: nn.Module) -> None:
    """The operators of torch quantize float32, bfloat16 and float16."""
    model, x = model.double(), X.double()
    converted = convert(export(model, x), toy(LINEAR), x)
    assert converted(x).dtype is torch.float64
    assert sqnr(model(x), converted(x)) > 25
    rows = [row for row in qompose.report(converted).rows if row.operator == "aten.linear"]
    assert all(row.state != "float" or "float64" in row.reason for row in rows)
