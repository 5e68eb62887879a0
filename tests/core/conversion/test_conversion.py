# SPDX-License-Identifier: Apache-2.0
"""Conversion: which Q/DQ operators come where, what becomes of parameters, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.spec import qdq
from qompose.spec.qparams import choose_qparams
from torch import Tensor, nn

from tests.core.toy import (
    DYNAMIC,
    LINEAR,
    PER_TENSOR,
    STATIC,
    STATIC_UINT8,
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
    found = Counter(
        {name.replace("<built-in function getitem>", "getitem"): n for name, n in found.items()}
    )
    assert found == Counter({"linear": 2, "tanh": 1, **expected})
    assert not [node for node in converted.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize(
    "config", [STATIC, STATIC_UINT8, PER_TENSOR, DYNAMIC, WEIGHT_ONLY], ids=str
)
def test_the_converted_model_is_close(model: nn.Module, config: QuantizationConfig) -> None:
    converted = convert(export(model, X), toy(LINEAR, config=config), X)
    assert 30 < sqnr(model(X), converted(X)) < 80


def test_parameters_become_integers_under_their_own_names(model: nn.Module) -> None:
    state = convert(export(model, X), toy(LINEAR), X).state_dict()
    assert {name: tensor.dtype for name, tensor in state.items() if "zero_point" not in name} == {
        "0.weight_q": torch.int8, "0.weight_scale": torch.float32, "0.bias": torch.float32,
        "2.weight_q": torch.int8, "2.weight_scale": torch.float32,
    }  # fmt: skip
    assert not any(bool(t.any()) for name, t in state.items() if "zero_point" in name)


def test_a_weights_integers_are_those_of_the_formula(model: nn.Module) -> None:
    state = convert(export(model, X), toy(LINEAR), X).state_dict()
    weight = model[0].weight.detach()
    scale, _ = choose_qparams(
        weight.amin(1), weight.amax(1), dtype=torch.int8, quant_min=-127, quant_max=127,
        qscheme=torch.per_channel_symmetric,
    )  # fmt: skip
    assert torch.equal(state["0.weight_scale"], scale)
    expected = torch.round(weight / scale.unsqueeze(1)).clamp(-127, 127).to(torch.int8)
    assert torch.equal(state["0.weight_q"], expected)


def test_zero_points_of_one_length_are_one_tensor() -> None:
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    state = convert(export(model, randn(2, 4)), toy(LINEAR), randn(2, 4)).state_dict()
    assert [name for name in state if "zero_point" in name] == ["zero_point_4"]


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y) + self.c(y) + torch.tanh(y)


def test_every_user_has_a_dequantize_of_its_own() -> None:
    converted = convert(export(seeded(Fork()), X), toy(LINEAR), X)
    reads = [node for node in converted.graph.nodes if qdq.is_dequantize(node)]
    assert all(len(node.users) == 1 for node in reads)
    (tanh,) = nodes_calling(converted, "tanh")
    linears = nodes_calling(converted, "linear")
    sources = {node.args[0].args[0] for node in (tanh, *linears[1:])}
    assert len(sources) == 1, "all three read the integers of one quantize"
    assert qdq.is_quantize(next(iter(sources)))


def test_a_quantized_output_that_the_model_returns_is_dequantized() -> None:
    converted = convert(export(seeded(nn.Linear(3, 4)), X), toy(LINEAR), X)
    (output,) = (node for node in converted.graph.nodes if node.op == "output")
    assert qdq.is_dequantize(output.args[0][0])
    assert converted(X).dtype is torch.float32


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


def test_example_values_are_those_that_run() -> None:
    """Every node's recorded shape and type are what it computes."""
    model = seeded(Fork())
    for config in (STATIC, PER_TENSOR, DYNAMIC):
        converted = convert(export(model, X), toy(LINEAR, config=config), X)
        seen = _Shapes(converted)
        seen.run(X)
        assert seen.wrong == []


class _Shapes(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.wrong: list[str] = []

    def run_node(self, node: torch.fx.Node) -> Any:
        result = super().run_node(node)
        recorded = node.meta.get("val")
        if isinstance(result, Tensor) and node.op != "placeholder":
            same = (recorded.dtype, recorded.shape) == (result.dtype, result.shape)
            self.wrong += [] if same else [f"{node.format_node()}: {recorded}"]
        return result
