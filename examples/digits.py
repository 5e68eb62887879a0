# SPDX-License-Identifier: Apache-2.0
"""Train a small residual network on real images of digits, quantize it, and compare every engine.

The network runs in float, with XNNPACK's kernels in this process and on the ExecuTorch runtime, and
with oneDNN's int8 kernels. It fails if an int8 engine loses more accuracy than allowed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import digits_task as task
import torch
from checks import Check, verdict, wide_console
from engines import Composition, Engine, int8_share, quantize
from quiet import start_executorch
from rich.table import Table
from steps import Steps
from torch.export import Dim, ExportedProgram, export

PRODUCTS = ("aten.conv2d", "aten.linear")
COMPOSITIONS = {("xnnpack",): ("torch", "executorch"), ("x86_inductor",): ("torch",)}
MIN_FLOAT_ACCURACY = 0.98
MAX_LOST_POINTS = 0.5


@dataclass(frozen=True, slots=True)
class Result:
    """An engine and the fraction of test images that it gets right."""

    engine: Engine
    accuracy: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was quantized, and the results: float first, then every int8 engine."""

    compositions: list[Composition]
    results: list[Result]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, print its tables, and return 1 where a figure is worse than it must be."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    start_executorch()
    with Steps() as steps:
        outcome = measure(steps)
    console = wide_console()
    console.print(*(composition.table() for composition in outcome.compositions))
    console.print(summary(outcome.results))
    return verdict(checks(outcome.results), console)


def measure(
    steps: Steps, wanted: Mapping[tuple[str, ...], tuple[str, ...]] = COMPOSITIONS
) -> Outcome:
    """Train, quantize with each backend for each of its targets, and count right answers."""
    training, test = task.load()
    with steps.step(f"train on {len(training)} images") as track:
        net = task.train(training, track=track)
    exported = _export(net, training)
    calibration = task.calibration(training)
    compositions = [
        quantize(exported, backends, targets, calibration, steps)
        for backends, targets in wanted.items()
    ]
    nbytes = compositions[0].quantized.report.bytes_before
    engines = [Engine("float", net, nbytes)]
    engines += [
        composition.engine(target, f"int8 {composition.backends[0]} on {target}")
        for composition in compositions
        for target in composition.lowered
    ]
    with steps.step(f"test on {len(test)} images") as track:
        results = [Result(e, task.accuracy(e.run, test)) for e in track(engines)]
    return Outcome(compositions, results)


def _export(net: torch.nn.Module, data: task.Data) -> ExportedProgram:
    images = data.images[: task.BATCH_SIZE]
    return export(net, (images,), dynamic_shapes={"images": {0: Dim("batch", max=task.BATCH_SIZE)}})


def summary(results: Sequence[Result]) -> Table:
    """The figures of every engine, one row each."""
    table = Table("engine", title="Handwritten digits: 8x8 images, residual network")
    for name in ("accuracy", "points to float", "conv + linear MACs on int8", "bytes", "of float"):
        table.add_column(name, justify="right")
    reference = results[0]
    for result in results:
        report = result.engine.report
        table.add_row(
            result.engine.name,
            f"{result.accuracy:.2%}",
            f"{_points(result, reference):+.2f}" if report else "",
            f"{int8_share(report, PRODUCTS):.1%}" if report else "",
            f"{result.engine.nbytes:,}",
            f"{result.engine.nbytes / reference.engine.nbytes:.3f}",
        )
    return table


def checks(results: Sequence[Result]) -> list[Check]:
    """What the demo promises: a good float network, and int8 engines as good."""
    reference, *quantized = results
    made = [Check("float: accuracy", reference.accuracy, low=MIN_FLOAT_ACCURACY)]
    made += [
        Check(
            f"{result.engine.name}: points of accuracy lost to float",
            -_points(result, reference),
            high=MAX_LOST_POINTS,
            places=2,
        )
        for result in quantized
    ]
    return made


def _points(result: Result, reference: Result) -> float:
    return 100 * (result.accuracy - reference.accuracy)


if __name__ == "__main__":
    sys.exit(main())
