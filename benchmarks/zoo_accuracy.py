# SPDX-License-Identifier: Apache-2.0
"""Accuracy of small architectures as Q/DQ models: qompose, qompose on a peer's operators, and peers.

Weights are random, and figures vary by some decibels between sets of weights: `--draws` perturbs the weights
and averages the errors.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import torch
from accuracy_engines import ENGINES
from accuracy_tasks.subject import ROOT, Subject
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo_run import FIRST_HELD_OUT, Stages, models

NAMED = (
    "clip_vision", "vision_transformer", "dinov2", "dinov2_registers", "swin_v2", "wav2vec2", "hubert",
    "gpt2", "efficientnet", "mobilenet_v3", "ghostnet", "loop", "loop_two_values", "loop_of_branches",
    "scan_cell", "lstm_cell", "conv_lstm",
)  # fmt: skip
SHOWN = ("x86", "x86, as torchao", "torchao x86",
         "xnnpack", "xnnpack, as torchao", "torchao xnnpack")  # fmt: skip
BATCHES, HELD_OUT = 8, 6
PERTURBED = 0.3
"""Of the standard deviation of each weight."""


def _floats(value: object) -> Tensor:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return torch.cat([t.detach().double().flatten() for t in tensors if t.is_floating_point()])


def _network(model: Any, draw: int) -> nn.Module:
    """The network of a model; of draws behind the first with other weights."""
    network: nn.Module = model.build()
    generator = torch.Generator().manual_seed(draw)
    for weight in (p for p in network.parameters() if draw and p.dim() > 1):
        noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weight.data += PERTURBED * weight.data.std() * noise
    return network


def _error(model: Any, engine: str, draw: int) -> float:
    """The squared error of an engine over the squared size of what the float network gives."""
    inputs = model.inputs
    held_out = range(FIRST_HELD_OUT, FIRST_HELD_OUT + HELD_OUT)
    calibration = [inputs(number + 1) for number in range(BATCHES)]
    subject = Subject("", _network(model, draw), calibration, {}, lambda *_: {}, transformer=True)
    with torch.no_grad():
        exact = torch.cat([_floats(subject.module(*inputs(number))) for number in held_out])
    with redirect_stdout(sys.stderr):
        made = ENGINES[engine].make(subject, calibration, Stages(lambda stage: None), False)
    with torch.no_grad():
        found = torch.cat([_floats(made.run(*inputs(number))) for number in held_out])
    return float((found - exact).square().sum() / exact.square().sum())


def _cells(model: Any, engines: list[str], draws: int) -> Iterator[str]:
    for engine in engines:
        try:
            errors = [_error(model, engine, draw) for draw in range(draws)]
            yield f"{-10 * torch.tensor(errors).mean().clamp(min=1e-20).log10():.2f}"
        except Exception as error:
            print(f"{engine}: {type(error).__name__}: {error}", file=sys.stderr)
            yield "failed"


def main() -> None:
    """Print a table of decibels, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*NAMED], metavar="MODEL")
    parser.add_argument(
        "--engines", nargs="+", default=[*SHOWN], choices=[*ENGINES], metavar="ENGINE"
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=1,
        help="number of perturbed weight sets (default: %(default)s)",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT)]
    zoo = models("zoo_models")
    print(f"| SQNR, dB | {' | '.join(options.engines)} |\n|---|" + "---:|" * len(options.engines))
    for name in options.models:
        print(
            f"| {name} | {' | '.join(_cells(zoo[name], options.engines, options.draws))} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
