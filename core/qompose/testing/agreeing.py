# SPDX-License-Identifier: Apache-2.0
"""The checks of what a kernel computes: it agrees with the integer reference, whatever it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qompose import QomposeError
from qompose.testing.data import other_layouts
from qompose.testing.failures import ContractError
from qompose.testing.measures import (
    MOST_OFF,
    first_difference,
    rounding_fault,
    steps_of,
    tensors_of,
)
from qompose.testing.rows import keeps_parameters
from qompose.testing.suite import Suite
from qompose.testing.trials import RANDOM, Trial, outputs
from qompose.testing.varying import Variation, of_literals, of_shapes


def matches_reference(suite: Suite, trial: Trial, target: str) -> None:
    """The kernel agrees with the integer arithmetic to one step, on random data and on extremes."""
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
    _check_rounding(trial, target, what, random, steps)
    if isinstance(lowered, nn.Module):
        _check_layouts(suite, trial, target, (random[0][1], steps))


def run_on(trial: Trial, target: str, kind: str, run: Callable[[], Any]) -> Any:
    """Return what a kernel gives; that it raises is a failure. `kind` says of what inputs."""
    try:
        return run()
    except Exception as error:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected=f"the kernel to run on {kind}",
            found=f"{type(error).__name__}: {error}",
            remedy="mend the kernel",
        ) from error


def expect_close(
    suite: Suite,
    trial: Trial,
    target: str,
    what: str,
    results: tuple[list[Tensor], list[Tensor], list[Tensor | None]],
    remedy: str = "see zero points, the rounding (half to even, once), saturation of sums, and the "
    "clamp to [quant_min, quant_max]",
) -> None:
    """Compare the kernel's outputs with others; `results` are those, the kernel's, and their steps."""
    bound = suite.tolerance(trial)
    found = first_difference(*results, bound)
    if found is not None:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected=f"the kernel to agree with {what}, to one step of the output (float outputs to "
            f"{bound:g} of the largest value)",
            found=found,
            remedy=remedy,
        )


def _check_rounding(
    trial: Trial,
    target: str,
    what: str,
    runs: Sequence[tuple[list[Tensor], list[Tensor]]],
    steps: Sequence[Tensor | None],
) -> None:
    """Check that few values are off by a step."""
    for place, step in enumerate(steps):
        if step is None:
            continue
        found = rounding_fault([w[place] for w, _ in runs], [a[place] for _, a in runs], step)
        if found is not None:
            raise ContractError(
                f"{trial}, target {target!r}",
                expected=f"at most {MOST_OFF:.0%} of the values a step off {what}",
                found=found,
                remedy="round once, to the nearest integer, half to even; do not truncate",
            )


def _check_layouts(
    suite: Suite, trial: Trial, target: str, known: tuple[list[Tensor], list[Tensor | None]]
) -> None:
    """Check that equal inputs which lie otherwise in memory give equal outputs."""
    lowered = trial.lowered(target)
    kind = "inputs that are not contiguous in memory"
    for batch in other_layouts(trial.all_inputs[0][1]):
        with torch.no_grad():
            try:
                trial.converted(*batch)
            except RuntimeError:  # such as a view, which goes by strides itself
                continue
            actual = tensors_of(run_on(trial, target, kind, partial(lowered, *batch)))
        expect_close(
            suite, trial, target, f"itself on {kind}", (known[0], actual, known[1]),
            "go by the strides of the tensors that the kernel is given, or call contiguous() first",
        )  # fmt: skip


def matches_for_integers(suite: Suite, trial: Trial, target: str) -> None:
    """The same, where a consumer behind the row wants integers."""
    suite.require(matches_reference, suite.plain(trial), target)
    matches_reference(suite, trial, target)


def takes_other_shapes(suite: Suite, trial: Trial, target: str) -> None:
    """What the rule claims with another batch, rank or depth, the kernel computes rightly."""
    suite.require(matches_reference, trial, target)
    _check_variations(
        suite, trial, target, of_shapes(trial),
        "go by the shapes of the tensors and sum in int32 or wider, or refuse the shape in the guard",
    )  # fmt: skip


def takes_other_literals(suite: Suite, trial: Trial, target: str) -> None:
    """What the rule claims with other literal arguments, the kernel computes rightly."""
    suite.require(matches_reference, trial, target)
    _check_variations(
        suite, trial, target, of_literals(trial),
        "a pattern takes any literal: read them with Region.argument (what is padded has the zero point), "
        "or refuse others in the guard",
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
            raise _broken(
                varied, target, error, "let patterns and guards take any graph"
            ) from error
        except Exception:
            continue
        try:
            lowered, (reference, what) = varied.lowered(target), varied.reference
            runs = [(k, outputs(reference, b), outputs(lowered, b)) for k, b in varied.all_inputs]
        except Exception as error:
            raise _broken(varied, target, error, remedy) from error
        for kind, wanted, actual in runs:
            results = (wanted, actual, steps_of(varied.converted))
            expect_close(suite, varied, target, f"{what} on {kind}", results, remedy)


def _broken(trial: Trial, target: str, error: Exception, remedy: str) -> ContractError:
    return ContractError(
        f"{trial}, target {target!r}",
        expected="a refusal with a reason, or a model that runs",
        found=f"{type(error).__name__}: {error}",
        remedy=remedy,
    )
