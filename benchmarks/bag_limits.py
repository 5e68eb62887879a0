# SPDX-License-Identifier: Apache-2.0
"""What limits the speed of bags: the same bags from caches, in order, from huge pages, at fewer bits.

The kernels are torch's own, called directly. One row per table and kind of ids, with the minimum time of
many calls, which other processes disturb little.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, WIDTH, BAGS, LENGTH = 1_000_000, 128, 512, 32
BATCHES = 64
"""Different ids, in turn."""
NEAR = {"all rows": ROWS, "2,000 rows": 2_000, "64 rows": 64}
"""How many rows the ids are of: those of memory, of the second cache, and of the first."""
BITS = (8, 4, 2)

Bag = Callable[[Tensor, Tensor], Tensor]


def kernel(bits: int) -> Bag:
    """What sums bags of a table: torch's kernel for rows of so many bits, or of floats."""
    offsets = torch.arange(0, BAGS * LENGTH, LENGTH)
    if bits == 32:
        return lambda table, ids: F.embedding_bag(ids, table, offsets, mode="sum")
    run = _operator(bits, "rowwise_offsets").default
    return lambda table, ids: run(table, ids, offsets, False, 0, False, None, None, False)


def table(bits: int, floats: Tensor) -> Tensor:
    """The table in so many bits."""
    if bits == 32:
        return floats
    packed: Tensor = _operator(bits, "prepack")(floats)
    return packed


def _operator(bits: int, what: str) -> Any:
    """torch's operator of this kind for rows of 8, 4 or 2 bits."""
    name = "byte" if bits == 8 else f"{bits}bit"
    return getattr(torch.ops.quantized, f"embedding_bag_{name}_{what}")


def in_pages(source: Tensor, huge: bool) -> Tensor:
    """The same tensor in pages of 2 MiB, where the system has them, or of 4 KiB."""
    memory = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    copy = torch.frombuffer(memory, dtype=source.dtype).reshape(source.shape)
    return copy.copy_(source)


def bytes_read(rows: Tensor) -> int:
    """The bytes of the rows of one call."""
    return BAGS * LENGTH * rows.element_size() * rows.shape[1]


def ids(near: str) -> list[Tensor]:
    """Ids for each call, (bags * length,)."""
    number = BAGS * LENGTH
    if near == "in order":
        return [torch.arange(number) + start for start in torch.randint(ROWS - number, (BATCHES,))]
    spread = ROWS // NEAR[near]
    return [torch.randint(NEAR[near], (number,)) * spread for _ in range(BATCHES)]


def least(run: Callable[[Tensor], object], inputs: list[Tensor], seconds: float) -> float:
    """Microseconds of the fastest call."""
    best, batches, end = float("inf"), itertools.cycle(inputs), time.perf_counter() + seconds
    while time.perf_counter() < end:
        batch = next(batches)
        start = time.perf_counter()
        run(batch)
        best = min(best, time.perf_counter() - start)
    return best * 1e6


Line = tuple[str, str, str, float, float]
"""Table, pages, ids, microseconds and bytes of a measurement."""


def of_tables(seconds: float) -> Iterator[Line]:
    """The same bags of tables in every number of bits, from every place."""
    floats = torch.randn(ROWS, WIDTH)
    for bits in (32, *BITS):
        name = "float" if bits == 32 else f"{bits} bits"
        for pages, huge in (("4 KiB", False), ("2 MiB", True)):
            rows = in_pages(table(bits, floats), huge)
            bag = partial(kernel(bits), rows)
            for near in (*NEAR, "in order"):
                yield name, pages, near, least(bag, ids(near), seconds), bytes_read(rows)


def of_widths(seconds: float) -> Iterator[Line]:
    """Rows of 8 bits that begin where a cache line does and fill 1, 2, 4 and 8 of them; scale and all."""
    for size in (1, 2, 4, 8):
        rows = in_pages(table(8, torch.zeros(ROWS, 64 * size - 8)), True)
        for near in ("all rows", "64 rows"):
            taken = least(partial(kernel(8), rows), ids(near), seconds)
            yield f"8 bits, {64 * size - 8} wide", "2 MiB", near, taken, bytes_read(rows)


def of_memory(seconds: float) -> Iterator[Line]:
    """Reading and copying in one piece."""
    for megabytes in (2, 8, 48):
        source = in_pages(torch.zeros(megabytes << 18), True)
        target = torch.zeros_like(source)
        for name, run in (("copy", target.copy_), ("largest", torch.amax)):
            taken = least(lambda _, run=run, s=source: run(s), ids("64 rows"), seconds)
            yield f"{name} of {megabytes} MiB", "2 MiB", "", taken, source.nbytes


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds for each line (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print("| table | pages | ids of | us | MB | GB/s |\n|---|---|---|---:|---:|---:|")
    parts = (of_tables, of_widths, of_memory)
    for name, pages, near, taken, read in itertools.chain(
        *(part(options.seconds) for part in parts)
    ):
        speed = read / taken / 1e3
        print(
            f"| {name} | {pages} | {near} | {taken:.0f} | {read / 1e6:.2f} | {speed:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
