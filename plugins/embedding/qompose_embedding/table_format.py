# SPDX-License-Identifier: Apache-2.0
"""The formats of stored tables: integers beside their scales, or rows that carry theirs.

A row of `bits` bits holds the integers `u = q - base`, from 0 up. *Plain*, they are bytes (or, below 8
bits, several to a byte, the first in the lowest bits), and scales and offsets are tensors of their own.
*Packed* is the format of torch's `quantized::embedding_bag_*` kernels: bytes, followed in the same row by
scale and offset, with the value `u * scale + offset`: float32 at 8 bits, float16 below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from qompose.backend import NotLowerable, QuantizedTensor
from torch import Tensor


@dataclass(frozen=True)
class TableFormat:
    """How to read the integers of a table: `bits` of each, the least of them, and how many a row has."""

    bits: int
    base: int
    width: int

    @property
    def in_a_byte(self) -> int:
        """Return how many integers a byte holds."""
        return 8 // self.bits

    @property
    def padding(self) -> int:
        """Return how many integers the last byte of a row lacks."""
        return -self.width % self.in_a_byte


def format_of(table: QuantizedTensor) -> TableFormat:
    """Return the form of a table of shape (rows, width).

    Raises:
        NotLowerable: it is not a table of integers of at most 8 bits.
    """
    integers = table.tensor
    if table.dtype not in (torch.uint8, torch.int8) or integers.dim() != 2:
        raise NotLowerable(
            f"the table must be an int8 or uint8 matrix, got a {table.dtype} tensor of shape "
            f"{tuple(integers.shape)}"
        )
    for bits in (2, 4, 8):
        base = 0 if table.dtype is torch.uint8 else -(2 ** (bits - 1))
        if table.low >= base and table.high < base + 2**bits:
            return TableFormat(bits, base, integers.shape[1])
    raise NotLowerable(
        f"the table's quantized range [{table.low}, {table.high}] does not fit {table.dtype}"
    )


def by_row(table: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return scales and zero points as float32, both of shape (rows, groups); one group is a whole row.

    Raises:
        NotLowerable: scales are neither for rows nor for groups within them.
    """
    rows, width = table.tensor.shape
    grouped = table.group is not None and table.scales.shape == (rows, width // table.group)
    if table.axis != 0 and not grouped:
        raise NotLowerable("its scales are neither per row nor per group within rows")
    groups = table.scales.shape[1] if grouped else 1
    return tuple(v.float().reshape(rows, groups) for v in (table.scales, table.zero_points))  # type: ignore[return-value]


def unsigned(integers: Tensor, form: TableFormat) -> Tensor:
    """Return the integers of a table counted from 0, as uint8."""
    if form.base == 0:
        return integers
    return (integers.to(torch.int16) - form.base).to(torch.uint8)


def in_bytes(integers: Tensor, form: TableFormat, *, first_highest: bool = False) -> Tensor:
    """Return integers counted from 0, uint8 (rows, width), several to a byte, the first lowest or highest."""
    if form.bits == 8:
        return integers
    filled = torch.nn.functional.pad(integers, (0, form.padding))
    places = filled.reshape(len(filled), -1, form.in_a_byte).unbind(-1)
    packed = torch.zeros_like(places[0])
    for number, place in enumerate(reversed(places) if first_highest else places):
        packed |= place << (number * form.bits)
    return packed


def parameters(table: QuantizedTensor, form: TableFormat, *, least: int) -> tuple[Tensor, Tensor]:
    """Return scales and offsets, (rows, groups), with `value = (q - least) * scale + offset`.

    Below 8 bits they are float16 where that holds them, as it does those of this backend's configurations.
    """
    scale, zero_point = by_row(table)
    exact = torch.stack([scale, (least - zero_point) * scale])
    held = exact.half()
    # An offset that was rounded before is recovered up to the rounding of a product.
    fits = form.bits < 8 and torch.allclose(held.float(), exact, rtol=2**-21, atol=0)
    scale, offset = held if fits else exact
    return scale.clone(), offset.clone()  # each in its own memory


def packed_rows(table: QuantizedTensor, form: TableFormat) -> Tensor:
    """Return a table in its packed form, uint8 (rows, bytes).

    Raises:
        NotLowerable: rows are in groups, or need other scales and offsets than the format holds.
    """
    scale, offset = parameters(table, form, least=form.base)
    held = torch.float32 if form.bits == 8 else torch.float16
    if scale.shape[1] != 1:
        raise NotLowerable("packed rows support one scale each, not groups")
    if scale.dtype is not held:
        raise NotLowerable(
            f"packed rows store scales and offsets as {held}, which cannot represent those of "
            "this table exactly"
        )
    tail = torch.cat([scale, offset], 1).view(torch.uint8)
    integers = in_bytes(unsigned(table.tensor, form), form)
    return torch.cat([integers, tail], 1).contiguous()
