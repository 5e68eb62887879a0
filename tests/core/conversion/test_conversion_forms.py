# SPDX-License-Identifier: Apache-2.0
"""Forms of conversion: several schemes in one model, unfolded, in place, and casts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec, RuleQuantizer
from qompose.errors import UncalibratedError
from qompose.observers import PerBlockMinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from qompose.program.graph import module_path
from qompose.program.meta import tag_of
from qompose.spec import qdq
from torch import Tensor, nn

from tests.core.conversion.recorded import computed, wrongly_recorded
from tests.core.toy import (
    DYNAMIC,
    LINEAR,
    RUN_TIME,
    STATIC,
    WEIGHT_ONLY,
    convert,
    export,
    graph_text,
    nodes_calling,
    operators,
    plan_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

aten = torch.ops.aten
GROUPS = QuantizationSpec(
    torch.int8, PerBlockMinMaxObserver, -8, 7, torch.per_channel_symmetric, block_size=(4,)
)
TOKENS = replace(
    RUN_TIME, qscheme=torch.per_channel_affine, block_size=(-1,),
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
)  # fmt: skip
PER_TOKEN = QuantizationConfig(TOKENS, None, STATIC.weight, name="per token")
INT4 = QuantizationConfig(None, None, GROUPS, name="int4 groups")
LAYERS = {
    "static": STATIC, "dynamic": DYNAMIC, "tokens": PER_TOKEN, "weights": WEIGHT_ONLY,
    "groups": INT4, "plain": None,
}  # fmt: skip


class Layers(nn.Module):
    """One linear for each scheme, behind one another, with a tanh between them."""

    def __init__(self, *names: str, size: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(size, size) for name in names or LAYERS})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


X = randn(2, 3, 8)


def mixed(*names: str) -> RuleQuantizer:
    quantizer = toy(LINEAR, config=None)
    for name in names or LAYERS:
        quantizer.set_module_name(f"layers.{name}", LAYERS[name])
    return quantizer


def small(module: nn.Module) -> nn.Module:
    """Weights of a size that tanh does not saturate."""
    with torch.no_grad():
        for parameter in seeded(module).parameters():
            parameter.mul_(0.2)
    return module


QUANTIZERS = {
    "static": "quantize_per_tensor.default",
    "dynamic": "quantize_per_tensor.tensor",
    "tokens": "quantize_per_token.default",
}
WEIGHTS = dict.fromkeys(LAYERS, "dequantize_per_channel.default") | {
    "groups": "dequantize_per_channel_group.default",
    "plain": "",
}


def test_one_model_has_all_schemes_side_by_side() -> None:
    model = small(Layers())
    converted = convert(export(model, X), mixed(), X)
    linears = {module_path(n).split(".")[1]: n for n in nodes_calling(converted, "linear")}
    assert set(linears) == set(LAYERS)
    for name, node in linears.items():
        read, weight = node.args[:2]
        assert str(weight.target).endswith(WEIGHTS[name] or "layers.plain.weight"), name
        if name in QUANTIZERS:
            assert qdq.is_dequantize(read)
            assert str(read.args[0].target).endswith(f".{QUANTIZERS[name]}"), name
        else:
            assert read.target is aten.tanh.default, f"{name} reads floats"
    assert 15 < sqnr(model(X), converted(X)) < 60, "as good as its int4 layer"
    of_anchor = {node.name: name for name, node in linears.items()}
    assert {of_anchor[claim.anchor]: claim.mode for claim in plan_of(converted).claims} == {
        "static": "static", "dynamic": "dynamic", "tokens": "dynamic",
        "weights": "weight-only", "groups": "weight-only",
    }  # fmt: skip


FREE = ("dynamic", "tokens", "weights", "groups", "plain")


@pytest.mark.parametrize("name", FREE)
def test_calibration_changes_no_bit_where_none_is_needed(name: str) -> None:
    prepared = prepare(export(small(Layers(name)), X), mixed(name))
    without = qompose.convert_pt2e(prepared)
    for scale in (0.0, 1.0, 1e4):
        prepared(randn(2, 3, 8) * scale)
    after = qompose.convert_pt2e(prepared)
    assert torch.equal(without(X), after(X))
    assert graph_text(without) == graph_text(after)
    for one, other in zip(without.state_dict().values(), after.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("scheme", [torch.per_channel_affine, torch.per_channel_symmetric], ids=str)
def test_every_token_has_a_scale_of_its_own(tokens: int, scheme: torch.qscheme) -> None:
    """A loud token does not cost a quiet one its steps."""
    spec = replace(TOKENS, qscheme=scheme, observer_or_fake_quant_ctr=PlaceholderObserver)
    config = replace(PER_TOKEN, input_activation=spec)
    model = seeded(nn.Linear(8, 8, bias=False))
    x = randn(tokens, 8) * torch.tensor([10.0**-n for n in range(tokens)]).unsqueeze(1)
    converted = qompose.convert_pt2e(prepare(export(model, x), toy(LINEAR, config=config)))
    for one, other in zip(model(x), converted(x), strict=True):
        assert sqnr(one, other) > 28


def test_dynamic_dimensions_stay_so_under_every_scheme() -> None:
    model, tokens = small(Layers()), torch.export.Dim("tokens", max=64)
    program = export(model, X, dynamic_shapes={"x": {1: tokens}})
    converted = convert(program, mixed(), X)
    longer = randn(2, 11, 8, seed=1)
    assert converted(longer).shape == (2, 11, 8)
    assert sqnr(model(longer), converted(longer)) > 14


@pytest.mark.parametrize("name", [*LAYERS, "all"])
def test_unfolded_models_keep_floats_and_give_the_same_bits(name: str) -> None:
    names = LAYERS if name == "all" else (name,)
    model = small(Layers(*names))
    prepared = prepare(export(model, X), mixed(*names))
    prepared(X)
    folded = qompose.convert_pt2e(prepared)
    unfolded = qompose.convert_pt2e(prepared, fold_quantize=False)
    state = unfolded.state_dict()
    for path, parameter in model.named_parameters():
        assert torch.equal(state[path], parameter)
    assert not [path for path in state if path.endswith("_q")]
    number = sum(layer != "plain" for layer in names)
    reads = [n for n in unfolded.graph.nodes if qdq.is_quantize(n)]
    assert sum(n.args[0].op == "get_attr" for n in reads) == number
    assert torch.equal(folded(X), unfolded(X))
    least = {"groups": 18.0, "plain": float("inf"), "all": 15.0}.get(name, 32.0)
    assert sqnr(model(X), folded(X)) >= least


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
@pytest.mark.parametrize("names", [("static",), ("static", "plain", "static2")], ids=len)
def test_unfolded_models_are_lowered_too(fold: bool, names: tuple[str, ...]) -> None:
    model = small(Layers(*names))
    converted = convert(export(model, X), toy(LINEAR), X, fold_quantize=fold)
    lowered = qompose.lower(converted, strict=True)
    assert operators(lowered)["linear"] == len(names)
    assert all(
        n.target is torch.ops.qompose_toy.linear.default for n in nodes_calling(lowered, "linear")
    )
    assert not [n for n in lowered.state_dict() if n.endswith("weight")]
    assert sqnr(converted(X), lowered(X)) > 35, "the same up to one step"


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
def test_in_place_and_functional_forms_give_the_same(fold: bool) -> None:
    model = small(Layers())
    module = export(model, X).module(check_guards=False)
    apart = prepare(module, mixed())
    before = graph_text(module)
    assert apart is not module
    assert graph_text(module) == before
    prepared = qompose.prepare_pt2e(module, mixed(), inplace=True)
    assert prepared is module
    assert graph_text(prepared) == graph_text(apart)
    for part in (prepared, apart):
        part(X)
    expected = qompose.convert_pt2e(apart, fold_quantize=fold)
    assert torch.equal(apart(X), model(X)), "the prepared model is left alone"
    assert torch.equal(qompose.convert_pt2e(apart, fold_quantize=fold)(X), expected(X))
    converted = qompose.convert_pt2e(prepared, fold_quantize=fold, inplace=True)
    assert converted is module
    assert graph_text(converted) == graph_text(expected)
    assert torch.equal(converted(X), expected(X))
    assert list(converted.state_dict()) == list(expected.state_dict())
    assert json.dumps(qompose.report(converted).to_dict()) == json.dumps(
        qompose.report(expected).to_dict()
    )


@pytest.mark.parametrize("inplace", [False, True])
def test_a_conversion_that_fails_leaves_the_prepared_model_as_it_was(inplace: bool) -> None:
    model = small(Layers())
    prepared = prepare(export(model, X), mixed())
    text, state = graph_text(prepared), {k: v.clone() for k, v in prepared.state_dict().items()}
    with pytest.raises(UncalibratedError):
        qompose.convert_pt2e(prepared, inplace=inplace)
    assert graph_text(prepared) == text
    assert torch.equal(prepared(X), model(X))
    parameters = [path for path, _ in model.named_parameters()]
    assert all(torch.equal(prepared.state_dict()[path], state[path]) for path in parameters)
    fresh = prepare(export(model, X), mixed())
    fresh(X)
    converted = qompose.convert_pt2e(prepared, inplace=inplace)
    assert torch.equal(converted(X), qompose.convert_pt2e(fresh)(X))


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
def test_a_cast_that_loses_values_is_named(fold: bool) -> None:
    model = small(Layers("static", "plain"))
    with torch.no_grad():
        model.layers["static"].weight[0, :2] = torch.tensor([7e4, -1e30])
    for dtype, warned in ((torch.float16, True), (torch.bfloat16, False)):
        config = QuantizationConfig(None, None, QuantizationSpec(dtype, PlaceholderObserver))
        prepared = prepare(export(model, X), toy(LINEAR, config=config))
        converted = qompose.convert_pt2e(prepared, fold_quantize=fold)
        told = [line for line in qompose.report(converted).notes if "become infinite" in line]
        assert len(told) == warned
        if warned:
            assert "layers.static" in told[0] and "2 of 64 values" in told[0]


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 55), (torch.bfloat16, 40)], ids=str)
def test_casts(dtype: torch.dtype, bound: float, fold: bool) -> None:
    half = QuantizationSpec(dtype, PlaceholderObserver)
    model = small(Layers("static", "plain"))
    prepared = prepare(export(model, X), toy(LINEAR, config=QuantizationConfig(half, None, half)))
    converted = qompose.convert_pt2e(prepared, fold_quantize=fold)
    assert converted(X).dtype is torch.float32
    assert bound < sqnr(model(X), converted(X)) < bound + 40
    stored = {path: t.dtype for path, t in converted.state_dict().items() if "weight" in path}
    if fold:
        assert stored == dict.fromkeys(
            [f"layers.{n}.weight_half" for n in ("static", "plain")], dtype
        )
    else:
        assert set(stored.values()) == {torch.float32}
    weight = model.layers["static"].weight
    (x, w) = nodes_calling(converted, "linear")[0].args[:2]
    assert (x.meta["val"].dtype, w.meta["val"].dtype) == (torch.float32, torch.float32)
    by_hand = nn.functional.linear(
        X.to(dtype).float(), weight.to(dtype).float(), model.layers["static"].bias
    )
    seen = computed(converted, X).values()
    assert any(isinstance(value, Tensor) and torch.equal(value, by_hand) for value in seen)


class Encoder(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        layers = {"query": nn.Linear(size, size), "key": nn.Linear(size, size, bias=False)}
        self.encoder = nn.ModuleDict({"layer0": nn.ModuleDict(layers)})
        self.head = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.encoder["layer0"]
        return self.head(layer["query"](x) + torch.tanh(layer["key"](x)))


CONFIGS = [STATIC, DYNAMIC, PER_TOKEN, WEIGHT_ONLY, INT4]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tensors_and_nodes_say_which_module_they_belong_to(config: QuantizationConfig) -> None:
    converted = convert(export(small(Encoder()), X), toy(LINEAR, config=config), X)
    paths = ("encoder.layer0.query", "encoder.layer0.key", "head")
    expected = {f"{path}.weight{end}" for path in paths for end in ("_q", "_scale")}
    zero = "zero_point_8x2" if config is INT4 else "zero_point_8"
    expected |= {"encoder.layer0.query.bias", "head.bias", zero}
    assert set(converted.state_dict()) == expected
    read = {str(n.target) for n in converted.graph.nodes if n.op == "get_attr"}
    assert read == expected, "nothing is stored that nothing reads"
    found = 0
    for node in converted.graph.nodes:
        if qdq.is_quantize(node):
            maker = node.args[0]
            readers = [reader for read in node.users for reader in read.users]
            owner = maker if maker.op == "call_function" else readers[0]
            assert module_path(node) == module_path(owner), node.format_node()
        elif qdq.is_dequantize(node):
            (reader,) = node.users
            if reader.op == "call_function":
                assert module_path(node) == module_path(reader), node.format_node()
            found += 1
        if qdq.is_quantize(node) or qdq.is_dequantize(node):
            assert tag_of(node, "claim") is None, "it is no part of a claim"
            assert node.meta.get("val") is not None
    assert found >= 3
    calls = [n for n in converted.graph.nodes if n.op == "call_function"]
    tagged = [n.name for n in calls if tag_of(n, "claim") is not None]
    assert tagged == [n.name for n in nodes_calling(converted, "linear")]


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
    assert wrongly_recorded(converted, x) == []
    assert sqnr(model(x), converted(x)) > (12 if config is INT4 else 24)
    for node in filter(qdq.is_dequantize, converted.graph.nodes):
        assert node.meta["val"].dtype is dtype
