# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of prepare and convert: qompose and torchao, in one run, on one thread.

Time: chains of N x (linear, relu), 8 wide, so that all of it is the engine's own work. Both engines get
the same exported program and their own XNNPACK quantizer in its default configuration, and are
interleaved; a column is the median of the repeats.

Memory: a model that is all weights. A process for each engine prepares, calibrates with one row and
converts in place, with nothing else holding the float model, and reads its peak from Linux.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
# Tensors of 64 kB and more go back to the system when they are freed, so that the peak is of live ones.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
warnings.simplefilter("ignore")  # torchao and ExecuTorch warn about themselves
logging.disable(logging.WARNING)

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

WIDTH = 8
SIZES = (125, 250, 500, 1000, 2000)
LONGEST = 60.0
"""An engine stops where a run would take more seconds than this."""
MEGABYTE = 2**20


@dataclass(frozen=True)
class Engine:
    """Prepare and convert, each from a GraphModule to one, in place."""

    prepare: Callable[[Any], Any]
    convert: Callable[[Any], Any]


def _qompose() -> Engine:
    import qompose
    from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(True))
    return Engine(
        lambda model: qompose.prepare_pt2e(model, quantizer, inplace=True),
        lambda model: qompose.convert_pt2e(model, inplace=True),
    )


def _torchao() -> Engine:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(True))
    return Engine(lambda model: prepare_pt2e(model, quantizer), convert_pt2e)


ENGINES: dict[str, Callable[[], Engine]] = {"qompose": _qompose, "torchao": _torchao}


def chain(length: int) -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(length) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers).eval(), torch.randn(2, WIDTH)


