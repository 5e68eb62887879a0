# SPDX-License-Identifier: Apache-2.0
"""Bounds of clamps, which are to be numbers of one type.

Of `x.clamp(0, 6.0)`, the exporter of torch 2.13 makes a tensor of one bound, and then finds no operator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.fx import Node

aten = torch.ops.aten
CLAMPS: Final = (aten.clamp.default, aten.clamp_.default)


def of_one_type(nodes: Iterable[Node]) -> None:
    """Let bounds be floats where one of them is, in place: torch promotes them alike."""
    for node in nodes:
        if node.target in CLAMPS and any(isinstance(bound, float) for bound in _bounds(node)):
            node.args = (node.args[0], *map(_as_float, node.args[1:]))
            node.kwargs = {name: _as_float(bound) for name, bound in node.kwargs.items()}


def _bounds(node: Node) -> tuple[object, ...]:
    return (*node.args[1:], *node.kwargs.values())


def _as_float(bound: Any) -> Any:
    return float(bound) if isinstance(bound, int) else bound
