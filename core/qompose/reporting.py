# SPDX-License-Identifier: Apache-2.0
"""Report: what happened to every float operator, read from the record that each stage's model carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from qompose.counting import Counts, count_nodes
from qompose.errors import NothingQuantizedError, NotLoweredError, StageError, UserError
from qompose.ledger import FLOAT as FLOAT
from qompose.ledger import FLOAT_KERNEL as FLOAT_KERNEL
from qompose.ledger import KERNEL as KERNEL
from qompose.ledger import OBSERVED as OBSERVED
from qompose.ledger import REFERENCE as REFERENCE
from qompose.ledger import SIMULATED as SIMULATED
from qompose.ledger import Report, Row
from qompose.plan import META_KEY, Operator, Record
from qompose.requirements import notes_on


def report(model: Any) -> Report:
    """Return the report of a prepared, converted, reference, lowered or loaded model.

    Raises:
        StageError: the model carries no record; it did not come from qompose.
    """
    meta = getattr(model, "meta", None)
    record = meta.get(META_KEY) if isinstance(meta, dict) else None
    if not isinstance(record, Record):
        raise StageError(
            f"{type(model).__name__} carries no record of a quantization: pass what prepare_pt2e, "
            f"convert_pt2e, lower or load returned{one_of(model)}"
        )
    plan = record.plan
    return Report(
        stage=record.stage,
        target=record.target,
        rows=tuple(_row(operator, record) for operator in plan.operators),
        counts=_counts(model, record),
        requantizations=plan.requantizations(record.dropped),
        conflicts=tuple(
            f"{c.loser} rule {c.loser_rule} lost {', '.join(c.nodes)} to {c.winner} rule {c.winner_rule}"
            for c in plan.conflicts
        ),
        rewrites=(*map(str, plan.rewrites), *record.balanced),
        notes=(*plan.notes, *record.findings, *notes_on(record)),
        bytes_before=plan.float_bytes,
        bytes_after=record.bytes,
        fingerprint=record.fingerprint,
    )


def one_of(model: Any) -> str:
    """Say which methods there are, each with a record of its own, where a program of several was passed."""
    methods = model if isinstance(model, Mapping) else getattr(model, "methods", None)
    if not isinstance(methods, Mapping) or not methods:
        return ""
    return f"; of a program of several methods pass one of them: {', '.join(map(str, methods))}"


def _counts(model: Any, record: Record) -> Counts:
    """Count in the graph itself; of another runtime's program only what took the regions is known."""
    if isinstance(model, GraphModule):
        return count_nodes(model)
    known = getattr(model, "counts", None)  # of what a file tells of a lowered model
    return known if isinstance(known, Counts) else Counts(kernels=len(record.kernels))


def _row(operator: Operator, record: Record) -> Row:
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
    """Return whether the kernel that runs a claim computes in int8."""
    claim = record.plan.claims[number]
    backend = record.backends.get(claim.owner)
    rule = backend.rule(claim.rule) if backend is not None else None
    kernel = rule.kernels.get(record.target) if rule is not None else None
    in_float = {k.name for k in kernel.chain if k.float_arithmetic} if kernel is not None else ()
    return FLOAT_KERNEL if record.kernels[number] in in_float else KERNEL


def assert_quantized(model: Any, min_fraction: float = 1.0) -> None:
    """Check that quantizers took enough of a model of any stage, whatever runs it.

    Args:
        model: what `prepare_pt2e`, `convert_pt2e`, `lower` or `load` returned.
        min_fraction: the least part of all multiply-accumulates, from 0 to 1, that is not float. Where
            the model has none to count, it is the part of all float operators; 0 holds for every model.

    Raises:
        NothingQuantizedError: they did not; the message names the operators that stay in float.
        StageError: the model was not even prepared.
        UserError: `min_fraction` is no part from 0 to 1.
    """
    _check_fraction(min_fraction)
    found = report(model)
    taken = [row for row in found.rows if row.state != FLOAT]
    part, what = _part(taken, found.rows, "float operators")
    if part >= min_fraction:
        return
    left = [row for row in found.rows if row.state == FLOAT and (row.macs or part == 0)]
    raise NothingQuantizedError(
        f"{part:.1%} of all {what} are quantized, and {min_fraction:.1%} are asked for:\n{_listed(left)}"
    )


def assert_lowered(model: Any, min_fraction: float = 1.0) -> None:
    """Check that enough of what was quantized runs on kernels for integers, be it weights alone.

    Args:
        model: what `lower` returned.
        min_fraction: the least part of all multiply-accumulates, from 0 to 1; at 1, every operator that a
            quantizer claimed must have a kernel as well.

    Raises:
        NotLoweredError: it does not; the message names the operators that stay behind.
        StageError: the model was not lowered.
        UserError: `min_fraction` is no part from 0 to 1.
    """
    _check_fraction(min_fraction)
    found = report(model)
    if found.stage != "lowered":
        raise StageError(
            f"assert_lowered takes what lower returned, and got a {found.stage} model, which has no "
            "kernels yet; assert_quantized checks it"
        )
    claimed = [row for row in found.rows if row.owner]
    done = [row for row in claimed if row.state in (KERNEL, FLOAT_KERNEL)]
    part, what = _part(done, found.rows, "quantized operators", claimed)
    behind = [row for row in found.rows if row not in done and (row.macs or row.owner)]
    if part >= min_fraction and not (min_fraction == 1.0 and behind):
        return
    raise NotLoweredError(
        f"{part:.1%} of all {what} run on int8 kernels, and "
        f"{min_fraction:.1%} are asked for:\n{_listed(behind or [*found.rows])}"
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
        raise UserError(f"min_fraction={min_fraction!r} is not a part from 0 to 1")


def _listed(rows: list[Row]) -> str:
    if not rows:
        return "  - the program has no operator that computes floats"
    return "\n".join(
        f"  - {row.name} ({row.operator}{f' in {row.module}' if row.module else ''}), {row.macs:,} MACs: "
        f"{row.state}, {row.reason}"
        for row in sorted(rows, key=lambda row: -row.macs)
    )
