# SPDX-License-Identifier: Apache-2.0
"""What the stages say of themselves: one line at INFO each, and what was asked and not done, by name."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from qompose.errors import NothingQuantizedError, NotLoweredError, QomposeWarning
from qompose.graph import describe
from qompose.lowering import UNREAD
from qompose.nested import nodes_in
from qompose.plan import Operator, Plan, Record
from qompose.reporting import report

_LOGGER = logging.getLogger("qompose")
_MOST = 20


def log_stage(model: Any) -> None:
    """Log a stage's result in one line: who took how many operators, and how much of the work that is."""
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info("%s", report(model).headline())


def say_if_nothing_was_quantized(plan: Plan, program: GraphModule, *, strict: bool) -> None:
    """Warn that no quantizer claims anything, with operators and reasons.

    Raises:
        NothingQuantizedError: `strict`.
    """
    if plan.claims:
        return
    number = len(plan.operators)
    message = f"Nothing was quantized: no quantizer claims any of {number} operators."
    if not plan.operators:
        calls = [describe(node) for node in nodes_in(program) if node.op == "call_function"]
        message += f" The program calls {', '.join(calls[:_MOST]) or 'no operator at all'}."
    lines = sorted(f"{_place(operator)}: {operator.reason}" for operator in plan.operators)
    message += f"\n{_listed(lines)}" if lines else ""
    if strict:
        raise NothingQuantizedError(message)
    warnings.warn(message, QomposeWarning, stacklevel=4)


def say_if_all_was_dropped(record: Record) -> None:
    """Warn that conversion followed none of the claims, each with its reason."""
    claims = record.plan.claims
    if not claims or len(record.dropped) < len(claims):
        return
    lines = [_of_claim(record, number, reason) for number, reason in sorted(record.dropped.items())]
    warnings.warn(
        f"Nothing was quantized: conversion followed none of all claims ({len(lines)}):\n"
        f"{_listed(lines)}",
        QomposeWarning,
        stacklevel=3,
    )


def say_if_modes_were_lost(prepared: GraphModule) -> None:
    """Warn that torchao's functions for train and eval were called on a model that they do not change."""
    if "_exported_training" in vars(prepared):
        warnings.warn(
            "torchao's move_exported_model_to_train, move_exported_model_to_eval or "
            "allow_exported_model_train_eval was called on this model, and did nothing: it was trained and "
            "evaluated in the mode of its export. Import these from qompose, or call train() and eval().",
            QomposeWarning,
            stacklevel=3,
        )


def say_what_fell_back(record: Record, *, strict: bool) -> None:
    """Warn of the regions that were claimed and have no kernel, those that conversion dropped included.

    Raises:
        NotLoweredError: `strict`.
    """
    dropped = {number: f"left in float: {reason}" for number, reason in record.dropped.items()}
    missed = {n: reason for n, reason in record.fallbacks.items() if reason != UNREAD}
    reasons = {**dropped, **missed}
    if not reasons:
        return
    lines = [_of_claim(record, number, reason) for number, reason in sorted(reasons.items())]
    one = len(lines) == 1
    what = "1 quantized region has" if one else f"{len(lines)} quantized regions have"
    message = f"{what} no int8 kernel on {record.target}:\n"
    message += "\n".join(f"  - {line}" for line in lines)
    if strict:
        raise NotLoweredError(message)
    warnings.warn(message, QomposeWarning, stacklevel=3)


def _of_claim(record: Record, number: int, reason: str) -> str:
    """Return a line that says of a claim where it is, whose, and what became of it."""
    claim = record.plan.claims[number]
    modules = (o.module for o in record.plan.operators if o.claim == number and o.module)
    module = next(modules, "")
    place = f"{claim.anchor}{f' in {module}' if module else ''}"
    return f"{place} ({claim.owner}, rule {claim.rule}): {reason}"


def _place(operator: Operator) -> str:
    where = f" in {operator.module}" if operator.module else ""
    return f"{operator.name} ({operator.operator}{where})"


def _listed(lines: Sequence[str]) -> str:
    rest = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return "\n".join(f"  - {line}" for line in [*lines[:_MOST], *rest])
