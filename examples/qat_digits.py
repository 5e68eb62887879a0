# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training on real images of digits, where calibration alone loses accuracy.

At 8 bits the network runs XNNPACK's kernels. At 4 bits there are none: XNNPACK's rules decide what is
quantized, and the integers are simulated (Q/DQ). Accuracy is that of the converted model, averaged over
networks from several seeds, on test images that no recipe was chosen by. Calibration gets the best of all
its ranges. The example fails if training does not recover accuracy.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import digits_task as task
import qompose
import torch
from checks import Check, verdict, wide_console
from plotting import Line, plot
from qat_task import MobileDigits, Recipe, train
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from rich.table import Table
from steps import Steps, Track
from torch import Tensor
from torch.export import Dim, ExportedProgram, export

NETWORKS = 4
"""How many are trained, each from a seed of its own: one test image is 0.22 points, of one network."""
RANGES = ("histogram", "mse", "percentile", "entropy", "minmax", "moving_average")
WEIGHT_RANGES = {8: ("minmax",), 4: ("minmax", "mse")}
"""Of activations, and of weights by bits: calibration is measured with each pair."""
FLOAT = Recipe(epochs=30, rate=0.01)
RECIPES = {8: Recipe(epochs=10, rate=3e-4, batch=96), 4: Recipe(epochs=50, rate=1e-2, batch=96)}
STARTS = {8: ("histogram", "minmax"), 4: ("mse", "mse")}
"""The ranges that training starts from; at eight bits moving averages, at four the first values of scales."""
FREEZE_FROM = 0.8
"""The part of the epochs after which batch norms keep their statistics."""
MIN_FLOAT_ACCURACY = 0.97
MIN_LOST_BY_CALIBRATION = 5.0
MAX_LOST_POINTS = {8: 0.2, 4: 1.0}
MAX_SECONDS = 120.0
BAR = 50

Split = tuple[task.Data, task.Data]
Measured = tuple[float, list[float]]
"""The accuracy of what is deployed, and that of the simulation after each epoch, to look at alone."""
Ranges = tuple[str, str]
"""How ranges are estimated: of activations, of weights."""


class FourBits(qompose.backend.Backend):
    """XNNPACK's rules without its kernels, which take eight bits."""

    name = "four_bits"
    api_version = 1
    rules = tuple(
        replace(rule, accepts={}, kernels={}, integer_bias=False)
        for rule in qompose.backend.load_backend("xnnpack").rules
    )


def quantizer(bits: int, ranges: Ranges, trains: bool = False) -> qompose.Quantizer:
    """Return XNNPACK's own at eight bits; at four its rules, simulated. A weight has one scale."""
    of_activations, of_weights = ranges
    if bits == 8:
        config = get_symmetric_quantization_config(
            is_qat=trains, range=of_activations, weight_range=of_weights
        )
        return XNNPACKQuantizer().set_global(config)
    most = 2 ** (bits - 1) - 1
    activation = qompose.activation_spec(torch.int8, -most - 1, most, range=of_activations)
    weight = qompose.weight_spec(-most, most, per_channel=False, range=of_weights)
    config = qompose.QuantizationConfig(activation, activation, weight)
    word = "learned" if trains else "moving_average"
    trained = qompose.training_config(config, word, is_qat=trains)
    return qompose.RuleQuantizer(FourBits()).set_global(trained)


