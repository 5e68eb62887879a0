# SPDX-License-Identifier: Apache-2.0
"""What replaces a lookup in a quantized table, on each target."""

from __future__ import annotations

import torch
from qompose import NotLowerable, Region
from torch.fx import Node

aten = torch.ops.aten


def gather_rows(region: Region) -> Node:
    """Emit a lookup of integers, scale and zero point, and `(integer - zero_point) * scale` on those rows.

    These are operators of torch itself: they compile, export and check the indices.
    """
    table = region.quantized("weight")
    indices = region.argument("output", "indices")
    path = str(table.node.target)
    rows = region.call(aten.embedding.default, table.node, indices, dtype=table.dtype)
    columns = [
        region.call(aten.embedding.default, region.constant(f"{path}_{name}", values), indices)
        for name, values in (
            ("scale", table.scales.unsqueeze(1)),
            ("zero_point", table.zero_points.unsqueeze(1)),
        )
    ]
    floats = region.call(aten.to.dtype, rows, torch.float32)
    centred = region.call(aten.sub.Tensor, floats, columns[1])
    result = region.call(aten.mul.Tensor, centred, columns[0])
    dtype = region.output_node.meta["val"].dtype
    return result if dtype is torch.float32 else region.call(aten.to.dtype, result, dtype)


def embedding_byte(region: Region) -> Node:
    """Emit ExecuTorch's own lookup, which reads rows of bytes with a float scale and zero point each.

    Raises:
        NotLowerable: the package executorch, which defines the operator, is not installed; or the table
            stood for another type than float32.
    """
    dtype = region.output_node.meta["val"].dtype
    if dtype is not torch.float32:
        raise NotLowerable(f"the operator gives float32, and the model wants {dtype}")
    try:
        from executorch.exir.passes import _quant_patterns_and_replacements  # noqa: F401
    except ImportError as error:
        raise NotLowerable(
            f"{error}; the operator comes with the package: pip install executorch"
        ) from error
    table = region.quantized("weight")
    path = str(table.node.target)
    scale = region.constant(f"{path}_scale", table.scales)
    zero_points = table.zero_points.to(table.scales.dtype)
    zero_point = None  # stands for zeros
    if bool(zero_points.any()):
        zero_point = region.constant(f"{path}_zero_point", zero_points)
    return region.call(
        torch.ops.quantized_decomposed.embedding_byte.default,
        table.node,
        scale,
        zero_point,
        table.low,
        table.high,
        region.argument("output", "indices"),
    )
