# SPDX-License-Identifier: Apache-2.0
"""What `demo.py` runs: two models, each with two compositions of backends, without a compiler.

Both models are judged on data unseen in calibration, the encoder on texts of other packages, next to
figures of peers on the same texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import digits
import measured
import qompose
import sentence_encoder as sentence
from checks import verdict
from engines import Composition, Engine, int8_share, quantize
from rich.console import Console
from rich.table import Table
from steps import Steps

ROUNDS = 5
TARGET = ("torch",)
PEERS = ("torchao x86", "nncf", "onnxruntime")
LEGEND = (
    "int8: fraction of the multiply-accumulates; neighbour: fraction of the texts with the same nearest\n"
    "text as in the float model; ms: a batch of 16 texts, not compiled."
)


def run(output: Path, steps: Steps) -> int:
    """Quantize, judge, write the report and print the tables; return 1 where a figure is too bad."""
    peers = measured.read(sentence.PEERS)
    images = digits.measure(steps, dict.fromkeys(digits.COMPOSITIONS, TARGET)).results
    steps.say(f"First result: digits, {', '.join(map(_right, images))}")
    subject = sentence.load(sentence.task.JUDGED_OF_EACH, steps)
    encoders = [
        quantize(subject.exported, backends, TARGET, subject.calibration, steps)
        for backends in (sentence.X86, sentence.XNNPACK)
    ]
    texts = sentence.judge(_engines(subject, encoders), subject.data, ROUNDS, steps)
    _save(output, subject, encoders[0], steps)
    steps.say("Done")
    console = Console()
    console = console if console.is_terminal else Console(width=80)
    console.print(images_table(images), "", texts_table(texts, subject, peers))
    for line in (
        LEGEND,
        f"* {peers.source}",
        f"{output} shows what happened to every operator: open it in a browser.",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return verdict([*digits.checks(images), *sentence.checks(texts, sentence.BOUNDS)], console)


def _right(result: digits.Result) -> str:
    return f"{result.engine.name} {result.accuracy:.2%} right"


def _engines(subject: sentence.Subject, encoders: Sequence[Composition]) -> list[Engine]:
    before = encoders[0].quantized.report.bytes_before
    quantized = [e.engine("torch", f"int8 {' + '.join(e.backends)}") for e in encoders]
    return [Engine("float", subject.model, before), *quantized]


def _save(path: Path, subject: sentence.Subject, encoder: Composition, steps: Steps) -> None:
    """Write the report of an encoder, with the error of every operator on one batch of texts."""
    with steps.step(f"compare every operator, write {path}"):
        model = encoder.lowered["torch"]
        found = qompose.compare(subject.exported, model, subject.data[:1])
        qompose.report(model).save(path, comparison=found)


def images_table(results: Sequence[digits.Result]) -> Table:
    """Every engine of the first task."""
    made = _table(f"Digits: residual network, {digits.task.TEST_IMAGES} test images", "right")
    for result in results:
        made.add_row(*_facts(result.engine, digits.PRODUCTS), f"{result.accuracy:.2%}")
    return made


def texts_table(
    results: Sequence[sentence.Result], subject: sentence.Subject, peers: measured.Page
) -> Table:
    """Every engine of the second task, and what was measured of peers before."""
    count = sum(subject.judged.values())
    made = _table(
        f"all-MiniLM-L6-v2: {count} texts of packages that did not calibrate it",
        *("cosine", "neighbour", "SQNR, dB", "ms"),
    )
    for result in results:
        decibels = "" if result is results[0] else f"{result.decibels:.2f}"
        figures = (f"{result.cosine:.4f}", f"{result.neighbour:.4f}", decibels)
        made.add_row(
            *_facts(result.engine, ["aten.linear"]), *figures, f"{result.milliseconds:.0f}"
        )
    for row in peers.rows:
        if row["engine"] in PEERS:
            made.add_row(f"{row['engine']} *", "", "", *(row[name] for name in sentence.COMPARED))
    return made


def _table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    made.add_column("engine", no_wrap=True, min_width=29)
    for name in ("MB", "int8", *columns):
        made.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    return made


def _facts(engine: Engine, products: Sequence[str]) -> tuple[str, str, str]:
    """The name, the megabytes, and the part of the work of `products` that int8 kernels do."""
    share = f"{int8_share(engine.report, products):.0%}" if engine.report else ""
    return engine.name, f"{engine.nbytes / 1e6:.2f}", share
