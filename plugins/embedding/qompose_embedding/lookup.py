# SPDX-License-Identifier: Apache-2.0
"""Lookup of float rows in a quantized table, of which no other rows are dequantized.

The functions are written once for graphs and for tensors: `call(operator, *arguments)` inserts a node in
one case and computes in the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from qompose_embedding.table_format import TableFormat

aten = torch.ops.aten

Call: TypeAlias = Callable[..., Any]

UNPACK: Final = {
    8: torch.ops.quantized.embedding_bag_byte_unpack.default,
    4: torch.ops.quantized.embedding_bag_4bit_unpack.default,
    2: torch.ops.quantized.embedding_bag_2bit_unpack.default,
}
"""By bits, the operator that unpacks a matrix of packed rows to float32."""


def compute(operator: Any, *arguments: Any) -> Any:
    """Call an operator on tensors: the `Call` without a graph."""
    return operator(*arguments)


def from_packed(
    call: Call, form: TableFormat, rows: Any, indices: Any, shape: Sequence[Any]
) -> Any:
    """Return float32 rows (*shape, width) of a packed table, for indices of that shape.

    Indices out of range raise IndexError, as in a float table.
    """
    in_order = len(shape) == 1
    flat = indices if in_order else call(aten.reshape.default, indices, [-1])
    # Not embedding, which does the same after two microseconds of checks.
    gathered = call(aten.index_select.default, rows, 0, flat)
    values = call(UNPACK[form.bits], gathered)
    if not in_order:
        values = call(aten.reshape.default, values, [*shape, form.width + form.padding])
    return _cropped(call, form, values)


def from_plain(
    call: Call,
    form: TableFormat,
    table: Any,
    scale: Any,
    offset: Any,
    indices: Any,
    *,
    in_float: bool = False,
) -> Any:
    """Return float32 rows of a plain table.

    Args:
        scale, offset: float32 or float16 (rows, groups); None: no offsets.
        in_float: take bytes apart by arithmetic, for runtimes without operators on their bits.
    """
    rows = call(aten.embedding.default, table, indices)
    if form.bits < 8:
        unpacked = _divided_bytes if in_float else _unpacked_bytes
        rows = _cropped(call, form, unpacked(call, form, rows))
    values = call(aten.to.dtype, rows, torch.float32)
    scale, offset = (
        None if v is None else call(aten.embedding.default, v, indices) for v in (scale, offset)
    )
    return _scaled(call, form, values, scale, offset)


def _scaled(call: Call, form: TableFormat, values: Any, scale: Any, offset: Any) -> Any:
    """Return `values * scale + offset`, for values (..., width) and the others (..., groups)."""
    groups = _shape(scale)[-1]

    def beside(numbers: Any) -> Any:
        numbers = call(aten.to.dtype, numbers, torch.float32)
        return call(aten.unsqueeze.default, numbers, -1) if groups > 1 else numbers

    if groups > 1:
        values = call(aten.unflatten.int, values, -1, [groups, form.width // groups])
    values = call(aten.mul.Tensor, values, beside(scale))
    if offset is not None:
        values = call(aten.add.Tensor, values, beside(offset))
    return call(aten.flatten.using_ints, values, -2, -1) if groups > 1 else values


def _unpacked_bytes(call: Call, form: TableFormat, rows: Any) -> Any:
    """Return the integers of bytes that hold several each."""
    mask, parts = 2**form.bits - 1, [rows]
    for number in range(1, form.in_a_byte):
        parts.append(call(aten.bitwise_right_shift.Tensor_Scalar, rows, number * form.bits))
    parts = [call(aten.bitwise_and.Scalar, part, mask) for part in parts]
    return call(aten.flatten.using_ints, call(aten.stack.default, parts, -1), -2, -1)


def _divided_bytes(call: Call, form: TableFormat, rows: Any) -> Any:
    """Return the integers of bytes that hold several each, as floats; see `_unpacked_bytes`."""
    parts, rest, base = [], call(aten.to.dtype, rows, torch.float32), 2.0**form.bits
    for _ in range(form.in_a_byte):
        above = call(aten.floor.default, call(aten.mul.Tensor, rest, 1 / base))
        parts.append(call(aten.sub.Tensor, rest, call(aten.mul.Tensor, above, base)))
        rest = above
    return call(aten.flatten.using_ints, call(aten.stack.default, parts, -1), -2, -1)


def _cropped(call: Call, form: TableFormat, values: Any) -> Any:
    """Drop what fills the last byte of a row."""
    if not form.padding:
        return values
    return call(aten.slice.Tensor, values, -1, 0, form.width)


def _shape(value: Any) -> Sequence[Any]:
    """Return the shape of a tensor, or of a node's value."""
    tensor = value.meta["val"] if isinstance(value, torch.fx.Node) else value
    return tuple(tensor.shape)


def _unpacked(bits: int, weight: Tensor) -> Tensor:
    width = (weight.shape[1] - 4) * (8 // bits)
    return weight.new_empty((weight.shape[0], width), dtype=torch.float32)


def _summed(
    bits: int,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None = None,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    pruned_weights: bool = False,
    per_sample_weights: Tensor | None = None,
    compressed_indices_mapping: Tensor | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    bags = indices.shape[0] if offsets is None else offsets.shape[0] - int(include_last_offset)
    width = (weight.shape[1] - 4) * (8 // bits)
    return weight.new_empty((bags, width), dtype=torch.float32)


def _register_fakes() -> torch.library.Library:
    """Register fakes of torch's operators on packed rows of less than 8 bits, which torch 2.13 lacks.

    They exist as long as the library that is returned. Torch accepts fakes of these operators only from a
    module of its own, which does not exist; as kernels for meta tensors it accepts them from anywhere.
    """
    library = torch.library.Library("quantized", "IMPL")  # type: ignore[no-untyped-call]
    for bits in (4, 2):
        for ending, fake in (("unpack", _unpacked), ("rowwise_offsets", _summed)):
            name = f"embedding_bag_{bits}bit_{ending}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"quantized::{name}", "Meta"):
                library.impl(name, functools.partial(fake, bits), "Meta")  # type: ignore[no-untyped-call]
    return library


_FAKES: Final = _register_fakes()
