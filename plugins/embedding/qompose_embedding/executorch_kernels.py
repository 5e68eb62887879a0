# SPDX-License-Identifier: Apache-2.0
"""The calls that replace lookups and bags in an ExecuTorch program: `quantized_decomposed.embedding_*`.

The operators read rows of signed integers (of bytes of either kind, at 8 bits) with a float scale and zero
point for each row or group. They do not check indices: another operator does so before. ExecuTorch has no
bags: those of one length become a lookup and a sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from qompose.backend import NotLowerable, QuantizedTensor, Region
from torch import Tensor
from torch.fx import Node

from qompose_embedding.bag_operators import MAX, MEAN, Bags
from qompose_embedding.table_format import TableFormat, by_row, format_of, in_bytes, unsigned
from qompose_embedding.torch_kernels import as_requested, bags_of, step_of

aten = torch.ops.aten


def lookup(region: Region) -> Node:
    """Emit ExecuTorch's own lookup.

    Raises:
        NotLowerable: the package executorch, which defines the operator, is not installed.
    """
    return as_requested(region, _rows(region, region.argument("output", "indices")))


def bag(region: Region) -> Node:
    """Emit ExecuTorch's own lookup, and operators that put its rows together; see `bag_of_rows`.

    Raises:
        NotLowerable: bags have several lengths, or unknown ones; the package executorch is missing.
    """
    return bag_of_rows(region, partial(_rows, region))


def bag_of_rows(region: Region, look_up: Callable[[Any], Node]) -> Node:
    """Emit a lookup, and operators that put its rows together in bags of one length.

    Args:
        look_up: emits float32 rows for indices.

    Raises:
        NotLowerable: bags have several lengths, or unknown ones.
    """
    bags = bags_of(region)
    length = _length(bags)
    rows = look_up(bags.indices)
    together = region.step(aten.reshape.default, rows, [-1, length, _shape(rows)[-1]])

    def beside(factors: Any) -> Node:
        return region.step(aten.reshape.default, factors, [-1, length, 1])

    if bags.per_sample_weights is not None:
        together = region.step(aten.mul.Tensor, together, beside(bags.per_sample_weights))
    kept = None
    if bags.padding_idx >= 0:
        kept = beside(region.step(aten.ne.Scalar, bags.indices, bags.padding_idx))
    return as_requested(region, _pooled(region, together, kept, bags.mode))


def _pooled(region: Region, rows: Node, kept: Node | None, mode: int) -> Node:
    """Put rows (bags, length, width) together, of those that `kept` (bags, length, 1) names."""
    step = region.step
    if mode == MAX:
        if kept is None:
            return step(aten.amax.default, rows, [1])
        lowest = step(aten.full_like.default, rows, -torch.inf)
        most = step(aten.amax.default, step(aten.where.self, kept, rows, lowest), [1])
        return step(
            aten.where.self,
            step(aten.any.dim, kept, 1),
            most,
            step(aten.zeros_like.default, most),
        )
    if kept is None:
        pooling = aten.mean.dim if mode == MEAN else aten.sum.dim_IntList
        return step(pooling, rows, [1])
    zeros = step(aten.zeros_like.default, rows)
    total = step(aten.sum.dim_IntList, step(aten.where.self, kept, rows, zeros), [1])
    if mode != MEAN:
        return total
    factors = step(aten.to.dtype, kept, torch.float32)
    counts = step(aten.clamp.default, step(aten.sum.dim_IntList, factors, [1]), 1.0)
    return step(aten.div.Tensor, total, counts)


def _length(bags: Bags) -> int:
    """Return how many indices each bag has."""
    length = step_of(bags.indices, bags.offsets, bags.include_last_offset)
    if isinstance(length, int):
        return length
    raise NotLowerable(
        "the target has no embedding bag operator. Bags of one fixed length are lowered to a "
        "lookup and a reduction if their offsets are torch.arange(0, end, length), as they are for "
        "2-D indices; end is the number of indices, plus 1 with include_last_offset=True"
    )


def _rows(region: Region, indices: Any) -> Node:
    """Emit a lookup of float32 rows."""
    try:
        with warnings.catch_warnings():  # about its own resource files, and what it imports
            warnings.simplefilter("ignore")
            from executorch.exir.passes import _quant_patterns_and_replacements  # noqa: F401
    except ImportError as error:
        raise NotLowerable(
            f"{error}; install the package that provides the operator: pip install executorch"
        ) from error
    table = region.quantized("weight")
    form = format_of(table)
    known = torch.ops.quantized_decomposed
    operator = {8: known.embedding_byte, 4: known.embedding_4bit, 2: known.embedding_2bit}[
        form.bits
    ]
    rows = region.step(
        operator.default, *_arguments(region, table, form), _within(region, table, indices)
    )
    filled = form.padding or form.width == 1
    return region.step(aten.slice.Tensor, rows, -1, 0, form.width) if filled else rows


def _within(region: Region, table: QuantizedTensor, indices: Node) -> Node:
    """Emit the indices once more, as int64, after a check that the table has them.

    The operators check nothing: those of bytes end the process, those of fewer bits read past the table. A
    lookup of float rows checks, and so does one of rows without any values, whose sums are zeros.
    """
    rows = torch.zeros(len(table.tensor), 0, dtype=torch.int64)
    checked = region.constant(f"{table.node.target}_rows", rows)
    nothing = region.step(aten.embedding.default, checked, indices)
    zeros = region.step(aten.sum.dim_IntList, nothing, [-1])
    return region.step(aten.add.Tensor, zeros, indices)


def _arguments(region: Region, table: QuantizedTensor, form: TableFormat) -> list[Any]:
    """Return the arguments of the operator that come before the indices."""
    scale, zero_point = by_row(table)
    node, low, high, path = table.node, table.low, table.high, str(table.node.target)
    if form.bits < 8:
        low, high = {4: (-8, 7), 2: (-2, 1)}[form.bits]  # what the operators expect
        zero_point = zero_point - (form.base - low)
        node = region.constant(f"{path}_signed", signed_bytes(unsigned(table.tensor, form), form))
    elif form.width == 1:  # the operator mistakes groups of one value for none
        node = region.constant(f"{path}_doubled", torch.cat([table.tensor] * 2, 1))
    if form.padding and scale.shape[1] > 1:
        raise NotLowerable(f"grouped rows of {form.width} values do not fill whole bytes")
    if scale.shape[1] == 1:
        scale, zero_point = scale.squeeze(1), zero_point.squeeze(1)
    zero_points = None  # stands for zeros
    if bool(zero_point.any()):
        zero_points = region.constant(f"{path}_zero_point", zero_point.contiguous())
    return [node, region.constant(f"{path}_scale", scale.contiguous()), zero_points, low, high]


def signed_bytes(integers: Tensor, form: TableFormat) -> Tensor:
    """Return integers counted from 0, uint8 (rows, width), several to a byte as ExecuTorch reads them.

    Of 4 bits, the first is the highest; of 2 bits, the lowest.
    """
    return in_bytes(integers, form, first_highest=form.bits == 4)


def _shape(node: Node) -> Any:
    return node.meta["val"].shape