@dataclass
class Curve:
    """The seconds of one engine, by length of the chain; `stopped` tells why it has no more."""

    prepare: dict[int, list[float]] = field(default_factory=dict)
    convert: dict[int, list[float]] = field(default_factory=dict)
    stopped: str = ""

    def seconds(self, size: int) -> float:
        return median(self.prepare[size]) + median(self.convert[size])

    def too_long(self, size: int, longest: float) -> bool:
        """Tell whether a run of `size` is expected to take too long, going by the sizes before it."""
        if self.stopped or not self.prepare:
            return bool(self.stopped)
        last = max(self.prepare)
        power = 1.0
        if last // 2 in self.prepare:  # a curve that bends goes on bending
            power = max(1.0, math.log2(self.seconds(last) / self.seconds(last // 2)))
        expected = self.seconds(last) * (size / last) ** power
        if expected > longest:
            self.stopped = f"stopped before N = {size}: about {expected:.0f} s are to be expected"
        return bool(self.stopped)


def _run(engine: Engine, program: Any, example: Tensor) -> tuple[float, float]:
    model = program.module()
    gc.collect()
    start = time.perf_counter()
    prepared = engine.prepare(model)
    middle = time.perf_counter()
    with torch.no_grad():
        prepared(example)
    gc.collect()
    again = time.perf_counter()
    engine.convert(prepared)
    return middle - start, time.perf_counter() - again


def measure_time(
    names: Sequence[str], sizes: Sequence[int], repeats: int, longest: float
) -> dict[str, Curve]:
    engines, curves = {name: ENGINES[name]() for name in names}, {name: Curve() for name in names}
    model, example = chain(4)
    for engine in engines.values():  # imports, traced patterns, generated code
        for _ in range(2):
            _run(engine, torch.export.export(model, (example,)), example)
    for size in sizes:
        model, example = chain(size)
        program = torch.export.export(model, (example,))
        for _ in range(repeats):
            for name, engine in engines.items():
                curve = curves[name]
                if size not in curve.prepare and curve.too_long(size, longest):
                    continue
                prepared, converted = _run(engine, program, example)
                curve.prepare.setdefault(size, []).append(prepared)
                curve.convert.setdefault(size, []).append(converted)
        print(f"N = {size} done", file=sys.stderr, flush=True)
    return curves


def time_table(curves: dict[str, Curve]) -> list[list[str]]:
    rows = [["engine", "N", "prepare s", "convert s", "both s", "t(N) / t(N/2)", "ms per linear"]]
    for name, curve in curves.items():
        for size in curve.prepare:
            both = curve.seconds(size)
            half = f"{both / curve.seconds(size // 2):.2f}" if size // 2 in curve.prepare else ""
            parts = (median(curve.prepare[size]), median(curve.convert[size]), both)
            rows.append(
                [name, str(size), *(f"{t:.3f}" for t in parts), half, f"{both / size * 1e3:.2f}"]
            )
    return rows


def heavy(layers: int, width: int, largest: int) -> tuple[nn.Module, Tensor]:
    parts = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(*parts, nn.Linear(width, largest)).eval(), torch.randn(1, width)


def _from_system(name: str) -> int:
    """The bytes that /proc/self/status has under a name."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{name} is not in /proc/self/status: this part needs Linux")


def measure_memory(name: str, shape: Sequence[int]) -> dict[str, float]:
    """Peak of this process while it prepares and converts, in bytes; to be run in a process of its own."""
    engine = ENGINES[name]()
    small, example = chain(2)
    _run(engine, torch.export.export(small, (example,)), example)
    model, example = heavy(*shape)
    floats = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(sum(p.numel() * p.element_size() for p in m.parameters()) for m in model)
    module = torch.export.export(model, (example,)).module()
    del model, small
    gc.collect()
    process = _from_system("VmRSS") - floats
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again from here
    prepared = engine.prepare(module)
    del module
    with torch.no_grad():
        prepared(example)
    converted = engine.convert(prepared)
    peak = _from_system("VmHWM") - process
    state = {t.data_ptr(): t.nbytes for t in converted.state_dict().values()}
    return {"float": floats, "largest": largest, "peak": peak, "after": sum(state.values())}


def memory_table(names: Sequence[str], shape: Sequence[int]) -> list[list[str]]:
    rows = [
        [
            "engine",
            "float MB",
            "largest layer MB",
            "peak MB",
            "peak / (float + largest)",
            "after MB",
        ]
    ]
    for name in names:
        command = [sys.executable, __file__, "--memory-of", name, "--heavy", *map(str, shape)]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(lines.splitlines()[-1])
        size = [f"{found[key] / MEGABYTE:.1f}" for key in ("float", "largest", "peak", "after")]
        ratio = found["peak"] / (found["float"] + found["largest"])
        rows.append([name, *size[:3], f"{ratio:.2f}", size[3]])
    return rows


def show(title: str, rows: list[list[str]], notes: Sequence[str] = ()) -> None:
    """Print rows as a table for the terminal, and as Markdown."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}\n")
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print()
    head, *body = rows
    for row in [head, ["---"] * len(head), *body]:
        print(f"| {' | '.join(row)} |")
    for note in notes:
        print(f"\n{note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=SIZES,
        help="lengths of the chains (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--longest",
        type=float,
        default=LONGEST,
        help="stop an engine if its next run would take more seconds (default: %(default)s)",
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--heavy", type=int, nargs=3, default=(40, 1024, 8192),
                        metavar=("LAYERS", "WIDTH", "LARGEST"))  # fmt: skip
    parser.add_argument("--memory-of", choices=list(ENGINES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.memory_of:
        print(json.dumps(measure_memory(options.memory_of, options.heavy)))
        return
    curves = measure_time(options.engines, options.sizes, options.repeats, options.longest)
    notes = [f"{name} {curve.stopped}." for name, curve in curves.items() if curve.stopped]
    show("Seconds of prepare and convert", time_table(curves), notes)
    layers, width, largest = options.heavy
    title = f"Peak memory: {layers} linears of {width} x {width} and one of {width} x {largest}"
    show(title, memory_table(options.engines, options.heavy))


if __name__ == "__main__":
    main()
