# SPDX-License-Identifier: Apache-2.0
"""Reports count what is in the graph, stage by stage, and are data first."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace

import pytest
import qompose
import torch
from qompose.errors import NothingQuantizedError, NotLoweredError
from qompose.reporting.report_data import FLOAT, KERNEL, OBSERVED, SIMULATED
from torch import nn

from tests.core.diagnosis.reports import in_float, report as made, row as taken
from tests.core.toy import (
    ADD,
    CONV,
    INT8,
    LINEAR,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    VIEW,
    Model,
    convert,
    export,
    prepare,
    randn,
    seeded,
    toy,
)

X = randn(6, 3)


NET = Model(
    lambda m, x: torch.tanh(torch.sigmoid(m.b(m.a(x)))).sum(1), a=nn.Linear(3, 4), b=nn.Linear(4, 4)
)
PROGRAM = export(seeded(NET), X)


@functools.cache
def stages() -> dict[str, torch.fx.GraphModule]:
    prepared = prepare(PROGRAM, toy(LINEAR, SIGMOID))
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    with pytest.warns(qompose.QomposeWarning, match=r"sigmoid \(toy, rule sigmoid\)"):
        lowered = qompose.lower(converted)
    return {"prepared": prepared, "converted": converted, "lowered": lowered}


def reports() -> dict[str, qompose.Report]:
    return {stage: qompose.report(module) for stage, module in stages().items()}


def test_states_at_every_stage() -> None:
    states = {
        stage: {row.name: row.state for row in report.rows} for stage, report in reports().items()
    }
    left = {"tanh": FLOAT, "sum_1": FLOAT}
    assert states == {
        "prepared": {"linear": OBSERVED, "linear_1": OBSERVED, "sigmoid": OBSERVED, **left},
        "converted": {"linear": SIMULATED, "linear_1": SIMULATED, "sigmoid": SIMULATED, **left},
        "lowered": {"linear": KERNEL, "linear_1": KERNEL, "sigmoid": SIMULATED, **left},
    }
    lowered = reports()["lowered"]
    assert lowered.count(KERNEL) == lowered.count(KERNEL, "toy") == 2
    for row in (row for report in reports().values() for row in report.rows):
        assert row.reason if row.state == FLOAT else row.owner == "toy"


def test_coverage_is_by_multiply_accumulates() -> None:
    quantizer = toy(LINEAR).set_module_name("b", None)
    report = qompose.report(qompose.lower(convert(PROGRAM, quantizer, X)))
    assert report.coverage() == pytest.approx(12 / 28)
    assert report.coverage(FLOAT) == pytest.approx(16 / 28)
    assert report.coverage(operator="aten.linear") == pytest.approx(12 / 28)
    assert report.coverage(operator="aten.tanh") == 0.0
    assert qompose.report(prepare(PROGRAM, quantizer)).coverage(OBSERVED) == pytest.approx(12 / 28)


def test_a_fallback_has_its_reason_and_a_kernel_its_name() -> None:
    rows = {row.name: row for row in reports()["lowered"].rows}
    assert "rule sigmoid" in rows["sigmoid"].reason
    assert rows["linear"].kernel == "toy linear"
    assert rows["linear"].module == "a"
    assert rows["linear"].selector == "global"


def test_two_owners_and_the_requantization_between_them() -> None:
    first = toy(LINEAR, name="first").set_global(None)
    second = toy(LINEAR, name="second", config=STATIC_UINT8)
    first.set_module_name("a", toy().backend.configs["static"])
    second.set_module_name("a", None)
    report = qompose.report(convert(PROGRAM, qompose.compose(first, second), X))
    assert {row.name: row.owner for row in report.rows if row.owner} == {
        "linear": "first", "linear_1": "second",
    }  # fmt: skip
    (meeting,) = report.requantizations
    assert (meeting.tensor, meeting.readers) == ("linear", ("linear_1",))
    assert (meeting.from_owner, meeting.to_owner) == ("first", "second")
    assert "int8 [-128, 127]" in meeting.from_spec and "uint8 [0, 255]" in meeting.to_spec
    for text in (report.to_markdown(), report.to_text(200)):
        assert str(meeting) in text
    of_several, of_one = (made.to_text(200) for made in (report, reports()["lowered"]))
    assert "selector" in of_several and "selector" not in of_one
    assert qompose.Report.from_dict(report.to_dict()) == report


def test_conflicts_are_told() -> None:
    both = qompose.compose(toy(LINEAR, name="first"), toy(LINEAR, ADD, name="second"))
    report = qompose.report(prepare(PROGRAM, both))
    assert any("second (rule linear)" in line and "first" in line for line in report.conflicts)


def test_bytes_before_and_after() -> None:
    assert reports()["converted"].bytes_before == 4 * (3 * 4 + 4 + 4 * 4 + 4)
    lowered = reports()["lowered"]
    assert lowered.bytes_after < lowered.bytes_before


def test_markdown_is_a_table_with_totals() -> None:
    text = reports()["lowered"].to_markdown()
    assert "168" in text, "multiply-accumulates in all"
    table = [line for line in text.partition("| owner | state")[0].splitlines() if line[:1] == "|"]
    assert {line.count("|") for line in table} == {7}
    assert sum(int(row.split("|")[-3]) for row in table[2:]) == 5


def test_the_first_line_counts_operators_once_and_kernels_apart() -> None:
    lowered, converted = reports()["lowered"], reports()["converted"]
    first = "lowered for torch: 2 operators in 2 int8 kernels, 1 simulated (Q/DQ), 2 in float"
    assert lowered.to_text(120).splitlines()[0] == first
    assert lowered.headline().startswith(first)
    assert converted.to_text(120).startswith("converted: 3 operators simulated (Q/DQ), 2 in float")
    assert "kernel" not in lowered.to_text(120).split("in the graph")[1].splitlines()[0]


def test_operators_of_one_region_are_one_kernel() -> None:
    fused = made(taken("a", region=0), taken("b", "a", region=0), taken("c", "b", region=1))
    assert fused.to_text().startswith("lowered for torch: 3 operators in 2 int8 kernels\n")
    one = made(taken("a", region=4))
    assert one.to_text().startswith("lowered for torch: 1 operator in 1 int8 kernel\n")


def test_float_operators_that_move_values_share_a_line() -> None:
    kinds = ("view", "permute", "to.dtype", "view", "clone", "expand", "slice.Tensor")
    moves = [in_float(f"m{i}", operator=f"aten.{kind}") for i, kind in enumerate(kinds)]
    report = made(taken("a"), in_float("tanh", operator="aten.tanh"), *moves)
    for text in (report.to_text(), report.to_markdown()):
        (line,) = (line for line in text.splitlines() if "moves, casts, copies" in line)
        assert "2 view" in line and " 7 " in line
        assert "aten.tanh" in text and "aten.permute" not in text
    assert len(report.summary()) == 8, "data are not shortened"
    assert "aten.permute" in made(taken("a"), moves[1]).to_text(), "one alone has its reason"
    work = in_float("big", operator="aten.view", macs=3)
    assert "aten.view" in made(work, *moves).to_text(), "what computes is no move"


def test_many_rewrites_of_one_kind_share_a_line() -> None:
    folded = [f"fold_batch_norm: conv_{number}, norm" for number in range(4)]
    rounded = [f"gptq on linear_{number}: less error" for number in range(5)]
    found = made(rewrites=(*rounded[:3], *folded, *rounded[3:]))
    lines = [line for line in str(found).splitlines() if line.startswith("- ")]
    assert lines == [
        "- gptq: 5 rewrites (listed in `report.rewrites`)",
        *(f"- {x}" for x in folded),
    ]
    assert all(line in found.to_dict()["rewrites"] for line in rounded)


def test_states_have_colors_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    report = made(taken("a"), in_float("b"))
    assert "\x1b[" not in report.to_text()
    colored = report.to_text(colors=True)
    assert "\x1b[1;32mint8 kernel" in colored and "\x1b[1;35mfloat" in colored
    plain = re.sub(r"\x1b\[[\d;]*m", "", colored).splitlines()
    assert [line.rstrip() for line in plain] == report.to_text().splitlines()


@pytest.mark.parametrize("fraction", [1.0, 0.9], ids=["all", "nine tenths"])
def test_what_was_not_lowered_is_named(fraction: float) -> None:
    """The second linear stays in float."""
    model = qompose.lower(convert(PROGRAM, toy(LINEAR).set_module_name("b", None), X))
    with pytest.raises(NotLoweredError, match=r"linear_1 \(aten.linear in b\)"):
        qompose.assert_lowered(model, min_fraction=fraction)
    qompose.assert_lowered(model, min_fraction=0.4)


def test_a_region_without_a_kernel_is_named_even_where_it_has_no_macs() -> None:
    model = stages()["lowered"]
    with pytest.raises(NotLoweredError, match="sigmoid"):
        qompose.assert_lowered(model)
    qompose.assert_lowered(model, min_fraction=0.99)
    with pytest.raises(qompose.UserError, match="-1"):
        qompose.assert_lowered(model, min_fraction=-1)


def test_why_finds_operators_modules_and_kinds() -> None:
    report = reports()["lowered"]
    (row,) = report.why("linear_1")
    for words in ("linear_1", "aten.linear", "toy linear", "rule linear", "config static"):
        assert words in str(row)
    assert report.why("b") == (row,)
    assert [row.name for row in report.why("aten.linear")] == ["linear", "linear_1"]
    for name in ("tanh", "sigmoid"):
        (row,) = report.why(name)
        assert row.reason and row.reason in str(row)
    with pytest.raises(qompose.UserError, match="'linear_1' or 'linear'"):
        report.why("linear_11")


def test_why_of_a_module_covers_what_is_inside_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    report = qompose.report(prepare(export(seeded(model), X), toy(LINEAR)))
    assert [row.module for row in report.why("0")] == ["0.0", "0.1"]
    assert [row.module for row in report.why("0.1")] == ["0.1"]


@pytest.mark.parametrize("width", [80, 120])
def test_text_and_details_name_all_and_keep_to_their_width(width: int) -> None:
    for report in reports().values():
        text, details = report.to_text(width), report.details(width)
        assert max(map(len, f"{text}\n{details}".splitlines())) <= width
        squeezed = "".join(details.split())
        for row in report.rows:
            assert "".join((row.name + row.module + row.state).split()) in squeezed


def test_data_becomes_a_report_again() -> None:
    for report in reports().values():
        assert qompose.Report.from_dict(json.loads(report.to_json())) == report
        assert report.to_dict() == json.loads(report.to_json())
    data = report.to_dict()
    more, counts = {**data, "more": 1}, {**data, "counts": 3}
    for wrong in ({}, more, {**data, "rows": [{"name": "x"}]}, counts, {**data, "schema": 0}):
        with pytest.raises(qompose.errors.ConfigError):
            qompose.Report.from_dict(wrong)


def test_one_range_for_two_owners_is_told() -> None:
    moving = replace(INT8, observer_or_fake_quant_ctr=qompose.observers.MovingAverageMinMaxObserver)
    config = replace(STATIC, input_activation=moving, output_activation=moving, name="moving")
    both = qompose.compose(
        toy(LINEAR, name="a").set_module_name("b", None), toy(LINEAR, name="b", config=config)
    )
    report = qompose.report(convert(PROGRAM, both, X))
    assert report.requantizations == ()
    assert any("MovingAverageMinMaxObserver" in note for note in report.notes)


class TestEnoughIsQuantized:
    """`assert_quantized`, at every stage."""

    def test_all(self) -> None:
        prepared = prepare(PROGRAM, toy(LINEAR))
        prepared(X)
        converted = qompose.convert_pt2e(prepared)
        for model in (prepared, converted, qompose.lower(converted)):
            qompose.assert_quantized(model)

    def test_a_part(self) -> None:
        converted = convert(PROGRAM, toy(LINEAR).set_module_name("b", None), X)
        qompose.assert_quantized(converted, min_fraction=0.4)
        with pytest.raises(NothingQuantizedError, match=r"(?s)42.9%.*linear_1 .*in b"):
            qompose.assert_quantized(converted, min_fraction=0.5)

    def test_nothing(self) -> None:
        prepared = prepare(PROGRAM, toy(CONV))
        with pytest.raises(NothingQuantizedError, match=r"(?s)0.0%.*linear_1 "):
            qompose.assert_quantized(prepared, min_fraction=0.01)
        qompose.assert_quantized(prepared, min_fraction=0.0)
        qompose.assert_lowered(qompose.lower(qompose.convert_pt2e(prepared)), min_fraction=0.0)

    def test_a_program_without_float_operators_is_said_to_be_one(self) -> None:
        prepared = prepare(export(Model(lambda m, x: x + 1), torch.arange(3)), toy(CONV))
        with pytest.raises(NothingQuantizedError):
            qompose.assert_quantized(prepared)
        lowered = qompose.lower(qompose.convert_pt2e(prepared))
        with pytest.raises(NotLoweredError):
            qompose.assert_lowered(lowered)
        qompose.assert_quantized(lowered, 0.0)
        qompose.assert_lowered(lowered, 0.0)

    def test_models_without_products_go_by_operators(self) -> None:
        program = export(nn.Sequential(nn.Sigmoid(), nn.Tanh()), X)
        converted = convert(program, toy(SIGMOID, VIEW), X)
        qompose.assert_quantized(converted, min_fraction=0.5)
        with pytest.raises(NothingQuantizedError, match=r"50.0%"):
            qompose.assert_quantized(converted)
        with pytest.warns(qompose.QomposeWarning):
            lowered = qompose.lower(converted)
        with pytest.raises(NotLoweredError, match=r"0.0%"):
            qompose.assert_lowered(lowered)

    def test_a_stage_without_kernels_is_sent_on(self) -> None:
        with pytest.raises(qompose.errors.StageError, match="assert_quantized"):
            qompose.assert_lowered(convert(PROGRAM, toy(LINEAR), X))


class TestWrongQuestions:
    """A question about what is not there is an error, and not a zero."""

    REPORT = qompose.report(convert(PROGRAM, toy(LINEAR), X))

    def test_states(self) -> None:
        for ask in (self.REPORT.count, self.REPORT.coverage):
            with pytest.raises(qompose.UserError, match="'float'"):
                ask("Float")
            with pytest.raises(qompose.UserError, match="None"):
                ask(None)  # type: ignore[arg-type]

    def test_owners(self) -> None:
        with pytest.raises(qompose.UserError, match="'toy'"):
            self.REPORT.count(SIMULATED, "tyo")
        with pytest.raises(qompose.UserError, match=r"'aten\.linear'"):
            self.REPORT.coverage(operator="aten.linaer")
        assert self.REPORT.count(KERNEL, "toy") == 0

    def test_a_member_that_claims_nothing_owns_none(self) -> None:
        both = qompose.compose(toy(LINEAR), toy(LINEAR, name="late"))
        assert qompose.report(prepare(PROGRAM, both)).count(OBSERVED, "late") == 0
        assert qompose.report(prepare(PROGRAM, toy(CONV))).count(OBSERVED, "toy") == 0

    @pytest.mark.parametrize("name", [None, 3, nn.Linear], ids=str)
    def test_why_of_no_text(self, name: object) -> None:
        with pytest.raises(qompose.UserError, match="why"):
            self.REPORT.why(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("macs", "many"), ("macs", -1), ("macs", True), ("macs", 1.5), ("state", "bogus"),
        ("reason", None), ("notes", "abc"), ("notes", [3]), ("notes", None), ("stage", 5),
        ("stage", "finished"), ("bytes_after", "1"), ("counts", {"observers": "two"}),
        ("requantizations", [{**dict.fromkeys(
            ("tensor", "from_owner", "from_spec", "to_owner", "to_spec"), "x"), "readers": "abc"}]),
    ],
)  # fmt: skip
def test_data_with_wrong_values_is_no_report(place: str, value: object) -> None:
    data = TestWrongQuestions.REPORT.to_dict()
    if place in data:
        data[place] = value
    else:
        data["rows"][0][place] = value
    with pytest.raises(qompose.errors.ConfigError):
        qompose.Report.from_dict(data)


def test_line_breaks_and_tags_in_notes_stay_in_their_line_of_markdown() -> None:
    noted = replace(TestWrongQuestions.REPORT, notes=("one\ntwo", "a <lambda>"))
    assert noted.to_markdown().splitlines()[-2:] == ["- one<br>two", r"- a \<lambda>"]
