# SPDX-License-Identifier: Apache-2.0
"""Report: what happened to every float operator, read from the record that each stage's model carries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from qompose.errors import NotLoweredError, StageError, UserError, near_names
from qompose.plan import META_KEY, Operator, Record

KERNEL, SIMULATED, FLOAT = "int8 kernel", "simulated (Q/DQ)", "float"
OBSERVED, REFERENCE = "observed", "integer reference"


@dataclass(frozen=True)
class Row:
    """One operator of the exported program: where it ended, who took it by which rule, and why (not)."""

    name: str
    operator: str
    module: str
    macs: int
    state: str
    owner: str = ""
    rule: str = ""
    config: str = ""
    mode: str = ""
    selector: str = ""
    kernel: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The rows of all float operators, totals, and what else the plan has to say."""

    stage: str
    target: str
    rows: tuple[Row, ...]
    conflicts: tuple[str, ...]
    rewrites: tuple[str, ...]
    notes: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    requantizations: int = 0

    def count(self, state: str, owner: str | None = None) -> int:
        """Return how many operators ended in a state, of one owner or of all."""
        return sum(row.state == state and owner in (None, row.owner) for row in self.rows)

    def coverage(self, state: str = KERNEL, operator: str | None = None) -> float:
        """Return the part of all multiply-accumulates (of one operator) that ended in a state.

        Raises:
            UserError: the model has no such operator.
        """
        known = {row.operator for row in self.rows}
        if operator is not None and operator not in known:
            raise UserError(
                f"{operator!r} does not occur in the model{near_names(operator, known)}"
            )
        rows = [row for row in self.rows if operator in (None, row.operator)]
        total = sum(row.macs for row in rows)
        return sum(row.macs for row in rows if row.state == state) / total if total else 0.0

    def summary(self) -> list[tuple[str, str, str, str, int, int]]:
        """Return (operator, state, owner, kernel or reason, operators, multiply-accumulates) in groups."""
        operators: Counter[tuple[str, str, str, str]] = Counter()
        work: Counter[tuple[str, str, str, str]] = Counter()
        for row in self.rows:
            key = (row.operator, row.state, row.owner, row.kernel or row.reason)
            operators[key] += 1
            work[key] += row.macs
        ordered = sorted(operators, key=lambda key: (-work[key], key))
        return [(*key, operators[key], work[key]) for key in ordered]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {**self.__dict__, "rows": [dict(row.__dict__) for row in self.rows]}

    def to_markdown(self) -> str:
        """Return the summary as a Markdown table, with the totals above it."""
        lines = [
            *self._totals(),
            "",
            "| " + " | ".join(_HEADER) + " |",
            "|" + "---|" * len(_HEADER),
        ]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in self.summary()]
        lines += [f"\n- {line}" for line in (*self.conflicts, *self.rewrites, *self.notes)]
        return "\n".join(lines)

    def _totals(self) -> list[str]:
        states = Counter(row.state for row in self.rows)
        parts = ", ".join(f"{n} {state}" for state, n in states.most_common())
        total = sum(row.macs for row in self.rows)
        share = ", ".join(
            f"{self.coverage(state):.1%} {state}" for state in states if self.coverage(state) > 0
        )
        lines = [f"{self.stage}{f' for {self.target}' if self.target else ''}: {parts}"]
        lines += [f"multiply-accumulates: {total:,}: {share}"] if total else []
        if self.requantizations:
            lines.append(f"{self.requantizations} requantizations where specifications meet")
        if self.bytes_after and self.bytes_before:
            ratio = self.bytes_after / self.bytes_before
            lines.append(
                f"model bytes: {self.bytes_before:,} -> {self.bytes_after:,} ({ratio:.1%})"
            )
        return lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._totals()
        table = Table(*_HEADER)
        for row in self.summary():
            table.add_row(*(f"{cell:,}" if isinstance(cell, int) else cell for cell in row))
        yield table
        yield from (*self.conflicts, *self.rewrites, *self.notes)

    def __str__(self) -> str:
        console = Console(width=120, record=True, file=StringIO())
        console.print(self)
        return console.export_text()


_HEADER = ("operator", "state", "owner", "kernel or reason", "operators", "MACs")


def report(model: Any) -> Report:
    """Return the report of a prepared, converted, reference or lowered model.

    Raises:
        StageError: the model carries no record; it did not come from qompose.
    """
    record = getattr(model, "meta", {}).get(META_KEY)
    if not isinstance(record, Record):
        raise StageError(
            f"{type(model).__name__} carries no record of a quantization: pass what prepare_pt2e, "
            "convert_pt2e, lower or load returned"
        )
    plan = record.plan
    return Report(
        stage=record.stage,
        target=record.target,
        rows=tuple(_row(operator, record) for operator in plan.operators),
        conflicts=tuple(
            f"{c.loser} rule {c.loser_rule} lost {', '.join(c.nodes)} to {c.winner} rule {c.winner_rule}"
            for c in plan.conflicts
        ),
        rewrites=(*(f"{r.name}: {', '.join(r.nodes)}" for r in plan.rewrites), *record.balanced),
        notes=(*plan.notes, *record.findings),
        bytes_before=plan.float_bytes,
        bytes_after=record.bytes,
        requantizations=plan.requantizations(record.dropped),
    )


def _row(operator: Operator, record: Record) -> Row:
    facts = {k: getattr(operator, k) for k in ("name", "operator", "module", "macs")}
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
        return (REFERENCE if record.stage == "reference" else KERNEL), ""
    return SIMULATED, record.fallbacks.get(number, "")


def assert_lowered(model: Any, min_fraction: float = 1.0) -> None:
    """Check that enough of what was quantized runs on int8 kernels.

    Args:
        model: what `lower` returned.
        min_fraction: the least part of all multiply-accumulates, from 0 to 1; at 1, every operator that a
            quantizer claimed must have a kernel as well.

    Raises:
        NotLoweredError: it does not; the message names the operators that stay behind.
    """
    if not 0 <= min_fraction <= 1:
        raise UserError(f"min_fraction={min_fraction} is not a part from 0 to 1")
    found = report(model)
    if found.stage != "lowered":
        raise StageError(f"assert_lowered takes what lower returned, and got a {found.stage} model")
    behind = [row for row in found.rows if row.state != KERNEL and (row.macs or row.owner)]
    if found.coverage() >= min_fraction and not (min_fraction == 1.0 and behind):
        return
    listed = "\n".join(
        f"  - {row.name} ({row.operator}{f' in {row.module}' if row.module else ''}), {row.macs:,} MACs: "
        f"{row.state}, {row.reason}"
        for row in sorted(behind, key=lambda row: -row.macs)
    )
    raise NotLoweredError(
        f"{found.coverage():.1%} of all multiply-accumulates run on int8 kernels, and "
        f"{min_fraction:.1%} are asked for:\n{listed}"
    )
