# SPDX-License-Identifier: Apache-2.0
"""The calls that replace lookups and bags in torch, in this process."""

from __future__ import annotations

from typing import Any

import torch
from qompose.backend import NotLowerable, Region
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qompose_embedding import bag_operators, lookup
from qompose_embedding.table_format import (
    TableFormat,
    format_of,
    in_bytes,
    packed_rows,
    parameters,
    unsigned,
)

aten = torch.ops.aten
_OPS = getattr(torch.ops, bag_operators.NAMESPACE)


def packed_lookup(region: Region) -> Node:
    """Emit a gathering of packed rows, and their unpacking."""
    form, table = _packed(region)
    indices = region.argument("output", "indices")
    values = lookup.from_packed(region.step, form, table, indices, _sizes(region, indices))
    return as_requested(region, values)


def plain_lookup(region: Region) -> Node:
    """Emit a gathering of integers, scales and offsets, and `integer * scale + offset`.

    These are operators of torch alone, on whatever device the table is.
    """
    return as_requested(region, plain_rows(region, region.argument("output", "indices")))


def plain_rows(region: Region, indices: Any, *, in_float: bool = False) -> Node:
    """Emit float32 rows of a plain table; see `lookup.from_plain`."""
    rows: Node = lookup.from_plain(region.step, *_plain(region), indices, in_float=in_float)
    return rows


def packed_bag(region: Region) -> Node:
    """Emit a bag of packed rows."""
    form, table = _packed(region)
    how = bags_of(region)
    return as_requested(
        region, region.step(_OPS.packed_bag.default, table, form.bits, form.width, *how)
    )


def plain_bag(region: Region) -> Node:
    """Emit a bag of rows that are dequantized first."""
    form, *table = _plain(region)
    how = bags_of(region)
    return as_requested(
        region, region.step(_OPS.plain_bag.default, *table, form.bits, form.width, *how)
    )


def bags_of(region: Region) -> bag_operators.Bags:
    """Return the arguments of a bag's operator; those for gradients are left out."""
    names = [name for name in bag_operators.Bags._fields if name != "padding_idx"]
    values = {name: region.argument("op", name) for name in names}
    overload = region.node("op").target
    padding = (
        None if overload is aten.embedding_bag.default else region.argument("op", "padding_idx")
    )
    if padding is None:
        padding = -1
    elif padding < 0 and overload is aten.embedding_bag.padding_idx:
        padding += len(region.quantized("weight").tensor)
    return bag_operators.Bags(**values, padding_idx=padding)


def step_of(indices: Any, offsets: Any, include_last_offset: bool) -> Any:
    """Return how far apart offsets are, a number or a node, where the graph makes them so; None elsewhere.

    torch makes them of a matrix of indices: they are in order, and end within the indices.
    """
    number = indices.meta["val"].shape[0]
    if not isinstance(offsets, Node) or offsets.target is not aten.arange.start_step:
        return None
    start, end, step = (*offsets.args, 1)[:3]
    end = end.meta["val"] if isinstance(end, Node) else end
    last = number + 1 if include_last_offset else number
    return step if start == 0 and statically_known_true(end == last) else None


def _packed(region: Region) -> tuple[TableFormat, Node]:
    """Return the format of a table, and the node that reads it packed.

    Raises:
        NotLowerable: it has other readers, which would need it in another format; or it is on a device for
            which torch has no kernels for packed rows.
    """
    table = region.quantized("weight")
    form, device = format_of(table), table.tensor.device
    if device.type != "cpu":
        raise NotLowerable(f"torch's kernels for packed rows require a CPU, got {device}")
    others = _others(region)
    if others:
        raise NotLowerable(f"packing would duplicate the table, also read by {', '.join(others)}")
    return form, region.constant(f"{table.node.target}_rows", packed_rows(table, form))


def _others(region: Region) -> list[str]:
    """Return the other readers of the table, which would not find it packed."""
    own = region.claim.owner
    return [f"{c.anchor} ({c.owner})" for c in region.readers("weight") if c.owner != own]


def _plain(region: Region) -> tuple[TableFormat, Node, Node, Node | None]:
    """Return the format of a table, and the nodes that read it, its scales and its offsets, None for 0.

    A table with other readers stays as it is, in bytes.
    """
    table = region.quantized("weight")
    form, path, node = format_of(table), str(table.node.target), table.node
    in_place = form.bits == 8 or bool(_others(region))
    scale, offset = parameters(table, form, least=0 if in_place else form.base)
    if not in_place:
        node = region.constant(f"{path}_bits", in_bytes(unsigned(table.tensor, form), form))
    offsets = region.constant(f"{path}_offset", offset) if bool(offset.any()) else None
    read = TableFormat(8 if in_place else form.bits, 0, form.width)
    return read, node, region.constant(f"{path}_scale", scale), offsets


def _sizes(region: Region, indices: Any) -> list[Any]:
    """Return the shape of indices: numbers, and nodes where a size may vary."""
    return [
        size if isinstance(size, int) else region.step(aten.sym_size.int, indices, dim)
        for dim, size in enumerate(indices.meta["val"].shape)
    ]


def as_requested(region: Region, values: Node) -> Node:
    """Return float32 values in the type of the region's output."""
    dtype = region.output_node.meta["val"].dtype
    return values if dtype is torch.float32 else region.step(aten.to.dtype, values, dtype)
