# SPDX-License-Identifier: Apache-2.0
"""The order in which the dimensions of a tensor lie in memory, and operators that bring it about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

aten = torch.ops.aten

Value = TypeVar("Value", Tensor, Node)


def numbers(sizes: Sequence[Any]) -> list[int]:
    """Return sizes or strides as numbers, symbolic ones as they were in the example."""
    return [s.node.hint if isinstance(s, torch.SymInt) else int(s) for s in sizes]


def order_of(tensor: Tensor) -> list[int] | None:
    """Return the dimensions, outermost in memory first; None where that depends on data."""
    if free_unbacked_symbols(tensor):
        return list(range(tensor.dim())) if tensor.is_contiguous() else None
    strides = numbers(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape have the same strides, but for dimensions of one element."""
    pairs = zip(*map(numbers, (one.stride(), other.stride(), one.shape)), strict=True)
    return all(a == b or size == 1 for a, b, size in pairs)


def laid_out(do: Callable[..., Value], tensor: Value, order: Sequence[int]) -> Value:
    """Let a tensor lie in memory in an order of its dimensions; where it does already, this copies nothing.

    Args:
        do: calls an operator, or inserts a call of it in a graph.
    """
    if list(order) == sorted(order):
        return do(aten.contiguous.default, tensor)
    dense = do(aten.contiguous.default, do(aten.permute.default, tensor, list(order)))
    return do(aten.permute.default, dense, [order.index(dim) for dim in range(len(order))])
