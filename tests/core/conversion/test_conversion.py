# SPDX-License-Identifier: Apache-2.0
"""Conversion: which Q/DQ operators come where, in every form; what becomes of parameters; what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec, RuleQuantizer
from qompose.conversion.qparams_solver import few_levels, invalid, outliers
from qompose.errors import ConfigError, UncalibratedError
from qompose.observers import (
    MinMaxObserver,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    activation_spec,
)
from qompose.observers.make_observer import UnitScaleObserver, has_data
from qompose.observers.value_screening import Screen
from qompose.program.graph import module_path
from qompose.program.meta import CAST_TAG, tag_of
from qompose.spec import DerivedQuantizationSpec, SharedQuantizationSpec, qdq
from qompose.spec.qdq import QParams
from qompose.spec.qparams import choose_qparams
from torch import Tensor, nn
from torch.ao.quantization.observer import (
    MinMaxObserver as ForeignObserver,
    PerChannelMinMaxObserver as ForeignChannelObserver,
)
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from tests.core.conversion.recorded import computed, wrongly_recorded
from tests.core.toy import (
    DYNAMIC,
    INT8,
    LINEAR,
    PER_TENSOR,
    RUN_TIME,
    STATIC,
    STATIC_UINT8,
    WEIGHT,
    WEIGHT_ONLY,
    Annotator,
    Model,
    annotate,
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
from tests.zoo import by_name

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


class Transposed(nn.Module):
    """A linear whose weight is computed from a tensor, which each call may write to."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        if writes:
            self.register_buffer("table", randn(3, 4, seed=5))
        else:
            self.table = randn(3, 4, seed=5)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.table.t())
        if self.writes:
            self.table.add_(1.0)
        return y


def products_weights(node: Node) -> None:
    if node.target is torch.ops.aten.linear.default:
        x, weight = node.all_input_nodes
        annotate(node, {x: INT8, weight: PER_TENSOR.weight}, INT8)


def test_what_is_computed_from_parameters_is_stored_as_integers() -> None:
    program = export(Transposed(False), X)
    converted = convert(program, Annotator(products_weights), X)
    assert sqnr(program.module()(X), converted(X)) > 30
    assert operators(converted)["quantize_per_tensor"] == 2
    assert operators(converted)["t"] == 0
    (stored,) = converted.state_dict().values()
    assert stored.dtype is torch.int8


def test_what_a_program_writes_to_is_computed_in_each_call() -> None:
    converted = convert(export(Transposed(True), X), Annotator(products_weights), X)
    assert operators(converted)["t"] == 1
    assert not torch.equal(converted(X), converted(X))


def test_an_operator_that_runs_as_integers_is_not_evaluated() -> None:
    def all_of_it(node: Node) -> None:
        products_weights(node)
        if node.target is torch.ops.aten.t.default:
            annotate(node, {node.args[0]: INT8}, INT8)

    converted = convert(export(Transposed(False), X), Annotator(all_of_it), X)
    assert operators(converted)["t"] == 1


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
    assert sqnr(model(X), convert(export(model, X), Annotator(shared), X)(X)) > 25


def test_more_data_after_a_conversion_counts_in_the_next(model: nn.Module) -> None:
    prepared = prepare(export(model, X), toy(LINEAR))
    prepared(X)
    first = qompose.convert_pt2e(prepared)
    prepared(X * 10)
    second = qompose.convert_pt2e(prepared)
    scales = [nodes_calling(m, "quantize_per_tensor")[0].args[1] for m in (first, second)]
    assert scales[1] == pytest.approx(10 * scales[0], rel=1e-4)


def two_inputs() -> nn.Module:
    layers = {"seen": nn.Linear(3, 3), "inner": nn.ModuleDict({"unseen": nn.Linear(3, 3)})}
    return seeded(Model(lambda m, x, y: (m.seen(x), m.inner["unseen"](y)), **layers))


def any_rows(model: nn.Module) -> ExportedProgram:
    rows = {0: torch.export.Dim.DYNAMIC}
    return export(model, X, X.clone(), dynamic_shapes=(rows, rows))


