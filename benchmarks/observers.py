# SPDX-License-Identifier: Apache-2.0
"""Accuracy with each way to estimate ranges: of activations (`range=`) and of weights (`weight_range=`).

Two tasks with real data: handwritten digits, with several small networks from different seeds, and nearest
sentences, with a pretrained encoder. One calibration serves every name whose statistics merge. No timings.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import qompose
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, export

sys.path[:0] = [str(Path(__file__).parents[1] / "examples")]

BACKENDS = ("xnnpack", "x86_inductor")
RANGES = (
    "histogram", "mse", "percentile", "entropy", "minmax", "moving_average", "torch_histogram"
)  # fmt: skip
SEARCHED = ("mse", "histogram")
IN_ORDER = ("moving_average", "torch_histogram")
"""The words whose statistics depend on the order of batches: each calibrates for itself."""


@dataclass(frozen=True)
class Variant:
    """A row of the tables: the words, and the bits of activations and weights."""

    range: str = "histogram"
    weight_range: str = "minmax"
    bits: int = 8
    weight_bits: int = 8

    def quantizer(self, backend: str) -> qompose.Quantizer | None:
        """The quantizer of a backend; None where it has no kernel with so few bits."""
        words: dict[str, Any] = {"range": self.range, "weight_range": self.weight_range}
        if self.weight_bits == 4:
            words.update(weight_qmin=-8, weight_qmax=7)
        if backend == "x86_inductor":
            from qompose_x86_inductor import (
                X86InductorQuantizer,
                get_default_x86_inductor_quantization_config,
            )

            config = get_default_x86_inductor_quantization_config(
                reduce_range=self.bits == 7, **words
            )
            return X86InductorQuantizer().set_global(config)
        from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config

        if self.bits != 8:
            return None
        return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(True, **words))


VARIANTS = (
    *(Variant(word) for word in RANGES),
    *(Variant(word, bits=7) for word in RANGES),
    *(Variant(weight_range=word) for word in SEARCHED),
    *(Variant(weight_range=word, weight_bits=4) for word in ("minmax", *SEARCHED)),
)


@dataclass
class Model:
    """An exported program, batches to calibrate it with, and the outputs of the float model.

    `run` gives the outputs of a callable for all test data.
    """

    program: ExportedProgram
    batches: list[tuple[Tensor, ...]]
    run: Callable[[Any], Tensor]
    expected: Tensor
    found: dict[str, qompose.Statistics] = field(default_factory=dict)
    """What a calibration with histograms saw, by backend."""

    def outputs(self, backend: str, variant: Variant) -> Tensor | None:
        """The outputs of the model that a backend's integer kernels run."""
        quantizer = variant.quantizer(backend)
        if quantizer is None:
            return None
        prepared = qompose.prepare_pt2e(self.program, quantizer)
        shared = variant.range not in IN_ORDER
        seen: Any = self.found.get(backend, self.batches) if shared else self.batches
        qompose.calibrate(prepared, seen, progress=False)
        if backend not in self.found and variant.range == "histogram":
            self.found[backend] = qompose.statistics(prepared)
        return self.run(qompose.lower(qompose.convert_pt2e(prepared)))


@dataclass(frozen=True)
class Task:
    """Models of one kind, and the figures of what they give; `scores` takes the outputs of all models."""

    title: str
    models: list[Model]
    columns: tuple[str, ...]
    scores: Callable[[Sequence[Tensor]], list[str]]

    def cells(self, backend: str, variant: Variant) -> list[str]:
        """The figures of a variant, and how far above the error the signal is, in decibels."""
        found = [model.outputs(backend, variant) for model in self.models]
        given = [outputs for outputs in found if outputs is not None]
        if not given:
            return [""] * (len(self.columns) + 1)
        return [*self.scores(given), f"{sqnr([m.expected for m in self.models], given):.2f}"]


