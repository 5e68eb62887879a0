# SPDX-License-Identifier: Apache-2.0
"""Preparation keeps the way to be called, wrong input of a stage is an error, and the stages fit together."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, RuleQuantizer, UserError
from qompose.errors import (
    BackendNotFoundError,
    ConfigError,
    NotExportedError,
    StageError,
    TargetError,
    UncalibratedError,
)
from qompose.observers import AutoRangeObserver, MinMaxObserver
from qompose.program.meta import tag_of
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace

from tests.core.toy import (
    INT8,
    LINEAR,
    STATIC,
    WEIGHT_ONLY,
    Model,
    ToyBackend,
    convert,
    export,
    graph_text,
    operators,
    plan_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)
from tests.zoo import by_name


def fork(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(y) + m.c(y) + y


FORK = seeded(Model(fork, **{name: nn.Linear(3, 3) for name in "abc"}))


def test_what_was_prepared_in_inference_mode_is_calibrated_outside() -> None:
    activation = replace(INT8, observer_or_fake_quant_ctr=AutoRangeObserver)
    config = replace(STATIC, input_activation=activation, algorithms=("gptq",))
    x, program = randn(16, 3), export(FORK, randn(16, 3))
    with torch.inference_mode():
        inside = prepare(program, toy(config=config))
    outside = prepare(program, toy(config=config))
    first, second = (qompose.convert_pt2e(qompose.calibrate(p, [x])) for p in (inside, outside))
    assert torch.equal(first(x), second(x))


def test_inference_mode_changes_nothing() -> None:
    """Weights are inference tensors too, as their module was made there. torch counts no writes to those."""
    activation = replace(INT8, observer_or_fake_quant_ctr=AutoRangeObserver)
    config, x = replace(STATIC, input_activation=activation), randn(16, 3)

    def converted() -> GraphModule:
        model = seeded(Model(fork, **{name: nn.Linear(3, 3) for name in "abc"}))
        prepared = prepare(export(model, x), toy(config=config))
        return qompose.convert_pt2e(qompose.calibrate(prepared, [x]))

    with torch.inference_mode():
        inside = converted()
        assert all(weight.is_inference() for weight in inside.parameters())
        y = inside(x)
    assert torch.equal(y, converted()(x))


def test_regions_are_tagged_with_their_claims() -> None:
    """What later stages read survives in `node.meta["custom"]`."""
    prepared = prepare(export(FORK, randn(2, 3)), toy())
    for number, claim in enumerate(plan_of(prepared).claims):
        for node in prepared.graph.nodes:
            assert (tag_of(node, "claim") == number) is (node.name in claim.nodes)


def test_the_callback_sees_every_place_and_may_replace_observers() -> None:
    class Fixed(MinMaxObserver):
        def calculate_qparams(self) -> tuple[Tensor, Tensor]:
            return torch.tensor(0.5), torch.tensor(3)

    places: list[str] = []

    class Replacing(RuleQuantizer):
        def prepare_obs_or_fq_callback(self, model: GraphModule, edges: Any) -> None:
            places.extend(p.name if isinstance(p, Node) else f"{p[0]}>{p[1]}" for p in edges)
            for place in edges:
                if isinstance(place, Node):
                    edges[place] = Fixed(dtype=torch.int8, quant_min=-128, quant_max=127)

    quantizer = Replacing(ToyBackend([LINEAR])).set_global(ToyBackend().configs["static"])
    x = randn(2, 3)
    program = export(seeded(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))), x)
    converted = convert(program, quantizer, x)
    assert sorted(place.lstrip("_0123456789") for place in places) == [
        "input_1>linear", "linear", "linear>linear_1", "linear_1", "weight>linear", "weight>linear_1",
    ]  # fmt: skip
    arguments = [
        n.args[1:3] for n in converted.graph.nodes if ".quantize_per_tensor" in str(n.target)
    ]
    assert arguments.count((0.5, 3)) == 2, "both outputs, and the edge that shares with one"


@pytest.mark.parametrize(
    "change",
    [
        lambda edges: edges.update(
            {next(p for p in edges if type(p) is tuple)[0]: MinMaxObserver()}
        ),
        lambda edges: edges.popitem(),
        lambda edges: edges.update(dict.fromkeys(edges, nn.Identity())),
        lambda edges: edges.update(dict.fromkeys(edges, MinMaxObserver(dtype=torch.int32))),
    ],
)
def test_a_callback_may_not_add_observers_or_take_others(change: Callable[[Any], None]) -> None:
    class Changing(RuleQuantizer):
        def prepare_obs_or_fq_callback(self, model: GraphModule, edges: Any) -> None:
            change(edges)

    quantizer = Changing(ToyBackend([LINEAR])).set_global(ToyBackend().configs["static"])
    with pytest.raises(ConfigError, match="prepare_obs_or_fq_callback"):
        prepare(export(nn.Linear(3, 4), randn(2, 3)), quantizer)


class Keywords(nn.Linear):
    def forward(  # type: ignore[override]
        self, first: Tensor, *, pair: dict[str, Tensor], scale: Tensor
    ) -> dict[str, Any]:
        apply = super().forward
        return {"sum": apply(first) * scale, "rest": [pair["a"], apply(pair["b"])]}


def test_the_way_to_call_is_kept() -> None:
    x = randn(2, 3)
    arguments = {"pair": {"a": x, "b": x + 1}, "scale": torch.tensor(2.0)}
    model = seeded(Keywords(3, 3))
    program = torch.export.export(model, (x,), arguments)
    expected = model(x, **arguments)
    prepared = prepare(program, toy(LINEAR))
    torch.testing.assert_close(prepared(x, **arguments), expected, rtol=0, atol=0)
    reordered = {"scale": arguments["scale"], "pair": arguments["pair"]}
    torch.testing.assert_close(prepared(x, **reordered), expected, rtol=0, atol=0)
    converted = qompose.convert_pt2e(prepared)
    assert list(converted(x, **arguments)) == ["sum", "rest"]
    assert len(qompose.lower(converted)(x, **arguments)["rest"]) == 2


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch 2.13, about itself
def test_a_prepared_model_can_be_copied() -> None:
    x = randn(2, 3)
    prepared = prepare(export(FORK, x), toy(LINEAR))
    twin = copy.deepcopy(prepared)
    twin(x)
    with pytest.raises(qompose.errors.UncalibratedError):
        qompose.convert_pt2e(prepared)
    assert torch.equal(qompose.convert_pt2e(twin)(x), convert(export(FORK, x), toy(LINEAR), x)(x))


X = randn(6, 3)


def make() -> nn.Module:
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 2)}
    return seeded(Model(lambda m, x: m.second(torch.sigmoid(m.first(x))), **layers))


PROGRAM = export(make(), X)


@pytest.fixture
def net() -> nn.Module:
    return make()


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a module that was not exported": (
        lambda net: qompose.prepare_pt2e(net, toy()), NotExportedError, "prepare_pt2e .*tests.core.toy.Model",
    ),
    "a traced module": (
        lambda net: qompose.prepare_pt2e(symbolic_trace(net), toy()), NotExportedError, "prepare_pt2e",
    ),
    "nothing": (lambda net: qompose.prepare_pt2e(None, toy()), NotExportedError, "NoneType"),
    "an exported program in place": (
        lambda net: qompose.prepare_pt2e(PROGRAM, toy(), inplace=True), UserError, "GraphModule",
    ),
    "no members": (lambda net: qompose.compose(), UserError, ""),
    "a member of another kind": (
        lambda net: qompose.compose(toy(), object()), UserError, "builtins.object",
    ),
    "a name for a quantizer": (
        lambda net: qompose.prepare_pt2e(PROGRAM, "toy"), BackendNotFoundError, "'toy'",
    ),
    "a class for a quantizer": (
        lambda net: qompose.prepare_pt2e(PROGRAM, RuleQuantizer), UserError, "RuleQuantizer is a class",
    ),
    "a program in the quantizer's place": (
        lambda net: qompose.prepare_pt2e(toy(), PROGRAM), UserError, "^.{,200}$",  # it is not printed
    ),
    "calibrate before prepare": (
        lambda net: qompose.calibrate(PROGRAM.module(), [X]), StageError, "calibrate .*prepare_pt2e",
    ),
    "convert before prepare": (
        lambda net: qompose.convert_pt2e(PROGRAM.module()), StageError, "convert_pt2e .*prepare",
    ),
    "convert twice": (
        lambda net: qompose.convert_pt2e(convert(PROGRAM, toy(), X)), StageError, "a converted model",
    ),
    "lower before convert": (
        lambda net: qompose.lower(prepare(PROGRAM, toy())), StageError, "lower .*a prepared model",
    ),
    "lower a reference": (
        lambda net: qompose.lower(convert(PROGRAM, toy(LINEAR), X, use_reference_representation=True)),
        StageError, "use_reference_representation",
    ),
    "convert before calibrate": (
        lambda net: qompose.convert_pt2e(prepare(PROGRAM, toy())), UncalibratedError, "calibrate",
    ),
    "an unknown target": (
        lambda net: qompose.lower(convert(PROGRAM, toy(LINEAR), X), "troch"), TargetError, "'troch'.*'torch'",
    ),
    "no record": (lambda net: qompose.report(net), StageError, "Model"),
    "quantize without example inputs": (
        lambda net: qompose.quantize(net, backends=[toy()]), UserError, "example_inputs",
    ),
    "quantize with a number for example inputs": (
        lambda net: qompose.quantize(net, 3, backends=[toy()]), UserError, "example_inputs",
    ),
    "quantize without backends": (lambda net: qompose.quantize(net, (X,), backends=[]), UserError, ""),
    "quantize without calibration": (
        lambda net: qompose.quantize(net, (X,), backends=[toy(LINEAR)]), UncalibratedError, "linear_1",
    ),
    "quantize a graph module": (
        lambda net: qompose.quantize(PROGRAM.module(), (X,), backends=[toy()]), UserError, "GraphModule",
    ),
    "quantize with an unknown backend": (
        lambda net: qompose.quantize(net, (X,), backends=["toi"], calibration=[X]),
        BackendNotFoundError, "'toi'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "named"), WRONG.values(), ids=WRONG)
def test_wrong_input(
    call: Callable[[Any], Any],
    error: type[Exception],
    named: str,
    net: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qompose.backend.discovery.entry_points", lambda group: [])
    with pytest.raises(error, match=f"(?s){named}"):
        call(net)
    assert issubclass(error, UserError)


@pytest.mark.parametrize("given", ["model", "program"])
def test_quantize_runs_all_stages(net: nn.Module, given: str) -> None:
    what = (net, (X,)) if given == "model" else (PROGRAM,)
    result = qompose.quantize(*what, backends=[toy(LINEAR)], calibration=[X])
    assert operators(result.model)["linear"] == 2
    assert not operators(result.model)["dequantize_per_channel"]
    assert sqnr(net(X), result.model(X)) > 30
    assert sqnr(result.converted(X), result.model(X)) > 35
    assert torch.equal(result.exported.module()(X), net(X))
    assert (result.report.stage, result.report.target) == ("lowered", "torch")
    assert result.quantizer.members[0].name == "toy"


def test_quantize_goes_by_statistics(net: nn.Module) -> None:
    """Those of a calibration of the same module, in place of data, as often as one likes."""
    seen = qompose.statistics(qompose.calibrate(prepare(PROGRAM, toy(LINEAR)), [X, 2 * X]))
    quantize = functools.partial(qompose.quantize, backends=[toy(LINEAR)])
    expected = quantize(net, (X,), calibration=[X, 2 * X])
    for _ in range(2):
        assert torch.equal(quantize(net, (X,), calibration=seen).model(X), expected.model(X))
    with pytest.raises(qompose.errors.StatisticsError, match="parameters"):
        quantize(seeded(copy.deepcopy(net), 7), (X,), calibration=seen)
    with pytest.raises(UserError, match="transform="):
        quantize(net, (X,), calibration=seen, transform=lambda b: b)


@pytest.mark.parametrize("training", [True, False])
def test_quantize_exports_in_eval_mode_and_puts_the_mode_back(training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9)).train(training)
    result = qompose.quantize(model, (X,), backends=[toy(LINEAR)], calibration=[X])
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    assert torch.equal(result.model(X), result.model(X))


def test_quantize_without_calibration_where_nothing_is_static(net: nn.Module) -> None:
    with pytest.warns(QomposeWarning, match="linear.*toy"):
        result = qompose.quantize(net, (X,), backends=[toy(LINEAR, config=WEIGHT_ONLY)])
    assert sqnr(net(X), result.model(X)) > 30


def test_stages_do_not_change_what_they_were_given() -> None:
    prepared = prepare(PROGRAM, toy(LINEAR))
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    texts = [graph_text(prepared), graph_text(converted)]
    outputs = [prepared(X), converted(X)]
    qompose.lower(converted)
    qompose.lower(converted)
    assert [graph_text(prepared), graph_text(converted)] == texts
    assert torch.equal(prepared(X), outputs[0])
    assert torch.equal(converted(X), outputs[1])


def test_options_of_convert_stand_where_torchao_has_them() -> None:
    """A script written for it passes them by place, or the model by name."""
    prepared = qompose.calibrate(prepare(PROGRAM, toy(LINEAR)), [X])
    spelled_out = qompose.convert_pt2e(model=prepared, use_reference_representation=True)
    stages = [qompose.report(m).stage for m in (qompose.convert_pt2e(prepared, False), spelled_out)]
    assert stages == ["converted", "reference"]
    folded, unfolded = (
        {t.dtype for t in qompose.convert_pt2e(prepared, False, fold).state_dict().values()}
        for fold in (True, False)
    )
    assert torch.int8 in folded and torch.int8 not in unfolded


def test_a_reference_spells_out_bodies_of_control_flow_too() -> None:
    model, inputs = by_name("cond_shared_weight"), by_name("cond_shared_weight").inputs()
    prepared = prepare(model.export(), toy())
    for sign in (1, -1):
        prepared(*(sign * x for x in inputs))
    simulated = qompose.convert_pt2e(prepared)
    spelled_out = qompose.convert_pt2e(prepared, use_reference_representation=True)
    states = {row.state for row in qompose.report(spelled_out).rows if row.owner}
    assert states == {"integer reference"}
    for sign in (1, -1):
        signed = [sign * x for x in inputs]
        assert sqnr(simulated(*signed), spelled_out(*signed)) > 60
