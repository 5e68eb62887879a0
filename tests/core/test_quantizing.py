# SPDX-License-Identifier: Apache-2.0
"""What the result of the one call can do; no test here depends on how fast anything is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizedModel, UserError
from qompose.errors import TargetError
from torch import Tensor, nn

from tests.core.toy import LINEAR, export, randn, seeded, toy

X = randn(6, 3)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor, *, factor: Tensor) -> Tensor:
        return self.linear(x) * factor


def quantized(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> QuantizedModel:
    program = torch.export.export(seeded(module), args, kwargs)
    prepared = qompose.prepare_pt2e(program, toy(LINEAR))
    prepared(*args, **kwargs)
    converted = qompose.convert_pt2e(prepared)
    return QuantizedModel(program, converted, qompose.lower(converted), toy(LINEAR))


class Timed:
    """A model that moves a clock, and remembers its inputs."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.calls: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((args, kwargs))
        self.clock[0] += self.seconds


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timed]:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    return lambda seconds: Timed(clock, seconds)


def test_float_lowered_and_compiled_are_timed_in_turns(timed: Callable[[float], Timed]) -> None:
    result = quantized(nn.Linear(3, 4), X)
    slow, fast = timed(3.0), timed(1.0)
    object.__setattr__(result, "model", slow)
    result.compiled["max-autotune"] = fast  # type: ignore[assignment]
    float_time = timed(2.0)
    object.__setattr__(result.exported, "module", lambda: float_time)
    with pytest.warns(qompose.QomposeWarning, match=r"than float: lowered \(1.50 times\)$") as said:
        timings = result.benchmark(X, rounds=2, warmup=1)
    assert [Path(w.filename).name for w in said] == ["test_quantizing.py"]
    assert [(row.name, row.seconds, row.ratio) for row in timings.rows] == [
        ("float", 2.0, 1.0),
        ("lowered", 3.0, 1.5),
        ("compiled, max-autotune", 1.0, 0.5),
    ]
    assert json.loads(json.dumps(timings.to_dict()))[2]["ratio"] == 0.5
    assert [len(model.calls) for model in (float_time, slow, fast)] == [3, 3, 3]
    assert "compiled, max-autotune   1000.000 ms" in str(timings)


@pytest.mark.filterwarnings("ignore:slower than float:qompose.QomposeWarning")
def test_without_inputs_the_example_inputs_are_those_of_export() -> None:
    result = quantized(Scaled(), X, factor=torch.tensor(2.0))
    assert [row.name for row in result.benchmark(rounds=1).rows] == ["float", "lowered"]


def test_keywords_of_a_call(timed: Callable[[float], Timed]) -> None:
    result, model = quantized(Scaled(), X, factor=torch.tensor(2.0)), timed(1.0)
    object.__setattr__(result, "model", model)
    object.__setattr__(result.exported, "module", lambda: model)
    result.benchmark(X, keywords={"factor": X}, rounds=1, warmup=0)
    assert [kwargs for _, kwargs in model.calls] == [{"factor": X}] * 2


def test_a_program_without_example_inputs_needs_some() -> None:
    result = quantized(nn.Linear(3, 4), X)
    result.exported.example_inputs = None
    with pytest.raises(UserError, match="benchmark needs inputs"):
        result.benchmark()


def test_what_cannot_be_called_is_not_timed() -> None:
    result = QuantizedModel(export(nn.Linear(3, 4), X), None, b"program", toy(LINEAR))  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="A bytes cannot be called beside the float program"):
        result.benchmark(X)


def test_compile_keeps_what_it_made_by_mode() -> None:
    result = quantized(nn.Linear(3, 4), X)
    compiled = result.compile()
    assert result.compiled == {"default": compiled}
    torch.testing.assert_close(compiled(X), result.model(X))
    with pytest.raises(UserError, match="mode must be one of"):
        result.compile("fast")
    assert [*result.compiled] == ["default"]
    torch._dynamo.reset()
