# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a report.

The page of a report: one HTML file that needs nothing else, no network least of all.

All text stands in it as HTML. Its script searches and sorts the table and draws the graph from data in the
page; the policy in its head lets no other script run and nothing be loaded.

Bars of who took how much, and the error of each operator by its depth.

HTML as text: elements whose content is escaped unless it is markup already.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from qompose.console import as_decibels
from qompose.reporting.graph_drawing import (
    DOTTED,
    Entry,
    edges_between,
    entries_of,
    graph_of,
    layers_of,
    number,
    owner_classes,
    state_class,
    step_class,
    step_legend,
)

_TEMPLATES = Path(__file__).with_name("templates")
_FIRST = ("operator", "kind", "module", "state", "owner")
_COMPARED = ("SQNR", "own SQNR", "cause")
_LAST = ("kernel or reason", "MACs", "rule", "config")


def page(
    report: Mapping[str, Any],
    comparison: Mapping[str, Any] | None,
    *,
    totals: Sequence[str],
    remarks: Mapping[str, Sequence[str]],
    states: Mapping[str, str],
) -> str:
    """Return the page of a report; equal reports have equal pages.

    Args:
        report: as data (`Report.to_dict`).
        comparison: as data (`Comparison.to_dict`), where there is one.
        totals: lines that sum it up, the first of them the headline.
        remarks: lines by their heading.
        states: where operators may end, in the order in which they are listed, and the border of each.
    """
    entries = entries_of(report, comparison)
    script = _read("page.js")
    data = {"report": report, "comparison": comparison, "graph": graph_of(entries, states)}
    return Template(_read("page.html")).substitute(
        title=element("title", f"{totals[0]} - qompose"),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=_read("page.css"),
        headline=element("p", totals[0], class_="headline"),
        totals=element("ul", *(element("li", line) for line in totals[1:])),
        coverage=coverage(entries, states),
        errors=errors(entries, comparison),
        pickers=joined(_pickers(entries, states, comparison is not None), "\n"),
        filters=joined(_filters(entries, states), "\n"),
        table=_table(entries, states, comparison is not None),
        remarks=_remarks(remarks),
        data=embedded(data),
        script=script,
    )


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text("utf-8")


def _pickers(entries: Sequence[Entry], states: Mapping[str, str], compared: bool) -> list[Markup]:
    """Return the choice of what colours mean, and the legend of each."""
    titles = {"owner": "owner", "state": "state", "sqnr": "SQNR", "own": "own SQNR"}
    shown = {
        "owner": [(style, owner) for owner, style in owner_classes(entries).items()],
        "state": [
            (state_class(s, states), s) for s in states if any(e.state == s for e in entries)
        ],
        **(dict.fromkeys(("sqnr", "own"), step_legend()) if compared else {}),
    }
    options = (element("option", titles[mode], value=mode) for mode in shown)
    label = element("label", "Colour by ", element("select", *options, id="mode"))
    return [label, *(_legend(mode, rows) for mode, rows in shown.items())]


def _legend(mode: str, rows: Sequence[tuple[str, str]]) -> Markup:
    items = (
        element("li", element("span", class_=f"swatch {style}"), words) for style, words in rows
    )
    hidden = None if mode == "owner" else "hidden"
    return element("ul", *items, class_="legend", data_mode=mode, hidden=hidden)


def _filters(entries: Sequence[Entry], states: Mapping[str, str]) -> list[Markup]:
    """Return the fields that narrow the table."""
    found = element(
        "input", type="search", id="search", placeholder="name, module, rule, reason",
        autocomplete="off", spellcheck="false",
    )  # fmt: skip
    listed = [state for state in states if any(entry.state == state for entry in entries)]
    return [
        element("label", "Search ", found),
        element("label", "State ", _choice("state", listed)),
        element("label", "Owner ", _choice("owner", [*owner_classes(entries)])),
    ]


def _choice(name: str, values: Sequence[str]) -> Markup:
    options = (element("option", value, value=value) for value in values)
    return element("select", element("option", "all", value=""), *options, id=name)


