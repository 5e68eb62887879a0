# SPDX-License-Identifier: Apache-2.0
"""What `xnnpack_runtime.py` measures: models by name, with inputs to calibrate and others to compare on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

Inputs = list[tuple[Tensor, ...]]
CALIBRATION_SEED, HELD_OUT_SEED = 100, 200
"""Batch norms of the networks have seen the images of seeds 0 and 1."""
QUICK_PIXELS, QUICK_TOKENS, QUICK_LAYERS = 64, 16, 2
MLP_WIDTH, MLP_LAYERS = 1024, 4


@dataclass(frozen=True)
class Subject:
    """A model in eval mode and its inputs, each of batch one."""

    module: nn.Module
    calibration: Inputs
    held_out: Inputs


@dataclass(frozen=True)
class Amounts:
    """How many inputs to calibrate with and to compare on; `quick` asks for small networks too."""

    calibration: int
    held_out: int
    quick: bool


def _network(name: str, amounts: Amounts) -> Subject:
    from tests.zoo import images, network, tokens

    entry = network(name)
    reads_text, options = "text" in entry.tags, {}
    if amounts.quick:
        options["size"] = QUICK_TOKENS if reads_text else QUICK_PIXELS
        options |= {"layers": QUICK_LAYERS} if "transformers" in entry.tags else {}
    draw = tokens if reads_text else images
    size = (options["size"],) if "size" in options else ()
    return Subject(
        network(name, **options).build(),
        _single(draw(amounts.calibration, *size, seed=CALIBRATION_SEED)),
        _single(draw(amounts.held_out, *size, seed=HELD_OUT_SEED)),
    )


def _single(batch: Tensor) -> Inputs:
    return [(row,) for row in batch.split(1)]


def _mlp(amounts: Amounts) -> Subject:
    torch.manual_seed(0)
    layers = (
        part for _ in range(MLP_LAYERS) for part in (nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.ReLU())
    )
    module = nn.Sequential(*layers).eval()
    calibration, held_out = (
        _single(torch.randn(count, MLP_WIDTH)) for count in (amounts.calibration, amounts.held_out)
    )
    return Subject(module, calibration, held_out)


def _digits(amounts: Amounts) -> Subject:
    import digits_task as task

    training, test = task.load()
    net = task.train(training, epochs=1 if amounts.quick else task.EPOCHS)
    calibration = training.images[: amounts.calibration]
    return Subject(net, _single(calibration), _single(test.images[: amounts.held_out]))


def _minilm(amounts: Amounts) -> Subject:
    import sentence_task as task

    inside, outside = task.split(task.texts())
    calibration, held_out = (
        task.batches(_spread(texts, count), size=1)
        for texts, count in ((inside, amounts.calibration), (outside, amounts.held_out))
    )
    return Subject(task.load(), list(calibration), list(held_out))


def _spread(texts: Sequence[str], count: int) -> list[str]:
    """So many of the sorted texts, evenly: neighbours begin with the same words."""
    return [texts[index * len(texts) // count] for index in range(min(count, len(texts)))]


NETWORKS = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "vit_b_16",
    "bert_base",
)
SUBJECTS: dict[str, Callable[[Amounts], Subject]] = {
    **{name: partial(_network, name) for name in NETWORKS},
    "mlp": _mlp,
    "digits": _digits,
    "minilm": _minilm,
}
