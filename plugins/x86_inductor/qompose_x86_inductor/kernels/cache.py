# SPDX-License-Identifier: Apache-2.0
"""What replaces a write to a cache of keys or values: the same write of integers, and of their scales.

What reads the cache reads `integers * scales`. All of it is operators of aten, which torch's compiler fuses
with what is around them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from qompose.backend import DynamicTensor, Kernel, NotLowerable, Region
from torch import Tensor
from torch.fx import Node

aten = torch.ops.aten
LEAST: Final = 1e-5
"""The least magnitude that a row is taken to have, as torch's operator for scales per token has it."""


class CacheEmitter:
    """Emits the write to a cache.

    Args:
        rows: the name of the operator's argument that has what is written.
    """

    def __init__(self, rows: str) -> None:
        self.rows = rows

    def __call__(self, region: Region) -> Node:
        """Emit it.

        Raises:
            NotLowerable: the rows are not symmetric int8 with a scale each; or see `Region.take_over`.
        """
        source = region.dynamic(self.rows)
        if not source.symmetric or (source.dims, source.low, source.high) != (1, -128, 127):
            raise NotLowerable(f"{source.node.name} is not symmetric int8 with a scale per row")
        write: Any = region.node("output").target
        buffer: Any = region.argument("output", "self")
        path, initial = region.take_over(buffer)
        held = [
            region.state(f"{path}_{name}", value)
            for name, value in zip(("int8", "scale"), _quantized(initial), strict=True)
        ]
        floats = region.inputs(self.rows)[0]
        arguments = [region.argument("output", a.name) for a in write._schema.arguments]
        for to, rows in zip(held, _rows(region, source), strict=True):
            region.step(write, *_with(arguments, {buffer: to, floats: rows}))
        values = region.step(aten.to.dtype, held[0], torch.float32)
        return region.call(aten.mul_.Tensor, values, held[1])  # mul would convert to another copy


def _with(arguments: list[Any], replaced: dict[Node, Node]) -> Any:
    return torch.fx.node.map_arg(arguments, lambda node: replaced.get(node, node))


def _quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers of a cache's initial values, and the scales of its rows, float32 (..., 1)."""
    scales = values.abs().amax(-1, keepdim=True).clamp_min(LEAST) / 127
    integers = (values * (1 / scales)).round().clamp(-128, 127).to(torch.int8)
    return integers.contiguous(), scales.contiguous()


def _rows(region: Region, source: DynamicTensor) -> tuple[Node, Node]:
    """Emit the integers of rows, and their scales."""
    step = region.step
    largest = step(aten.amax.default, step(aten.abs.default, source.node), [-1], True)
    scales = step(aten.div.Tensor, step(aten.clamp_min.default, largest, LEAST), 127)
    steps = step(aten.mul.Tensor, source.node, step(aten.reciprocal.default, scales))
    rounded = step(aten.clamp.default, step(aten.round.default, steps), -128, 127)
    return step(aten.to.dtype, rounded, torch.int8), scales


def kernel(rows: str) -> Kernel:
    """Return the kernel of an operator that writes to a cache; see `CacheEmitter`."""
    return Kernel("int8 cache", CacheEmitter(rows), float_output=True, float_arithmetic=True)
