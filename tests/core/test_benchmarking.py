# SPDX-License-Identifier: Apache-2.0
"""Timing models side by side; no test here depends on how fast anything is."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator

import pytest
import qompose
import torch
from qompose import quantized_model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the models move."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def lasting(clock: list[float], *seconds: float) -> Iterator[float]:
    def call(*inputs: torch.Tensor) -> None:
        clock[0] += next(durations)

    durations = iter(seconds)
    return call  # type: ignore[return-value]


def test_the_median_of_the_rounds_after_the_warm_up_counts(clock: list[float]) -> None:
    models = {
        "float": lasting(clock, 50.0, 4.0, 2.0, 9.0),
        "int8": lasting(clock, 50.0, 1.0, 8.0, 2.0),
    }
    timings = qompose.quantized_model.bench(models, torch.zeros(1), rounds=3, warmup=1)
    assert [(row.name, row.seconds, row.ratio) for row in timings.rows] == [
        ("float", 4.0, 1.0),
        ("int8", 2.0, 0.5),
    ]
    assert json.loads(json.dumps(timings.to_dict()))[1]["ratio"] == 0.5
    assert "0.50 of float" in str(timings)


def test_slower_than_float_is_said_with_the_name_and_the_factor(clock: list[float]) -> None:
    models = {"float": lasting(clock, 1.0, 1.0), "int8": lasting(clock, 3.0, 3.0)}
    with pytest.warns(qompose.QomposeWarning, match=r"slower than float: int8 \(3.00 times\)"):
        qompose.quantized_model.bench(models, rounds=1, warmup=1)


def test_as_fast_as_float_is_no_warning(clock: list[float]) -> None:
    models = {"float": lasting(clock, 1.0, 1.0), "int8": lasting(clock, 1.0, 1.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qompose.quantized_model.bench(models, rounds=1, warmup=1)


@pytest.mark.parametrize(
    ("models", "options", "found"),
    [
        ({}, {}, "not 0 models, rounds=10"),
        ({"float": len}, {"rounds": 0}, "rounds=0"),
        ({"float": len}, {"warmup": -1}, "warmup=-1"),
    ],
    ids=["no models", "no rounds", "less than no warm-up"],
)
def test_nothing_to_time_is_refused(
    models: dict[str, object], options: dict[str, int], found: str
) -> None:
    with pytest.raises(qompose.UserError, match="bench needs a model, a round") as raised:
        quantized_model.bench(models, **options)  # type: ignore[arg-type]
    assert found in str(raised.value)


def test_models_run_without_gradients() -> None:
    seen = []
    models = {"float": lambda x: seen.append((x * 2).requires_grad)}
    qompose.quantized_model.bench(models, torch.ones(1, requires_grad=True), rounds=1)
    assert seen == [False] * 3
