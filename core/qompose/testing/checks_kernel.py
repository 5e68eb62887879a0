# SPDX-License-Identifier: Apache-2.0
"""The checks of what a kernel computes, wherever its rule applies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qompose import QomposeError, UserError, report
from qompose.errors import ConfigError
from qompose.reporting.report_data import KERNEL
from qompose.spec.quantization_spec import describe_spec
from qompose.testing.checks_rule import keeps_parameters, lowers
from qompose.testing.fixtures import (
    MOST_OFF,
    Blocked,
    ContractError,
    NotApplicable,
    expecting,
    first_difference,
    kinds_of,
    other_layouts,
    rounding_fault,
    sqnr,
    steps_of,
    tensors_of,
)
from qompose.testing.suite import Case, Suite
from qompose.testing.trial import RANDOM, Trial, outputs
from qompose.testing.variations import (
    Limit,
    Variation,
    beyond,
    covering,
    limits,
    of_literals,
    of_shapes,
)

_RUNS = "a rejection with a reason, or a model that runs"


def matches_reference(suite: Suite, trial: Trial, target: str) -> None:
    """The kernel agrees with the integer reference to one step."""
    suite.require(keeps_parameters, trial, target)
    reference, what = trial.reference
    lowered, steps = trial.lowered(target), steps_of(trial.converted)
    random: list[tuple[list[Tensor], list[Tensor]]] = []
    for kind, batch in trial.all_inputs:
        wanted = outputs(reference, batch)
        actual = run_on(trial, target, kind, partial(outputs, lowered, batch))
        expect_close(suite, trial, target, f"{what} on {kind}", (wanted, actual, steps))
        if kind == RANDOM:
            random.append((wanted, actual))
    for place, step in enumerate(steps):
        given, made = ([run[side][place] for run in random] for side in (0, 1))
        found = None if step is None else rounding_fault(given, made, step)
        if found is not None:
            _check_machine(trial, target)
            raise ContractError(
                trial.on(target),
                expected=f"at most {MOST_OFF:.0%} of the values differ by one step from {what}",
                found=found,
                remedy="round once, to the nearest integer, half to even; do not truncate",
            )
    if isinstance(lowered, nn.Module):
        _check_layouts(suite, trial, target, (random[0][1], steps))


def run_on(trial: Trial, target: str, kind: str, run: Callable[[], Any]) -> Any:
    """Return what a kernel returns on inputs of a `kind`; that it raises is a failure."""
    with expecting(trial.on(target), f"the kernel runs on {kind}", "fix the kernel"):
        return run()


def expect_close(
    suite: Suite,
    trial: Trial,
    target: str,
    what: str,
    results: tuple[list[Tensor], list[Tensor], list[Tensor | None]],
    remedy: str = (
        "check zero points, rounding (half to even, once), saturation of sums, and the clamp to "
        "[quant_min, quant_max]"
    ),
) -> None:
    """Compare the kernel's outputs with a reference; `results`: the reference, the outputs, their steps."""
    bound = suite.tolerance(trial)
    found = first_difference(*results, bound)
    if found is not None:
        _check_machine(trial, target)
        raise ContractError(
            trial.on(target),
            expected=(
                f"the kernel agrees with {what} within one step of the output (float outputs "
                f"within {bound:g} of the largest value)"
            ),
            found=found,
            remedy=remedy,
        )


def _check_machine(trial: Trial, target: str) -> None:
    """Excuse numbers that are wrong, where the program says so when it is called on this machine."""
    said = trial.disclaimer(target)
    if said:
        raise NotApplicable(said)


def _check_layouts(
    suite: Suite, trial: Trial, target: str, known: tuple[list[Tensor], list[Tensor | None]]
) -> None:
    """Check that equal inputs in another memory layout give equal outputs."""
    lowered = trial.lowered(target)
    kind = "non-contiguous inputs"
    for batch in other_layouts(trial.all_inputs[0][1]):
        with torch.no_grad():
            try:
                trial.converted(*batch)
            except RuntimeError:  # such as a view, which depends on strides itself
                continue
            actual = tensors_of(run_on(trial, target, kind, partial(lowered, *batch)))
        expect_close(
            suite, trial, target, f"itself on {kind}", (known[0], actual, known[1]),
            "use the strides of the tensors that the kernel gets, or call contiguous() first",
        )  # fmt: skip


def matches_reference_for_integers(suite: Suite, trial: Trial, target: str) -> None:
    """The same, where a consumer of the row reads integers, behind dynamic and weight-only rows too."""
    suite.require(matches_reference, suite.plain(trial), target)
    suite.judge(lowers, trial, target)  # no other test lowers this model
    matches_reference(suite, trial, target)


def takes_other_shapes(suite: Suite, trial: Trial, target: str) -> None:
    """What the rule claims besides its example, of other batches, ranks and depths, is right."""
    suite.require(matches_reference, trial, target)
    _check_variations(
        suite, trial, target, of_shapes(trial),
        "use the shapes of the tensors and sum in int32 or wider, or reject the shape in the guard",
    )  # fmt: skip


def takes_other_literals(suite: Suite, trial: Trial, target: str) -> None:
    """What the rule claims besides its example, with other literal arguments, is right."""
    suite.require(matches_reference, trial, target)
    _check_variations(
        suite, trial, target, of_literals(trial),
        "a pattern matches any literal: read literals with Region.argument (padding uses the "
            "zero point), or reject others in the guard",
    )  # fmt: skip