@dataclass(slots=True)
class Result:
    """A way to quantize: of each network the accuracy, the CPU seconds it took, and the accuracy by epoch."""

    name: str
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    curves: list[list[float]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return fmean(self.accuracies)

    @property
    def curve(self) -> list[float]:
        """The mean of the networks' curves."""
        return [fmean(epoch) for epoch in zip(*self.curves, strict=True)]


def in_float(net: MobileDigits, split: Split, seed: int, track: Track) -> Measured:
    """Train the network that all others start from."""
    train(net, split[0], FLOAT, seed, track=track)
    return task.accuracy(net, split[1]), []


def calibrated(exported: ExportedProgram, bits: int, ranges: Ranges, split: Split) -> Measured:
    """Quantize after training."""
    training, test = split
    prepared = qompose.prepare_pt2e(exported, quantizer(bits, ranges))
    qompose.calibrate(prepared, task.calibration(training, len(training)), progress=False)
    return task.accuracy(deployed(prepared, bits), test), []


def trained(
    exported: ExportedProgram, bits: int, split: Split, seed: int, track: Track
) -> Measured:
    """Train a quantized network on, with the float one as its teacher."""
    (training, test), recipe = split, RECIPES[bits]
    curve: list[float] = []
    prepared = qompose.prepare_qat_pt2e(exported, quantizer(bits, STARTS[bits], trains=True))
    learned = 1 if bits == 4 else None  # where scales are learned, observers but look for masks
    frozen = round(FREEZE_FROM * recipe.epochs)
    schedule = qompose.training.QATSchedule(observers_until=learned, batch_norm_until=frozen)

    def before(epoch: int) -> None:
        schedule.apply(prepared, epoch)

    def after(epoch: int) -> None:
        prepared.apply(
            qompose.training.disable_observer
        )  # to look at test images is not to learn from them
        curve.append(task.accuracy(prepared, test))

    teacher = exported.module()
    train(prepared, training, recipe, seed, teacher, before, after, track)
    return task.accuracy(deployed(prepared, bits), test), curve


def deployed(prepared: torch.fx.GraphModule, bits: int) -> Callable[[Tensor], Tensor]:
    """The model that runs: on integer kernels at eight bits, simulated at four."""
    converted = qompose.convert_pt2e(prepared)
    if bits != 8:
        return converted
    lowered: Callable[[Tensor], Tensor] = qompose.lower(converted)
    qompose.assert_lowered(lowered)
    return lowered


def splits(validates: bool) -> list[Split]:
    """What each network is trained on, and tested on: the test images, or parts of the training images."""
    training, test = task.load()
    if not validates:
        return [(training, test)] * NETWORKS
    fold = torch.arange(len(training)) % NETWORKS
    parts = [(fold != number, fold == number) for number in range(NETWORKS)]
    return [
        tuple(task.Data(training.images[rows], training.labels[rows]) for rows in part)  # type: ignore[misc]
        for part in parts
    ]


def measure(steps: Steps, validates: bool = False) -> list[Result]:
    """Float first; then, at eight bits and at four, the best of calibration, and trained."""
    found: dict[str, Result] = {}
    with torch.random.fork_rng(devices=[]), task.one_thread():
        for seed, split in enumerate(splits(validates)):
            measure_network(found, steps, seed, split)
    made = [found["float"]]
    for bits in (8, 4):
        ways = [found[by_calibration(bits, ranges)] for ranges in searched(bits)]
        made += [max(ways, key=lambda way: way.accuracy), found[f"trained, {bits} bits"]]
    return made


def searched(bits: int) -> list[Ranges]:
    """Return the pairs of ranges that calibration is measured with."""
    return list(product(RANGES, WEIGHT_RANGES[bits]))


def by_calibration(bits: int, ranges: Ranges) -> str:
    return f"calibrated, {bits} bits ({', '.join(ranges)})"


def measure_network(found: dict[str, Result], steps: Steps, seed: int, split: Split) -> None:
    """Add the figures of one more network to those of each way."""

    def count(name: str, way: Callable[..., Measured], *arguments: Any) -> None:
        result, begun = found.setdefault(name, Result(name)), time.process_time()
        accuracy, curve = way(*arguments)
        result.accuracies.append(accuracy)
        result.seconds.append(time.process_time() - begun)
        result.curves.append(curve)

    torch.manual_seed(seed)
    net, number = MobileDigits(), seed + 1
    with steps.step(f"network {number}: float, {len(split[0])} images") as track:
        count("float", in_float, net, split, seed, track)
    images = split[0].images[: task.BATCH_SIZE]
    exported = export(net, (images,), dynamic_shapes={"images": {0: Dim("batch", max=1024)}})
    for bits in (8, 4):
        with steps.step(f"network {number}: calibrate, {bits} bits") as track:
            for ranges in track(searched(bits)):
                count(by_calibration(bits, ranges), calibrated, exported, bits, ranges, split)
        with steps.step(f"network {number}: train, {bits} bits") as track:
            count(f"trained, {bits} bits", trained, exported, bits, split, seed, track)


def summary(results: Sequence[Result], what: str) -> Table:
    """The figures, one row each: means, and those of each network."""
    count = len(results[0].accuracies)
    title = f"Handwritten digits, 8x8 images, a small MobileNetV3: means of {count} networks"
    table = Table(
        "network", title=title, caption=f"{what}. In brackets: ranges of activations and weights"
    )
    for name in ("accuracy", "points to float", "of each network", "CPU seconds for one"):
        table.add_column(name, justify="right")
    for result in results:
        mine, each = "", ""
        if result is not results[0]:
            mine = f"{-lost(result, results[0]):+.2f}"
            pairs = zip(result.accuracies, results[0].accuracies, strict=True)
            each = " ".join(f"{100 * (own - of_float):+.2f}" for own, of_float in pairs)
        seconds = f"{max(result.seconds):.1f}"
        table.add_row(result.name, f"{result.accuracy:.2%}", mine, each, seconds)
    return table


def curves(results: Sequence[Result]) -> Table:
    """Bars of accuracy by epoch, from 80 % to 100 %; `|` is the float network."""
    table = Table("network", "epoch", "80 %" + " " * (BAR - 9) + "100 %", title="Accuracy by epoch")
    mark = _length(results[0].accuracy)
    for result in results:
        every = -(-len(result.curve) // 10)
        for epoch, accuracy in list(enumerate(result.curve, 1))[every - 1 :: every or 1]:
            bar = ("█" * _length(accuracy)).ljust(BAR + 1)
            shown = bar[:mark] + "|" + bar[mark + 1 :]
            table.add_row(
                result.name if epoch == every else "", str(epoch), f"{shown} {accuracy:.2%}"
            )
        table.add_section()
    return table


def _length(accuracy: float) -> int:
    return round(BAR * max(0.0, accuracy - 0.8) / 0.2)


def drawn(results: Sequence[Result]) -> str:
    """Both curves as an SVG, over the part of the training that is done."""
    level = 100 * results[0].accuracy
    lines = [Line("float", [(0.0, level), (100.0, level)], dashed=True)]
    for result in results:
        epochs = len(result.curve)
        points = [(100 * n / epochs, 100 * a) for n, a in enumerate(result.curve, 1)]
        lines += [Line(f"{result.name}, {epochs} epochs", points)] if points else []
    return plot(lines, x="training done, %", y="accuracy, %", low=80.0)


def lost(result: Result, reference: Result) -> float:
    return 100 * (reference.accuracy - result.accuracy)


def checks(results: Sequence[Result]) -> list[Check]:
    """What training promises: what calibration loses, it brings back."""
    reference, _, eight, calibrated, four = results
    made = [Check("float: accuracy", reference.accuracy, low=MIN_FLOAT_ACCURACY)]
    what, points = "points of accuracy lost to float", lost(calibrated, reference)
    made.append(Check(f"{calibrated.name}: {what}", points, MIN_LOST_BY_CALIBRATION, places=2))
    for bits, result in ((8, eight), (4, four)):
        points = round(lost(result, reference), 6)
        made.append(Check(f"{result.name}: {what}", points, high=MAX_LOST_POINTS[bits], places=2))
        what_it_took = f"{result.name}: CPU seconds for one network"
        made.append(Check(what_it_took, max(result.seconds), high=MAX_SECONDS, places=1))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, print its tables, and return 1 where a figure is worse than it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--validate",
        action="store_true",
        help="measure on parts of the training images instead of the test images, to choose a recipe",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("qat_digits.svg"),
        help="where to write the curves (default: %(default)s)",
    )
    asked = parser.parse_args(arguments)
    with Steps() as steps:
        results = measure(steps, asked.validate)
    what = f"{task.TEST_IMAGES} test images, which no recipe is chosen by: see --validate"
    if asked.validate:
        what = "each network on another part of the training images, and trained on the others"
    console = wide_console()
    console.print(summary(results, what), curves(results))
    asked.plot.write_text(drawn(results))
    console.print(f"The curves are in {asked.plot}.", highlight=False)
    return verdict(checks(results), console)


if __name__ == "__main__":
    sys.exit(main())
