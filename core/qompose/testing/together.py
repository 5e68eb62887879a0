# SPDX-License-Identifier: Apache-2.0
"""The checks on one model of all rows: it is saved and loaded, and shared by quantizers of two backends."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qompose import (
    ComposableQuantizer,
    QomposeWarning,
    Quantizer,
    Report,
    RuleQuantizer,
    convert_pt2e,
    load,
    lower,
    prepare_pt2e,
    report,
    save,
)
from qompose.ledger import FLOAT_KERNEL, KERNEL
from qompose.lowering import TORCH_TARGET
from qompose.plan import META_KEY, attach
from qompose.testing.agreeing import matches_reference
from qompose.testing.building import Inputs, copies
from qompose.testing.failures import ContractError, NotApplicable
from qompose.testing.measures import sqnr
from qompose.testing.models import BEHIND, FRONT, Model, surroundings
from qompose.testing.rows import annotates, converts
from qompose.testing.suite import Suite
from qompose.testing.trials import Trial, outputs


class _AllRows(nn.Module):
    """The models of several rows, side by side, with the inputs of each in turn."""

    def __init__(self, models: Sequence[Model], counts: Sequence[int]) -> None:
        super().__init__()
        self.models, self.counts = nn.ModuleList(models), tuple(counts)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all rows."""
        results: list[Tensor] = []
        rest = inputs
        for model, count in zip(self.models, self.counts, strict=True):
            results += model(*rest[:count])
            rest = rest[count:]
        return tuple(results)


@dataclass
class Gathering:
    """The rows of a backend that fit one configuration, as one model."""

    suite: Suite
    name: str

    def __post_init__(self) -> None:
        self.trials = list(self._sound_trials())
        if not self.trials:
            raise NotApplicable(f"no row of config {self.name!r} annotates and converts")
        self.model = _AllRows(
            [trial.model for trial in self.trials],
            [len(trial.batches("calibration", 1)[0]) for trial in self.trials],
        ).eval()
        per_trial = [trial.batches("calibration") for trial in self.trials]
        self.batches: list[Inputs] = [
            tuple(x for batch in batches for x in batch) for batches in zip(*per_trial, strict=True)
        ]
        with torch.no_grad():
            self.program = torch.export.export(self.model, copies(self.batches[0]))

    def _sound_trials(self) -> Any:
        """Yield the trials of rows that work alone: what does not has a check of its own."""
        for case in self.suite.cases():
            if case.config == self.name:
                trial: Trial = self.suite.trial(case)
                try:
                    self.suite.require(annotates, trial)
                    self.suite.require(converts, trial)
                    self._require_kernel(trial)
                except NotApplicable:
                    continue
                yield trial

    def _require_kernel(self, trial: Trial) -> None:
        if TORCH_TARGET.name in trial.terms.rule.kernels and self.suite.in_process:
            self.suite.require(matches_reference, trial, TORCH_TARGET.name)

    def quantizer(self, *members: Quantizer) -> Quantizer:
        """Return the quantizers of what stands around the rows, and others behind them."""
        models = dict(enumerate(trial.model for trial in self.trials))
        around = surroundings(
            self.suite.backend.configs[self.name],
            [f"models.{i}.{FRONT}" for i, model in models.items() if model.front is not None],
            [f"models.{i}.{BEHIND}" for i, model in models.items() if model.behind is not None],
            self.suite.known_targets,
        )
        return ComposableQuantizer([*around, *members])

    def converted(self, *members: Quantizer) -> GraphModule:
        """Return the Q/DQ program that quantizers make of all rows."""
        prepared = prepare_pt2e(self.program, self.quantizer(*members))
        with torch.no_grad():
            for batch in self.batches:
                prepared(*copies(batch))
        return convert_pt2e(prepared)


def gathering(suite: Suite, name: str) -> Gathering:
    """Return the rows of a configuration as one model, made once."""
    found: Gathering = suite.keep(("gathering", name), lambda: Gathering(suite, name))
    return found


def saves(suite: Suite, name: str) -> None:
    """A converted model of all rows is saved and loaded bit for bit, and lowers again in the same way."""
    rows = gathering(suite, name)
    subject = f"backend {suite.backend.name!r}, config {name!r}, one model of all rows"
    remedy = (
        "let kernels and patterns be functions of the graph alone, and hold no state of a model"
    )
    converted, batch = rows.converted(suite.quantizer(suite.backend.configs[name])), rows.batches[0]
    loaded = _through_a_file(converted, subject)
    _expect_equal(
        subject, "the loaded model", outputs(loaded, batch), outputs(converted, batch), remedy
    )
    if not suite.in_process:
        return
    # A loaded model finds installed backends, and not what stands around the rows.
    backends = {**converted.meta[META_KEY].backends, suite.backend.name: suite.backend}
    attach(loaded, replace(loaded.meta[META_KEY], backends=backends))
    first, again = _lowered(converted), _lowered(loaded)
    kernels = [[(r.name, r.state, r.kernel) for r in report(m).rows] for m in (first, again)]
    if kernels[0] != kernels[1]:
        raise ContractError(
            subject,
            expected="the loaded model to lower to the same kernels",
            found=str(next((a, b) for a, b in zip(*kernels, strict=True) if a != b)),
            remedy=remedy,
        )
    _expect_equal(
        subject,
        "what the loaded model lowers to",
        outputs(again, batch),
        outputs(first, batch),
        remedy,
    )