def _table(entries: Sequence[Entry], states: Mapping[str, str], compared: bool) -> Markup:
    columns, owners = (*_FIRST, *_COMPARED * compared, *_LAST), owner_classes(entries)
    numeric = dict.fromkeys(("MACs", "SQNR", "own SQNR"), "n")
    head = element("tr", *(element("th", t, scope="col", class_=numeric.get(t)) for t in columns))
    rows = []
    for index, entry in enumerate(entries):
        errors = _errors(entry) if compared else ()
        cells = (*_first(entry, owners, states), *errors, *_last(entry))
        rows.append(element("tr", *cells, id=f"row{index}", tabindex="-1"))
    return element(
        "table",
        element("caption", "All float operators, in the order of the program"),
        element("thead", head),
        element("tbody", joined(rows, "\n")),
        id="operators",
    )


def _first(
    entry: Entry, owners: Mapping[str, str], states: Mapping[str, str]
) -> tuple[Markup, ...]:
    return (
        element("th", breakable(entry.name), scope="row"),
        element("td", breakable(entry.operator), class_="kind"),
        element("td", breakable(entry.module), class_="path"),
        element("td", _swatch(state_class(entry.state, states)), entry.state, class_="nowrap"),
        element("td", _swatch(owners[entry.who]), entry.who, class_="nowrap"),
    )


def _errors(entry: Entry) -> tuple[Markup, ...]:
    return _measured(entry.sqnr), _measured(entry.own_sqnr), element("td", entry.cause)


def _last(entry: Entry) -> tuple[Markup, ...]:
    return (
        element("td", entry.kernel or entry.reason, class_="long"),
        element("td", f"{entry.macs:,}", class_="n", data_value=entry.macs),
        element("td", entry.rule),
        element("td", entry.config),
    )


def _swatch(style: str) -> Markup:
    return element("span", class_=f"swatch {style}")


def _measured(sqnr: float | None) -> Markup:
    if sqnr is None:
        return element("td")
    return element(
        "td", _swatch(step_class(sqnr)), as_decibels(sqnr), class_="n",
        data_value=str(sqnr).replace("inf", "Infinity"),
    )  # fmt: skip


def _remarks(remarks: Mapping[str, Sequence[str]]) -> Markup:
    """Return lists of lines, long ones folded."""
    parts = []
    for heading, lines in remarks.items():
        if lines:
            summary = element("summary", f"{heading} ({len(lines):,})")
            listed = element("ul", *(element("li", line) for line in lines))
            opened = "open" if len(lines) <= 10 else None
            parts.append(element("details", summary, listed, open=opened))
    return joined(parts, "\n") or element("p", "There are none.", class_="hint")


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


_VOID = {"br", "input", "meta"}


class Markup(str):
    """Text that is HTML already; any other is escaped where it becomes a part of some."""

    __slots__ = ()


def element(name: str, *content: object, **attributes: object) -> Markup:
    """Return an element. `class_` stands for `class`, `data_row` for `data-row`; None leaves one out."""
    given = (
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    start = f"<{name}{''.join(given)}>"
    return Markup(start if name in _VOID else f"{start}{joined(content)}</{name}>")


def joined(content: Iterable[object], between: str = "") -> Markup:
    """Return content one behind the other."""
    parts = (c if isinstance(c, Markup) else html.escape(str(c)) for c in content)
    return Markup(between.join(parts))


def breakable(text: str) -> Markup:
    """Return a name that may go on in the next line behind a dot, a slash or an underscore."""
    return joined(re.split(r"(?<=[./_])(?=.)", text), "<wbr>")


def table(header: Sequence[object], rows: Iterable[Sequence[object]], caption: str) -> Markup:
    """Return a table; cells of numbers align right."""
    head = element("tr", *(element("th", title, scope="col") for title in header))
    body = (element("tr", *map(_cell, row)) for row in rows)
    return element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", joined(body, "\n")),
    )


def _cell(content: object) -> Markup:
    if isinstance(content, Markup) and content.startswith(("<td", "<th")):
        return content
    numeric = isinstance(content, int)
    return element("td", f"{content:,}" if numeric else content, class_="n" if numeric else None)


def embedded(data: Any) -> Markup:
    """Return data as JSON that may stand in a script element: nothing in it ends that element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
