# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/zoo.py` takes no wrong output for a result."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("zoo_run")


X = torch.tensor([1.0, 2.0])


def test_the_worst_output_counts(run: Any) -> None:
    found = run.compared([(X, X, torch.arange(4))], [(X, X * 1.1, torch.tensor([0, 1, 2, 9]))])
    assert found["outputs"] == [run.EQUAL, 20.0] and found["same"] == 0.75
    assert found["sqnr"] == pytest.approx(20.0, abs=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [(X, X), X[:1], X.double(), X / torch.tensor([1.0, 0.0])],
    ids=["structure", "shape", "type", "infinite"],
)
def test_a_result_of_another_kind_is_none(wrong: Any, run: Any) -> None:
    with pytest.raises(run.WrongOutputError):
        run.compared([X], [wrong])


def test_rounding_to_eight_bits_costs_a_linear_layer_what_it_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 steps over 4 standard deviations to either side are 41 dB; input, weight and output cost."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rounded = importlib.import_module("zoo_yardstick")
    torch.manual_seed(0)
    linear, batches = torch.nn.Linear(64, 64), [(torch.randn(256, 64),) for _ in range(2)]
    program = torch.export.export(linear, batches[0]).module()
    (result,) = rounded.rounded_outputs(program, batches[:1], batches[1:])
    with torch.no_grad():
        wanted = linear(*batches[1])
    noise = float((wanted - result).square().sum() / wanted.square().sum())
    assert 1e-5 < noise < 3e-4