def _through_a_file(converted: GraphModule, subject: str) -> GraphModule:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.qompose"
        try:
            save(converted, path)
            loaded: GraphModule = load(path)
            return loaded
        except Exception as error:
            raise ContractError(
                subject,
                expected="save and load to take the converted model",
                found=f"{type(error).__name__}: {error}",
                remedy="rewrite graphs with operators of torch and registered custom ones only",
            ) from error


def _lowered(model: GraphModule) -> Any:
    with warnings.catch_warnings():  # regions without a kernel have a check of their own
        warnings.simplefilter("ignore", QomposeWarning)
        return lower(model, "torch")


def _expect_equal(
    subject: str, what: str, actual: list[Tensor], wanted: list[Tensor], remedy: str
) -> None:
    unequal = [
        i for i, pair in enumerate(zip(actual, wanted, strict=True)) if not torch.equal(*pair)
    ]
    if unequal:
        raise ContractError(
            subject,
            expected=f"outputs of {what} that are equal bit for bit",
            found=f"other values in output {unequal[0]}",
            remedy=remedy,
        )


def composes(suite: Suite, name: str, partner: str, first: bool) -> None:
    """With another backend's quantizer, before it or behind it, all rows stay right and losers are named."""
    rows = gathering(suite, name)
    own = suite.quantizer(suite.backend.configs[name])
    other = _partner(suite, rows, partner)
    members = (own, other) if first else (other, own)
    subject = (
        f"backend {suite.backend.name!r}, config {name!r}, composed with {partner!r} "
        f"({'before' if first else 'behind'} it)"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QomposeWarning)
        converted = _tried(subject, "prepare and convert", lambda: rows.converted(*members))
        lowered = (
            _tried(subject, "lower to 'torch'", lambda: lower(converted, "torch"))
            if suite.in_process
            else converted
        )
    for stage in (converted, lowered):
        _check_quality(suite, rows, subject, stage)
    if suite.in_process:
        _check_report(subject, report(lowered), {member.name for member in members})


def _partner(suite: Suite, rows: Gathering, partner: str) -> Quantizer:
    """Return the other quantizer; for the backend itself, one that selects half of the rows."""
    if partner != suite.backend.name:
        other = RuleQuantizer(suite.installed[partner])
        return other.set_global(suite.installed[partner].default_config)
    half = suite.bare_quantizer()
    half.set_global(None)
    for number in range(0, len(rows.trials), 2):
        half.set_module_name(f"models.{number}", suite.backend.configs[rows.name])
    return half


def _tried(subject: str, what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        raise ContractError(
            subject,
            expected=f"a composition to {what}",
            found=f"{type(error).__name__}: {error}",
            remedy="let no rule, guard, kernel or hook count on being the only quantizer",
        ) from error


def _check_quality(suite: Suite, rows: Gathering, subject: str, model: Any) -> None:
    batch = rows.batches[0]
    wanted, actual = outputs(rows.model, batch), outputs(model, batch)
    worst = min(range(len(wanted)), key=lambda i: sqnr(wanted[i], actual[i]))
    least = suite.least_sqnr(suite.backend.configs[rows.name])
    if sqnr(wanted[worst], actual[worst]) < least:
        raise ContractError(
            f"{subject}, {model.meta[META_KEY].stage}",
            expected=f"at least {least:.3g} dB on each row (min_sqnr)",
            found=f"{sqnr(wanted[worst], actual[worst]):.1f} dB in output {worst}",
            remedy="see what specifications meet there, and whether the kernel reads those of its inputs",
        )


def _check_report(subject: str, found: Report, members: set[str]) -> None:
    """Check that every operator has an owner or a reason, and that what lost is named."""
    for row in found.rows:
        owner = row.owner.partition("#")[0]
        known = owner in members or owner == "contract"
        if (row.owner and not known) or (
            row.state not in (KERNEL, FLOAT_KERNEL) and not row.reason.strip()
        ):
            raise ContractError(
                subject,
                expected="an owner, or a reason, for every operator in the report",
                found=str(row),
                remedy="let kernels and guards say why they refuse",
            )
    for conflict in found.conflicts:
        if not str(conflict).strip():
            raise ContractError(
                subject,
                expected="conflicts that name who lost what to whom",
                found=repr(conflict),
                remedy="leave the claims of other members alone",
            )
