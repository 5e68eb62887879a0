# SPDX-License-Identifier: Apache-2.0
"""Speed of int8 inference on x86: torchao, ONNX Runtime, OpenVINO, XNNPACK, qompose and float."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from comparing import Comparison
from side_by_side import Call, Row
from x86_engines import ENGINES, FLOAT, STOCK
from x86_workloads import WORKLOADS

COMPARED = (FLOAT, STOCK)


def work(engine: str, model: str, options: argparse.Namespace) -> tuple[Call, dict[str, Any]]:
    """Make what an engine runs."""
    torch.set_num_threads(options.threads)
    workload = WORKLOADS[model]()
    torch.set_grad_enabled(False)
    start = time.perf_counter()
    return ENGINES[engine](workload), {"make_s": time.perf_counter() - start}


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """The times, their ratios to some engines and to the fastest on the model, and the set-up."""
    ran = [other for other in row.siblings(rows).values() if not other.error]
    best = min(ran, key=lambda other: other.quantile(5))
    made = f"{row.found['make_s']:.0f}"
    return [*row.times(), *row.ratios(rows, (*COMPARED, best.engine)), made]


COMPARISON = Comparison(
    models=[*WORKLOADS],
    engines=[*ENGINES],
    columns=("ms", "p10", "p90", "of float", "of torchao", "of best", "set up s"),
    compared=COMPARED,
    packages=("torch", "torchao", "executorch", "onnxruntime", "openvino", "nncf", "qompose"),
    threads=2,
    work=work,
    cells=cells,
)

if __name__ == "__main__":
    COMPARISON.run(COMPARISON.parser(__doc__).parse_args())
