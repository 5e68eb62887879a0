# SPDX-License-Identifier: Apache-2.0
"""The checks of what a row takes and refuses: its constraints are enforced, and kept at their edges."""

from __future__ import annotations

import torch

from qompose import ConfigError, UserError, report
from qompose.ledger import KERNEL
from qompose.specs import describe_spec
from qompose.testing.agreeing import matches_reference
from qompose.testing.failures import Blocked, ContractError, NotApplicable
from qompose.testing.limits import Limit, beyond, covering, limits
from qompose.testing.measures import sqnr
from qompose.testing.rows import annotates, lowers
from qompose.testing.suite import Case, Suite
from qompose.testing.trials import Trial, outputs


def accepted_limits(suite: Suite, case: Case) -> list[Limit]:
    """Return configurations at the edges of what a row takes, few that cover all."""
    rule, config = suite.rule(case.rule), suite.backend.configs[case.config]
    taken = [limit for limit in limits(rule, config) if rule.objection(limit.config) is None]
    known = {role: describe_spec(spec) for role, spec in rule.specs_for(config).items()}
    return [limit for limit in covering(taken) if describe_spec(limit.spec) != known[limit.role]]


def refuses(suite: Suite, case: Case) -> None:
    """What a constraint excludes is refused with a reason, and when it is set if no rule takes it."""
    rule, config = suite.rule(case.rule), suite.backend.configs[case.config]
    for limit in limits(rule, config):
        subject = f"backend {suite.backend.name!r}, rule {rule.name!r}, {limit}"
        objection, constraint = rule.objection(limit.config), rule.accepts.get(limit.role)
        broken = beyond(constraint, limit.spec) if constraint is not None else None
        if objection is not None and not (isinstance(objection, str) and objection.strip()):
            raise ContractError(
                subject,
                expected="None, or the reason of a refusal as text",
                found=repr(objection),
                remedy="say in the objection what is asked for and what the kernel takes",
            )
        if objection is None and broken is not None:
            raise ContractError(
                subject,
                expected=f"a refusal, since `accepts` says {broken}",
                found="the rule takes it",
                remedy="leave Rule.objection and TensorConstraint.objection as they are, or call them",
            )
        if all(isinstance(other.objection(limit.config), str) for other in suite.backend.rules):
            _check_set(suite, limit, subject)


def _check_set(suite: Suite, limit: Limit, subject: str) -> None:
    try:
        suite.quantizer(limit.config)
    except ConfigError:
        return
    raise ContractError(
        subject,
        expected="set_global to raise ConfigError, since every rule refuses the configuration",
        found="it is taken, and nothing would be quantized",
        remedy="let the quantizer's set_ methods be those of qompose.RuleQuantizer",
    )


def accepts(suite: Suite, case: Case, limit: Limit, target: str) -> None:
    """What a constraint takes at its edges lowers and gives the right numbers."""
    suite.require(matches_reference, suite.trial(case), target)
    trial = suite.trial(case, name=str(limit), config=limit.config)
    for check in (lowers, matches_reference):
        try:
            suite.require(annotates, trial)
            suite.judge(check, trial, target)
        except (ContractError, Blocked) as reason:
            failure = reason if isinstance(reason, ContractError) else reason.__cause__
            if not isinstance(failure, ContractError):
                raise
            raise ContractError(
                f"backend {suite.backend.name!r}, rule {case.rule!r}, target {target!r}",
                expected=f"{limit}, which `accepts` allows, to work: {failure.expected}",
                found=failure.found,
                remedy=f"narrow accepts[{limit.role!r}] (a missing constraint allows everything), or mend "
                "the kernel",
            ) from reason


def half_precision(suite: Suite, trial: Trial) -> None:
    """A float16 or bfloat16 model is refused with a reason, or quantized with the right type."""
    terms = trial.terms
    try:
        trial.built  # noqa: B018
    except Exception as error:
        raise NotApplicable(f"no example in {terms.dtype}: {error}") from error
    if not trial.claims:
        silent = [o for o in trial.operators if o.claim is None and not o.reason.strip()]
        if silent:
            raise ContractError(
                str(trial),
                expected="a reason why the model's operators stay in float",
                found=f"none for {silent[0].name} ({silent[0].operator})",
                remedy="let the guard return the reason as text",
            )
        return
    for target in terms.rule.kernels:
        if suite.why_not(target) is None:
            _check_dtype(suite, trial, target)


def _check_dtype(suite: Suite, trial: Trial, target: str) -> None:
    batch = trial.batches("calibration", 1)[0]
    remedy = "refuse other types than float32 in the guard, or give the type of the region's output"
    try:
        lowered = trial.lowered(target)
        wanted, actual = outputs(trial.model, batch), outputs(lowered, batch)
    except UserError:
        return  # the target refuses it, and says why
    except Exception as error:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected="a refusal with a reason, or a model that runs",
            found=f"{type(error).__name__}: {error}",
            remedy=remedy,
        ) from error
    if any(
        r.state != KERNEL and r.reason for r in report(lowered).rows if r.owner == trial.terms.label
    ):
        return
    kinds = [[(x.dtype, tuple(x.shape)) for x in values] for values in (wanted, actual)]
    found = min(map(sqnr, wanted, actual)) if kinds[0] == kinds[1] else 0.0
    least = suite.least_sqnr(trial.terms.config)
    if kinds[0] != kinds[1] or found < least:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected=f"outputs of {_said(kinds[0])}, with at least {least:.3g} dB",
            found=f"{_said(kinds[1])}, with {found:.1f} dB",
            remedy=remedy,
        )


def _said(kinds: list[tuple[torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for dtype, shape in kinds)
