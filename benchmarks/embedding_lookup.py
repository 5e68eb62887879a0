# SPDX-License-Identifier: Apache-2.0
"""Speed and size of quantized embedding tables: lookups and bags, compared with float and torchao."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import qompose
import torch
import torch.nn.functional as F
from comparing import Comparison
from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
from side_by_side import Call, Row
from torch import Tensor, nn

WIDTH = 128
LOCAL = 2_000
"""Rows that a local workload takes its ids from, spread evenly over the table."""
BATCHES = 64
"""Different inputs, in turn."""


@dataclass(frozen=True)
class Workload:
    """A table of so many rows, and ids: so many, or so many bags of 32; of `LOCAL` rows, or of all."""

    rows: int
    ids: int
    bags: bool = False
    local: bool = False

    def model(self) -> nn.Module:
        """The float model."""
        torch.manual_seed(0)
        if self.bags:
            return nn.EmbeddingBag(self.rows, WIDTH, mode="sum").eval()
        return nn.Embedding(self.rows, WIDTH).eval()

    def inputs(self) -> list[Tensor]:
        """Different ids for each call."""
        shape = (BATCHES, self.ids, 32) if self.bags else (BATCHES, self.ids)
        if not self.local:
            return [*torch.randint(self.rows, shape)]
        return [*(torch.randint(LOCAL, shape) * (self.rows // LOCAL))]

    def bytes(self) -> int:
        """What has to be read of a table of bytes in one call."""
        return self.ids * (32 if self.bags else 1) * (WIDTH + 8)


WORKLOADS = {
    "lookup of 1": Workload(1_000_000, 1, local=True),
    "lookup of 256, 100k rows": Workload(100_000, 256, local=True),
    "lookup of 256, 1M rows": Workload(1_000_000, 256, local=True),
    "lookup of 16k": Workload(1_000_000, 16_384),
    "512 bags of 32": Workload(1_000_000, 512, bags=True),
}


def size_of(module: nn.Module) -> int:
    """The bytes of a module's state."""
    return sum(t.nbytes for t in module.state_dict().values())


def quantized(workload: Workload, bits: int) -> qompose.QuantizedModel:
    """The model in rows of `bits` bits, lowered for this process."""
    quantizer = EmbeddingQuantizer(get_embedding_quantization_config(bits))
    inputs = (workload.inputs()[0],)
    return qompose.quantize(workload.model(), example_inputs=inputs, backends=[quantizer])


def torchao(workload: Workload) -> Any:
    """The graph that torchao's quantizer leads to; it has none for bags."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.embedding_quantizer import (
        EmbeddingQuantizer as Torchaos,
    )

    if workload.bags:
        raise NotImplementedError("its EmbeddingQuantizer annotates no bags")
    ids = workload.inputs()[0]
    program = torch.export.export(workload.model(), (ids,)).module()
    prepared = prepare_pt2e(program, Torchaos())
    prepared(ids)
    return convert_pt2e(prepared)


def memory_limit(workload: Workload) -> Call:
    """Reads as many bytes as a call has to, in one piece, from places all over a table of bytes."""
    table = torch.zeros(workload.rows * (WIDTH + 8) // 4)
    size = workload.bytes() // 4
    starts = itertools.cycle(torch.randint(len(table) - size, (BATCHES,)).tolist())
    return lambda: torch.amax(table[(start := next(starts)) : start + size])


def calling(run: Callable[..., Any], workload: Workload) -> Call:
    """Call a model with one input after the other."""
    inputs = itertools.cycle(workload.inputs())
    return lambda: run(next(inputs))


def float_function(workload: Workload, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """torch's function on the float table, with no module around it."""
    if workload.bags:
        return lambda ids: F.embedding_bag(ids, weight, mode="sum")
    return lambda ids: F.embedding(ids, weight)


def made(engine: str, workload: Workload) -> tuple[Callable[..., Any], int]:
    """What an engine runs, and the bytes of its table."""
    if "float" in engine:
        model = workload.model()
        runs = {"float": float_function(workload, model.weight), "float module": model}
        return runs.get(engine) or torch.compile(model), size_of(model)
    if engine == "torchao":
        model = torchao(workload)
        return model, size_of(model)
    result = quantized(workload, int(engine.split()[-2]))
    run = result.compile() if engine.startswith("compiled") else result.model
    return run, size_of(result.model)


def work(engine: str, model: str, options: argparse.Namespace) -> tuple[Call, dict[str, Any]]:
    """Make what an engine runs."""
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    workload = WORKLOADS[model]
    if engine == "memory limit":
        return memory_limit(workload), {"bytes": 0}
    run, size = made(engine, workload)
    return calling(run, workload), {"bytes": size}


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """Microseconds, ratios to float, and the size of the table as a part of the float one."""
    times = [f"{row.quantile(tenth) * 1e3:.1f}" for tenth in (5, 1, 9)]
    of_float = row.siblings(rows)["float"].found["bytes"] if "float" in row.siblings(rows) else 0
    size = f"{row.found['bytes'] / of_float:.3f}" if of_float and row.found["bytes"] else ""
    return [*times, *row.ratios(rows, ("float", "memory limit")), size]


COMPARISON = Comparison(
    models=[*WORKLOADS],
    engines=["float", "float module", "compiled float", "torchao",
             "qompose 8 bits", "qompose 4 bits", "qompose 2 bits", "compiled qompose 8 bits",
             "memory limit"],
    columns=("us", "p10", "p90", "of float", "of the limit", "bytes, of float"),
    compared=("float", "memory limit"),
    packages=("torch", "torchao", "qompose"),
    threads=1,
    work=work,
    cells=cells,
)  # fmt: skip

if __name__ == "__main__":
    COMPARISON.run(COMPARISON.parser(__doc__).parse_args())
