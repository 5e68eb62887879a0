# SPDX-License-Identifier: Apache-2.0
"""Speed, size and fidelity on ExecuTorch's XNNPACK: float, the stock int8 flow and qompose, side by side.

Every engine gets the same model, calibration inputs and held-out inputs, and runs in a process of its
own. The processes of a model run in turn, round after round, so that a slow minute is slow for all.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from runtime_engines import EAGER, ENGINES, FLOAT, OURS, STOCK, Run, decibels, make
from runtime_subjects import SUBJECTS, Amounts, Inputs

WARM_UP = 3
FEWEST_RUNS = 3
"""In a round, however slow the model is."""
LONGEST_REASON = 120
"""Characters of a failure below the table; the JSON file has all of it."""


def work(engine: str, model: str, options: argparse.Namespace) -> None:
    """Be the process of one engine: set up, say what there is, then a round for each line of input."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # runtimes print; the channel is for answers alone
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=channel, flush=True)

    torch.set_num_threads(options.threads)
    try:
        start = time.perf_counter()
        subject = SUBJECTS[model](Amounts(options.calibration, options.held_out, options.quick))
        torch.set_grad_enabled(False)  # only now: a subject may have to be trained
        built = time.perf_counter()
        program = make(engine, subject, options.threads)
        made = {"build_s": built - start, "make_s": time.perf_counter() - built}
        sqnr = None if engine == EAGER else decibels(program, subject)
    except Exception as error:  # whatever an engine raises is its result
        reason = f"{type(error).__name__}: {error}"
        answer({"error": reason, "traceback": traceback.format_exc()})
        return
    found = {key: value for key, value in vars(program).items() if key != "run"}
    answer({**found, **made, "sqnr_db": sqnr})
    held_out = subject.held_out
    del subject
    gc.collect()
    gc.disable()  # or it would run inside some of the rounds
    for _ in sys.stdin:
        answer(_one_round(program.run, held_out, options.seconds))


def _one_round(run: Run, held_out: Inputs, seconds: float) -> list[float]:
    """Seconds of each run, for about so many seconds."""
    for _ in range(WARM_UP):
        run(held_out[0])
    taken: list[float] = []
    while len(taken) < FEWEST_RUNS or sum(taken) < seconds:
        start = time.perf_counter()
        run(held_out[0])
        taken.append(time.perf_counter() - start)
    return taken


@dataclass
class Row:
    """The results of one engine on one model; `rounds_ms` has the median of each round."""

    model: str
    engine: str
    error: str = ""
    rounds_ms: list[float] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def quantile(self, tenth: int) -> float:
        """The milliseconds that so many tenths of the rounds stay under."""
        if len(self.rounds_ms) < 2:
            return self.rounds_ms[0]
        return quantiles(self.rounds_ms, n=10, method="inclusive")[tenth - 1]

    def ratio(self, other: Row | None) -> float | None:
        """Time as a part of that of `other`: the median over rounds, each compared with its neighbour."""
        if other is None or self.error or other.error:
            return None
        pairs = zip(self.rounds_ms, other.rounds_ms, strict=True)
        return median(mine / theirs for mine, theirs in pairs)

    def to_dict(self, others: dict[str, Row]) -> dict[str, Any]:
        """Everything as JSON-able data; ratios are to the rows of the same model."""
        data = asdict(self)
        if self.rounds_ms and not self.error:
            data |= {"ms": self.quantile(5), "p10_ms": self.quantile(1), "p90_ms": self.quantile(9)}
            data |= {f"of_{name}": self.ratio(others.get(name)) for name in (EAGER, FLOAT, STOCK)}
        return data


class Worker:
    """The process of one engine, as seen from outside. Its failure ends up in `row.error`."""

    def __init__(self, engine: str, model: str, arguments: Sequence[str]) -> None:
        self.row = Row(model, engine)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, __file__, *arguments, "--work", engine, "--models", model]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, text=True
        )
        found = self._answer()
        self.row.error = self.row.error or found.pop("error", "")
        self.row.found = found

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._log.seek(0)
        last = self._log.read().strip().splitlines()[-1:]
        self.row.error = f"its process ended with {self._process.wait()}: {' '.join(last)}"
        return {}

    def one_round(self) -> None:
        """Run for a while; a process that has ended says so to whoever reads its answer."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write("round\n")
            self._process.stdin.flush()
        taken = self._answer()
        if not self.row.error:
            self.row.rounds_ms.append(median(taken) * 1e3)

    def close(self) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._log.close()


def measure(model: str, options: argparse.Namespace, arguments: Sequence[str]) -> list[Row]:
    """Set the engines up one after the other, then run them in turn."""
    workers = []
    for engine in options.engines:
        print(f"{model}: {engine}", file=sys.stderr, flush=True)
        workers.append(Worker(engine, model, arguments))
    for _ in range(options.rounds):
        for worker in workers:
            if not worker.row.error:
                worker.one_round()
    for worker in workers:
        worker.close()
    return [worker.row for worker in workers]


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
        shown.add_row(row.model, row.engine, *_cells(row, _siblings(row, rows)))
    return shown


def _siblings(row: Row, rows: Sequence[Row]) -> dict[str, Row]:
    return {other.engine: other for other in rows if other.model == row.model}


def _cells(row: Row, others: dict[str, Row]) -> list[str]:
    if row.error:
        return ["failed"]
    times = [f"{row.quantile(tenth):.3f}" for tenth in (5, 1, 9)]
    ratios = [row.ratio(others.get(name)) for name in (EAGER, FLOAT, STOCK)]
    found = row.found
    cells = [
        *times,
        *("" if r is None else f"{r:.3f}" for r in ratios),
        f"{found['bytes'] / 1e6:.2f}",
    ]
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
    packages = ("torch", "executorch", "torchao", "transformers", "qompose")
    return {
        "versions": {name: version(name) for name in packages},
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
        work(options.work, options.models[0], options)
        return
    rows = [row for model in options.models for row in measure(model, options, arguments)]
    settings = _settings(options)
    console = Console(width=200, highlight=False, markup=False)
    console.print(table(rows))
    for line in (*_notes(rows), json.dumps(settings)):
        console.print(f"\n{line}", soft_wrap=True)
    if options.json:
        data = [row.to_dict(_siblings(row, rows)) for row in rows]
        options.json.write_text(json.dumps({"settings": settings, "rows": data}, indent=1) + "\n")


if __name__ == "__main__":
    main()
