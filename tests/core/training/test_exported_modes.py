# SPDX-License-Identifier: Apache-2.0
"""Train and eval under torchao's names: what they do to a model of each stage, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning
from qompose.errors import StageError
from torch import nn
from torch.fx import GraphModule

from tests.core.qat import batch_for, prepared_for, product_model, product_quantizer

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
    assert qompose.training.move_exported_model_to_eval(prepared) is prepared
    assert not prepared.training
    assert qompose.training.allow_exported_model_train_eval(prepared) is prepared
    prepared.apply(qompose.training.disable_observer)
    assert repeats_itself(prepared)
    assert qompose.training.move_exported_model_to_train(prepared).training
    assert not repeats_itself(prepared)


@pytest.mark.parametrize("form", [qompose.convert_pt2e, lambda m: m], ids=["converted", "prepared"])
def test_eval_is_for_every_stage(form: Any) -> None:
    done = form(trained())
    assert qompose.training.move_exported_model_to_eval(done) is done
    assert qompose.training.allow_exported_model_train_eval(done) is done
    assert not done.training


def test_a_program_exported_in_training_goes_into_evaluation() -> None:
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model(), (X,), dynamic_shapes=(batch,))
    module = program.module(check_guards=False)
    assert not repeats_itself(module)
    assert qompose.training.move_exported_model_to_eval(module) is module
    assert repeats_itself(module)
    wanted = model().eval()
    wanted.load_state_dict(module.state_dict())
    assert torch.allclose(module(X), wanted(X), atol=1e-6)
    prepared = qompose.prepare_qat_pt2e(module, product_quantizer())
    assert not prepared.training


def test_what_has_no_training_is_refused() -> None:
    converted = qompose.convert_pt2e(trained())
    with pytest.raises(StageError, match="takes a prepared model, got a converted one"):
        qompose.training.move_exported_model_to_train(converted)
    exported = torch.export.export(model(), (X,)).module()
    for function in (
        qompose.training.move_exported_model_to_train,
        qompose.training.allow_exported_model_train_eval,
    ):
        with pytest.raises(StageError, match=r"got 'GraphModule'.*exported in either mode"):
            function(exported)
    with pytest.raises(StageError, match=r"got 'Sequential'.*model\.eval"):
        qompose.training.move_exported_model_to_eval(model())


@pytest.mark.parametrize("called", [True, False])
def test_torchaos_functions_are_told_to_do_nothing(
    called: bool, recwarn: pytest.WarningsRecorder
) -> None:
    prepared = trained()
    if called:  # what they leave on a model; tests/interop calls them themselves
        prepared._exported_training = False  # type: ignore[assignment]
        with pytest.warns(QomposeWarning, match=r"did nothing.*Import these from qompose"):
            qompose.convert_pt2e(prepared)
    else:
        qompose.convert_pt2e(prepared)
        assert not [w for w in recwarn if w.category is QomposeWarning]
