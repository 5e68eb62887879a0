# SPDX-License-Identifier: Apache-2.0
"""Bars of who took how much, and the error of each operator by its depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from qompose.diagnosis.colours import DOTTED, owner_classes
from qompose.diagnosis.entries import Entry, number
from qompose.diagnosis.layout import layers_of
from qompose.diagnosis.markup import Markup, element, joined, table
from qompose.diagnosis.pictures import edges_between
from qompose.rendering import as_decibels

_WORST = 12
"""How many operators are listed beside the chart."""

_MANY = 200
"""From how many operators on their marks are small."""

_HEIGHT, _TOP, _BOTTOM = 260, 18, 12
"""Of the chart, in pixels: all, and what stays free."""


def coverage(entries: Sequence[Entry], states: Mapping[str, str]) -> Markup:
    """Return a table with a bar for each owner and state: part of the work, and of the operators."""
    owners = owner_classes(entries)
    total, rows = max(1, sum(entry.macs for entry in entries)), []
    for owner in owners:
        for state in states:
            group = [entry for entry in entries if (entry.who, entry.state) == (owner, state)]
            if group:
                work = sum(entry.macs for entry in group)
                style = f"bar {owners[owner]}{' line' * (states[state] == DOTTED)}"
                bars = (
                    _bar(work / total, f"{work:,}", style),
                    _bar(len(group) / len(entries), f"{len(group):,}", style),
                )
                who = element("th", element("span", owner, class_="who"), " ", state, scope="row")
                rows.append((who, *bars))
    return table(("owner and state", "multiply-accumulates", "operators"), rows, "Coverage")


def _bar(part: float, words: str, style: str) -> Markup:
    bar = element("span", element("span", class_=style, style=f"width:{part:.2%}"), class_="track")
    return element("td", bar, element("span", f"{part:.1%} ", element("small", words)))


def errors(entries: Sequence[Entry], comparison: Mapping[str, Any] | None) -> Markup:
    """Return the chart of a comparison, the operators that add most, and what was not compared."""
    if comparison is None:
        call = element("code", "report.save(path, qompose.compare(...))")
        return element(
            "p",
            "This report was saved without a comparison: ",
            call,
            " puts one here.",
            class_="hint",
        )
    compared = [entry for entry in entries if entry.sqnr is not None or entry.own_sqnr is not None]
    names = {entry.name for entry in entries}
    others = [row for row in comparison["rows"] if row["name"] not in names]
    head = (
        f"{comparison['reference']} and {comparison['other']}, {_inputs(comparison['batches'])}: "
        f"{len(compared):,} of {len(entries):,} operators compared"
    )
    lines = [f"not in both: {name}" for name in comparison["unpaired"]] + comparison["notes"]
    parts = [element("p", head)]
    parts += [_chart(entries), _adding_most(comparison, entries)] if compared else []
    parts += [_others(others)] if others else []
    parts += [element("ul", *(element("li", line) for line in lines))] if lines else []
    return joined(parts, "\n")


def _chart(entries: Sequence[Entry]) -> Markup:
    runs = [range(i, i + 1) for i in range(len(entries))]
    depths = layers_of(len(entries), edges_between(runs, entries))
    values = [v for e in entries for v in (e.sqnr, e.own_sqnr) if v is not None]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = (10 * math.floor(min(finite) / 10), 10 * math.ceil(max(finite) / 10) or 10)
    high += 10 * (high <= low)
    unbounded = -math.inf in values  # which has a line of its own below all
    low -= 10 * unbounded
    marks = [
        _mark(row, entry, 100 * (depths[row] + 0.5) / (max(depths) + 1), (low, high), own)
        for own in (True, False)
        for row, entry in enumerate(entries)
    ]
    lines = [(y, _height(y, (low, high))) for y in _ticks(low, high)]
    grid = [element("line", x1="0", x2="100%", y1=y, y2=y, class_="grid") for _, y in lines]
    names = {low: "-inf dB"} if unbounded else {}
    ticks = [element("text", names.get(dB, f"{dB} dB"), x="100%", y=y + 4) for dB, y in lines]
    ticks.append(element("text", "equal", x="100%", y=_height(math.inf, (low, high)) + 4))
    style = "plot many" if len(entries) > _MANY else "plot"
    plot = element(
        "svg", *grid, *marks, class_=style, height=_HEIGHT, role="img",
        aria_label="SQNR of each operator by its depth; the table below has the numbers",
    )  # fmt: skip
    axis = element("svg", *ticks, class_="axis", height=_HEIGHT, aria_hidden="true")
    depth = element("p", f"depth: 1 to {max(depths) + 1:,} operators from an input", class_="depth")
    key = element(
        "p", element("span", "●", class_="whole"), " SQNR of the whole run   ",
        element("span", "◇", class_="own"), " SQNR of what the operator itself adds", class_="key",
    )  # fmt: skip
    return element("figure", key, element("div", axis, plot, class_="chart"), depth)


def _ticks(low: int, high: int) -> range:
    step = 10 * math.ceil((high - low) / 80)
    return range(low, high + 1, step)


def _height(value: float, ends: tuple[int, int]) -> int:
    """Return how far below the top a value is drawn; equal values have a line of their own above all."""
    if value == math.inf:
        return _TOP - 8
    low, high = ends
    part = (min(max(value, low), high) - low) / (high - low)
    return round(_HEIGHT - _BOTTOM - part * (_HEIGHT - _BOTTOM - _TOP - 12))


def _mark(row: int, entry: Entry, x: float, ends: tuple[int, int], own: bool) -> Markup:
    value = entry.own_sqnr if own else entry.sqnr
    if value is None:
        return Markup("")
    words = f"{entry.name}: {'own SQNR ' if own else 'SQNR '}{as_decibels(value)}, {entry.cause}"
    facts = {"data_row": row, "class_": "own" if own else "whole"}
    title, y = element("title", words), _height(value, ends)
    if own:  # a shape of its own as well as a colour
        return element("text", title, "◇", x=f"{x:.2f}%", y=y, **facts)
    return element("circle", title, cx=f"{x:.2f}%", cy=y, r=3.5, **facts)


def _adding_most(comparison: Mapping[str, Any], entries: Sequence[Entry]) -> Markup:
    """Return a table of the first operators of a comparison, whose order says what matters."""
    by_name = {entry.name: (row, entry) for row, entry in enumerate(entries)}
    named = dict.fromkeys(row["name"] for row in comparison["rows"])
    rows = []
    for name in [name for name in named if name in by_name][:_WORST]:
        row, entry = by_name[name]
        link = element("a", name, href=f"#row{row}")
        rows.append((link, entry.cause, as_decibels(entry.own_sqnr), as_decibels(entry.sqnr)))
    header = ("operator", "cause", "own SQNR", "SQNR")
    return element("div", table(header, rows, "What adds most"), class_="scroll")


def _others(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return the values that belong to no operator of the report, such as parameters."""
    cells = [
        (
            row["value"],
            row["operator"],
            row["cause"],
            *(as_decibels(number(row[n])) for n in ("sqnr", "own_sqnr")),
        )
        for row in rows
    ]
    header = ("value", "operator", "cause", "SQNR", "own SQNR")
    listed = table(header, cells, "Parameters, and what else has no row")
    summary = element("summary", f"Compared values of no operator in the table: {len(rows):,}")
    return element("details", summary, element("div", listed, class_="scroll"))


def _inputs(batches: int) -> str:
    return f"{batches:,} input{'s' * (batches != 1)}"
