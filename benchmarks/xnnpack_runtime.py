# SPDX-License-Identifier: Apache-2.0
"""Speed, size and fidelity on ExecuTorch's XNNPACK: float, the stock int8 flow and qompose, side by side.

Every engine gets the same model, calibration inputs and held-out inputs, and runs in a process of its
own. The processes of a model run in turn, round after round, so that a slow minute is slow for all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from runtime_engines import EAGER, ENGINES, FLOAT, OURS, STOCK, decibels, make
from runtime_subjects import SUBJECTS, Amounts
from side_by_side import Call, Row, measure, serve, versions

LONGEST_REASON = 120
"""Characters of a failure below the table; the JSON file has all of it."""
COMPARED = (EAGER, FLOAT, STOCK)


def work(engine: str, model: str, options: argparse.Namespace) -> tuple[Call, dict[str, Any]]:
    """Make the program of an engine, and measure what can be measured before it is timed."""
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    subject = SUBJECTS[model](Amounts(options.calibration, options.held_out, options.quick))
    torch.set_grad_enabled(False)  # only now: a subject may have to be trained
    built = time.perf_counter()
    program = make(engine, subject, options.threads)
    made = {"build_s": built - start, "make_s": time.perf_counter() - built}
    sqnr = None if engine == EAGER else decibels(program, subject)
    found = {key: value for key, value in vars(program).items() if key != "run"}
    run, inputs = program.run, subject.held_out[0]
    return lambda: run(inputs), {**found, **made, "sqnr_db": sqnr}


COLUMNS = (
    "model", "engine", "ms", "p10", "p90", "of eager", "of float", "of stock", "MB", "SQNR dB",
    "delegates", "int8 in them", "float in them", "portable",
)  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """One row for each engine on each model, which is Markdown as it stands."""
    shown = Table(box=box.MARKDOWN)
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)
    for row in rows:
        shown.add_row(row.model, row.engine, *_cells(row, rows))
    return shown


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    if row.error:
        return ["failed"]
    found = row.found
    cells = [*row.times(), *row.ratios(rows, COMPARED), f"{found['bytes'] / 1e6:.2f}"]
    if row.engine == EAGER:
        return cells
    counts = (sum(found[key].values()) for key in ("delegated_int8", "delegated_float", "portable"))
    return [*cells, f"{found['sqnr_db']:.1f}", str(found["delegates"]), *map(str, counts)]


def _notes(rows: Sequence[Row]) -> list[str]:
    """What the table has no room for: why an engine failed, and which operators are not int8."""
    notes = [
        f"{row.model}, {row.engine}: {' '.join(row.error.split())[:LONGEST_REASON]}"
        for row in rows
        if row.error
    ]
    for row in rows:
        if row.engine not in (STOCK, OURS) or row.error:
            continue
        for key, what in (("delegated_float", "float in delegates"), ("portable", "portable")):
            names = ", ".join(f"{count} {name}" for name, count in sorted(row.found[key].items()))
            notes += [f"{row.model}, {row.engine}, {what}: {names}"] if names else []
    return notes


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "versions": versions(("torch", "executorch", "torchao", "transformers", "qompose")),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **{key: value for key, value in vars(options).items() if key not in ("work", "json")},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--models", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS), metavar="MODEL",
        help=f"of {', '.join(SUBJECTS)}")  # fmt: skip
    add("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    add("--rounds", type=int, default=15, help="of every engine, in turn (%(default)s)")
    add("--seconds", type=float, default=0.5, help="of one round of one engine (%(default)s)")
    add("--threads", type=int, default=1, help="of torch and of the runtime (%(default)s)")
    add("--calibration", type=int, default=32, help="inputs to calibrate with (%(default)s)")
    add("--held-out", type=int, default=32, help="other inputs, for the SQNR (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every figure and reason here too")
    add("--quick", action="store_true", help="small networks, three short rounds: for a look only")
    add("--work", choices=ENGINES, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = sys.argv[1:]
    options = _parser().parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds = 3, 0.05
        options.calibration, options.held_out = 4, 4
    if options.work:
        serve(lambda: work(options.work, options.models[0], options), options.seconds)
        return
    rows = [
        row
        for model in options.models
        for row in measure(model, options.engines, options.rounds, arguments)
    ]
    settings = _settings(options)
    console = Console(width=200, highlight=False, markup=False)
    console.print(table(rows))
    for line in (*_notes(rows), json.dumps(settings)):
        console.print(f"\n{line}", soft_wrap=True)
    if options.json:
        data = [row.to_dict(rows, COMPARED) for row in rows]
        options.json.write_text(json.dumps({"settings": settings, "rows": data}, indent=1) + "\n")


if __name__ == "__main__":
    main()
