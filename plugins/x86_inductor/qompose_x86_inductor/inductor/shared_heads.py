# SPDX-License-Identifier: Apache-2.0
"""Keys and values behind the copies of them for each head of a group, which our own C++ does not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from qompose_x86_inductor.inductor.graphs import is_written_between, value_of

aten = torch.ops.aten
_PASS_ON: Final = {
    aten.reshape.default, aten.view.default, aten.expand.default, aten.clone.default,
    aten.contiguous.default, aten.unsqueeze.default, aten.slice.Tensor,
}  # fmt: skip


def behind_copies(node: Any) -> tuple[Any, list[fx.Node]]:
    """Return what views and copies start from, and these, the first one first."""
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.target in _PASS_ON:
        chain.append(node)
        node = node.args[0]
    return node, chain[::-1]


def without_copies(node: fx.Node, reader: fx.Node, but: Sequence[fx.Node] = ()) -> fx.Node:
    """Return the keys or values (B, H, S, columns) of which a node gives each to the heads of a group.

    That is the node itself where it does something else, or something is written to before `reader` reads it,
    `but` by some nodes.
    """
    source, chain = behind_copies(node)
    start, end = value_of(source), value_of(node)
    if not chain or start is None or end is None or start.dim() != 4:
        return node
    fits = repeats_heads(start, chain, end) and not is_written_between(chain[0], reader, but)
    return source if fits else node


def repeats_heads(start: Tensor, chain: list[fx.Node], end: Tensor) -> bool:
    """Return whether views and copies do nothing but give each head to those of a group, side by side."""
    batch, heads, *rest = start.shape
    if end.dim() != 4 or any(type(size) is not int for size in (*start.shape, *end.shape)):
        return False
    if heads == 0 or end.shape[1] % heads:
        return False
    times = end.shape[1] // heads
    allowed = {
        tuple(shape)
        for shape in (
            (batch, heads, *rest),
            (batch, heads, 1, *rest),
            (batch, heads, times, *rest),
            (batch, heads * times, *rest),
        )
    }
    return all((value := value_of(n)) is not None and tuple(value.shape) in allowed for n in chain)
