# SPDX-License-Identifier: Apache-2.0
"""What tests of attention in C++ share: operands in any layout, masks, and the call of the library."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch
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
