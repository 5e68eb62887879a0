# SPDX-License-Identifier: Apache-2.0
"""From indices to float rows: what is gathered is dequantized, and nothing else of a table.

The functions are written once for graphs and for tensors: `call(operator, *arguments)` inserts a node in
one case and computes in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from qompose_embedding import fakes
from qompose_embedding.forms import Form

aten = torch.ops.aten

Call: TypeAlias = Callable[..., Any]

UNPACK: Final = {
    8: torch.ops.quantized.embedding_bag_byte_unpack.default,
    4: torch.ops.quantized.embedding_bag_4bit_unpack.default,
    2: torch.ops.quantized.embedding_bag_2bit_unpack.default,
}
"""By bits, what makes float32 of packed rows, a matrix of them."""


_SHAPES: Final = fakes.register()


def compute(operator: Any, *arguments: Any) -> Any:
    """Call an operator on tensors: the `Call` of those who have no graph."""
    return operator(*arguments)


def from_packed(call: Call, form: Form, rows: Any, indices: Any, shape: Sequence[Any]) -> Any:
    """Return float32 rows (*shape, width) of a packed table, for indices of that shape.

    Indices out of range raise IndexError, as in a float table.
    """
    in_order = len(shape) == 1
    flat = indices if in_order else call(aten.reshape.default, indices, [-1])
    # Not embedding, which does the same behind two microseconds of questions.
    gathered = call(aten.index_select.default, rows, 0, flat)
    values = call(UNPACK[form.bits], gathered)
    if not in_order:
        values = call(aten.reshape.default, values, [*shape, form.width + form.padding])
    return _cropped(call, form, values)


def from_plain(call: Call, form: Form, table: Any, scale: Any, offset: Any, indices: Any) -> Any:
    """Return float32 rows of a plain table.

    Args:
        scale, offset: float32 or float16 (rows, groups); None: no offsets.
    """
    rows = call(aten.embedding.default, table, indices)
    if form.bits < 8:
        rows = _cropped(call, form, _taken_apart(call, form, rows))
    values = call(aten.to.dtype, rows, torch.float32)
    scale, offset = (
        None if v is None else call(aten.embedding.default, v, indices) for v in (scale, offset)
    )
    return _scaled(call, form, values, scale, offset)


def _scaled(call: Call, form: Form, values: Any, scale: Any, offset: Any) -> Any:
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


def _taken_apart(call: Call, form: Form, rows: Any) -> Any:
    """Return the integers of bytes that hold several."""
    mask, parts = 2**form.bits - 1, [rows]
    for number in range(1, form.in_a_byte):
        parts.append(call(aten.bitwise_right_shift.Tensor_Scalar, rows, number * form.bits))
    parts = [call(aten.bitwise_and.Scalar, part, mask) for part in parts]
    return call(aten.flatten.using_ints, call(aten.stack.default, parts, -1), -2, -1)


def _cropped(call: Call, form: Form, values: Any) -> Any:
    """Leave out what fills up the last byte of a row."""
    if not form.padding:
        return values
    return call(aten.slice.Tensor, values, -1, 0, form.width)


def _shape(value: Any) -> Sequence[Any]:
    """Return the shape of a tensor, or of a node's value."""
    tensor = value.meta["val"] if isinstance(value, torch.fx.Node) else value
    return tuple(tensor.shape)