def sqnr(expected: Iterable[Tensor], found: Iterable[Tensor]) -> float:
    """Signal over quantization noise of all outputs together, in decibels."""
    pairs = [(e.double(), f.double()) for e, f in zip(expected, found, strict=True)]
    noise = sum(float((e - f).square().sum()) for e, f in pairs)
    signal = sum(float(e.square().sum()) for e, _ in pairs)
    return float(10 * torch.log10(torch.tensor(signal / noise))) if noise else math.inf


def digits(options: argparse.Namespace) -> Task:
    """Residual networks on images of digits, one for each seed."""
    import digits_task

    training, test = digits_task.load()
    images, dynamic = training.images[: digits_task.BATCH_SIZE], {0: Dim("batch", max=32)}
    models = []
    for seed in range(options.seeds):
        net = digits_task.train(training, seed=seed)
        program = export(net, (images,), dynamic_shapes={"images": dynamic})

        def run(fn: Callable[[Tensor], Tensor]) -> Tensor:
            with torch.no_grad():
                return torch.cat([fn(images) for images, _ in test.batches()])

        models.append(Model(program, digits_task.calibration(training), run, run(net)))

    def scores(outputs: Sequence[Tensor]) -> list[str]:
        right = sum(int((o.argmax(-1) == test.labels).sum()) for o in outputs)
        agreed = sum(
            int((o.argmax(-1) == model.expected.argmax(-1)).sum())
            for o, model in zip(outputs, models, strict=True)
        )
        count = len(test) * len(outputs)
        return [f"{right / count:.4f}", f"{agreed / count:.4f}"]

    float_right = scores([model.expected for model in models])[0]
    title = f"Digits: {options.seeds} networks, {len(test)} images each; float {float_right}"
    return Task(title, models, ("accuracy", "as float"), scores)


def sentences(options: argparse.Namespace) -> Task:
    """The pretrained sentence encoder on docstrings."""
    import sentence_task

    net, texts = sentence_task.load(), sentence_task.texts()
    batches = sentence_task.batches(texts[:: options.every])
    rows = {0: Dim("batch", min=2, max=sentence_task.BATCH_SIZE)}
    with torch.no_grad():
        program = export(
            net, batches[0], dynamic_shapes={"input_ids": rows, "attention_mask": rows}
        )

    def run(fn: Callable[..., Tensor]) -> Tensor:
        return sentence_task.embed(fn, batches)

    expected = run(net)

    def scores(outputs: Sequence[Tensor]) -> list[str]:
        (vectors,) = outputs
        return [
            f"{sentence_task.mean_cosine(expected, vectors):.5f}",
            f"{sentence_task.same_nearest_neighbour(expected, vectors):.4f}",
        ]

    model = Model(program, sentence_task.calibration(texts), run, expected)
    title = f"Sentences: MiniLM, {len(expected)} texts"
    return Task(title, [model], ("cosine", "same neighbour"), scores)


def table(task: Task, variants: Sequence[Variant]) -> Iterable[str]:
    """The lines of a table, in Markdown."""
    names = ("bits", "`range=`", "`weight_range=`")
    headings = [*names, *(f"{b}: {c}" for b in BACKENDS for c in (*task.columns, "SQNR, dB"))]
    yield f"| {' | '.join(headings)} |"
    yield "|---|---|---|" + "---:|" * (len(headings) - len(names))
    for variant in variants:
        cells = [c for backend in BACKENDS for c in task.cells(backend, variant)]
        bits = f"{variant.bits}, weights {variant.weight_bits}"
        yield f"| {bits} | {variant.range} | {variant.weight_range} | {' | '.join(cells)} |"


TASKS = {"digits": digits, "sentences": sentences}


def main() -> None:
    """Print a table for each task, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    add("--seeds", type=int, default=10, help="number of digit networks (default: %(default)s)")
    add("--every", type=int, default=1, help="use every N-th text (default: %(default)s)")
    options = parser.parse_args()
    # What stays in float, and why, is what `report` is for: it is the same for every word.
    warnings.simplefilter("ignore", qompose.QomposeWarning)
    for name in options.tasks:
        task = TASKS[name](options)
        print(f"\n{task.title}\n", flush=True)
        for line in table(task, VARIANTS):
            print(line, flush=True)


if __name__ == "__main__":
    main()
