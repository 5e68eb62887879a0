# SPDX-License-Identifier: Apache-2.0
"""Speed, size and accuracy on ExecuTorch's XNNPACK: float, the stock int8 flow and qompose.

Every engine gets the same model, calibration inputs and held-out inputs, and has its own process. Their
rounds are interleaved, so that a slow minute is slow for all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from comparing import Comparison, failures
from runtime_engines import EAGER, ENGINES, FLOAT, OURS, STOCK, decibels, make
from runtime_subjects import SUBJECTS, Amounts
from side_by_side import Call, Row

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


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """The times and their ratios, the size, the fidelity, and where the operators run."""
    found = row.found
    result = [*row.times(), *row.ratios(rows, COMPARED), f"{found['bytes'] / 1e6:.2f}"]
    if row.engine == EAGER:
        return result
    counts = (sum(found[key].values()) for key in ("delegated_int8", "delegated_float", "portable"))
    return [*result, f"{found['sqnr_db']:.1f}", str(found["delegates"]), *map(str, counts)]


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table has no room for: why an engine failed, and which operators are not int8."""
    lines = failures(rows)
    for row in rows:
        if row.engine not in (STOCK, OURS) or row.error:
            continue
        for key, what in (("delegated_float", "float in delegates"), ("portable", "portable")):
            names = ", ".join(f"{count} {name}" for name, count in sorted(row.found[key].items()))
            lines += [f"{row.model}, {row.engine}, {what}: {names}"] if names else []
    return lines


COMPARISON = Comparison(
    models=[*SUBJECTS],
    engines=[*ENGINES],
    columns=(
        "ms", "p10", "p90", "of eager", "of float", "of stock", "MB", "SQNR dB",
        "delegates", "int8 in them", "float in them", "portable",
    ),
    compared=COMPARED,
    packages=("torch", "executorch", "torchao", "transformers", "qompose"),
    threads=1,
    work=work,
    cells=cells,
    notes=notes,
)  # fmt: skip


def main() -> None:
    parser = COMPARISON.parser(__doc__.splitlines()[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--calibration", type=int, default=32, help="calibration inputs (default: %(default)s)")
    add(
        "--held-out",
        type=int,
        default=32,
        help="held-out inputs for the SQNR (default: %(default)s)",
    )
    add(
        "--quick",
        action="store_true",
        help="small networks and three short rounds, for a quick look",
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 3, 0.05
        options.calibration, options.held_out = 4, 4
    COMPARISON.run(options)


if __name__ == "__main__":
    main()
