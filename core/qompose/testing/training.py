# SPDX-License-Identifier: Apache-2.0
"""The check that a row is trained as it is deployed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule

from qompose import QomposeWarning, convert_pt2e, prepare_qat_pt2e, training_config
from qompose.schedules import disable_observer
from qompose.testing.building import copies, quantizer_for
from qompose.testing.failures import ContractError, NotApplicable
from qompose.testing.measures import sqnr, tensors_of
from qompose.testing.rows import converts
from qompose.testing.suite import Suite
from qompose.testing.trials import Trial, outputs
from qompose.training_specs import why_not_trained

LEAST_SQNR = 40.0
"""Between what was trained and what is deployed, in decibels."""


def trains(suite: Suite, trial: Trial) -> None:
    """The row is claimed in training too, passes gradients on, and is deployed as it was trained."""
    suite.require(converts, trial)
    reason = why_not_trained(trial.terms.config)
    if reason is not None:
        raise NotApplicable(reason)
    config = training_config(trial.terms.config)
    terms = replace(trial.terms, config=config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QomposeWarning)
            prepared = prepare_qat_pt2e(trial.built.program, quantizer_for(terms, trial.model))
            if not terms.claims_in(prepared):
                raise _failure(trial, "the rule to claim its example", "nothing is claimed")
            _train(trial, prepared)
            simulated = [outputs(prepared, batch) for batch in trial.batches("calibration")]
            converted = convert_pt2e(prepared)
    except ContractError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise _failure(trial, "prepare_qat_pt2e, a step and convert_pt2e", found) from error
    deployed = [outputs(converted, batch) for batch in trial.batches("calibration")]
    least = min(
        sqnr(one, other)
        for ones, others in zip(simulated, deployed, strict=True)
        for one, other in zip(ones, others, strict=True)
    )
    if least < LEAST_SQNR:
        wanted = f"{LEAST_SQNR:g} dB between the fake-quantized and the converted model"
        raise _failure(trial, f"at least {wanted}", f"{least:.1f} dB")


def _train(trial: Trial, prepared: GraphModule) -> None:
    """Take gradients of each batch, and leave the model in evaluation, with its ranges as they are."""
    for batch in trial.batches("calibration"):
        results = [x for x in tensors_of(prepared(*copies(batch))) if x.requires_grad]
        if results:
            sum(x.float().square().mean() for x in results).backward()  # type: ignore[union-attr]
    lost = [name for name, gradient in _gradients(prepared) if not torch.isfinite(gradient).all()]
    if lost:
        raise _failure(trial, "finite gradients", f"those of {', '.join(lost)} are not")
    prepared.eval().apply(disable_observer)


def _gradients(model: GraphModule) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad


def _failure(trial: Trial, expected: str, found: str) -> ContractError:
    return ContractError(
        f"{trial}, in training",
        expected=expected,
        found=found,
        remedy="see that the rule's specifications can be fake-quantized, and that its guard takes the "
        "configuration of `training_config`",
    )
