# SPDX-License-Identifier: Apache-2.0
"""Accuracy of files for ONNX Runtime compared with the converted models they come from, and what was fused.

Every model of the zoo is quantized by the `onnx` backend with random inputs and judged on others: the SQNR
against the float model, of the Q/DQ model in torch and of the file in ONNX Runtime, and how many of the
operators that the backend claimed ONNX Runtime runs in int8 or only moves.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shlex
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import machine
import qompose
import torch
from observers import sqnr
from qompose.errors import QomposeError, UncalibratedError
from qompose.reporting.report_data import KERNEL
from torch import Tensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(machine.ROOT))

from tests.zoo import ZOO, ZooModel, by_name

CALIBRATED, JUDGED = range(1, 5), range(11, 15)
"""Draws of a model's inputs."""
MORE = range(20, 80)
"""Draws that calibrate, too, where the first ones have not taken every branch."""
CLOSE = 0.5
"""Decibels that the file may be worse than the converted model."""
PACKAGES = ("qompose", "torch", "onnx", "onnxruntime", "transformers")
HEAD = "| model | converted, dB | file, dB | claimed | fused | left |\n|---|--:|--:|--:|--:|---|"
NOTHING = "nothing to quantize"


@dataclass
class Cell:
    """What came of a model: a reason, or decibels and counts."""

    model: str
    reason: str = ""
    refused: bool = False
    converted: float = 0.0
    file: float = 0.0
    claimed: int = 0
    fused: int = 0
    left: tuple[str, ...] = ()
    commit: str = ""

    @property
    def is_close(self) -> bool:
        """Whether the file is as good as the converted model."""
        return not self.reason and self.file >= self.converted - CLOSE

    def line(self) -> str:
        """The row of the table."""
        if self.reason:
            return f"| {self.model} | | | | | {self.reason} |"
        off = "; ".join(dict.fromkeys(self.left))
        figures = f"{self.converted:.2f} | {self.file:.2f} | {self.claimed} | {self.fused}"
        return f"| {self.model} | {figures} | {off} |"


