# SPDX-License-Identifier: Apache-2.0
"""What users give sensitivity and tune by mistake, files that were changed, and scores without bound."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import qompose
from qompose import UserError
from torch import nn

from tests.core.toy import export, prepare, randn, seeded, toy

X = randn(16, 4)
PROGRAM = export(seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), X)


def tuned(metric: Any, drop: float = 0.0, **options: Any) -> qompose.diagnosis.Tuning:
    data = options.pop("data", [X])
    return qompose.tune(PROGRAM, toy(), data, metric, drop, progress=False, **options)


def exact(model: Any) -> float:
    """The power of the error, below zero."""
    return -float((model(X) - PROGRAM.module()(X)).detach().square().sum())


@pytest.mark.parametrize("limit", [0, -1, 2.5, "two", True])
def test_limits_that_are_none(limit: Any) -> None:
    prepared = prepare(PROGRAM, toy())
    prepared(X)
    with pytest.raises(UserError, match="limit"):
        qompose.sensitivity(prepared, [X], limit=limit)
    with pytest.raises(UserError, match="limit"):
        tuned(exact, data=iter([X]), limit=limit)


def test_rankings_of_another_model() -> None:
    with pytest.raises(UserError, match="ranking"):
        tuned(exact, ranking={})  # type: ignore[arg-type]
    image = randn(1, 3, 4, 4)
    other = prepare(export(seeded(nn.Conv2d(3, 3, 1)), image), toy())
    other(image)
    with pytest.raises(UserError, match="ranking"):
        tuned(exact, ranking=qompose.sensitivity(other, [image]))


def test_scores_without_bound_are_written(tmp_path: Path) -> None:
    prepared = qompose.calibrate(prepare(PROGRAM, toy()), [X])
    worst = exact(qompose.convert_pt2e(prepared))

    def metric(model: Any) -> float:
        score = exact(model)
        return -math.inf if math.isclose(score, worst, rel_tol=1e-4) else score

    found = tuned(metric, drop=1e9)
    assert found.quantized_score == -math.inf
    assert found.attempts[0].drop == math.inf
    json.dumps(found.to_dict(), allow_nan=False)
    found.save(tmp_path / "tuned.json")
    assert qompose.diagnosis.Tuning.load(tmp_path / "tuned.json") == found


def test_data_that_is_a_single_batch() -> None:
    with pytest.raises(UserError, match="tune"):
        tuned(exact, data=X)


def test_scores_without_bound_are_told_in_words() -> None:
    asked: list[Any] = []

    def metric(model: Any) -> float:
        asked.append(model)
        return 0.0 if len(asked) == 1 else -math.inf

    with pytest.raises(qompose.errors.TuningError) as caught:
        tuned(metric)
    assert "-inf" in str(caught.value)
    assert caught.value.tuning.score == -math.inf
    assert "inf dB" not in str(caught.value.tuning)
