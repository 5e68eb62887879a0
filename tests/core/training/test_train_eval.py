# SPDX-License-Identifier: Apache-2.0
"""Train and eval under torchao's names, and what a training loop switches on the way."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, training
from qompose.errors import ConfigError, StageError
from qompose.observers import FakeQuantize
from qompose.training import QATSchedule
from qompose.training.train_eval import BatchNorm
from torch import nn
from torch.fx import GraphModule

from tests.core.qat import batch_for, prepared_for, product_model, product_quantizer
from tests.core.toy import operators

X = batch_for("linear")


def model() -> nn.Module:
    return product_model("linear", "relu", bias=True).train()


def trained() -> GraphModule:
    prepared = prepared_for(model(), X)
    prepared(X)
    return prepared


def repeats_itself(module: Any) -> bool:
    """Whether neither dropouts nor batch statistics are at work; the model has both."""
    others = torch.cat([X[:2], torch.zeros_like(X[2:])])
    with torch.no_grad():
        first, second = module(X), module(X)
        return torch.equal(first, second) and torch.equal(module(others)[:2], first[:2])


def test_prepared_models_are_switched() -> None:
    prepared = trained()
    assert not repeats_itself(prepared)
    assert training.move_exported_model_to_eval(prepared) is prepared
    assert not prepared.training
    assert training.allow_exported_model_train_eval(prepared) is prepared
    prepared.apply(training.disable_observer)
    assert repeats_itself(prepared)
    assert training.move_exported_model_to_train(prepared).training
    assert not repeats_itself(prepared)


def test_eval_is_for_every_stage() -> None:
    done = qompose.convert_pt2e(trained())
    assert training.move_exported_model_to_eval(done) is done
    assert training.allow_exported_model_train_eval(done) is done
    assert not done.training


def test_a_program_exported_in_training_goes_into_evaluation() -> None:
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model(), (X,), dynamic_shapes=(batch,))
    module = program.module(check_guards=False)
    assert not repeats_itself(module)
    assert training.move_exported_model_to_eval(module) is module
    assert repeats_itself(module)
    wanted = model().eval()
    wanted.load_state_dict(module.state_dict())
    assert torch.allclose(module(X), wanted(X), atol=1e-6)
    assert not qompose.prepare_qat_pt2e(module, product_quantizer()).training


def exported(mode: bool) -> GraphModule:
    """The model as exported, with any number of rows, in training or in evaluation."""
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model().train(mode), (X,), dynamic_shapes=(batch,))
    return program.module(check_guards=False)


def counted(module: GraphModule) -> list[int]:
    return [int(b) for name, b in module.named_buffers() if name.endswith("num_batches_tracked")]


@pytest.mark.parametrize("mode", [True, False], ids=["exported in training", "in evaluation"])
def test_an_exported_program_goes_both_ways(mode: bool) -> None:
    module = exported(mode)
    assert training.move_exported_model_to_eval(module) is module
    assert repeats_itself(module)
    assert training.move_exported_model_to_train(module) is module
    before, kept = counted(module), {n: b.clone() for n, b in module.named_buffers()}
    module(X)
    if mode:  # in evaluation they are not in the program
        assert [after - b for after, b in zip(counted(module), before, strict=True)] == [1, 1]
    assert not repeats_itself(module)
    moved = [n for n, b in module.named_buffers() if "running" in n and not torch.equal(b, kept[n])]
    assert len(moved) == 4
    assert repeats_itself(training.move_exported_model_to_eval(module))


def test_a_frozen_batch_norm_stays_frozen_through_both_modes() -> None:
    frozen = model()
    frozen[1].eval()
    module = torch.export.export(frozen, (X,)).module()
    training.move_exported_model_to_train(training.move_exported_model_to_eval(module))
    kept = {n: b.clone() for n, b in module.named_buffers()}
    module(X)
    moved = {n.split(".")[0] for n, b in module.named_buffers() if not torch.equal(b, kept[n])}
    assert "1" not in moved
    assert moved


def test_allowed_programs_have_train_and_eval() -> None:
    module = exported(True)
    with pytest.raises(NotImplementedError):  # torch's own
        module.eval()
    assert training.allow_exported_model_train_eval(module) is module
    assert repeats_itself(module.eval())
    assert not repeats_itself(module.train())
    assert repeats_itself(module.train(False))


def test_the_dropouts_of_a_converted_model_come_back() -> None:
    converted = training.allow_exported_model_train_eval(qompose.convert_pt2e(trained()))
    assert repeats_itself(converted)
    assert converted.train().training
    assert not repeats_itself(converted)
    assert not converted.eval().training
    assert repeats_itself(converted)


def test_a_program_moved_about_is_trained_like_any_other() -> None:
    module = training.move_exported_model_to_eval(exported(True))
    prepared = qompose.prepare_qat_pt2e(module, product_quantizer()).train()
    before = counted(prepared)
    prepared(X)
    assert [after - b for after, b in zip(counted(prepared), before, strict=True)] == [1, 1]


def test_what_was_not_exported_is_refused() -> None:
    for name in ("to_train", "to_eval"):
        with pytest.raises(StageError, match="Sequential"):
            getattr(training, f"move_exported_model_{name}")(model())
    with pytest.raises(StageError, match="ExportedProgram"):
        training.allow_exported_model_train_eval(torch.export.export(model(), (X,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("called", [True, False])
def test_torchaos_functions_are_told_to_do_nothing(
    called: bool, recwarn: pytest.WarningsRecorder
) -> None:
    prepared = trained()
    if called:  # what they leave on a model; tests/interop calls them themselves
        prepared._exported_training = False  # type: ignore[assignment]
    qompose.convert_pt2e(prepared)
    said = [str(w.message) for w in recwarn if w.category is QomposeWarning]
    assert ["qompose" in message for message in said] == [True] * called


def state_of(model: GraphModule) -> tuple[bool, bool, bool]:
    """Whether it simulates, observes, and takes batch statistics; the same in all of the model."""
    fakes = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
    (found,) = {
        (bool(f.fake_quant_enabled), bool(f.observer_enabled), not n.frozen)
        for f in fakes
        for n in norms
    }
    return found


SCHEDULE = QATSchedule(fake_quantize_from=2, observers_until=4, batch_norm_until=3)
STATES = {
    0: (False, True, True), 1: (False, True, True), 2: (True, True, True),
    3: (True, True, False), 4: (True, False, False), 9: (True, False, False),
}  # fmt: skip


@pytest.mark.parametrize("steps", [[*STATES], [9, 0, 4, 2]], ids=["in order", "resumed"])
def test_a_step_has_its_state(steps: list[int]) -> None:
    prepared = prepared_for(model(), X)
    for step in steps:
        SCHEDULE.apply(prepared, step)
        assert state_of(prepared) == STATES[step]


def test_by_itself_all_goes_on() -> None:
    prepared = prepared_for(model(), X)
    QATSchedule().apply(prepared, 10**6)
    assert state_of(prepared) == (True, True, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fake_quantize_from", -1), ("batch_norm_until", True), ("observers_until", 0)],
)
def test_what_is_no_schedule(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        QATSchedule(**{name: value})


def test_other_modules_are_left_alone() -> None:
    model = product_model("linear", "relu", bias=True)
    for name in ("observer", "fake_quant"):
        model.apply(getattr(training, f"disable_{name}"))
        model.apply(getattr(training, f"enable_{name}"))
    model.apply(training.freeze_batch_norm).apply(training.unfreeze_batch_norm)
    assert not hasattr(model[1], "frozen")


def test_only_a_change_of_mode_makes_new_code() -> None:
    program = torch.export.export(
        nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()).train(), (X[:, :3],)
    )
    module = training.allow_exported_model_train_eval(program.module())
    made: list[None] = []
    module.recompile = lambda: made.append(None)  # type: ignore[assignment, return-value]
    for switch, expected in (
        *((module.train, 1), (module.train, 1), (module.eval, 2)),
        *((module.eval, 2), (module.train, 3), (module.train, 3)),
    ):
        switch()
        assert len(made) == expected
    assert operators(module)["add_"] == 1
