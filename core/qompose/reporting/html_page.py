# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a report: one file that needs nothing else, no network least of all.

All text stands in the page as HTML. Its script searches and sorts the table, and draws the graph from
data in the page; the policy in its head lets no other script run and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from qompose.console import as_decibels
from qompose.reporting.graph_drawing import (
    DOTTED,
    edges_between,
    graph_of,
    layers_of,
    owner_classes,
    state_class,
    step_class,
    step_legend,
)

if TYPE_CHECKING:
    from qompose.reporting.report_data import Comparison, MeasuredRow

_TEMPLATES = Path(__file__).with_name("templates")
_MODE_TITLES = {"owner": "owner", "state": "state", "sqnr": "SQNR", "own": "own SQNR"}


def page(
    entries: Sequence[MeasuredRow],
    comparison: Comparison | None,
    *,
    data: Mapping[str, Any],
    totals: Sequence[str],
    remarks: Mapping[str, Sequence[str]],
    states: Mapping[str, str],
) -> str:
    """Return the page of a report; equal reports have equal pages.

    Args:
        entries: the rows of the report, with what the comparison, where there is one, has of them.
        data: what the page's script reads, by name: the report and the comparison.
        totals: lines that sum it up, the first of them the headline.
        remarks: lines by their heading.
        states: where operators may end, in the order in which they are listed, and the border of each.
    """
    owners = owner_classes(entries)
    listed_states = [state for state in states if any(entry.state == state for entry in entries)]
    state_classes = {state: state_class(state, states) for state in listed_states}
    legends = {
        "owner": [(style, owner) for owner, style in owners.items()],
        "state": [(style, state) for state, style in state_classes.items()],
    }
    if comparison is not None:
        legends |= {"sqnr": step_legend(), "own": step_legend()}
    script = _read("page.js")
    return _environment().get_template("page.html").render(
        totals=totals,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(_read("page.css")),
        coverage=list(_coverage(entries, owners, states)),
        comparison=comparison,
        **({} if comparison is None else _errors(entries, comparison)),
        legends=legends,
        mode_titles=_MODE_TITLES,
        listed_states=listed_states,
        state_classes=state_classes,
        owners=owners,
        entries=entries,
        remarks=remarks,
        data={**data, "graph": graph_of(entries, states)},
        script=Markup(script),
    )  # fmt: skip


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "breakable": breakable,
        "decibels": as_decibels,
        "script_number": lambda value: str(value).replace("inf", "Infinity"),
        "step_class": step_class,
    }
    return environment


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text("utf-8")


def breakable(text: str) -> Markup:
    """Return a name that may go on in the next line behind a dot, a slash or an underscore."""
    return Markup("<wbr>").join(re.split(r"(?<=[./_])(?=.)", text))


def _coverage(
    entries: Sequence[MeasuredRow], owners: Mapping[str, str], states: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the operators of one owner in one state: how many they are, and their work, as parts of all."""
    total = max(1, sum(entry.macs for entry in entries))
    for owner, owner_style in owners.items():
        for state, border in states.items():
            group = [entry for entry in entries if (entry.who, entry.state) == (owner, state)]
            if group:
                macs = sum(entry.macs for entry in group)
                yield {
                    "owner": owner,
                    "state": state,
                    "style": owner_style + " line" * (border == DOTTED),
                    "macs": macs,
                    "part_of_macs": macs / total,
                    "operators": len(group),
                    "part_of_operators": len(group) / len(entries),
                }


_WORST = 12
"""How many operators are listed beside the chart."""
_MANY = 200
"""Up to how many operators have large marks."""
_HEIGHT, _TOP, _BOTTOM = 260, 18, 12
"""Of the chart, in pixels: all, and what stays free."""


def _errors(entries: Sequence[MeasuredRow], comparison: Comparison) -> dict[str, Any]:
    """Return what the template shows of a comparison: the chart, and which operators add most."""
    measured = [entry for entry in entries if entry.sqnr is not None or entry.own_sqnr is not None]
    by_name = {entry.name: (row, entry) for row, entry in enumerate(entries)}
    named = dict.fromkeys(row.name for row in comparison)
    return {
        "measured_entries": len(measured),
        "chart": _chart(entries) if measured else None,
        "worst": [by_name[name] for name in named if name in by_name][:_WORST],
        "values_without_row": [row for row in comparison if row.name not in by_name],
    }


def _chart(entries: Sequence[MeasuredRow]) -> dict[str, Any]:
    """Return the error of each operator by its depth: labels and heights of the scale, and the marks."""
    runs = [range(i, i + 1) for i in range(len(entries))]
    depths = layers_of(len(entries), edges_between(runs, entries))
    values = [v for e in entries for v in (e.sqnr, e.own_sqnr) if v is not None]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = (10 * math.floor(end / 10) for end in (min(finite), max(finite) + 10))
    unbounded = -math.inf in values  # which has a line of its own below all
    low -= 10 * unbounded
    scale = (low, high)
    ticks = range(low, high + 1, 10 * math.ceil((high - low) / 80))
    grid = {decibels: _height(decibels, scale) for decibels in ticks}
    names = {low: "-inf dB"} if unbounded else {}
    return {
        "ticks": [
            *((names.get(decibels, f"{decibels} dB"), y) for decibels, y in grid.items()),
            ("equal", _height(math.inf, scale)),
        ],
        "grid": list(grid.values()),
        "marks": [*_marks(entries, depths, scale, True), *_marks(entries, depths, scale, False)],
        "depth": max(depths) + 1,
        "style": "plot many" if entries[_MANY:] else "plot",
        "height": _HEIGHT,
    }


def _height(value: float, scale: tuple[int, int]) -> int:
    """Return how far below the top a value is drawn; equal values have a line of their own above all."""
    if value == math.inf:
        return _TOP - 8
    low, high = scale
    part = (min(max(value, low), high) - low) / (high - low)
    return round(_HEIGHT - _BOTTOM - part * (_HEIGHT - _BOTTOM - _TOP - 12))


def _marks(
    entries: Sequence[MeasuredRow], depths: Sequence[int], scale: tuple[int, int], own: bool
) -> Iterator[dict[str, Any]]:
    """Yield the measurements of operators, of the whole run or of what each adds, as the chart has them."""
    for row, entry in enumerate(entries):
        value = entry.own_sqnr if own else entry.sqnr
        if value is not None:
            x = f"{100 * (depths[row] + 0.5) / (max(depths) + 1):.2f}%"
            kind = "own SQNR" if own else "SQNR"
            words = f"{entry.name}: {kind} {as_decibels(value)}, {entry.cause}"
            y = _height(value, scale)
            yield {"row": row, "x": x, "y": y, "own": own, "words": words}