class TooLongError(BaseException):
    """A model used up its time; no handler of errors on the way is to take it for one of its own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooLongError` after so many seconds of processor time: a process that is paused uses none."""

    def stop(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge(entry: ZooModel) -> Cell:
    """Quantize a model and compare; what the targets refuse is the result."""
    cell = Cell(entry.name)
    try:
        program = entry.fresh_export()
        prepared = qompose.prepare_pt2e(program, qompose.compose("onnx"))
        for draw in CALIBRATED:
            prepared(*entry.inputs(draw))
        try:
            converted = qompose.convert_pt2e(prepared)
        except UncalibratedError:  # of a branch that no draw has taken
            for draw in MORE:
                prepared(*entry.inputs(draw))
            converted = qompose.convert_pt2e(prepared)
        if not any(row.owner == "onnx" for row in qompose.report(converted).rows):
            return Cell(entry.name, NOTHING)
        lowered = qompose.lower(converted, "onnxruntime")
        ours = [row for row in qompose.report(lowered).rows if row.owner == "onnx"]
        cell.claimed, cell.fused = len(ours), sum(row.state == KERNEL for row in ours)
        cell.left = tuple(f"{row.name}: {row.reason}" for row in ours if row.state != KERNEL)
        runs = [
            (_floats(entry.build()(*x)), _floats(converted(*x)), _floats(lowered(*x)))
            for x in map(entry.inputs, JUDGED)
        ]
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
        return Cell(entry.name, said, refused=isinstance(error, QomposeError))
    wanted, simulated, found = ([t for run in runs for t in run[side]] for side in range(3))
    cell.converted, cell.file = sqnr(wanted, simulated), sqnr(wanted, found)
    return cell


def _floats(value: Any) -> list[Tensor]:
    """The floating-point outputs."""
    leaves = pytree.tree_leaves(value)
    return [x.detach().double() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def summary(cells: list[Cell]) -> Iterator[str]:
    """Lines on all models together."""
    there = [cell for cell in cells if not cell.reason]
    nothing = sum(cell.reason == NOTHING for cell in cells)
    refused = sum(cell.refused for cell in cells)
    failed = len(cells) - len(there) - nothing - refused
    claimed, fused = sum(c.claimed for c in there), sum(c.fused for c in there)
    yield (
        f"{len(cells)} of {len(ZOO)} models: {len(there)} run, {nothing} have nothing to quantize, "
        f"{refused} are refused with a reason, {failed} failed or took too long."
    )
    yield (
        f"{sum(c.is_close for c in there)} of {len(there)} files are at most {CLOSE} dB worse than the "
        f"converted model; {fused} of {claimed} claimed operators are fused."
    )


def page(cells: list[Cell]) -> str:
    """The table as a page of results."""
    facts = machine.facts(PACKAGES)
    commits = ", ".join(dict.fromkeys(cell.commit for cell in cells))
    places = {model.name: place for place, model in enumerate(ZOO)}
    left = sorted(places.keys() - {cell.model for cell in cells})
    lines = [
        "# Accuracy of ONNX files\n",
        "SQNR to the float model on draws that nobody calibrated with, of the converted model in torch and",
        "of the file in ONNX Runtime with its default optimisation; and how many of the operators that the",
        "backend claims ONNX Runtime runs in int8 or moves. `inf`: nothing differs, or no output is a float.",
        f"\nMeasured on {date.today()} by\n",
        f"```sh\npython benchmarks/onnx_accuracy.py {shlex.join(sys.argv[1:])}\n```\n",
        *machine.lines({**facts, "commit": commits}),
        "",
        *summary(cells),
        *([f"\nNot run: {', '.join(left)}."] if left else []),
        f"\n{HEAD}",
        *(cell.line() for cell in sorted(cells, key=lambda cell: places[cell.model])),
    ]
    return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=[m.name for m in ZOO], metavar="MODEL")
    add("--mixed", action="store_true", help="in an order that mixes families, not the zoo's")
    add("--seconds", type=float, default=600, metavar="S",
        help="processor time that a model may take (default: %(default)s)")  # fmt: skip
    add("--minutes", type=float, metavar="M", help="begin with no other model after this time")
    add("--json", type=Path, metavar="FILE", help="write every figure to this file at once")
    add("--resume", action="store_true", help="do not run again what the file of --json has")
    add("--page", type=Path, metavar="FILE",
        help="write the table to this file, with command, date and versions")  # fmt: skip
    return parser.parse_args()


def _kept(options: argparse.Namespace) -> dict[str, Cell]:
    """What an earlier run measured, by model."""
    if not options.resume or not options.json or not options.json.exists():
        return {}
    return {row["model"]: Cell(**row) for row in json.loads(options.json.read_text("utf-8"))}


def _write(options: argparse.Namespace, cells: list[Cell]) -> None:
    if options.json:
        options.json.write_text(json.dumps([*map(asdict, cells)], indent=1) + "\n", "utf-8")
    if options.page:
        options.page.write_text(page(cells), "utf-8")


def main() -> None:
    """Print a row for each model as soon as it is measured."""
    options = _options()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    facts = machine.facts(PACKAGES)
    print(*machine.lines(facts), f"\n{HEAD}", sep="\n")
    known, start = _kept(options), time.monotonic()
    names = sorted(options.models, key=lambda n: zlib.crc32(n.encode()) if options.mixed else 0)
    for name in names:
        if name in known:
            continue
        if options.minutes and time.monotonic() - start > 60 * options.minutes:
            break
        try:
            with limited(options.seconds), torch.no_grad():
                cell = judge(by_name(name))
        except TooLongError:
            cell = Cell(name, f"it took more than {options.seconds:g} s")
        cell.commit = facts["commit"]
        known[name] = cell
        print(cell.line(), flush=True)
        gc.collect()
        _write(options, [*known.values()])
    _write(options, [*known.values()])
    print("", *summary([*known.values()]), sep="\n")


if __name__ == "__main__":
    main()
