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
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import qompose
import torch
from observers import sqnr
from qompose.reporting.report_data import KERNEL
from torch import Tensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(machine.ROOT))

from tests.zoo import ZOO, ZooModel, by_name

CALIBRATED, JUDGED = range(1, 5), range(11, 15)
"""Draws of a model's inputs."""
CLOSE = 0.5
"""Decibels that the file may be from the converted model, whichever is the better."""
PACKAGES = ("qompose", "torch", "onnx", "onnxruntime", "transformers")


@dataclass
class Cell:
    """What came of a model: a reason, or decibels and counts."""

    model: str
    reason: str = ""
    converted: float = 0.0
    file: float = 0.0
    claimed: int = 0
    fused: int = 0
    left: tuple[str, ...] = ()

    @property
    def is_close(self) -> bool:
        """Whether the file is as good as the converted model."""
        return not self.reason and self.file > self.converted - CLOSE

    def line(self) -> str:
        """The row of the table."""
        if self.reason:
            return f"| {self.model} | | | | | {self.reason} |"
        off = "; ".join(dict.fromkeys(self.left))
        figures = f"{self.converted:.2f} | {self.file:.2f} | {self.claimed} | {self.fused}"
        return f"| {self.model} | {figures} | {off} |"


def judge(entry: ZooModel) -> Cell:
    """Quantize a model and compare; what the targets refuse is the result."""
    cell = Cell(entry.name)
    try:
        program = entry.fresh_export()
        prepared = qompose.prepare_pt2e(program, qompose.compose("onnx"))
        for draw in CALIBRATED:
            prepared(*entry.inputs(draw))
        converted = qompose.convert_pt2e(prepared)
        if not any(row.owner == "onnx" for row in qompose.report(converted).rows):
            return Cell(entry.name, "nothing to quantize")
        lowered = qompose.lower(converted, "onnxruntime")
    except Exception as error:
        return Cell(entry.name, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    ours = [row for row in qompose.report(lowered).rows if row.owner == "onnx"]
    cell.claimed, cell.fused = len(ours), sum(row.state == KERNEL for row in ours)
    cell.left = tuple(f"{row.name}: {row.reason}" for row in ours if row.state != KERNEL)
    runs = [
        (_floats(entry.build()(*x)), _floats(converted(*x)), _floats(lowered(*x)))
        for x in map(entry.inputs, JUDGED)
    ]
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
    claimed, fused = sum(c.claimed for c in there), sum(c.fused for c in there)
    yield f"{len(cells)} models: {len(there)} run, {len(cells) - len(there)} have a reason instead"
    yield f"{sum(c.is_close for c in there)} of {len(there)} files within {CLOSE} dB of the converted model"
    yield f"{fused} of {claimed} claimed operators are fused"


def main() -> None:
    """Print a row for each model as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[m.name for m in ZOO], metavar="MODEL")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure to this file at once"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for line in machine.lines(machine.facts(PACKAGES)):
        print(line)
    print(
        "\n| model | converted, dB | file, dB | claimed | fused | left |\n|---|--:|--:|--:|--:|---|"
    )
    cells: list[Cell] = []
    for name in options.models:
        with torch.no_grad():
            cells.append(judge(by_name(name)))
        print(cells[-1].line(), flush=True)
        gc.collect()
        if options.json:
            options.json.write_text(json.dumps([*map(asdict, cells)], indent=1) + "\n", "utf-8")
    print("", *summary(cells), sep="\n")


if __name__ == "__main__":
    main()
