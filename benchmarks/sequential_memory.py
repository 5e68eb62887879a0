# SPDX-License-Identifier: Apache-2.0
"""Anonymous memory and time of GPTQ, with one layer's second moments at a time or with all, in MB.

    python benchmarks/sequential_memory.py --widths 2048 2048 2048 --word gptq_sequential

Linears of random weights, without a bias, int4 in groups of 128 for x86, four batches of 64 rows. What the
process had before the step is taken off, the float model among it. Integers that the sequential form chose
lie in a temporary file, a byte a weight; what is there at the peak includes activations.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
# Tensors of 64 kB and more go back to the system when they are freed, so that the peak is of live ones.
if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
    import sys

    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    os.execv(sys.executable, [sys.executable, *sys.argv])  # glibc reads them as a process starts

import argparse
import itertools
import threading
import time
from collections.abc import Callable

import qompose
import qompose_x86_inductor as x86
import torch
from machine import anonymous_bytes
from torch import nn

_EVERY = 0.002
"""Seconds."""
ROWS, BATCHES = 64, 4


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """The most that a step adds to what the process had before, in MB, and seconds of processor."""
    before, ended, peak = anonymous_bytes(), threading.Event(), 0

    def watch() -> None:
        nonlocal peak
        while not ended.wait(_EVERY):
            peak = max(peak, anonymous_bytes() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    start = time.process_time()
    run()
    taken = time.process_time() - start
    ended.set()
    watching.join()
    return peak / 1e6, taken


def steps(widths: list[int], word: str) -> list[Callable[[], object]]:
    """Calibrate and convert a chain of linears."""
    torch.manual_seed(0)
    layers = (nn.Linear(one, other, bias=False) for one, other in itertools.pairwise(widths))
    model = nn.Sequential(*layers).eval().requires_grad_(False)
    mixture = torch.randn(32, widths[0])
    noise = (torch.randn(ROWS, widths[0]) for _ in range(BATCHES))
    batches = [(torch.randn(ROWS, 32) @ mixture + 0.3 * part,) for part in noise]
    config = x86.get_default_x86_inductor_quantization_config(
        weight_only=True, group_size=128, algorithms=(word,)
    )
    program = torch.export.export(model, batches[0])
    prepared = qompose.prepare_pt2e(program, x86.X86InductorQuantizer().set_global(config))
    return [
        lambda: qompose.calibrate(prepared, batches, progress=False),
        lambda: qompose.convert_pt2e(prepared),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[2048] * 9)
    parser.add_argument("--word", default="gptq_sequential", choices=["gptq_sequential", "gptq"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for step in steps([128, 128], given.word):
        step()  # what a first call takes
    pairs = [one * other for one, other in itertools.pairwise(given.widths)]
    print(
        f"float model {sum(pairs) * 4 / 1e6:.1f}, three largest layers {12 * max(pairs) / 1e6:.1f}"
    )
    for name, step in zip(("calibrate", "convert"), steps(given.widths, given.word), strict=True):
        print(f"{name}: {{:.1f}} MB, {{:.1f}} s".format(*measured(step)))


if __name__ == "__main__":
    main()
