# SPDX-License-Identifier: Apache-2.0
"""A quantizer of the catalogue on a model, under torchao's engine and under ours, as a cell of a table.

`python -m tests.ecosystem.measuring NAME...` prints the cells of these quantizers as JSON; `measured_apart`
runs it for each family, since some change the process they are in.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import qompose
import torch
from torch.fx import GraphModule

from tests.core.toy import sqnr
from tests.ecosystem.catalogue import BY_NAME, STRICT, UNGUARDED, Entry
from tests.ecosystem.models import KINDS, Sample, sample
from tests.processes import python

ROOT = Path(__file__).parents[2]
LONGEST = 160
"""Characters of an error that the page shows."""

TOLERANCE = 1.0
"""dB between two results that count as the same: kernels of float operators round otherwise elsewhere."""


@dataclass(frozen=True)
class Cell:
    """What became of a model: numbers of operators, and the error in dB where there is a result."""

    quantizes: int = 0
    dequantizes: int = 0
    chosen: int = 0
    modules: dict[str, int] = field(default_factory=dict)
    sqnr: float = math.nan
    step: str = ""
    error: str = ""

    @property
    def state(self) -> str:
        """One of "failed", "no-op" and "quantized"."""
        if self.error:
            return "failed"
        return "quantized" if self.counts else "no-op"

    def __str__(self) -> str:
        if self.state == "failed":
            return f"fails in {self.step}"
        return f"{self.counts}, {self.sqnr:.1f} dB" if self.counts else "**no-op**"

    @property
    def counts(self) -> str:
        """The numbers of operators as text, "" where there are none."""
        some = self.quantizes + self.dequantizes > 0
        parts = [f"{self.quantizes} q {self.dequantizes} dq"] * some
        parts += [f"{self.chosen} cq"] * (self.chosen > 0)
        parts += [f"{number} {name}" for name, number in sorted(self.modules.items())]
        return " ".join(parts)


def counted(model: GraphModule) -> dict[str, Any]:
    """The quantization operators of a graph, and the modules that it calls."""
    calls = {
        op: [n for n in model.graph.nodes if n.op == op] for op in ("call_function", "call_module")
    }
    names = Counter(
        re.sub(r"^(choose_qparams|quantize|dequantize).*", r"\1", str(node.target).split(".")[1])
        for node in calls["call_function"]
        if "." in str(node.target)
    )
    modules = Counter(
        type(model.get_submodule(node.target)).__name__
        for node in calls["call_module"]
        if node.target != "_guards_fn"
    )
    found = {"quantizes": names["quantize"], "dequantizes": names["dequantize"]}
    return {**found, "chosen": names["choose_qparams"], "modules": dict(modules)}


Step = Callable[..., Any]


def by_torchao(entry: Entry, given: Sample) -> Iterator[tuple[str, Step]]:
    """The steps of the stock flow, with the program exported as this quantizer needs it."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    def prepare() -> GraphModule:
        program = given.export(strict=entry.export == STRICT)
        guarded = entry.export not in (UNGUARDED, STRICT)
        return prepare_pt2e(program.module(check_guards=guarded), entry.make())

    yield "prepare", prepare
    yield "convert", convert_pt2e


def by_qompose(entry: Entry, given: Sample) -> Iterator[tuple[str, Step]]:
    """The same steps of ours, with the program as torch.export makes it."""
    yield "prepare", lambda: qompose.prepare_pt2e(given.export(), entry.make())
    yield "convert", qompose.convert_pt2e


ENGINES = {"torchao": by_torchao, "qompose": by_qompose}


def measure(entry: Entry, kind: str, engine: str) -> Cell:
    """One cell; an error of any kind is its content."""
    given, step = sample(kind), "prepare"
    try:
        with torch.no_grad():
            (_, prepare), (_, convert) = ENGINES[engine](entry, given)
            prepared = prepare()
            step = "calibrate"
            for batch in given.batches:
                prepared(*batch)
            step = "convert"
            converted = convert(prepared)
            step = "run"
            found = sqnr(given.expected, converted(*given.held_out))
    except Exception as error:  # whatever it is, the table shows it
        return Cell(step=step, error=_first_line(error))
    return Cell(**counted(converted), sqnr=found)


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


Cells = dict[str, dict[str, dict[str, Cell]]]
"""By quantizer, model and engine."""


def measured_apart(names: Sequence[str], jobs: int = 2) -> Cells:
    """The cells of quantizers, each family in a process of its own."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(BY_NAME[name].family, []).append(name)
    with ThreadPoolExecutor(jobs) as pool:
        done = [cells for part in pool.map(_in_a_process, families.values()) for cells in part]
    found = dict(done)
    return {name: found[name] for name in names}


def _in_a_process(names: Sequence[str]) -> list[tuple[str, dict[str, dict[str, Cell]]]]:
    printed = python("-m", "tests.ecosystem.measuring", *names, cwd=ROOT, OMP_NUM_THREADS="1")
    rows = json.loads(printed.splitlines()[-1])
    return [
        (name, {k: {e: Cell(**cell) for e, cell in row.items()} for k, row in kinds.items()})
        for name, kinds in rows.items()
    ]


@contextmanager
def quietly() -> Iterator[TextIO]:
    """Nothing but the result on standard output: two of these quantizers print while they annotate."""
    printed, sys.stdout = sys.stdout, sys.stderr
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield printed
    finally:
        sys.stdout = printed


def cells_of(name: str) -> dict[str, dict[str, Cell]]:
    """The cells of a quantizer, by model and engine, in this process."""
    entry = BY_NAME[name]
    return {kind: {engine: measure(entry, kind, engine) for engine in ENGINES} for kind in KINDS}


def main(*names: str) -> None:
    """Print the cells of quantizers as a line of JSON."""
    with quietly():
        rows = {name: cells_of(name) for name in names}
    print(json.dumps(rows, default=asdict))


if __name__ == "__main__":
    main(*sys.argv[1:])
