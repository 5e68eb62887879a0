# SPDX-License-Identifier: Apache-2.0
"""Stages say one line each in the log, and warn by name; wrong arguments are said to be wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, UserError
from qompose.errors import NothingQuantizedError, NotLoweredError, TargetError
from torch import nn

from tests.core.toy import (
    CONV,
    INT8,
    LINEAR,
    SIGMOID,
    STATIC,
    Annotator,
    Model,
    annotate,
    aten,
    convert,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

X = randn(6, 3)
NET = Model(
    lambda m, x: torch.tanh(torch.sigmoid(m.b(m.a(x)))), a=nn.Linear(3, 4), b=nn.Linear(4, 4)
)
PROGRAM = export(seeded(NET), X)


class TestLog:
    """`logging.getLogger("qompose")`."""

    def test_one_line_for_each_stage(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever logs it."""
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        monkeypatch.setattr(handler, "emit", records.append)
        root = logging.getLogger()
        monkeypatch.setattr(root, "handlers", [handler])
        monkeypatch.setattr(root, "level", logging.DEBUG)
        logging.getLogger("qompose").manager._clear_cache()  # of who is enabled
        first = toy(LINEAR, name="first").set_module_name("b", None)
        qompose.lower(convert(PROGRAM, qompose.compose(first, toy(LINEAR, name="second")), X))
        mine = [record for record in records if record.name.startswith("qompose")]
        assert {(record.name, record.levelname) for record in mine} == {("qompose", "INFO")}
        assert [record.getMessage().partition(":")[0] for record in mine] == [
            "prepared", "converted", "lowered for torch",
        ]  # fmt: skip

    def test_nothing_is_printed_and_no_handler_is_added(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        qompose.lower(convert(PROGRAM, toy(LINEAR), X))
        assert capsys.readouterr() == ("", "")
        assert logging.getLogger("qompose").handlers == []


class TestWarnings:
    """What was asked and not done."""

    def test_nothing_quantized_names_operators_and_counts_the_rest(self) -> None:
        deep = nn.Sequential(*(nn.Tanh() for _ in range(25)))
        with pytest.warns(QomposeWarning) as caught:
            qompose.prepare_pt2e(export(deep, X), toy(LINEAR))
        (warning,) = caught
        assert warning.filename == __file__
        text = str(warning.message)
        assert "25" in text and text.count("(aten.tanh in ") == 20
        assert text.endswith("5 more")

    def test_a_program_without_float_operators_is_named_by_what_it_calls(self) -> None:
        program = export(Model(lambda m, x: x + 1), torch.arange(3))
        with pytest.warns(QomposeWarning, match=r"aten.add.Tensor"):
            qompose.prepare_pt2e(program, toy(LINEAR))
        with pytest.raises(NothingQuantizedError, match=r"aten.add.Tensor"):
            qompose.prepare_pt2e(program, toy(LINEAR), strict=True)

    def test_what_conversion_dropped_was_not_lowered_either(self) -> None:
        """One input holds masks, so the claim on what reads it is not followed."""
        gated = Model(lambda m, x, mask: m.linear(x) + torch.sigmoid(mask), linear=nn.Linear(3, 3))
        quantizer = toy(LINEAR, SIGMOID).set_operator_type(torch.sigmoid, STATIC)
        prepared = prepare(export(seeded(gated), X, X.clone()), quantizer)
        prepared(X, torch.full_like(X, -torch.inf))
        converted = qompose.convert_pt2e(prepared)
        with pytest.warns(QomposeWarning) as caught:
            qompose.lower(converted)
        assert "mask -> sigmoid has 18 infinite" in str(caught[0].message)
        with pytest.raises(NotLoweredError, match="mask -> sigmoid"):
            qompose.lower(converted, strict=True)

    def test_conversion_that_follows_no_claim_says_so_once(self) -> None:
        masked = Model(lambda m, x, mask: torch.sigmoid(mask) + torch.sigmoid(mask + x))
        prepared = prepare(export(masked, X, X.clone()), toy(SIGMOID))
        prepared(X, torch.full_like(X, -torch.inf))
        with pytest.warns(QomposeWarning) as caught:
            qompose.convert_pt2e(prepared)
        (warning,) = caught
        _, *lines = str(warning.message).splitlines()
        for name, line in zip(("sigmoid", "sigmoid_1"), lines, strict=True):
            assert f"{name} (toy, rule sigmoid)" in line and "infinite" in line
        assert warning.filename == __file__


def test_the_members_are_not_blamed_for_a_misspelling() -> None:
    def tanh(node: Any) -> None:
        if node.target is aten.tanh.default:
            annotate(node, {node.args[0]: INT8}, INT8)

    converted = convert(PROGRAM, qompose.compose(toy(LINEAR), Annotator(tanh)), X)
    with pytest.raises(TargetError, match="'cuda'"):
        qompose.lower(converted, "cuda")
    with pytest.warns(QomposeWarning, match="tanh .*annotator"):
        qompose.lower(converted)


PREPARED = prepare(PROGRAM, toy(LINEAR))
PREPARED(X)
CONVERTED = qompose.convert_pt2e(PREPARED)
MEMBER = toy(LINEAR)
STEPS: dict[str, Callable[[], Any]] = {
    "prepare_pt2e": lambda: qompose.prepare_pt2e(None, MEMBER),
    "prepare_pt2e without a quantizer": lambda: qompose.prepare_pt2e(PROGRAM, None),
    "calibrate": lambda: qompose.calibrate(None, [X]),
    "calibrate without batches": lambda: qompose.calibrate(PREPARED, None),
    "calibrate with None as a batch": lambda: qompose.calibrate(PREPARED, [None]),
    "convert_pt2e": lambda: qompose.convert_pt2e(None),
    "lower": lambda: qompose.lower(None),
    "lower without a target": lambda: qompose.lower(CONVERTED, None),
    "save": lambda: qompose.save(None, "model"),
    "save without a path": lambda: qompose.save(CONVERTED, None),
    "load": lambda: qompose.load(None),
    "report": lambda: qompose.report(None),
    "assert_lowered": lambda: qompose.assert_lowered(None),
    "assert_quantized": lambda: qompose.assert_quantized(None),
    "assert_quantized without a part": lambda: qompose.assert_quantized(CONVERTED, None),
    "quantize": lambda: qompose.quantize(None, (X,), backends=MEMBER),
    "quantize without backends": lambda: qompose.quantize(PROGRAM, backends=None),
    "quantize with None as a backend": lambda: qompose.quantize(PROGRAM, backends=[None]),
    "quantize for no target": lambda: qompose.quantize(
        PROGRAM, backends=MEMBER, calibration=[X], target=None
    ),
    "compose": lambda: qompose.compose(None),
    "compose with a policy of None": lambda: qompose.compose(MEMBER, on_conflict=None),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_none_is_refused_with_a_message(step: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match=r".{20}"):
        step()


def test_an_annotation_of_the_output_node_itself_is_named() -> None:
    """It has inputs, and makes no tensor: what is said of its output concerns nothing."""

    def both(node: Any) -> None:
        if node.op == "output":
            (result,) = node.args[0]
            annotate(node, {result: INT8}, INT8)

    prepared = prepare(PROGRAM, Annotator(both))
    (claim,) = plan_of(prepared).claims
    assert [str(spec.point) for spec in claim.specs] == ["tanh -> output"]
    assert any("annotation of output by annotator" in note for note in plan_of(prepared).notes)
    with pytest.warns(QomposeWarning):
        alone = qompose.prepare_pt2e(
            PROGRAM, Annotator(lambda n: annotate(n, {}, INT8) if n.op == "output" else None)
        )
    assert any("annotation of output" in note for note in qompose.report(alone).notes)


def test_an_annotation_of_an_integer_input_is_named() -> None:
    lookup = Model(lambda m, ids: m.table(ids), table=nn.Embedding(5, 3))
    program = export(seeded(lookup), torch.tensor([1, 2]))
    member = Annotator(lambda n: annotate(n, {}, INT8) if n.op == "placeholder" else None)
    prepared = prepare(program, qompose.compose(member, toy(CONV)))
    assert any("annotation of ids by annotator" in note for note in plan_of(prepared).notes)
