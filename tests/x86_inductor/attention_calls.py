# SPDX-License-Identifier: Apache-2.0
"""What tests of attention in C++ share: operands in any layout, masks, the call, and a bound for floats."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from qompose_x86_inductor.native import float_attention
from torch import Tensor

LAYOUTS = ("plain", "by token", "packed", "by column")
MASKS = ("none", "keep", "rows out", "added", "infinite", "lowest")


def operand(
    draw: Callable[..., Tensor], layout: str, batch: int, heads: int, length: int, width: int
) -> Tensor:
    """Values (batch, heads, length, width), drawn by shape, that lie in memory as a layout says."""
    if layout == "by token":
        return draw(batch, length, heads, width).transpose(1, 2)
    if layout == "packed":
        return draw(batch, length, 3, heads, width)[:, :, 1].transpose(1, 2)
    if layout == "by column":
        return draw(batch, heads, width, length).transpose(2, 3)
    return draw(batch, heads, length, width)


def operands_and_mask(draw: st.DrawFn, values: Callable[..., Tensor]) -> list[Any]:
    """Queries, keys, values and a mask or None, of any sizes, layouts and groups of heads.

    Args:
        values: makes a tensor of a shape.
    """
    batch, shared, times = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, length = shared * times, draw(st.integers(1, 30))
    keys = draw(st.integers(1, 40) | st.integers(60, 150))
    width, columns = (draw(st.integers(1, 40) | st.sampled_from([64, 128])) for _ in range(2))
    torch.manual_seed(draw(st.integers(0, 99)))
    sizes = ((heads, length, width), (shared, keys, width), (shared, keys, columns))
    tensors = [operand(values, draw(st.sampled_from(LAYOUTS)), batch, *each) for each in sizes]
    full = (batch, heads, length, keys)
    shape = tuple(size if draw(st.booleans()) else 1 for size in full)[draw(st.integers(0, 2)) :]
    return [*tensors, a_mask(draw(st.sampled_from(MASKS)), shape)]


def plain_operands(
    values: Callable[..., Tensor],
    *,
    batch: int = 1,
    heads: int = 3,
    length: int = 20,
    keys: int = 50,
    width: int = 32,
) -> tuple[Tensor, ...]:
    """Queries, keys and values, contiguous."""
    torch.manual_seed(0)
    return tuple(values(batch, heads, rows, width) for rows in (length, keys, keys))


def with_rows_out(infinite: bool) -> Tensor:
    """A mask of 20 queries and 50 keys: the fourth query has none, the eighth only the first."""
    mask = torch.ones(20, 50, dtype=torch.bool)
    mask[3], mask[7, 1:] = False, False
    return torch.zeros(20, 50).masked_fill(~mask, -math.inf) if infinite else mask


class Guarded:
    """A copy of a tensor after which memory cannot be read: a program that does so ends there."""

    def __init__(self, x: Tensor) -> None:
        self._memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protect = ctypes.CDLL(None).mprotect
        assert protect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
        at = mmap.PAGESIZE - x.numel() * x.element_size()
        self._memory[at : mmap.PAGESIZE] = x.numpy().tobytes()
        moved = torch.frombuffer(self._memory, dtype=x.dtype, count=x.numel(), offset=at)
        self.tensor = moved.view(x.shape)


def a_mask(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    """A mask of a shape that broadcasts; of "rows out", every second row has no key left."""
    if kind == "none":
        return None
    kept = torch.rand(shape) < 0.7
    if kind == "rows out" and len(shape) > 1:
        kept[..., ::2, :] = False
    if kind in ("keep", "rows out"):
        return kept
    if kind == "added":
        return torch.randn(shape) * 2
    lowest = -math.inf if kind == "infinite" else torch.finfo(torch.float32).min
    return torch.zeros(shape).masked_fill(~kept, lowest)


def call(
    function: Any, tensors: tuple[Tensor, ...], mask: Tensor | None, result: Tensor, *numbers: Any
) -> None:
    """Call a function of `native_entry.cpp` for attention; `numbers`: threads, then what is its own."""
    query, key, value = tensors
    batch, heads, length, width = query.shape
    wide = None if mask is None else mask.expand(batch, heads, length, key.shape[2])
    operands = (*tensors, wide)
    strides = [stride for x in operands for stride in ((0,) * 4 if x is None else x.stride())]
    counts = (batch, heads, key.shape[1], length, key.shape[2], width, value.shape[3])
    threads, *others = numbers
    function(
        ctypes.c_int(threads),
        (ctypes.c_int64 * 7)(*counts),
        (ctypes.c_void_p * 4)(*(0 if x is None else x.data_ptr() for x in operands)),
        (ctypes.c_int64 * 16)(*strides),
        ctypes.c_int(0 if mask is None else 1 if mask.dtype == torch.bool else 2),
        *others,
        ctypes.c_void_p(result.data_ptr()),
    )


def agree(
    got: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *others: Any
) -> None:
    """Compare with attention of doubles; `others`: whether it is causal, the scale, and what masks do.

    The bound is of some roundings of scores, which are sums of products of float32.
    """
    exact = mask if mask is None or mask.dtype == torch.bool else mask.double()
    query, key, value = query.double(), key.double(), value.double()
    wanted = float_attention.reference(query, key, value, exact, *others)
    times = query.shape[1] // key.shape[1]
    sums = query.abs() @ key.abs().repeat_interleave(times, 1).mT * abs(others[1])
    bound = 2**-22 * (float(sums.max()) + 4) * float(value.abs().max())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=bound, equal_nan=True)
