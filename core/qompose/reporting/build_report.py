# SPDX-License-Identifier: Apache-2.0
"""What becomes of every float operator, reported from the record and the graph of a stage's model.

Stages log it in one line at INFO, and warn of what was requested and not done, by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from qompose.errors import (
    NothingQuantizedError,
    NotLoweredError,
    StageError,
    UserError,
    warn_user,
)
from qompose.plan.plan import UNREAD, Operator, Plan, Record, notes_on
from qompose.program.control_flow import nodes_in
from qompose.program.graph import describe
from qompose.program.meta import CAST_TAG, KERNELS_TAG, META_KEY, OBSERVER_PREFIX, tag_of
from qompose.reporting.report_data import (
    FLOAT,
    FLOAT_KERNEL,
    KERNEL,
    OBSERVED,
    REFERENCE,
    SIMULATED,
    UNVERIFIED,
    Counts,
    Report,
    Row,
)
from qompose.spec import qdq
from qompose.spec.quantization_spec import fits_bits


def report(model: Any) -> Report:
    """Return the report of a prepared, converted, reference, lowered or loaded model.

    Raises:
        StageError: the model carries no record; it did not come from qompose.
    """
    meta = getattr(model, "meta", None)
    record = meta.get(META_KEY) if isinstance(meta, dict) else None
    if not isinstance(record, Record):
        raise StageError(
            f"{type(model).__name__} has no quantization record; pass the result of "
            f"prepare_pt2e, convert_pt2e, lower or load{one_of(model)}"
        )
    plan = record.plan
    return Report(
        stage=record.stage,
        target=record.target,
        rows=_rows(record),
        counts=_counts(model, record),
        requantizations=plan.requantizations(record.dropped),
        conflicts=tuple(
            f"{c.loser} (rule {c.loser_rule}) lost {', '.join(c.nodes)} to {c.winner} (rule "
            f"{c.winner_rule}){f': {c.reason}' if c.reason else ''}"
            for c in plan.conflicts
        ),
        rewrites=(*map(str, plan.rewrites), *record.balanced),
        notes=(*plan.notes, *record.findings, *notes_on(record)),
        bytes_before=plan.float_bytes,
        bytes_after=record.bytes,
        fingerprint=record.fingerprint,
        idle_owners=plan.idle_owners,
        file_bytes=record.file_bytes if _packs_integers(record) else 0,
    )


_PACKED = 6
"""Bits. Integers of seven are for kernels whose sums saturate, on some processors alone."""


def _packs_integers(record: Record) -> bool:
    """Tell whether a model has integers of so few bits that a file is noticeably smaller than the model."""
    groups = record.plan.groups if record.target in ("", "torch") else ()
    followed = (g for g in groups if not all(claim in record.dropped for claim in g.claims))
    return any(fits_bits(group.spec, _PACKED) for group in followed)


def one_of(model: Any) -> str:
    """Say which methods there are, each with a record of its own, where a program of several was passed."""
    methods = model if isinstance(model, Mapping) else getattr(model, "methods", None)
    if not isinstance(methods, Mapping) or not methods:
        return ""
    return f". This program has several methods; pass one of them: {', '.join(map(str, methods))}"


def _counts(model: Any, record: Record) -> Counts:
    """Count in the graph itself; of another runtime's program only what took the regions is known."""
    if isinstance(model, GraphModule):
        return count_nodes(model)
    known = getattr(model, "counts", None)  # of a lowered model that a file describes
    return known if isinstance(known, Counts) else Counts(kernels=len(record.kernels))


def _rows(record: Record) -> tuple[Row, ...]:
    """Return a row for each operator. Regions are numbered as they come, whatever the order of members."""
    operators = record.plan.operators
    claims = dict.fromkeys(o.claim for o in operators if o.claim is not None)
    regions = {claim: number for number, claim in enumerate(claims)}
    return tuple(_row(operator, record, regions) for operator in operators)


def _row(operator: Operator, record: Record, regions: Mapping[int, int]) -> Row:
    facts = {k: getattr(operator, k) for k in ("name", "operator", "module", "macs", "inputs")}
    number = operator.claim
    if number is None:
        return Row(**facts, state=FLOAT, reason=operator.reason)
    claim = record.plan.claims[number]
    state, reason = _state(number, record)
    return Row(
        **facts,
        state=state,
        owner=claim.owner,
        rule=claim.rule,
        config=claim.config,
        mode=claim.mode,
        selector=claim.selector,
        kernel=record.kernels.get(number, ""),
        reason=reason,
        region=regions[number],
    )


def _state(number: int, record: Record) -> tuple[str, str]:
    if number in record.dropped:
        return FLOAT, record.dropped[number]
    if record.stage == "prepared":
        return OBSERVED, ""
    if number in record.kernels:
        return REFERENCE if record.stage == "reference" else _kind(number, record), ""
    return SIMULATED, record.fallbacks.get(number, "")


def _kind(number: int, record: Record) -> str:
    """Return whether the kernel that runs a claim computes in int8, and whether that is known."""
    claim = record.plan.claims[number]
    backend = record.backends.get(claim.owner)
    rule = backend.rule(claim.rule) if backend is not None else None
    kernel = rule.kernels.get(record.target) if rule is not None else None
    taken = [k for k in kernel.chain if k.name == record.kernels[number]] if kernel else []
    if any(k.unverified for k in taken):
        return UNVERIFIED
    return FLOAT_KERNEL if any(k.float_arithmetic for k in taken) else KERNEL