def _check_variations(
    suite: Suite, trial: Trial, target: str, variations: Iterable[Variation], remedy: str
) -> None:
    for variation in variations:
        terms = replace(trial.terms, example=variation.example, variation=variation.label)
        varied = Trial(terms)
        try:
            if not varied.claims:
                continue
        except QomposeError as error:
            raise ContractError(
                varied.on(target),
                expected=_RUNS,
                found=f"{type(error).__name__}: {error}",
                remedy="make patterns and guards reject such graphs with a reason, not raise",
            ) from error
        except Exception:
            continue
        with expecting(varied.on(target), _RUNS, remedy):
            lowered, (reference, what) = varied.lowered(target), varied.reference
            runs = [(k, outputs(reference, b), outputs(lowered, b)) for k, b in varied.all_inputs]
        for kind, wanted, actual in runs:
            results = (wanted, actual, steps_of(varied.converted))
            expect_close(suite, varied, target, f"{what} on {kind}", results, remedy)


def accepted_limits(suite: Suite, case: Case) -> list[Limit]:
    """Return few configurations at the edges of what a row takes, which cover them all."""
    rule, config = suite.rule(case.rule), suite.backend.configs[case.config]
    taken = [limit for limit in limits(rule, config) if rule.objection(limit.config) is None]
    known = {role: describe_spec(spec) for role, spec in rule.specs_for(config).items()}
    return [limit for limit in covering(taken) if describe_spec(limit.spec) != known[limit.role]]


def refuses(suite: Suite, case: Case) -> None:
    """What the constraints exclude is refused, with a reason."""
    rule, config = suite.rule(case.rule), suite.backend.configs[case.config]
    for limit in limits(rule, config):
        subject = f"backend {suite.backend.name!r}, rule {rule.name!r}, {limit}"
        objection, constraint = rule.objection(limit.config), rule.accepts.get(limit.role)
        broken = beyond(constraint, limit.spec) if constraint is not None else None
        if objection is not None and not (isinstance(objection, str) and objection.strip()):
            raise ContractError(
                subject,
                expected="None, or the reason for the rejection as a string",
                found=repr(objection),
                remedy="say in the objection what was requested and what the kernel supports",
            )
        if objection is None and broken is not None:
            raise ContractError(
                subject,
                expected=f"a rejection, because `accepts` has {broken}",
                found="the rule accepts it",
                remedy="if you override Rule.objection or TensorConstraint.objection, call super()",
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
        expected="set_global raises ConfigError, because every rule rejects the configuration",
        found="it was accepted, but nothing would be quantized",
        remedy="do not override the set_ methods of qompose.RuleQuantizer",
    )


def accepts(suite: Suite, case: Case, limit: Limit, target: str) -> None:
    """What the constraints accept at their edges works."""
    suite.require(matches_reference, suite.trial(case), target)
    trial = suite.trial(case, name=str(limit), config=limit.config)
    for check in (lowers, matches_reference):
        try:
            suite.judge(check, trial, target)
        except (ContractError, Blocked) as reason:
            failure = reason if isinstance(reason, ContractError) else reason.__cause__
            if not isinstance(failure, ContractError):
                raise
            raise ContractError(
                f"backend {suite.backend.name!r}, rule {case.rule!r}, target {target!r}",
                expected=f"{limit} works, because `accepts` allows it ({failure.expected})",
                found=failure.found,
                remedy=(
                    f"narrow accepts[{limit.role!r}] (a missing constraint allows everything), or "
                    "fix the kernel"
                ),
            ) from reason


def half_precision(suite: Suite, trial: Trial) -> None:
    """A float16 or bfloat16 model is refused with a reason, or quantized with the right type."""
    terms = trial.terms
    try:
        trial.built  # noqa: B018
    except Exception as error:
        raise NotApplicable(f"no example in {terms.dtype}: {error}") from error
    for target in terms.rule.kernels if trial.claims else ():
        if suite.why_not(target) is None:
            _check_dtype(suite, trial, target)


def _check_dtype(suite: Suite, trial: Trial, target: str) -> None:
    batch = trial.batches("calibration", 1)[0]
    remedy = (
        "reject dtypes other than float32 in the guard, or return the dtype of the region's output"
    )
    try:
        with expecting(trial.on(target), _RUNS, remedy):
            lowered = trial.lowered(target)
            wanted, actual = outputs(trial.model, batch), outputs(lowered, batch)
    except ContractError as failure:
        cause = failure.__cause__
        if isinstance(cause, UserError) and not isinstance(cause, ConfigError):
            return  # the target refuses it, with a reason; a ConfigError blames the kernel
        raise
    if any(
        r.state != KERNEL and r.reason for r in report(lowered).rows if r.owner == trial.terms.label
    ):
        return
    same = kinds_of(wanted) == kinds_of(actual)
    found = min(map(sqnr, wanted, actual)) if same else 0.0
    least = suite.least_sqnr(trial.terms.config)
    if not same or found < least:
        raise ContractError(
            trial.on(target),
            expected=f"outputs of {_described(wanted)} with at least {least:.3g} dB",
            found=f"{_described(actual)} with {found:.1f} dB",
            remedy=remedy,
        )


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in kinds_of(tensors))
