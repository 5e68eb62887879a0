# SPDX-License-Identifier: Apache-2.0
"""What a model asks of the machine: asked once, kept with the model, and held against every machine."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning
from qompose.backend import Finished, RuleUse, Target, discovery
from qompose.errors import (
    ArtefactError,
    ConfigError,
    MemberError,
    RequirementError,
    RequirementWarning,
)
from qompose.storage.program_json import decode_record, encode_record
from torch import nn
from torch.fx import GraphModule

from tests.core.offering import offered_by_a_package
from tests.core.toy import (
    INT8,
    LINEAR,
    VIEW,
    WEIGHT,
    Model,
    ToyBackend,
    convert,
    export,
    randn,
    seeded,
    toy,
)

X = randn(6, 8)
BITS = {"bits": "many"}


class Here:
    """A machine, and the toy backend's opinion of it."""

    def __init__(self) -> None:
        self.uses: list[Sequence[RuleUse]] = []
        self.reason: str | None = None
        self.answer: Any = BITS

    def requirements(self, uses: Sequence[RuleUse]) -> Any:
        self.uses.append(uses)
        return self.answer

    def objection(self, requirements: Mapping[str, str]) -> str | None:
        assert requirements == BITS
        return self.reason

    @property
    def facts(self) -> dict[str, Callable[..., Any]]:
        return {"requirements": self.requirements, "objection": self.objection}


@pytest.fixture
def here() -> Iterator[Here]:
    """The toy backend as installed, here."""
    machine = Here()
    with offered_by_a_package(lambda: ToyBackend(**machine.facts)):
        yield machine


def mlp() -> nn.Module:
    layers = {"first": nn.Linear(8, 16), "second": nn.Linear(16, 4)}
    return seeded(Model(lambda m, x: m.second(m.first(x).view(-1, 16)), **layers))


def converted(**facts: Any) -> GraphModule:
    return convert(export(mlp(), X), toy(LINEAR, VIEW, **facts), X)


def test_a_backend_is_asked_once_with_the_specification_of_each_role(here: Here) -> None:
    model = converted(**here.facts)
    (uses,) = here.uses
    linears = {"input": INT8, "weight": WEIGHT, "output": INT8}
    assert [(use.rule, use.mode, dict(use.specs)) for use in uses] == [
        ("linear", "static", linears),
        ("linear", "static", linears),
        ("view", "static", {"self": INT8, "output": INT8}),
    ]
    for stage in (model, qompose.lower(model)):
        assert any("bits many" in note for note in qompose.report(stage).notes)


def test_claims_that_were_not_followed_ask_for_nothing(here: Here) -> None:
    prepared = qompose.prepare_pt2e(export(mlp(), X), toy(LINEAR, **here.facts))
    with pytest.warns(QomposeWarning):
        model = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    assert here.uses == []
    assert not any("bits" in note for note in qompose.report(model).notes)


@pytest.mark.parametrize("answer", [None, {"bits": 8}, {8: "bits"}, ["bits"]], ids=str)
def test_an_answer_that_cannot_be_stored(here: Here, answer: Any) -> None:
    here.answer = answer
    with pytest.raises(ConfigError, match="backend 'toy': requirements"):
        converted(**here.facts)


def test_a_backend_that_fails_is_named() -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("no idea")

    with pytest.raises(MemberError, match="backend 'toy': requirements"):
        converted(requirements=fail)
    model = converted(requirements=lambda uses: BITS, objection=fail)
    with pytest.raises(MemberError, match="backend 'toy': objection"):
        qompose.lower(model)


def test_a_machine_that_has_it_is_told_nothing(here: Here, tmp_path: Path) -> None:
    qompose.save(converted(**here.facts), tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = qompose.load(tmp_path / "model")
        qompose.lower(loaded)
    assert any("bits many" in note for note in qompose.report(loaded).notes)


class TestAnotherMachine:
    """The model says `bits many`, and there are few."""

    def saved(self, here: Here, path: Path) -> GraphModule:
        model = converted(**here.facts)
        qompose.save(model, path)
        here.reason = "there are few; buy some"
        return model

    def test_refuses_to_load(self, here: Here, tmp_path: Path) -> None:
        self.saved(here, path := tmp_path / "model")
        said = r"(?s)toy.*there are few; buy some.*allow_mismatch"
        with pytest.raises(RequirementError, match=said):
            qompose.load(path)
        assert issubclass(RequirementError, ArtefactError)

    def test_loads_what_is_asked_for_all_the_same(self, here: Here, tmp_path: Path) -> None:
        model = self.saved(here, tmp_path / "model")
        with pytest.warns(RequirementWarning, match=r"toy .*there are few") as said:
            loaded = qompose.load(tmp_path / "model", allow_mismatch=True)
        with pytest.warns(RequirementWarning, match=r"toy .*there are few") as again:
            lowered = qompose.lower(loaded)
        assert [Path(w.filename).name for w in (*said, *again)] == ["test_requirements.py"] * 2
        assert torch.equal(loaded(X), model(X))
        assert qompose.report(lowered).count("int8 kernel") == 3

    @pytest.mark.parametrize("runs_here", [False, True])
    def test_matters_to_a_runtime_that_runs_here(self, here: Here, runs_here: bool) -> None:
        chip = Target("chip", lambda model, signature: Finished(model), runs_here=runs_here)
        rule = replace(LINEAR, kernels={"chip": LINEAR.kernels["torch"]})
        here.reason = "there are few"
        program = export(seeded(nn.Linear(8, 4)), X)
        model = convert(program, toy(rule, targets=(chip,), **here.facts), X)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            qompose.lower(model, "chip")
        assert [w.category for w in said] == [RequirementWarning] * runs_here


def test_without_its_backend_a_model_loads_as_before(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qompose.save(converted(**here.facts), tmp_path / "model")
    monkeypatch.setattr(discovery, "entry_points", lambda group: [])
    assert torch.equal(qompose.load(tmp_path / "model")(X), converted()(X))


def test_forged_requirements_are_refused() -> None:
    data = encode_record(converted(requirements=lambda uses: BITS).meta["qompose"])
    forged = json.loads(json.dumps(data["requirements"]).replace('"many"', "7"))
    with pytest.raises(ConfigError, match=r"record\.requirements\.toy\.bits"):
        decode_record({**data, "requirements": forged})