def assert_quantized(model: Any, min_fraction: float = 1.0) -> None:
    """Check that enough of a model is quantized, at any stage.

    Args:
        model: what `prepare_pt2e`, `convert_pt2e`, `lower` or `load` returned.
        min_fraction: the least share of multiply-accumulates, from 0 to 1, that must be quantized; for a
            model without any, the least share of float operators. 0 holds for every model.

    Raises:
        NothingQuantizedError: the share is smaller; the message lists the operators that stay in float.
        StageError: the model was not prepared.
        UserError: `min_fraction` is not a number from 0 to 1.
    """
    _check_fraction(min_fraction)
    found = report(model)
    taken = [row for row in found.rows if row.state != FLOAT]
    part, what = _part(taken, found.rows, "float operators")
    if part >= min_fraction:
        return
    left = [row for row in found.rows if row.state == FLOAT and (row.macs or part == 0)]
    raise NothingQuantizedError(
        f"{part:.1%} of all {what} are quantized, expected at least {min_fraction:.1%}:\n{_listed(left)}"
    )


def assert_lowered(model: Any, min_fraction: float = 1.0) -> None:
    """Check that enough of a model runs on kernels that read integers, including weight-only kernels.

    Kernels that nothing here confirms (`Kernel.unverified`) do not count.

    Args:
        model: what `lower` returned.
        min_fraction: the least share of multiply-accumulates, from 0 to 1; at 1, every claimed operator
            must have a kernel as well.

    Raises:
        NotLoweredError: the share is smaller; the message lists the other operators with reasons.
        StageError: the model was not lowered.
        UserError: `min_fraction` is not a number from 0 to 1.
    """
    _check_fraction(min_fraction)
    found = report(model)
    if found.stage != "lowered":
        raise StageError(
            f"assert_lowered expects the result of lower, got a {found.stage} model, which "
            "has no kernels yet; use assert_quantized"
        )
    claimed = [row for row in found.rows if row.owner]
    done = [row for row in claimed if row.state in (KERNEL, FLOAT_KERNEL)]
    part, what = _part(done, found.rows, "quantized operators", claimed)
    behind = [row for row in found.rows if row not in done and (row.macs or row.owner)]
    if part >= min_fraction and not (min_fraction == 1.0 and behind):
        return
    raise NotLoweredError(
        f"{part:.1%} of all {what} run in kernels that read integers, expected at least "
        f"{min_fraction:.1%}{' of operators' * (part == 1)}:\n{_listed(behind or [*found.rows])}"
    )


def _part(
    done: Sequence[Row], rows: Sequence[Row], what: str, counted: Sequence[Row] | None = None
) -> tuple[float, str]:
    """Return a part of all multiply-accumulates, or, where there are none, of the operators counted."""
    total = sum(row.macs for row in rows)
    if total:
        return sum(row.macs for row in done) / total, "multiply-accumulates"
    return len(done) / max(1, len(rows if counted is None else counted)), what


def _check_fraction(min_fraction: object) -> None:
    if not isinstance(min_fraction, (int, float)) or not 0 <= min_fraction <= 1:
        raise UserError(f"min_fraction must be a number between 0 and 1, got {min_fraction!r}")


def _listed(rows: list[Row]) -> str:
    if not rows:
        return "  - the program has no float operators"
    return "\n".join(
        f"  - {row.name} ({row.operator}{f' in {row.module}' if row.module else ''}), {row.macs:,} MACs: "
        f"{row.state}, {row.reason or row.kernel}"
        for row in sorted(rows, key=lambda row: -row.macs)
    )


def count_nodes(model: GraphModule) -> Counts:
    """Count the nodes of a graph module of any stage, those in bodies included."""
    nodes = list(nodes_in(model))
    return Counts(
        observers=sum(
            node.op == "call_module" and str(node.target).startswith(OBSERVER_PREFIX)
            for node in nodes
        ),
        quantize=sum(map(qdq.is_quantize, nodes)),
        dequantize=sum(map(qdq.is_dequantize, nodes)),
        choose_qparams=sum(
            node.op == "call_function" and node.target in qdq.CHOOSE for node in nodes
        ),
        cast=sum(bool(tag_of(node, CAST_TAG)) for node in nodes),
        kernels=len({claim for node in nodes for claim in tag_of(node, KERNELS_TAG) or ()}),
    )


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
    message = f"Nothing was quantized: no quantizer claims any of the {number} operators."
    if not plan.operators:
        calls = [describe(node) for node in nodes_in(program) if node.op == "call_function"]
        message += f" The program calls {', '.join(calls[:_MOST]) or 'no operators'}."
    lines = sorted(f"{_place(operator)}: {operator.reason}" for operator in plan.operators)
    message += f"\n{_shortened(lines)}" if lines else ""
    if strict:
        raise NothingQuantizedError(message)
    warn_user(message)


def say_if_all_was_dropped(record: Record) -> None:
    """Warn that conversion followed none of the claims, each with its reason."""
    claims = record.plan.claims
    if not claims or len(record.dropped) < len(claims):
        return
    lines = [_of_claim(record, number, reason) for number, reason in sorted(record.dropped.items())]
    warn_user(
        f"Nothing was quantized: conversion applied none of the {len(lines)} claims:\n"
        f"{_shortened(lines)}"
    )


def say_if_modes_were_lost(prepared: GraphModule) -> None:
    """Warn that torchao's functions for train and eval were called on a model that they do not change."""
    if "_exported_training" in vars(prepared):
        warn_user(
            "torchao's move_exported_model_to_train, move_exported_model_to_eval or "
            "allow_exported_model_train_eval was called on this model but had no effect, so "
            "it was trained and evaluated in the mode of its export. Import these functions "
            "from qompose, or call train() and eval()."
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
    warn_user(message)


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


def _shortened(lines: Sequence[str]) -> str:
    rest = lines[_MOST:]
    more = [f"and {len(rest)} more"] if rest else []
    return "\n".join(f"  - {line}" for line in [*lines[:_MOST], *more])
