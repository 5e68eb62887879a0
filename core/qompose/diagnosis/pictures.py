# SPDX-License-Identifier: Apache-2.0
"""The graph of a report as a page draws it: all operators, and those of modules drawn as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from qompose.diagnosis.colours import looks, owner_classes
from qompose.diagnosis.entries import Entry
from qompose.diagnosis.layout import BOX, drawn

_MANY = 60
"""Up to how many boxes a page shows at first."""

Run = range
"""Operators that are drawn as one: they stand one behind the other in the program."""


def graph_of(entries: Sequence[Entry], states: Mapping[str, str]) -> dict[str, Any]:
    """Return the drawings of a program, the coarsest first, as data, and the number of the first shown."""
    levels = [
        *_module_levels(entries),
        ("all operators", [range(i, i + 1) for i in range(len(entries))]),
    ]
    fitting = [number for number, (_, runs) in enumerate(levels) if len(runs) <= _MANY]
    return {
        "levels": [_level(title, runs, entries, states) for title, runs in levels],
        "first": max(fitting, default=0),
        "box": BOX,
    }


def _module_levels(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Run]]]:
    """Yield the depths of modules at which something is drawn as one, and something apart."""
    deepest, last = max((_depth(e.module) for e in entries), default=0), 1
    for depth in range(1, deepest + 1):
        runs = list(_runs([".".join(e.module.split(".")[:depth]) for e in entries]))
        if last < len(runs) < len(entries):
            last = len(runs)
            yield f"modules, {depth} deep", runs


def _depth(module: str) -> int:
    return module.count(".") + 1 if module else 0


def _runs(keys: Sequence[str]) -> Iterator[Run]:
    """Yield the longest ranges of equal keys.

    Not all of a key at once: a module that is called twice would read what it made itself.
    """
    start = 0
    for _, group in groupby(keys):
        length = sum(1 for _ in group)
        yield range(start, start + length)
        start += length


def _level(
    title: str, runs: Sequence[Run], entries: Sequence[Entry], states: Mapping[str, str]
) -> dict[str, Any]:
    edges, owners = edges_between(runs, entries), owner_classes(entries)
    drawing = drawn(len(runs), edges)
    shown = [looks([entries[i] for i in run], owners, states) for run in runs]
    return {
        "title": title,
        "width": drawing.width,
        "layers": max(drawing.layers, default=-1) + 1,
        "nodes": [
            {
                "rows": [run.start, run.stop],
                "at": [layer, place],
                "label": _label(run, entries),
                "kind": entries[run.start].operator if len(run) == 1 else f"{len(run)} operators",
                "looks": look,
                "border": border,
                "lane": lane,
            }
            for run, layer, place, lane, (look, border) in zip(
                runs, drawing.layers, drawing.places, drawing.lanes, shown, strict=True
            )
        ],
        "edges": edges,
    }


def _label(run: Run, entries: Sequence[Entry]) -> str:
    """Return the name of an operator, or the module that those of a run have in common."""
    if len(run) == 1:
        return entries[run.start].name
    paths = [entries[i].module.split(".") for i in run]
    common = 0
    while all(len(path) > common and path[common] == paths[0][common] for path in paths):
        common += 1
    return ".".join(paths[0][:common]) or "outside of modules"


def edges_between(runs: Sequence[Run], entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """Return (producer, reader) by the numbers of runs, each once, in the order of the program."""
    run_of = {entries[i].name: number for number, run in enumerate(runs) for i in run}
    edges = {
        (run_of[name], number): None
        for number, run in enumerate(runs)
        for i in run
        for name in entries[i].inputs
        if run_of.get(name, number) != number
    }
    return list(edges)