def test_uncalibrated_tensors_are_listed_with_their_modules() -> None:
    prepared = prepare(any_rows(two_inputs()), toy(LINEAR))
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
    model = two_inputs()
    converted = convert(any_rows(model), toy(LINEAR), X, X[:0], allow_uncalibrated=True)
    expected, actual = model(X, X), converted(X, X)
    assert torch.equal(expected[1], actual[1])
    assert 30 < sqnr(expected[0], actual[0]) < 80
    rows = {row.name: row for row in qompose.report(converted).rows}
    assert (rows["linear"].state, rows["linear_1"].state) == ("simulated (Q/DQ)", "float")
    assert "never saw calibration data" in rows["linear_1"].reason
    assert "inner.unseen.weight" in converted.state_dict()


def unit_scaled(prepared: GraphModule) -> GraphModule:
    """Convert without data; the warning and the report have to name the tensors that would be an error."""
    with pytest.raises(UncalibratedError) as refused:
        qompose.convert_pt2e(prepared)
    with pytest.warns(qompose.QomposeWarning) as caught:
        converted = qompose.convert_pt2e(prepared, allow_uncalibrated="unit_scale")
    notes = qompose.report(converted).notes
    for tensor in refused.value.tensors:
        assert any(tensor in str(warning.message) for warning in caught)
        assert sum(note.startswith(tensor) for note in notes) == 1
    return converted


def test_uncalibrated_regions_may_have_a_scale_of_one() -> None:
    """What is quantized then is what is with data: the graph can be looked at before there is any."""
    prepared = prepare(any_rows(two_inputs()), toy(LINEAR))
    prepared(X, X[:0])
    converted = unit_scaled(prepared)
    rows = {row.name: row for row in qompose.report(converted).rows}
    assert rows["linear"].state == rows["linear_1"].state == "simulated (Q/DQ)"
    scales = [n.args[1] for n in nodes_calling(converted, "quantize_per_tensor")]
    assert scales.count(1.0) == 2 and len(scales) == 4
    prepared(X, X)
    calibrated = qompose.convert_pt2e(prepared)
    assert operators(calibrated) == operators(converted)
    assert 1.0 not in [n.args[1] for n in nodes_calling(calibrated, "quantize_per_tensor")]


class Narrow(ForeignObserver):
    """Takes fewer integers than its specification says, as those that reduce ranges."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments | {"quant_min": 0, "quant_max": 63})


def without_data(*spec: Any, **shapes: Any) -> GraphModule:
    """Prepare a linear layer whose input has a specification of its own."""
    config = QuantizationConfig(QuantizationSpec(*spec), None, WEIGHT, algorithms=())
    return prepare(export(seeded(nn.Linear(3, 4)), X, **shapes), toy(LINEAR, config=config))


def test_channels_that_saw_nothing_have_a_scale_of_one_each() -> None:
    channels = torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_affine, 1
    converted = unit_scaled(without_data(*channels))
    (quantize,) = nodes_calling(converted, "quantize_per_channel")
    assert converted.get_buffer(quantize.args[1].target).tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("spec", "zero_point", "highest"),
    [
        ((torch.uint8, MinMaxObserver, 0, 255, torch.per_tensor_symmetric), 127, 255),
        ((torch.uint8, MinMaxObserver, 0, 127, torch.per_tensor_affine), 0, 127),
        ((torch.uint8, Narrow, None, None, torch.per_tensor_affine), 0, 63),
    ],
    ids=["unsigned symmetric", "affine", "foreign"],
)  # fmt: skip
def test_without_data_integers_are_those_of_the_observer(
    spec: Any, zero_point: int, highest: int
) -> None:
    (quantize,) = nodes_calling(unit_scaled(without_data(*spec)), "quantize_per_tensor")
    assert quantize.args[1:5] == (1.0, zero_point, 0, highest)


class Rows(ForeignChannelObserver):
    """Has a scale for each row, whatever its specification says."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments | {"ch_axis": 0})


def test_an_open_number_of_channels_has_no_unit_scale() -> None:
    rows = {0: torch.export.Dim.DYNAMIC}
    channels = torch.int8, Rows, -128, 127, torch.per_channel_affine, 1
    prepared = without_data(*channels, dynamic_shapes=(rows,))
    size = prepared.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    guards = len(size.node.shape_env.guards)
    (row,) = qompose.report(unit_scaled(prepared)).rows
    assert (row.state, str(size) in row.reason) == ("float", True)
    assert len(size.node.shape_env.guards) == guards


