# SPDX-License-Identifier: Apache-2.0
"""What users call: each wrong input is an error that says what to do, and the stages fit together."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, UserError
from qompose.errors import (
    BackendNotFoundError,
    NotExportedError,
    NothingQuantizedError,
    NotLoweredError,
    StageError,
    TargetError,
    UncalibratedError,
)
from torch import Tensor, nn
from torch.fx import symbolic_trace

from tests.core.toy import (
    LINEAR,
    SIGMOID,
    STATIC,
    WEIGHT_ONLY,
    NullQuantizer,
    convert,
    export,
    graph_text,
    operators,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)
from tests.zoo import by_name

X = randn(6, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x)))


@pytest.fixture
def net() -> nn.Module:
    return seeded(Net())


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qompose.backend.discovery.entry_points", lambda group: [])


WRONG: list[Any] = [
    pytest.param(
        lambda net: qompose.prepare_pt2e(net, toy()),
        NotExportedError,
        "prepare_pt2e takes a torch.export.ExportedProgram.*test_pipeline.Net.*torch.export.export",
        id="a module that was not exported",
    ),
    pytest.param(
        lambda net: qompose.prepare_pt2e(symbolic_trace(net), toy()),
        NotExportedError,
        "torch.export.ExportedProgram",
        id="a traced module",
    ),
    pytest.param(
        lambda net: qompose.prepare_pt2e(None, toy()), NotExportedError, "NoneType", id="nothing"
    ),
    pytest.param(
        lambda net: qompose.prepare_pt2e(export(net, X), toy(), inplace=True),
        UserError,
        "GraphModule",
        id="an exported program in place",
    ),
    pytest.param(lambda net: qompose.compose(), UserError, "at least one", id="no members"),
    pytest.param(
        lambda net: qompose.compose(toy(), object()),  # type: ignore[arg-type]
        UserError,
        "expected a quantizer, got builtins.object",
        id="a member of another kind",
    ),
    pytest.param(
        lambda net: qompose.compose(toy(), on_conflict="last"),
        UserError,
        'on_conflict must be "error" or "first"',
        id="an unknown policy",
    ),
    pytest.param(
        lambda net: qompose.calibrate(export(net, X).module(), [X]),
        StageError,
        "calibrate takes a prepared model.*prepare_pt2e first",
        id="calibrate before prepare",
    ),
    pytest.param(
        lambda net: qompose.convert_pt2e(export(net, X).module()),
        StageError,
        "convert_pt2e takes a prepared model",
        id="convert before prepare",
    ),
    pytest.param(
        lambda net: qompose.convert_pt2e(convert(export(net, X), toy(), X)),
        StageError,
        "got a converted model",
        id="convert twice",
    ),
    pytest.param(
        lambda net: qompose.lower(prepare(export(net, X), toy())),
        StageError,
        "lower takes a converted model, got a prepared model",
        id="lower before convert",
    ),
    pytest.param(
        lambda net: qompose.convert_pt2e(prepare(export(net, X), toy())),
        UncalibratedError,
        "calibrate",
        id="convert before calibrate",
    ),
    pytest.param(
        lambda net: qompose.lower(convert(export(net, X), toy(LINEAR), X), "tpu"),
        TargetError,
        "knows a target 'tpu'.*Known: torch",
        id="an unknown target",
    ),
    pytest.param(
        lambda net: qompose.report(net), StageError, "Net carries no record", id="no record"
    ),
    pytest.param(
        lambda net: qompose.quantize(net, backends=[toy()]),
        UserError,
        "example_inputs, a tuple",
        id="quantize without example inputs",
    ),
    pytest.param(
        lambda net: qompose.quantize(net, X, backends=[toy()]),
        UserError,
        "example_inputs, a tuple",
        id="quantize with a tensor for example inputs",
    ),
    pytest.param(
        lambda net: qompose.quantize(net, (X,), backends=[]),
        UserError,
        "at least one",
        id="quantize without backends",
    ),
    pytest.param(
        lambda net: qompose.quantize(net, (X,), backends=[toy(LINEAR)]),
        UncalibratedError,
        "4 observed tensors|3 observed tensors",
        id="quantize without calibration",
    ),
    pytest.param(
        lambda net: qompose.quantize(export(net, X).module(), (X,), backends=[toy()]),
        UserError,
        "GraphModule",
        id="quantize a graph module",
    ),
    pytest.param(
        lambda net: qompose.quantize(net, (X,), backends=["toi"], calibration=[X]),
        BackendNotFoundError,
        "'toi'",
        id="quantize with an unknown backend",
    ),
]


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_input(
    call: Callable[[Any], Any], error: type[Exception], message: str, net: nn.Module
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        call(net)
    assert issubclass(error, UserError)


def test_quantize_runs_all_stages(net: nn.Module) -> None:
    result = qompose.quantize(net, (X,), backends=[toy(LINEAR)], calibration=[X])
    assert operators(result.model)["linear"] == 2
    assert not operators(result.model)["dequantize_per_channel"]
    assert sqnr(net(X), result.model(X)) > 30
    assert sqnr(result.converted(X), result.model(X)) > 35
    assert torch.equal(result.exported.module()(X), net(X))
    assert (result.report.stage, result.report.target) == ("lowered", "torch")
    assert result.quantizer.members[0].name == "toy"


@pytest.mark.parametrize("file", [None, "seen.safetensors", "seen.json"])
def test_quantize_goes_by_statistics(net: nn.Module, file: str | None, tmp_path: Path) -> None:
    """Those of a calibration of the same module, in place of data, as often as one likes."""
    seen = qompose.statistics(qompose.calibrate(prepare(export(net, X), toy(LINEAR)), [X, 2 * X]))
    if file is not None:
        seen.save(tmp_path / file)
    found = seen if file is None else qompose.Statistics.load(tmp_path / file)
    expected = qompose.quantize(net, (X,), backends=[toy(LINEAR)], calibration=[X, 2 * X])
    for _ in range(2):
        result = qompose.quantize(net, (X,), backends=[toy(LINEAR)], calibration=found)
        assert torch.equal(result.model(X), expected.model(X))
    with pytest.raises(qompose.errors.StatisticsError, match="its parameters differ"):
        qompose.quantize(
            seeded(copy.deepcopy(net), 7), (X,), backends=[toy(LINEAR)], calibration=found
        )
    with pytest.raises(UserError, match="transform= is for batches"):
        qompose.quantize(
            net, (X,), backends=[toy(LINEAR)], calibration=found, transform=lambda b: b
        )


@pytest.mark.parametrize("training", [True, False])
def test_quantize_exports_in_eval_mode_and_puts_the_mode_back(training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9)).train(training)
    result = qompose.quantize(model, (X,), backends=[toy(LINEAR)], calibration=[X])
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    assert torch.equal(result.model(X), result.model(X))


def test_quantize_takes_a_program(net: nn.Module) -> None:
    result = qompose.quantize(export(net, X), backends=[toy(LINEAR)], calibration=[X])
    assert sqnr(net(X), result.model(X)) > 30


def test_quantize_without_calibration_where_nothing_is_static(net: nn.Module) -> None:
    with pytest.warns(QomposeWarning, match="linear.*toy.*input_1|no int8 kernel|arrives in float"):
        result = qompose.quantize(net, (X,), backends=[toy(LINEAR, config=WEIGHT_ONLY)])
    assert sqnr(net(X), result.model(X)) > 30


def test_nothing_quantized_is_one_warning_that_names_the_operators(net: nn.Module) -> None:
    with pytest.warns(QomposeWarning) as caught:
        qompose.prepare_pt2e(export(net, X), NullQuantizer())
    (warning,) = caught
    text = str(warning.message)
    assert "no quantizer claims any of 3 operators" in text
    assert all(name in text for name in ("linear_1 (aten.linear in second)", "sigmoid"))
    assert warning.filename == __file__


def test_strict_makes_nothing_quantized_an_error(net: nn.Module) -> None:
    with pytest.raises(NothingQuantizedError, match=r"linear \(aten.linear in first\)"):
        qompose.prepare_pt2e(export(net, X), NullQuantizer(), strict=True)


def test_strict_makes_a_selector_that_matches_nothing_an_error(net: nn.Module) -> None:
    quantizer = toy(LINEAR).set_module_type(nn.Conv2d, STATIC)
    with pytest.raises(UserError, match=r"torch.nn.modules.conv.Conv2d occurs nowhere"):
        qompose.prepare_pt2e(export(net, X), quantizer, strict=True)
    assert "Conv2d" in " ".join(qompose.report(prepare(export(net, X), quantizer)).notes)


def test_strict_makes_a_region_without_a_kernel_an_error(net: nn.Module) -> None:
    converted = convert(export(net, X), toy(LINEAR, SIGMOID), X)
    with pytest.raises(NotLoweredError, match=r"sigmoid \(toy, rule sigmoid\)"):
        qompose.lower(converted, strict=True)


def test_prepare_in_place_makes_the_module_itself_the_result(net: nn.Module) -> None:
    module = export(net, X).module(check_guards=False)
    prepared = qompose.prepare_pt2e(module, toy(LINEAR), inplace=True)
    assert prepared is module
    module(X)
    converted = qompose.convert_pt2e(module, inplace=True)
    assert converted is module
    expected = convert(export(net, X), toy(LINEAR), X)
    assert torch.equal(module(X), expected(X))
    assert graph_text(module) == graph_text(expected)


def test_a_graph_module_is_left_alone(net: nn.Module) -> None:
    module = export(net, X).module()
    before, state = graph_text(module), dict(module.meta)
    prepare(module, toy(LINEAR))
    assert graph_text(module) == before
    assert module.meta == state


def test_stages_do_not_change_what_they_were_given(net: nn.Module) -> None:
    prepared = prepare(export(net, X), toy(LINEAR))
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    texts = [graph_text(prepared), graph_text(converted)]
    outputs = [prepared(X), converted(X)]
    qompose.lower(converted)
    qompose.lower(converted)
    assert [graph_text(prepared), graph_text(converted)] == texts
    assert torch.equal(prepared(X), outputs[0])
    assert torch.equal(converted(X), outputs[1])


def test_options_of_convert_stand_where_torchao_has_them(net: nn.Module) -> None:
    """A script written for it passes them by place, or the model by name."""
    prepared = qompose.calibrate(prepare(export(net, X), toy(LINEAR)), [X])
    stages = [
        qompose.report(found).stage
        for found in (
            qompose.convert_pt2e(prepared, False),
            qompose.convert_pt2e(model=prepared, use_reference_representation=True),
        )
    ]
    assert stages == ["converted", "reference"]
    folded, unfolded = (
        {
            name: t.dtype
            for name, t in qompose.convert_pt2e(prepared, False, fold).state_dict().items()
        }
        for fold in (True, False)
    )
    assert torch.int8 in folded.values() and torch.int8 not in unfolded.values()


def test_one_quantizer_may_serve_many_programs(net: nn.Module) -> None:
    """It keeps nothing of the programs it saw."""
    quantizer, other = toy(LINEAR), seeded(nn.Sequential(nn.Linear(3, 3)))
    first = convert(export(net, X), quantizer, X)
    convert(export(other, X), quantizer, X)
    again = convert(export(net, X), quantizer, X)
    assert graph_text(first) == graph_text(again)


def test_no_warning_without_need(net: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = qompose.quantize(net, (X,), backends=[toy(LINEAR)], calibration=[X])
        str(result.report)


class TestReferenceRepresentation:
    def test_it_is_the_same_model_in_integers(self, net: nn.Module) -> None:
        prepared = prepare(export(net, X), toy(LINEAR, SIGMOID))
        prepared(X)
        simulated = qompose.convert_pt2e(prepared)
        spelled_out = qompose.convert_pt2e(prepared, use_reference_representation=True)
        assert {name for name in operators(spelled_out) if "quantize" in name} == set()
        assert sqnr(simulated(X), spelled_out(X)) > 100

    def test_the_report_says_what_is_in_integers_and_what_is_not(self, net: nn.Module) -> None:
        prepared = prepare(export(net, X), toy(LINEAR, SIGMOID))
        prepared(X)
        report = qompose.report(qompose.convert_pt2e(prepared, use_reference_representation=True))
        states = {row.name: (row.state, row.reason) for row in report.rows}
        assert states["linear"] == ("integer reference", "")
        assert states["sigmoid"][0] == "simulated (Q/DQ)"
        assert "has no integer reference" in states["sigmoid"][1]

    def test_it_is_not_for_lowering(self, net: nn.Module) -> None:
        prepared = prepare(export(net, X), toy(LINEAR))
        prepared(X)
        model = qompose.convert_pt2e(prepared, use_reference_representation=True)
        with pytest.raises(StageError, match="without use_reference_representation"):
            qompose.lower(model)

    def test_bodies_of_control_flow_are_spelled_out_too(self) -> None:
        model, inputs = (
            by_name("cond_shared_weight").export(),
            by_name("cond_shared_weight").inputs(),
        )
        prepared = prepare(model, toy())
        for sign in (1, -1):
            prepared(*(sign * x for x in inputs))
        simulated = qompose.convert_pt2e(prepared)
        spelled_out = qompose.convert_pt2e(prepared, use_reference_representation=True)
        states = {row.state for row in qompose.report(spelled_out).rows if row.owner}
        assert states == {"integer reference"}
        for sign in (1, -1):
            signed = [sign * x for x in inputs]
            assert sqnr(simulated(*signed), spelled_out(*signed)) > 60


def test_a_program_in_the_quantizers_place_is_not_printed() -> None:
    program = export(nn.Linear(3, 4), randn(2, 3))
    for swapped in (program, program.module()):
        with pytest.raises(
            UserError, match=r"the program comes first, then the quantizer$"
        ) as caught:
            qompose.prepare_pt2e(toy(), swapped)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 200
