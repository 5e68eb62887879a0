# SPDX-License-Identifier: Apache-2.0
"""Cost of a calibration batch relative to the eager float forward: qompose, by observer, and torchao."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from comparing import Comparison
from side_by_side import Call, Row
from torch import Tensor
from x86_workloads import WORKLOADS, Workload

FLOAT = "float eager"
RANGES = ("histogram", "minmax", "moving_average")
"""The words of qompose's configurations; the first is the default."""
BATCHES = 24
"""Different inputs, in turn: what an observer has seen before costs it less, or more."""
MODELS = ("resnet50-1", "resnet50-16", "bert_base-1x128", "bert_base-16x128", "minilm-16x64")


def qompose_prepared(work: Workload, backend: str, word: str) -> Any:
    """The model with qompose's observers of a range."""
    import qompose
    from qompose_x86_inductor import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )
    from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config

    if backend == "xnnpack":
        config = get_symmetric_quantization_config(is_per_channel=True, range=word)
        quantizer: qompose.Quantizer = XNNPACKQuantizer().set_global(config)
    else:
        config = get_default_x86_inductor_quantization_config(range=word)
        quantizer = X86InductorQuantizer().set_global(config)
    return qompose.prepare_pt2e(torch.export.export(work.module, work.inputs), quantizer)


def torchao_prepared(work: Workload) -> Any:
    """The model with torchao's default observers."""
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    # With a default export its quantizer raises on ResNets.
    exported = torch.export.export(work.module, work.inputs, strict=True).module()
    config = x86.get_default_x86_inductor_quantization_config()
    return prepare_pt2e(exported, x86.X86InductorQuantizer().set_global(config))


def work(engine: str, model: str, options: argparse.Namespace) -> tuple[Call, dict[str, Any]]:
    """Make what an engine runs."""
    torch.set_num_threads(options.threads)
    workload = WORKLOADS[model]()
    torch.set_grad_enabled(False)
    if engine == FLOAT:
        run: Any = workload.module
    elif engine == "torchao":
        run = torchao_prepared(workload)
    else:
        run = qompose_prepared(workload, *engine.split()[1:])
    batches = itertools.cycle([another(workload.inputs, n) for n in range(BATCHES)])
    for _ in range(4):  # observers that have seen a range are what a long run has
        run(*next(batches))
    return lambda: run(*next(batches)), {}


def another(inputs: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Inputs like these, with other images, or the same tokens in another order."""
    generator = torch.Generator().manual_seed(seed)

    def other(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator)
        return x.flatten()[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)

    return tuple(map(other, inputs))


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """The times, and their ratio to the float forward."""
    return [*row.times(), *row.ratios(rows, (FLOAT,))]


OURS = [f"qompose {backend} {word}" for backend in ("x86", "xnnpack") for word in RANGES]
COMPARISON = Comparison(
    models=MODELS,
    engines=[FLOAT, *OURS, "torchao"],
    columns=("ms", "p10", "p90", "of float"),
    compared=(FLOAT,),
    packages=("torch", "torchao", "qompose"),
    threads=2,
    work=work,
    cells=cells,
)

if __name__ == "__main__":
    COMPARISON.run(COMPARISON.parser(__doc__).parse_args())
