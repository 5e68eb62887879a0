# SPDX-License-Identifier: Apache-2.0
"""The example of training keeps its promises, and says so where a figure is worse."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from collections.abc import Iterator
from types import ModuleType

import pytest
from rich.console import Console

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def qat() -> Iterator[ModuleType]:
    for package in ("sklearn", "qompose_xnnpack"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("qat_digits")


def results(qat: ModuleType, *accuracies: float) -> list[object]:
    names = ("float", "calibrated, 8 bits", "trained, 8 bits", "calibrated, 4 bits",
             "trained, 4 bits")  # fmt: skip
    return [qat.Result(n, a, 1.0, [a]) for n, a in zip(names, accuracies, strict=True)]


@pytest.mark.long  # other processors round otherwise, and an image is 0.22 points
def test_training_brings_accuracy_back(
    qat: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qat, "MAX_SECONDS", float("inf"))  # others run beside the tests
    code = qat.main([])
    shown = capsys.readouterr().out
    assert (code, shown.count("FAILED")) == (0, 0), shown
    assert "trained, 4 bits" in shown and "All 5 checks hold." in shown


@pytest.mark.parametrize(
    ("accuracies", "seconds", "failed"),
    [
        ((0.99, 0.99, 0.99, 0.90, 0.985), 60, []),
        ((0.97, 0.97, 0.97, 0.90, 0.97), 60, ["float: accuracy"]),
        ((0.99, 0.99, 0.985, 0.90, 0.985), 60, ["trained, 8 bits"]),
        ((0.99, 0.99, 0.99, 0.95, 0.985), 60, ["calibrated, 4 bits"]),
        ((0.99, 0.99, 0.99, 0.90, 0.96), 60, ["trained, 4 bits"]),
        ((0.99, 0.99, 0.99, 0.90, 0.985), 121, ["seconds in all"]),
    ],
)
def test_what_is_worse_fails(
    qat: ModuleType, accuracies: tuple[float, ...], seconds: float, failed: list[str]
) -> None:
    made = qat.checks(results(qat, *accuracies), seconds)
    names = [check.what for check in made if not check.holds]
    assert [name.partition(": points")[0] for name in names] == failed


def test_the_plot_shows_where_float_is(qat: ModuleType) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(qat.curves(results(qat, 1.0, 0.8, 0.8, 0.8, 0.9)))
    lines = [line for line in captured.get().splitlines() if "4 bits" in line]
    assert lines[1].count("█") == qat.BAR // 2
    assert lines[1].index("|") > lines[1].rindex("█")
