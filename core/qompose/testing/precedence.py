# SPDX-License-Identifier: Apache-2.0
"""The check that selectors mean on this backend what they mean on every one: the most specific wins."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import combinations
from typing import Any

from qompose import QomposeWarning, QuantizationConfig, RuleQuantizer, prepare_pt2e
from qompose.nested import nodes_in
from qompose.plan import META_KEY, Operator
from qompose.testing.failures import Blocked, ContractError, NotApplicable
from qompose.testing.models import ROW, Row
from qompose.testing.rows import annotates
from qompose.testing.suite import Suite
from qompose.testing.trials import Trial

Setter = Callable[[RuleQuantizer, Any, "QuantizationConfig | None"], RuleQuantizer]

LEVELS: dict[str, Setter] = {
    "set_global": lambda q, operator, config: q.set_global(config),
    "set_module_type": lambda q, operator, config: q.set_module_type(Row, config),
    "set_operator_type": lambda q, operator, config: q.set_operator_type(operator, config),
    "set_module_name_regex": lambda q, operator, config: q.set_module_name_regex("r.w", config),
    "set_module_name": lambda q, operator, config: q.set_module_name(ROW, config),
    "set_module_name_object_type_order": lambda q, operator, config: (
        q.set_module_name_object_type_order(ROW, operator, 0, config)
    ),
}
"""What sets a configuration for a row's operator, the least specific first."""

PAIRS = [
    pair for pair in combinations(LEVELS, 2) if pair != ("set_module_type", "set_operator_type")
]
"""Pairs of a less and a more specific one. Types of modules and of operators are one level."""


def representative(suite: Suite) -> Trial:
    """Return the trial of a row of one operator that applies anywhere.

    Raises:
        NotApplicable: there is none.
    """
    blocked: Blocked | None = None
    for case in suite.rows():
        if suite.rule(case.rule).condition is not None:
            continue
        trial = suite.trial(case)
        try:
            suite.require(annotates, trial)
        except Blocked as reason:
            blocked = reason
            continue
        if trial.model.front is None and len(trial.operators) == len(trial.claims) == 1:
            return trial
    raise blocked or NotApplicable("no rule takes one operator that may stand anywhere")


def most_specific_wins(suite: Suite, lower: str, higher: str) -> None:
    """Of two selectors, the more specific one decides; None leaves the operator in float, with a reason."""
    trial = representative(suite)
    for wanted in (trial.terms.config, None):
        other = None if wanted is not None else trial.terms.config
        subject = f"backend {trial.terms.label!r}, {higher}({wanted}) over {lower}({other})"
        operator = _operator(suite, trial, {lower: other, higher: wanted}, subject)
        if (operator.claim is not None) != (wanted is not None):
            raise ContractError(
                subject,
                expected=f"{higher} to decide, which is more specific",
                found=f"{operator.name} is "
                + ("quantized" if operator.claim is not None else f"float: {operator.reason}"),
                remedy="let the quantizer's set_ methods be those of qompose.RuleQuantizer",
            )
        if wanted is None and not operator.reason.strip():
            raise ContractError(
                subject,
                expected="a reason why the operator stays in float",
                found="none",
                remedy="let the quantizer's propose be that of qompose.RuleQuantizer",
            )


def _operator(
    suite: Suite, trial: Trial, settings: dict[str, QuantizationConfig | None], subject: str
) -> Operator:
    """Return what became of the row's operator under selectors."""
    (claim,) = trial.claims
    target = next(n.target for n in nodes_in(trial.prepared) if n.name == claim.anchor)
    quantizer = suite.bare_quantizer()
    try:
        for level, config in settings.items():
            LEVELS[level](quantizer, target, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QomposeWarning)
            prepared = prepare_pt2e(trial.built.program, quantizer)
    except Exception as error:
        raise ContractError(
            subject,
            expected="prepare_pt2e to follow selectors",
            found=f"{type(error).__name__}: {error}",
            remedy="let the quantizer be a qompose.RuleQuantizer",
        ) from error
    operator: Operator
    (operator,) = prepared.meta[META_KEY].plan.operators
    return operator
