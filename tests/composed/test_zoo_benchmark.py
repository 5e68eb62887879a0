# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/zoo.py` measures all that backends list, and takes no wrong output for a result."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import qompose
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.mark.full
def test_flows_are_all_that_capabilities_name(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = module("zoo_flows", monkeypatch)
    found = [flow for flow in flows.flows(flows.usable()[0]) if not flow.dynamic]
    rows = [
        row
        for b in qompose.backends()
        for row in flows.load_backend(b.name).quantization_capabilities()
    ]
    named = {(row.backend, row.config, target) for row in rows for target in row.targets}
    alone = {(*flow.members[0], flow.target) for flow in found if len(flow.members) == 1}
    assert alone == {one for one in named if one[0] != "embedding" or one[2] == "torch"}
    assert {flow.backend for flow in found if len(flow.members) > 1} == {
        "embedding + x86_inductor", "embedding + xnnpack",
    }  # fmt: skip
    assert len({flow.name for flow in found}) == len(found)
    assert all(
        flow == flows.Flow.from_dict(json.loads(json.dumps(flow.to_dict()))) for flow in found
    )


X = torch.tensor([1.0, 2.0])


def test_the_worst_output_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = module("zoo_run", monkeypatch)
    found = run.compared([(X, X, torch.arange(4))], [(X, X * 1.1, torch.tensor([0, 1, 2, 9]))])
    assert found["outputs"] == [run.EQUAL, 20.0] and found["same"] == 0.75
    assert found["sqnr"] == pytest.approx(20.0, abs=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [(X, X), X[:1], X.double(), X / torch.tensor([1.0, 0.0])],
    ids=["structure", "shape", "type", "infinite"],
)
def test_a_result_of_another_kind_is_none(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = module("zoo_run", monkeypatch)
    with pytest.raises(run.WrongOutputError):
        run.compared([X], [wrong])


def test_rounding_to_eight_bits_costs_a_linear_layer_what_it_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 steps over 4 standard deviations to either side are 41 dB; input, weight and output cost."""
    rounded = module("zoo_yardstick", monkeypatch)
    torch.manual_seed(0)
    linear, batches = torch.nn.Linear(64, 64), [(torch.randn(256, 64),) for _ in range(2)]
    program = torch.export.export(linear, batches[0]).module()
    (result,) = rounded.rounded_outputs(program, batches[:1], batches[1:])
    with torch.no_grad():
        wanted = linear(*batches[1])
    noise = float((wanted - result).square().sum() / wanted.square().sum())
    assert 1e-5 < noise < 3e-4
