# SPDX-License-Identifier: Apache-2.0
"""Where something is in a program: its calls, and what messages call them."""

from __future__ import annotations

from collections.abc import Iterator

from qompose.backend import nodes_in
from torch.export import ExportedProgram
from torch.fx import Node


def calls_of(program: ExportedProgram) -> Iterator[Node]:
    """Yield the calls of a program, those of branches too."""
    yield from (node for node in nodes_in(program.graph_module) if node.op == "call_function")


def named(node: Node) -> str:
    """Return what a node calls, such as "aten.add.Tensor"."""
    return str(node.target).removesuffix(".default")


def bare(name: str) -> str:
    """Return "add" of "aten.add.Tensor"; what is no operator, such as `getitem`, has no dots."""
    return [*name.split("."), name][1]


def place_of(node: Node) -> str:
    """Return a node's name, operator and module."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed([str(entry[0]) for entry in stack.values()]), "")
    inside = f" in {path}" if path else ""
    return f"{node.name} ({named(node)}{inside})"
