# SPDX-License-Identifier: Apache-2.0
"""Conditions of rules beyond those of the kit: a guard returns why it refuses a match."""

from __future__ import annotations

from typing import Any, Final

import torch
from qompose.backend import Match, kit

from qompose_onnx.attention_graph import attends

aten = torch.ops.aten
_LAYOUTS: Final = frozenset((
    aten.view.default, aten.reshape.default, aten.unflatten.int, aten.flatten.using_ints,
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
))  # fmt: skip


def matrix(match: Match) -> str | None:
    """Require a matrix, or several."""
    several = len(kit.shape_of(match.node("input"))) > 1
    return None if several else "a product with a vector cannot be fused"


def not_after_linear(match: Match) -> str | None:
    """Require that neither input is a linear's: sums of a transformer's layers lose much in eight bits."""
    for name in ("self", "other"):
        node: Any = match.node(name)
        while node is not None and node.target is aten.dropout.default:
            node = node.args[0]
        if node is not None and node.target is aten.linear.default:
            return "it reads linears, which return float at no extra cost"
    return None


def not_of_heads(match: Match) -> str | None:
    """Require that it lays out neither attention's result nor what attention alone reads.

    OpenVINO makes an operator of each pair between moves whose zero point is not 0.
    """
    readers, source = [*match.output.users], match.output
    while source.target in _LAYOUTS:
        source = source.all_input_nodes[0]
    while readers and all(node.target in _LAYOUTS for node in readers):
        readers = [user for node in readers for user in node.users]
    if attends(source) or (readers and all(map(attends, readers))):
        return "it lays out floats that attention reads or gives: integers would be no faster"
    return None


def plain_average(match: Match) -> str | None:
    """Require what runtimes average in integers: see `qompose_onnx.averages`."""
    if match.argument("output", "divisor_override") is not None:
        return "AveragePool does not support divisor_override"
    asked = ("ceil_mode", "count_include_pad")
    pads: Any = match.argument("output", "padding")
    if any(pads) and all(match.argument("output", name) for name in asked):
        return "ONNX Runtime averages integers wrongly where ceil_mode meets padding that counts"
    return None


def to_one_pixel(match: Match) -> str | None:
    """Require a global average."""
    sizes: Any = match.argument("output", "output_size")
    return (
        None if all(n == 1 for n in sizes) else "only an average over the whole image can be fused"
    )


def over_image(match: Match) -> str | None:
    """Require a mean over height and width."""
    dims: Any = match.argument("output", "dim")
    over = sorted(dim % 4 for dim in dims)
    return None if over == [2, 3] else "only a mean over height and width can be fused"
