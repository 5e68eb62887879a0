# SPDX-License-Identifier: Apache-2.0
"""Shorter ways to the same, in the source that graphs are run by.

A module finds a tensor of its own by a failed look-up and a function in Python, half a microsecond each
time, and torch calls an operator by its overload through a reader of schemas, where the function of the same
name has its arguments compiled in. For a small kernel that is a third of its time.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Final

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.graph import PythonCode, _format_target

_ASSIGNMENT: Final = re.compile(r"\s*(\w+)(?: : [^=]*)? = ")


def shorten(code: PythonCode, graph: Graph, root: str) -> PythonCode:
    """Return the code of a graph with shorter ways to its tensors and operators, line by line the same.

    Args:
        root: what the code calls the module of the graph.
    """
    ways = {node.name: way for node in graph.nodes if (way := _way(node, graph, root))}
    lines = (_shortened(line, ways) for line in code.src.split("\n"))
    return replace(code, src="\n".join(lines))


def _shortened(line: str, ways: dict[str, tuple[str, str]]) -> str:
    """Return a line that gives a node its value, by the way of that node if it has one."""
    found = _ASSIGNMENT.match(line)
    if found is None or found[1] not in ways:
        return line
    long, short = ways[found[1]]
    start, rest = line[: found.end()], line[found.end() :]
    return start + short + rest[len(long) :] if rest.startswith(long) else line


def _way(node: Node, graph: Graph, root: str) -> tuple[str, str] | None:
    """Return what stands for a node's tensor or operator in its line, and what may stand there."""
    if node.op == "get_attr" and graph.owning_module is not None:
        place = _place(graph.owning_module, str(node.target), root)
        return None if place is None else (_format_target(root, str(node.target)), place)
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        name = _function(node.target)
        return None if name is None else (f"torch.ops.{node.target}(", f"torch.{name}(")
    return None


def _place(module: nn.Module, target: str, root: str) -> str | None:
    """Return where a module keeps a parameter or buffer, None where the target is none."""
    *path, last = target.split(".")
    source = root
    for name in path:
        inner = module._modules.get(name)
        if inner is None:
            return None
        module, source = inner, f"{source}._modules[{name!r}]"
    kept = (place for place in ("_buffers", "_parameters") if last in getattr(module, place))
    return next((f"{source}.{place}[{last!r}]" for place in kept), None)


@functools.cache
def _function(operator: OpOverload) -> str | None:
    """Return the name of torch's compiled function that calls this operator, and no other.

    That is one on a tensor that gives one tensor, with no other overload to choose from.
    """
    name = operator._opname
    function = getattr(torch._C._VariableFunctions, name, None)
    if operator.namespace != "aten" or function is None or getattr(torch, name, None) != function:
        return None
    schema = operator._schema
    first, results = (
        [str(a.type) for a in schema.arguments[:1]],
        [str(r.type) for r in schema.returns],
    )
    alone = _overloads(operator) == [operator]
    return name if alone and first == results == ["Tensor"] else None


def _overloads(operator: OpOverload) -> list[OpOverload]:
    """Return the overloads of an operator that neither write into a result nor know names of dimensions."""
    packet = operator.overloadpacket
    every = [getattr(packet, name) for name in packet.overloads()]
    return [
        one
        for one in every
        if not any(a.is_out or "Dimname" in str(a.type) for a in one._schema.arguments)
    ]
