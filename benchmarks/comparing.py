# SPDX-License-Identifier: Apache-2.0
"""The command line of a comparison of engines: its options, its table, and a file with every figure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from side_by_side import Call, Row, measure, serve, versions

LONGEST_REASON = 120
"""Characters of a failure below the table; the JSON file has all of it."""
INTERNAL = ("work", "json")
"""Options that say nothing of the measurement."""


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each engine that failed."""
    failed = (row for row in rows if row.error)
    return [f"{r.model}, {r.engine}: {' '.join(r.error.split())[:LONGEST_REASON]}" for r in failed]


@dataclass(frozen=True)
class Comparison:
    """What is run, and how its results are shown.

    Attributes:
        models, engines: their names, in the order of the table.
        columns: the titles after those of model and engine.
        compared: the engines that the JSON file gives ratios to.
        packages: those whose versions are printed.
        threads: the default number of threads of every engine.
        work: makes what an engine runs on a model, in a process of its own, with JSON-able facts of it.
        cells: the cells of a row whose engine has not failed.
        notes: lines below the table.
    """

    models: Sequence[str]
    engines: Sequence[str]
    columns: Sequence[str]
    compared: Sequence[str]
    packages: Sequence[str]
    threads: int
    work: Callable[[str, str, argparse.Namespace], tuple[Call, dict[str, Any]]]
    cells: Callable[[Row, Sequence[Row]], list[str]]
    notes: Callable[[Sequence[Row]], list[str]] = failures

    def parser(self, description: str) -> argparse.ArgumentParser:
        """The options that every comparison has."""
        parser = argparse.ArgumentParser(description=description)
        add = parser.add_argument
        for name, known in (("models", self.models), ("engines", self.engines)):
            add(f"--{name}", nargs="+", default=[*known], choices=[*known], metavar=name[:-1].upper(),
                help=f"any of {', '.join(known)} (default: all)")  # fmt: skip
        add(
            "--rounds",
            type=int,
            default=15,
            help="rounds of every engine, interleaved (default: %(default)s)",
        )
        add(
            "--seconds",
            type=float,
            default=0.5,
            help="seconds per round and engine (default: %(default)s)",
        )
        add(
            "--threads",
            type=int,
            default=self.threads,
            help="threads of every engine (default: %(default)s)",
        )
        add(
            "--json",
            type=Path,
            metavar="FILE",
            help="also write every figure and reason to this file",
        )
        add("--work", choices=[*self.engines], help=argparse.SUPPRESS)
        return parser

    def run(self, options: argparse.Namespace) -> None:
        """Be one engine's process where the options say so; measure and print otherwise."""
        if options.work:
            serve(lambda: self.work(options.work, options.models[0], options), options.seconds)
            return
        rows = [
            row
            for model in options.models
            for row in measure(model, options.engines, options.rounds, sys.argv[1:])
        ]
        settings = {
            "versions": versions(self.packages),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            **{key: value for key, value in vars(options).items() if key not in INTERNAL},
        }
        console = Console(width=200, highlight=False, markup=False)
        console.print(self.table(rows))
        for line in (*self.notes(rows), json.dumps(settings, default=str)):
            console.print(f"\n{line}", soft_wrap=True)
        if options.json:
            data = [row.to_dict(rows, self.compared) for row in rows]
            options.json.write_text(
                json.dumps({"settings": settings, "rows": data}, indent=1, default=str) + "\n"
            )

    def table(self, rows: Sequence[Row]) -> Table:
        """One row for each engine on each model, in Markdown."""
        shown = Table(box=box.MARKDOWN)
        for name in ("model", "engine"):
            shown.add_column(name, no_wrap=True)
        for name in self.columns:
            shown.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            cells = ["failed"] if row.error else self.cells(row, rows)
            shown.add_row(row.model, row.engine, *cells)
        return shown
