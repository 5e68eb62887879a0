# SPDX-License-Identifier: Apache-2.0
"""What a converted model holds: names, owners and types of its nodes, and no byte too many."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from qompose import QuantizationConfig
from qompose.program.graph import module_path
from qompose.program.meta import tag_of
from qompose.spec import qdq
from torch import Tensor, nn
from torch.fx import Node

from tests.core.conversion.test_conversion_forms import GROUPS, INT4, PER_TOKEN, Layers, X, small
from tests.core.toy import (
    DYNAMIC,
    INT8,
    LINEAR,
    STATIC,
    WEIGHT_ONLY,
    convert,
    export,
    nodes_calling,
    randn,
    sqnr,
    toy,
)


class Encoder(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layer0 = nn.Module()
        self.encoder.layer0.query, self.encoder.layer0.key = (
            nn.Linear(size, size), nn.Linear(size, size, bias=False)
        )  # fmt: skip
        self.head = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.encoder.layer0
        return self.head(layer.query(x) + torch.tanh(layer.key(x)))


CONFIGS = [STATIC, DYNAMIC, PER_TOKEN, WEIGHT_ONLY, INT4]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_names_come_from_module_paths(config: QuantizationConfig) -> None:
    program = export(small(Encoder()), X)
    converted = convert(program, toy(LINEAR, config=config), X)
    paths = ("encoder.layer0.query", "encoder.layer0.key", "head")
    expected = {f"{path}.weight{end}" for path in paths for end in ("_q", "_scale")}
    zero = "zero_point_8x2" if config is INT4 else "zero_point_8"
    expected |= {"encoder.layer0.query.bias", "head.bias", zero}
    assert set(converted.state_dict()) == expected
    read = {str(n.target) for n in converted.graph.nodes if n.op == "get_attr"}
    assert read == expected, "nothing is stored that nothing reads"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nodes_say_which_module_they_belong_to(config: QuantizationConfig) -> None:
    converted = convert(export(small(Encoder()), X), toy(LINEAR, config=config), X)
    found = Counter()
    for node in converted.graph.nodes:
        if qdq.is_quantize(node):
            maker = node.args[0]
            owner = maker if maker.op == "call_function" else _readers(node)[0]
            assert module_path(node) == module_path(owner), node.format_node()
            found["quantize"] += 1
        elif qdq.is_dequantize(node):
            (reader,) = node.users
            if reader.op == "call_function":
                assert module_path(node) == module_path(reader), node.format_node()
            found["dequantize"] += 1
        if qdq.is_quantize(node) or qdq.is_dequantize(node):
            assert tag_of(node, "claim") is None, "it is no part of a claim"
            assert node.meta.get("val") is not None
    assert found["dequantize"] >= 3
    calls = [n for n in converted.graph.nodes if n.op == "call_function"]
    tagged = [n.name for n in calls if tag_of(n, "claim") is not None]
    assert tagged == [n.name for n in nodes_calling(converted, "linear")]


def _readers(node: Node) -> list[Node]:
    """The operators that read a quantized tensor through their dequantize operators."""
    return [reader for read in node.users for reader in read.users]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_original_operator_keeps_its_type(
    config: QuantizationConfig, dtype: torch.dtype
) -> None:
    model, x = small(Encoder()).to(dtype), X.to(dtype)
    program = export(model, x)
    converted = convert(program, toy(LINEAR, config=config), x)
    before = {n.name: n.meta["val"].dtype for n in program.graph.nodes if n.op == "call_function"}
    after = {n.name: n.meta["val"] for n in converted.graph.nodes if n.op == "call_function"}
    assert {name: after[name].dtype for name in before} == before
    seen: dict[str, Any] = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            seen[n.name] = super().run_node(n)
            return seen[n.name]

    Watch(converted).run(x)
    assert {name: seen[name].dtype for name in before} == before
    least = 12 if config is INT4 else 24
    assert sqnr(model(x), seen["output"][0]) > least


@pytest.mark.parametrize(
    ("config", "share"),
    [
        pytest.param(STATIC, 0.30, id="static"),
        pytest.param(DYNAMIC, 0.30, id="dynamic"),
        pytest.param(WEIGHT_ONLY, 0.30, id="weight-only"),
        pytest.param(
            QuantizationConfig(None, None, replace(GROUPS, block_size=(64,))),
            0.32,
            id="groups of 64",
        ),
    ],
)
def test_the_converted_model_is_smaller(config: QuantizationConfig, share: float) -> None:
    """An int4 value takes a byte, and 64 of them a float32 scale and an int64 zero, stored once."""
    model, x = small(Encoder(256)), randn(2, 256)
    converted = convert(export(model, x), toy(LINEAR, config=config), x)
    assert _bytes(converted) <= share * _bytes(model)


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def test_zero_points_of_one_shape_are_one_tensor_whatever_the_weight() -> None:
    model = small(Layers("weights", "groups", "other", "fourth"))
    quantizer = toy(LINEAR, config=WEIGHT_ONLY)
    quantizer.set_module_name("layers.groups", INT4).set_module_name("layers.fourth", INT4)
    state = convert(export(model, X), quantizer, X).state_dict()
    zeros = {path: tensor for path, tensor in state.items() if "zero_point" in path}
    assert {path: tuple(t.shape) for path, t in zeros.items()} == {
        "zero_point_8": (8,), "zero_point_8x2": (8, 2),
    }  # fmt: skip
    assert not any(bool(tensor.any()) for tensor in zeros.values())


def test_static_activations_and_weights_in_groups_mix() -> None:
    config = QuantizationConfig(INT8, INT8, GROUPS)
    model = small(Layers("static", "plain"))
    converted = convert(export(model, X), toy(LINEAR, config=config), X)
    assert 15 < sqnr(model(X), converted(X)) < 45
