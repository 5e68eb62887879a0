# SPDX-License-Identifier: Apache-2.0
"""The page of a report: one HTML file that needs nothing else, no network least of all.

All text stands in it as HTML. Its script searches and sorts the table and draws the graph from data in the
page; the policy in its head lets no other script run and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from qompose.diagnosis.charts import coverage, errors
from qompose.diagnosis.colours import owner_classes, state_class, step_class, step_legend
from qompose.diagnosis.entries import Entry, entries_of
from qompose.diagnosis.markup import Markup, breakable, element, embedded, joined
from qompose.diagnosis.pictures import graph_of
from qompose.rendering import as_decibels

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
    for number, entry in enumerate(entries):
        errors = _errors(entry) if compared else ()
        cells = (*_first(entry, owners, states), *errors, *_last(entry))
        rows.append(element("tr", *cells, id=f"row{number}", tabindex="-1"))
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
