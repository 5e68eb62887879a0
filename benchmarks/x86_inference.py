# SPDX-License-Identifier: Apache-2.0
"""Speed of int8 inference on x86: torchao, ONNX Runtime, OpenVINO, XNNPACK and qompose, beside float."""

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
from side_by_side import Call, Row, measure, serve, versions
from x86_engines import ENGINES, FLOAT, STOCK
from x86_workloads import WORKLOADS

COLUMNS = ("model", "engine", "ms", "p10", "p90", "of float", "of torchao", "of best", "set up s")
PACKAGES = ("torch", "torchao", "executorch", "onnxruntime", "openvino", "nncf", "qompose")
COMPARED = (FLOAT, STOCK)


def work(engine: str, model: str, threads: int) -> tuple[Call, dict[str, Any]]:
    """Make what an engine runs."""
    torch.set_num_threads(threads)
    workload = WORKLOADS[model]()
    torch.set_grad_enabled(False)
    start = time.perf_counter()
    return ENGINES[engine](workload), {"make_s": time.perf_counter() - start}


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
    ran = [other for other in row.siblings(rows).values() if not other.error]
    best = min(ran, key=lambda other: other.quantile(5))
    made = f"{row.found['make_s']:.0f}"
    return [*row.times(), *row.ratios(rows, (*COMPARED, best.engine)), made]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="MODEL",
        help=f"of {', '.join(WORKLOADS)}")  # fmt: skip
    add("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="ENGINE",
        help=f"of {', '.join(ENGINES)}")  # fmt: skip
    add("--rounds", type=int, default=15, help="of every engine, in turn (%(default)s)")
    add("--seconds", type=float, default=0.5, help="of one round of one engine (%(default)s)")
    add("--threads", type=int, default=2, help="of every engine (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every figure and reason here too")
    add("--work", choices=list(ENGINES), help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = sys.argv[1:]
    options = _parser().parse_args(arguments)
    if options.work:
        serve(lambda: work(options.work, options.models[0], options.threads), options.seconds)
        return
    rows = [
        row
        for model in options.models
        for row in measure(model, options.engines, options.rounds, arguments)
    ]
    settings = {
        "versions": versions(PACKAGES),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **{key: value for key, value in vars(options).items() if key not in ("work", "json")},
    }
    console = Console(width=200, highlight=False, markup=False)
    console.print(table(rows))
    failed = [f"{r.model}, {r.engine}: {' '.join(r.error.split())}" for r in rows if r.error]
    for line in (*failed, json.dumps(settings)):
        console.print(f"\n{line}", soft_wrap=True)
    if options.json:
        data = [row.to_dict(rows, COMPARED) for row in rows]
        options.json.write_text(json.dumps({"settings": settings, "rows": data}, indent=1) + "\n")


if __name__ == "__main__":
    main()
