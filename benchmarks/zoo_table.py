# SPDX-License-Identifier: Apache-2.0
"""What `zoo.py` prints: a row for each run, the shares that work, and the reasons for what is not covered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from qompose.console import Table
from zoo_flows import EXPORT, Flow
from zoo_run import EQUAL

Row = dict[str, Any]
ENOUGH = 0.9
"""Of all multiply-accumulates: a row with less must say why."""
ALLOWED = 6.0
"""Decibels below the yardstick that are no finding: flows take operators apart, which rounds more often."""
LONGEST = 140
SHOWN = 6
"""Models named for a reason; the JSON file has all."""


def long_table(rows: Iterable[Row]) -> Table:
    """A line for each run."""
    header = ("model", "flow", "works", "coverage", "SQNR", "simulated", "plain int8", "seconds")
    ordered = list(rows)
    plain = yardsticks(ordered)
    lines = [
        (
            row["model"],
            row["flow"],
            "yes" if row["works"] else f"no: {row['stage']}",
            _percent(row.get("coverage")),
            _decibels(row.get("sqnr")),
            _decibels(row.get("simulated_sqnr")),
            _decibels(plain.get(row["model"])),
            f"{sum(row['seconds'].values()):.1f}",
        )
        for row in ordered
        if row["flow"] != EXPORT or not row["works"]
    ]
    return Table(header, tuple(lines))


def matrix(rows: Sequence[Row], flows: Sequence[Flow]) -> Table:
    """A line for each model; a cell has coverage and SQNR."""
    names = [flow.name for flow in flows if flow.name != EXPORT]
    cells = {(row["model"], row["flow"]): row for row in rows}
    models = dict.fromkeys(row["model"] for row in rows)
    plain = yardsticks(rows)
    lines = [
        (model, _decibels(plain.get(model)), *(_cell(cells.get((model, name))) for name in names))
        for model in models
    ]
    return Table(("model", "plain int8", *names), tuple(lines))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if not row["works"]:
        return f"fails: {row['stage']}"
    return f"{_percent(row.get('coverage'))} {_decibels(row.get('sqnr'))}".strip()


def summary(rows: Sequence[Row], flows: Iterable[Flow]) -> Table:
    """A line for each flow: the shares that work, that are covered, and that are or name a reason."""
    header = (
        "flow", "models", "work", "of those that export", f"covered by {ENOUGH:.0%}", "or with a reason",
        "median coverage", "median SQNR", "seconds",
    )  # fmt: skip
    exporting = {row["model"] for row in rows if row["flow"] == EXPORT and row["works"]}
    lines = []
    for flow in flows:
        own = [row for row in rows if row["flow"] == flow.name]
        if not own:
            continue
        working = [row for row in own if row["works"]]
        counted = [row for row in working if row.get("coverage") is not None]
        enough = [row for row in counted if row["coverage"] >= ENOUGH]
        named = [row for row in counted if row["coverage"] >= ENOUGH or not row["unnamed"]]
        errors = [row["sqnr"] for row in working if row.get("sqnr") is not None]
        lines.append((
            flow.name,
            len(own),
            _share(len(working), len(own)),
            _share(
                sum(row["model"] in exporting for row in working),
                sum(row["model"] in exporting for row in own),
            ),
            _share(len(enough), len(counted)),
            _share(len(named), len(counted)),
            _percent(median(row["coverage"] for row in counted)) if counted else "",
            _decibels(median(errors)) if errors else "",
            f"{sum(sum(row['seconds'].values()) for row in own):.0f}",
        ))  # fmt: skip
    return Table(header, tuple(lines))


def yardsticks(rows: Iterable[Row]) -> dict[str, float]:
    """The decibels of plain rounding to eight bits, by model; not of bodies, which it does not reach."""
    found = (row for row in rows if row["flow"] == EXPORT and row["works"] and not row["bodies"])
    return {row["model"]: row["sqnr"] for row in found if row["sqnr"] is not None}


def failures(rows: Iterable[Row]) -> Table:
    """A line for each run that did not work."""
    lines = [
        (row["model"], row["flow"], row["stage"], _short(row["error"]))
        for row in rows
        if not row["works"]
    ]
    return Table(("model", "flow", "fails in", "error"), tuple(lines))


def reasons(rows: Iterable[Row]) -> Table:
    """A line for each reason in a flow of rows that are not covered, with the models that have it."""
    models: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in rows:
        if (row.get("coverage") if row["works"] else None) is None or row["coverage"] >= ENOUGH:
            continue
        for operator, reason, _, macs in row["reasons"]:
            found = models.setdefault((row["flow"], operator, reason or "NO REASON"), [])
            found.append((macs / row["macs"], row["model"]))
    lines = []
    for (flow, operator, reason), found in models.items():
        ordered = sorted(found, reverse=True)
        named = ", ".join(f"{model} {part:.0%}" for part, model in ordered[:SHOWN])
        more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
        lines.append((flow, operator, reason, len(ordered), named + more))
    lines.sort(key=lambda line: (str(line[0]), -int(line[3])))
    return Table(
        ("flow", "operator", "why", "models", "with this part of their work"), tuple(lines)
    )


def suspects(rows: Sequence[Row]) -> Table:
    """Rows whose error makes no sense: a kernel far from its simulation, or far below plain rounding.

    Weights of fewer than eight bits cost more, and are judged by their simulation alone.
    """
    plain = yardsticks(rows)
    lines = [
        (row["model"], row["flow"], _decibels(row["sqnr"]), _decibels(row.get("simulated_sqnr")),
         _decibels(plain.get(row["model"])), why)
        for row in rows
        if row["works"] and row["flow"] != EXPORT and row.get("sqnr") is not None
        for why in _findings(row, plain.get(row["model"]))
    ]  # fmt: skip
    header = ("model", "flow", "SQNR", "simulated", "plain int8", "finding")
    return Table(header, tuple(lines))


def _findings(row: Row, plain: float | None) -> Iterator[str]:
    simulated = row.get("simulated_sqnr")
    if simulated is not None and row["sqnr"] < simulated - ALLOWED / 2 and row["sqnr"] < EQUAL / 2:
        yield "the kernels are worse than their simulation"
    few_bits = any(word in row["flow"] for word in ("int4", "int2"))
    if plain is not None and not few_bits and row["sqnr"] < plain - ALLOWED:
        yield "worse than plain rounding"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.1%}"


def _decibels(value: float | None) -> str:
    return "" if value is None else "equal" if value >= EQUAL else f"{value:.1f}"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}, {part / whole:.1%}" if whole else ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