class Converting(nn.Module):
    """Replaces its own nodes, once it knows the size of its blocks."""

    block_size: Any = None

    def __init__(self, **arguments: Any) -> None:
        super().__init__()

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace nothing."""


def test_what_replaces_its_own_nodes_has_no_unit_scale() -> None:
    prepared = without_data(torch.int8, Converting, -128, 127, torch.per_tensor_affine)
    (row,) = qompose.report(unit_scaled(prepared)).rows
    assert row.state == "float"


def test_a_unit_scale_is_where_its_tensor_is() -> None:
    spec = QuantizationSpec(
        torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_affine, 1
    )
    unit = UnitScaleObserver(spec, PerChannelMinMaxObserver(), torch.empty(2, 3, device="meta"))
    assert {value.device.type for value in unit.calculate_qparams()} == {"meta"}
    assert not has_data(unit)


def test_a_branch_that_never_ran_is_named_where_its_scale_is_from_outside() -> None:
    model = by_name("cond_weight_outside")
    prepared = prepare(model.export(), toy(LINEAR))
    prepared(*model.inputs())
    unit_scaled(prepared)


def test_what_is_derived_is_derived_from_the_unit_scale() -> None:
    def half(observers: list[Any]) -> tuple[Tensor, Tensor]:
        scale, zero_point = observers[0].calculate_qparams()
        return scale / 2, zero_point

    def annotate_node(node: Node) -> None:
        if node.target is torch.ops.aten.tanh.default:
            source = node.args[0]
            derived = DerivedQuantizationSpec([(source, node)], half, torch.int8)  # type: ignore[arg-type,list-item]
            annotate(node, {source: INT8}, derived)

    converted = unit_scaled(prepare(export(nn.Tanh(), X), Annotator(annotate_node)))
    assert [n.args[1] for n in nodes_calling(converted, "quantize_per_tensor")] == [1.0, 0.5]


def test_another_word_for_what_is_uncalibrated_is_refused(model: nn.Module) -> None:
    prepared = prepare(export(model, X), toy(LINEAR))
    with pytest.raises(ConfigError):
        qompose.convert_pt2e(prepared, allow_uncalibrated="unit")  # type: ignore[call-overload]


def test_a_dynamic_tensor_needs_no_calibration_whatever_its_observer(model: nn.Module) -> None:
    """Some configurations of this field observe dynamic tensors by minimum and maximum."""
    activation = QuantizationSpec(
        torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine, is_dynamic=True
    )
    config = QuantizationConfig(activation, None, WEIGHT)
    converted = qompose.convert_pt2e(prepare(export(model, X), toy(LINEAR, config=config)))
    assert sqnr(model(X), converted(X)) > 30


def half_linear(gain: float) -> nn.Linear:
    model = nn.Linear(16, 16, bias=False).requires_grad_(False)
    nn.init.eye_(model.weight).mul_(gain)
    return model.half()


CHOSEN_EACH_CALL = activation_spec(torch.int8, -128, 127, is_dynamic=True)


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
@pytest.mark.parametrize("size", [1e-7, 1e-6, 3.7e-6, 1e-5, 1.0, 1.5e4])
def test_dynamic_tensors_of_halves_keep_their_steps(size: float, symmetric: bool) -> None:
    """torch divides ranges in float16: below 7.6e-6 that gives 0, to 1e-4 far off, above 65,504 infinity."""
    activation = CHOSEN_EACH_CALL
    if symmetric:
        activation = replace(activation, qscheme=torch.per_tensor_symmetric)
    model = half_linear(min(1000.0, 1 / size))
    x = (randn(8, 16) * size).half()
    config = QuantizationConfig(activation, None, WEIGHT)
    converted = convert(export(model, x), toy(LINEAR, config=config), x)
    assert sqnr(model(x), converted(x)) > 38
    assert not any(tag_of(node, CAST_TAG) for node in converted.graph.nodes)  # none was asked for


def test_halves_of_annotations_alone_are_not_cast_for_their_range() -> None:
    """Engines that such annotations are for look for the form of torch."""
    model, x = half_linear(1.0), randn(8, 16).half()

    def annotate_node(node: Node) -> None:
        if node.target is torch.ops.aten.linear.default:
            annotate(node, {node.args[0]: CHOSEN_EACH_CALL}, None)

    converted = convert(export(model, x), Annotator(annotate_node), x)
    (chosen,) = nodes_calling(converted, "choose_qparams")
    (quantized,) = nodes_calling(converted, "quantize_per_tensor")
    assert chosen.args[0] is quantized.args[0]


def test_float64_is_converted_or_left_in_float_with_a_reason(model: nn.Module) -> None:
    """The operators of torch quantize float32, bfloat16 and float16."""
    model, x = model.double(), X.double()
    converted = convert(export(model, x), toy(LINEAR), x)
    assert converted(x).dtype is torch.float64
    assert sqnr(model(x), converted(x)) > 25
    rows = [row for row in qompose.report(converted).rows if row.operator == "aten.linear"]
    assert all(row.state != "float" or "float64" in row.reason for row in rows)


aten = torch.ops.aten
GROUPS = QuantizationSpec(
    torch.int8, PerBlockMinMaxObserver, -8, 7, torch.per_channel_symmetric, block_size=(4,)
)
TOKENS = replace(
    RUN_TIME, qscheme=torch.per_channel_affine, block_size=(-1,),
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
)  # fmt: skip
PER_TOKEN = QuantizationConfig(TOKENS, None, STATIC.weight, name="per token")
INT4 = QuantizationConfig(None, None, GROUPS, name="int4 groups", algorithms=())
LAYERS = {
    "static": STATIC, "dynamic": DYNAMIC, "tokens": PER_TOKEN, "weights": WEIGHT_ONLY,
    "groups": INT4, "plain": None,
}  # fmt: skip
BATCH = randn(2, 3, 8)


def mixed(*names: str) -> RuleQuantizer:
    quantizer = toy(LINEAR, config=None)
    for name in names or LAYERS:
        quantizer.set_module_name(f"layers.{name}", LAYERS[name])
    return quantizer


def layers(*names: str) -> nn.Module:
    """One linear for each scheme, behind one another, with a tanh between them that is not saturated."""
    parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in names or LAYERS})
    chain = lambda m, x: reduce(lambda y, layer: torch.tanh(layer(y)), m.layers.values(), x)  # noqa: E731
    return seeded(Model(chain, layers=parts), size=0.2)


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
    model = layers()
    converted = convert(export(model, BATCH), mixed(), BATCH)
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
    assert 15 < sqnr(model(BATCH), converted(BATCH)) < 60, "as good as its int4 layer"
    of_anchor = {node.name: name for name, node in linears.items()}
    assert {of_anchor[claim.anchor]: claim.mode for claim in plan_of(converted).claims} == {
        "static": "static", "dynamic": "dynamic", "tokens": "dynamic",
        "weights": "weight-only", "groups": "weight-only",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "high", "stored"),
    [
        (torch.per_channel_affine, 7, torch.int8),
        (torch.per_channel_affine, 127, torch.int64),
        (torch.per_channel_affine_float_qparams, 7, torch.float32),
    ],
    ids=["seven bits", "eight bits", "no integers"],
)
def test_zero_points_of_groups_are_bytes_where_those_lose_nothing(
    scheme: torch.qscheme, high: int, stored: torch.dtype
) -> None:
    spec = replace(GROUPS, quant_min=-high - 1, quant_max=high, qscheme=scheme)
    observer = PerBlockMinMaxObserver(
        torch.int8, (4,), qscheme=scheme, quant_min=-high - 1, quant_max=high
    )
    config = replace(INT4, weight=spec, algorithms=())
    layer = seeded(nn.Linear(8, 4))
    observer(layer.weight)
    converted = convert(export(layer, BATCH), toy(LINEAR, config=config), BATCH)
    found = converted.state_dict()["weight_zero_point"]
    assert found.dtype is stored
    assert torch.equal(found.to(torch.float64), observer.calculate_qparams()[1].to(torch.float64))


FREE = ("dynamic", "tokens", "weights", "groups", "plain")


@pytest.mark.parametrize("name", FREE)
def test_calibration_changes_no_bit_where_none_is_needed(name: str) -> None:
    prepared = prepare(export(layers(name), BATCH), mixed(name))
    without = qompose.convert_pt2e(prepared)
    for scale in (0.0, 1.0, 1e4):
        prepared(randn(2, 3, 8) * scale)
    after = qompose.convert_pt2e(prepared)
    assert torch.equal(without(BATCH), after(BATCH))
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
    assert not nodes_calling(converted, "flatten")
    for one, other in zip(model(x), converted(x), strict=True):
        assert sqnr(one, other) > 28


def test_dynamic_dimensions_stay_so_under_every_scheme() -> None:
    model, tokens = layers(), torch.export.Dim("tokens", max=64)
    program = export(model, BATCH, dynamic_shapes={"x": {1: tokens}})
    converted = convert(program, mixed(), BATCH)
    longer = randn(2, 11, 8, seed=1)
    assert converted(longer).shape == (2, 11, 8)
    assert sqnr(model(longer), converted(longer)) > 14


@pytest.mark.parametrize("name", [*LAYERS, "all"])
def test_unfolded_models_keep_floats_and_give_the_same_bits(name: str) -> None:
    names = LAYERS if name == "all" else (name,)
    model = layers(*names)
    prepared = prepare(export(model, BATCH), mixed(*names))
    prepared(BATCH)
    folded = qompose.convert_pt2e(prepared)
    unfolded = qompose.convert_pt2e(prepared, fold_quantize=False)
    state = unfolded.state_dict()
    for path, parameter in model.named_parameters():
        assert torch.equal(state[path], parameter)
    assert not [path for path in state if path.endswith("_q")]
    number = sum(layer != "plain" for layer in names)
    reads = [n for n in unfolded.graph.nodes if qdq.is_quantize(n)]
    assert sum(n.args[0].op == "get_attr" for n in reads) == number
    assert torch.equal(folded(BATCH), unfolded(BATCH))
    least = {"groups": 18.0, "plain": float("inf"), "all": 15.0}.get(name, 32.0)
    assert sqnr(model(BATCH), folded(BATCH)) >= least


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
@pytest.mark.parametrize("names", [("static",), ("static", "plain", "static2")], ids=len)
def test_unfolded_models_are_lowered_too(fold: bool, names: tuple[str, ...]) -> None:
    model = layers(*names)
    converted = convert(export(model, BATCH), toy(LINEAR), BATCH, fold_quantize=fold)
    lowered = qompose.lower(converted, strict=True)
    assert operators(lowered)["linear"] == len(names)
    assert all(
        n.target is torch.ops.qompose_toy.linear.default for n in nodes_calling(lowered, "linear")
    )
    assert not [n for n in lowered.state_dict() if n.endswith("weight")]
    assert sqnr(converted(BATCH), lowered(BATCH)) > 35, "the same up to one step"


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
def test_in_place_and_functional_forms_give_the_same(fold: bool) -> None:
    model = layers()
    module = export(model, BATCH).module(check_guards=False)
    apart = prepare(module, mixed())
    before = graph_text(module)
    assert apart is not module
    assert graph_text(module) == before
    prepared = qompose.prepare_pt2e(module, mixed(), inplace=True)
    assert prepared is module
    assert graph_text(prepared) == graph_text(apart)
    for part in (prepared, apart):
        part(BATCH)
    expected = qompose.convert_pt2e(apart, fold_quantize=fold)
    assert torch.equal(apart(BATCH), model(BATCH)), "the prepared model is left alone"
    assert torch.equal(qompose.convert_pt2e(apart, fold_quantize=fold)(BATCH), expected(BATCH))
    converted = qompose.convert_pt2e(prepared, fold_quantize=fold, inplace=True)
    assert converted is module
    assert graph_text(converted) == graph_text(expected)
    assert torch.equal(converted(BATCH), expected(BATCH))
    assert list(converted.state_dict()) == list(expected.state_dict())
    assert json.dumps(qompose.report(converted).to_dict()) == json.dumps(
        qompose.report(expected).to_dict()
    )


@pytest.mark.parametrize("inplace", [False, True])
def test_a_conversion_that_fails_leaves_the_prepared_model_as_it_was(inplace: bool) -> None:
    model = layers()
    prepared = prepare(export(model, BATCH), mixed())
    text, state = graph_text(prepared), {k: v.clone() for k, v in prepared.state_dict().items()}
    with pytest.raises(UncalibratedError):
        qompose.convert_pt2e(prepared, inplace=inplace)
    assert graph_text(prepared) == text
    assert torch.equal(prepared(BATCH), model(BATCH))
    parameters = [path for path, _ in model.named_parameters()]
    assert all(torch.equal(prepared.state_dict()[path], state[path]) for path in parameters)
    fresh = prepare(export(model, BATCH), mixed())
    fresh(BATCH)
    converted = qompose.convert_pt2e(prepared, inplace=inplace)
    assert torch.equal(converted(BATCH), qompose.convert_pt2e(fresh)(BATCH))


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
def test_a_cast_that_loses_values_is_named(fold: bool) -> None:
    model = layers("static", "plain")
    with torch.no_grad():
        model.layers["static"].weight[0, :2] = torch.tensor([7e4, -1e30])
    for dtype, warned in ((torch.float16, True), (torch.bfloat16, False)):
        config = QuantizationConfig(None, None, QuantizationSpec(dtype, PlaceholderObserver))
        prepared = prepare(export(model, BATCH), toy(LINEAR, config=config))
        converted = qompose.convert_pt2e(prepared, fold_quantize=fold)
        told = [line for line in qompose.report(converted).notes if "become infinite" in line]
        assert len(told) == warned
        if warned:
            assert "layers.static" in told[0] and "2 of 64 values" in told[0]


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 55), (torch.bfloat16, 40)], ids=str)
def test_casts(dtype: torch.dtype, bound: float, fold: bool) -> None:
    half = QuantizationSpec(dtype, PlaceholderObserver)
    model = layers("static", "plain")
    prepared = prepare(
        export(model, BATCH), toy(LINEAR, config=QuantizationConfig(half, None, half))
    )
    converted = qompose.convert_pt2e(prepared, fold_quantize=fold)
    assert converted(BATCH).dtype is torch.float32
    assert bound < sqnr(model(BATCH), converted(BATCH)) < bound + 40
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
        BATCH.to(dtype).float(), weight.to(dtype).float(), model.layers["static"].bias
    )
    seen = computed(converted, BATCH).values()
    assert any(isinstance(value, Tensor) and torch.equal(value, by_hand) for value in seen)


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
def test_casts_that_annotations_ask_for_are_those_that_inductor_knows(
    fold: bool, tmp_path: Path
) -> None:
    half = QuantizationSpec(torch.float16, PlaceholderObserver)

    def halve(node: Node) -> None:
        if node.target is torch.ops.aten.linear.default:
            annotate(node, {node.args[1]: half})

    model = layers("plain")
    prepared = prepare(export(model, BATCH), Annotator(halve))
    converted = qompose.convert_pt2e(prepared, fold_quantize=fold)
    assert operators(converted)["convert_element_type"] == 2
    assert operators(converted)["to"] == fold
    (kind,) = {t.dtype for path, t in converted.state_dict().items() if "weight" in path}
    assert kind is (torch.float16 if fold else torch.float32)
    layer = model.layers["plain"]
    with torch.no_grad():
        layer.weight.copy_(layer.weight.half())
    assert torch.equal(converted(BATCH), model(BATCH))
    qompose.save(converted, tmp_path / "model.pt2")
    assert torch.equal(qompose.load(tmp_path / "model.pt2")(BATCH), model(BATCH))


def encode(m: Any, x: Tensor) -> Tensor:
    layer = m.encoder["layer0"]
    return m.head(layer["query"](x) + torch.tanh(layer["key"](x)))


def encoder() -> nn.Module:
    layer = nn.ModuleDict({"query": nn.Linear(8, 8), "key": nn.Linear(8, 8, bias=False)})
    parts = {"encoder": nn.ModuleDict({"layer0": layer}), "head": nn.Linear(8, 8)}
    return seeded(Model(encode, **parts), size=0.2)


CONFIGS = [STATIC, DYNAMIC, PER_TOKEN, WEIGHT_ONLY, INT4]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tensors_and_nodes_say_which_module_they_belong_to(config: QuantizationConfig) -> None:
    converted = convert(export(encoder(), BATCH), toy(LINEAR, config=config), BATCH)
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
            chosen = any(a.op == "call_function" for a in node.all_input_nodes[1:])  # by its reader
            owner = readers[0] if chosen or maker.op != "call_function" else maker
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
    model, x = encoder().to(dtype), BATCH.to(dtype)
    program = export(model, x)
    converted = convert(program, toy(LINEAR, config=config), x)
    before = {n.name: n.meta["val"].dtype for n in program.graph.nodes if n.op == "call_function"}
    after = {n.name: n.meta["val"] for n in converted.graph.nodes if n.op == "call_function"}
    assert {name: after[name].dtype for name in before} == before
    assert wrongly_recorded(converted, x) == []
    assert sqnr(model(x), converted(x)) > (12 if config is INT4 else 24)
    for node in filter(qdq.is_dequantize, converted.graph.nodes):
        assert node.meta["val"].dtype is dtype


CHANNELS = 100_000


def of_channels(scale: float = 1.0, zero_point: Any = 0) -> QParams:
    """Parameters that are fine but for those of the last channel."""
    scales, zeros = torch.ones(CHANNELS), torch.zeros(CHANNELS, dtype=torch.int64)
    zeros = zeros if isinstance(zero_point, int) else zeros.float()
    scales[-1], zeros[-1] = scale, zero_point
    return QParams(scales, zeros, -8, 7, torch.int8, 0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"scale": 0.0}, f"has the scale 0 (1 of {CHANNELS}); scales must be positive"),
        ({"scale": float("nan")}, f"has the scale nan (1 of {CHANNELS}); scales must be"),
        ({"zero_point": float("inf")}, f"has the zero point inf (1 of {CHANNELS})"),
        ({"zero_point": 8}, f"has the zero point 8 (1 of {CHANNELS}), outside [-8, 7]"),
    ],
    ids=str,
)
def test_invalid_parameters(parameters: Any, message: str) -> None:
    (found,) = invalid(of_channels(**parameters), (CHANNELS, 4))
    assert message in found


def test_valid_parameters() -> None:
    assert not [*invalid(of_channels(), (CHANNELS, 4))]
    for zero_point in (-8, 7, 100.5):
        assert not [*invalid(of_channels(zero_point=zero_point), (CHANNELS, 4))]
    assert [*invalid(of_channels(), (7, 4))] == [
        f"has {CHANNELS} scales and {CHANNELS} zero points, expected 7"
    ]


def test_channels_that_eps_leaves_few_integers() -> None:
    least, most = torch.tensor([-1.0, 2.0, 5.0, 0.0]), torch.tensor([1.0, 2.01, 5.0, 0.5])
    found = choose_qparams(
        least, most, dtype=torch.uint8, quant_min=None, quant_max=None,
        qscheme=torch.per_channel_affine_float_qparams, eps=1e-3,
    )  # fmt: skip
    q = QParams(*found, 0, 255, torch.uint8, 0)
    told = "1 of 4 channels use less than a quarter of the 256 integers"
    assert few_levels(q, least, most, 1e-3).startswith(told)
    as_torch = replace(q, scale=torch.where(q.scale > 1e-3, q.scale, 1.0))
    assert few_levels(as_torch, least, most, 1e-3).startswith(told)
    fine = replace(q, scale=(most - least) / 255)
    assert few_levels(fine, least, most, 1e-6) == ""
    quarter = replace(q, scale=torch.full((4,), 4.0))
    assert few_levels(quarter, torch.zeros(4), torch.full((4,), 255.0), 1e-3) == ""
    whole = replace(q, zero_point=q.zero_point.round().long())
    assert few_levels(whole, least, most, 1e-3) == ""


@pytest.mark.parametrize(("most", "told"), [(1e-9, True), (1e-3, False), (0.0, False)])
def test_few_levels_of_a_whole_weight(most: float, told: bool) -> None:
    module = seeded(nn.Linear(3, 4))
    nn.init.constant_(module.weight, most)
    report = qompose.report(convert(export(module, X), toy(LINEAR, config=PER_TENSOR), X))
    assert any("less than a quarter" in note for note in report.notes) is told


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_parameters_that_no_observer_sees_are_named_if_they_are_not_finite(value: float) -> None:
    module = seeded(nn.Linear(3, 4))
    with torch.no_grad():
        module.bias[1] = value
    converted = convert(export(module, X), toy(LINEAR, config=WEIGHT_ONLY), X)
    report = qompose.report(converted)
    assert any("parameter bias" in note for note in report.notes)


@pytest.mark.parametrize(("most", "told"), [(1e-7, True), (1e-3, False), (0.0, False)])
def test_few_levels_of_most_channels_with_integer_zero_points(most: float, told: bool) -> None:
    """One channel of four is dead, which is nothing to tell."""
    highest = torch.tensor([1e-9, most, most, most])
    scale = (highest / 127).clamp(min=1e-8)
    q = QParams(scale, torch.zeros(4, dtype=torch.int64), -127, 127, torch.int8, axis=0)
    assert bool(few_levels(q, -highest, highest, float(scale.min()))) is told


EPS = 2.0**-10


@pytest.mark.parametrize(
    ("scale", "largest", "values", "lines"),
    [
        (1.0, 100.0, 64, 0), (1.0, 100.0, 63, 1), (1000.0, 100.0, 64, 0), (1001.0, 100.0, 64, 1),
        (EPS, 127 * EPS, 64, 0), (EPS, 126 * EPS, 63, 2),
    ],
)  # fmt: skip
def test_what_looks_wrong_though_it_can_be_used(
    scale: float, largest: float, values: int, lines: int
) -> None:
    screen = Screen()
    screen.bulk, screen.values = largest, values
    assert len([*outliers(scale, 1.0, screen, EPS)]) == lines


def _both(dtype: torch.dtype, weight: torch.dtype) -> Annotator:
    """Quantize linears, activations affinely to one type and weights by channel to another."""
    activation = QuantizationSpec(dtype, MinMaxObserver, qscheme=torch.per_tensor_affine)
    channels = QuantizationSpec(
        weight, PerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric
    )

    def annotate_linear(node: Node) -> None:
        if node.target is torch.ops.aten.linear.default:
            value, weight, _ = node.all_input_nodes
            annotate(node, {value: activation, weight: channels}, activation)

    return Annotator(annotate_linear)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dtype", "weight", "bound"),
    [
        (torch.int16, torch.int16, 70), (torch.uint16, torch.int8, 38), (torch.int8, torch.float8_e5m2, 22),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, 23), (torch.float8_e5m2, torch.int8, 18),
    ],
    ids=str,
)  # fmt: skip
def test_types_beside_int8(
    own: torch.dtype, dtype: torch.dtype, weight: torch.dtype, bound: float, tmp_path: Path
) -> None:
    """On new data, in the program's own type; trained, converted and loaded models say the same.

    The bounds are what rounding to the types' mantissas costs at three tensors in a row, less 3 dB; in
    bfloat16 its own eight bits come on top.
    """
    model = seeded(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))).to(own)
    seen, new = randn(64, 64).to(own), randn(64, 64, seed=1).to(own)
    program, quantizer = export(model, seen), _both(dtype, weight)
    converted = convert(program, quantizer, seen)
    found = converted(new)
    assert found.dtype is own and len(plan_of(converted).claims) == 2
    for read in filter(qdq.is_dequantize, converted.graph.nodes):
        for made in filter(qdq.is_quantize, read.all_input_nodes):
            (value,) = made.all_input_nodes
            assert read.meta["val"].dtype is value.meta["val"].dtype, "one type around a pair"
    assert sqnr(model(new).float(), found.float()) > min(bound, 34 if own is torch.bfloat16 else 99)
    qompose.save(converted, tmp_path / "model.pt2")
    assert torch.equal(qompose.load(tmp_path / "model.pt2")(new), found)
    if weight.is_floating_point:
        trained = qompose.prepare_qat_pt2e(program, quantizer)
        trained(seen)
        trained.eval()
        assert torch.equal(trained(new), qompose.convert_pt2e(trained)(new))


def test_float8_has_no_zero_point_and_no_dynamic_scale() -> None:
    """Integers around another number than 0 would lose their last bits as they become float8."""
    low, high = torch.tensor(1.0), torch.tensor(5.0)
    for dtype, largest in ((torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344)):
        given: dict[str, Any] = {"dtype": dtype, "quant_min": None, "quant_max": None}
        scale, zero_point = choose_qparams(low, high, **given, qscheme=torch.per_tensor_affine)
        assert (float(scale), int(zero_point)) == (pytest.approx(5 / largest), 0)
        with pytest.raises(ConfigError):
            QuantizationSpec(dtype, PlaceholderObserver, is_dynamic=True)
        with pytest.raises(ConfigError):
            QuantizationSpec(dtype, MinMaxObserver, quant_max=largest + 1)


def test_annotated_readers_of_a_dynamic_tensor_share_all_of_it() -> None:
    """As the engines that annotations are written for lower it; the numbers are those of one reader each."""
    dynamic = QuantizationSpec(torch.int8, PlaceholderObserver, -128, 127, is_dynamic=True)

    def annotate_linear(node: Node) -> None:
        if node.target is torch.ops.aten.linear.default:
            annotate(node, {node.all_input_nodes[0]: dynamic})

    layers = {name: nn.Linear(3, 3) for name in ("a", "b", "c")}
    net = seeded(Model(lambda m, x: (m.c(x), m.a(x) + m.b(x)), **layers))
    converted = convert(export(net, X), Annotator(annotate_linear), X)
    found = operators(converted)
    for name in ("choose_qparams", "quantize_per_tensor", "dequantize_per_tensor"):
        assert found[name] == 1
    assert min(map(sqnr, net(X), converted(X))) > 35
