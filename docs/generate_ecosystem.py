# SPDX-License-Identifier: Apache-2.0
"""Write benchmarks/results/ecosystem.md: other packages' quantizers under torchao's engine and ours.

python -m docs.generate_ecosystem              all of them, each family in a process of its own: two minutes
python -m docs.generate_ecosystem --jobs 4     four processes at a time
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from qompose.console import Block, Table, as_markdown

from tests.ecosystem.catalogue import (
    BY_NAME,
    CATALOGUE,
    NO_MEMBERS,
    PLAIN,
)
from tests.ecosystem.measuring import TOLERANCE, Cell, Cells, measured_apart
from tests.ecosystem.models import KINDS
from tests.ecosystem.reasons import reason_for

PAGE = Path(__file__).parents[1] / "benchmarks" / "results" / "ecosystem.md"

INTRODUCTION = """# Quantizers of other packages

Written by `docs/generate_ecosystem.py`, which runs every quantizer of torchao and ExecuTorch, unmodified,
on three small models with random weights: `cnn` (conv-bn-relu, conv-bn-add-relu, adaptive average pool,
linear), `mlp` (embedding-linear-relu-linear, from integer ids) and `encoder` (a pre-norm transformer
layer). Each is calibrated with four batches and evaluated on a fifth. [Interop](../../docs/interop.md)
explains how such quantizers become members of a composition.

A cell counts the quantize (q), dequantize (dq) and choose_qparams (cq) operators of the converted graph,
or the modules that a quantizer inserts instead, and gives the SQNR against the float model. The SQNR
shows that nothing is broken, not how accurate a real model would be. **no-op**: nothing was quantized;
qompose warns about it, torchao does not.

qompose takes what `torch.export.export(model, inputs)` returns. torchao's engine needs the options of the
last column for some quantizers: without `check_guards=False`, Arm's transforms reject the guard that
`.module()` adds to the program; without `strict=True`, quantizers that look operators up by
`source_fn_stack` find nothing.

MediaTek's and NXP's packages import their vendors' compilers. Their annotations run here, with an empty
stand-in for those.

One or two configurations of each are also composed with those of every other, in both orders and on every
model; `tests/ecosystem/test_pairs.py` states what must come of it."""


def page(cells: Cells) -> str:
    """Return the page as Markdown."""
    blocks: list[Block] = [
        *INTRODUCTION.splitlines(),
        "",
        "## Quantizer by model",
        _main_table(cells),
        "## What our engine does not quantize, and why",
        _explained(cells, lambda _, ours: ours.state != "quantized"),
        "## Where the two engines differ",
        _explained(cells, _differ),
        *_errors(cells),
        "## Configurations",
        Table(("quantizer", ""), tuple((e.name, e.note) for e in CATALOGUE if e.note)),
        "## Not members",
        Table(("class", "why"), tuple(NO_MEMBERS.items())),
    ]
    return as_markdown(blocks).rstrip("\n") + "\n"


def _main_table(cells: Cells) -> Table:
    header = [f"{kind}, {engine}" for kind in KINDS for engine in ("torchao", "qompose")]
    rows = [
        (name, *(cell for kind in KINDS for cell in row[kind].values()), _export(name))
        for name, row in cells.items()
    ]
    return Table(("quantizer", *header, "exported for torchao with"), tuple(rows))


def _export(name: str) -> str:
    export = BY_NAME[name].export
    return "" if export == PLAIN else export


def _differ(theirs: Cell, ours: Cell) -> bool:
    if ours.state != "quantized":
        return False
    return theirs.counts != ours.counts or abs(theirs.sqnr - ours.sqnr) > TOLERANCE


def _explained(cells: Cells, chosen: Callable[[Cell, Cell], bool]) -> Table:
    """Return a table of chosen cells; models for which the reason is the same share a row."""
    models: dict[tuple[str, str], list[str]] = {}
    for name, row in cells.items():
        for kind in KINDS:
            if chosen(row[kind]["torchao"], row[kind]["qompose"]):
                models.setdefault((name, reason_for(name, kind)), []).append(kind)
    rows = [(name, ", ".join(kinds), reason) for (name, reason), kinds in models.items()]
    return Table(("quantizer", "model", "why"), tuple(rows))


def _errors(cells: Cells) -> Iterator[Block]:
    """Yield the errors behind the cells that say "fails"."""
    rows = [
        (name, kind, engine, cell.error)
        for name, row in cells.items()
        for kind in KINDS
        for engine, cell in row[kind].items()
        if cell.error
    ]
    if rows:
        yield "## Errors"
        yield Table(("quantizer", "model", "engine", "error"), tuple(rows))


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write benchmarks/results/ecosystem.md.")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    cells = measured_apart([entry.name for entry in CATALOGUE], options.jobs)
    PAGE.write_text(page(cells), encoding="utf-8")


if __name__ == "__main__":
    main()
