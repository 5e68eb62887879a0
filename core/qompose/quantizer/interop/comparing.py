# SPDX-License-Identifier: Apache-2.0
"""What it takes for nodes of two programs to be the same: calls, constants, kinds of values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.program.graph import arguments_of, get_attribute, layout_of, owner_of, value_of

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Spelling:
    """A call: what is written in it, and what flows into it.

    `key` holds the target and every literal with its place; tuples and lists are alike, and defaults of
    the schema are filled in. `operands` are the nodes, and the symbolic numbers that stand where nodes
    could, in the order of their places.
    """

    key: Hashable
    operands: tuple[Any, ...]


_OPERAND = object()


def spelled(node: Node) -> Spelling:
    """Return what a call_function node calls, apart from its name."""
    if isinstance(node.target, torch._ops.OpOverload):
        arguments: Any = arguments_of(node)
    else:
        arguments = (node.args, node.kwargs)
    places: list[Hashable] = [node.target]
    operands = []
    for path, leaf in _leaves(arguments, ()):
        if isinstance(leaf, (Node, *SYMBOLIC)):
            operands.append(leaf)
            places.append((path, _OPERAND))
        else:
            places.append((path, type(leaf), repr(leaf)))  # nan is not equal to itself
    return Spelling(tuple(places), tuple(operands))


def _leaves(value: Any, path: tuple[Hashable, ...]) -> Iterator[tuple[tuple[Hashable, ...], Any]]:
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    else:
        yield path, value
        return
    yield path, len(items)
    for key, item in items:
        yield from _leaves(item, (*path, key))


def is_call(node: object) -> bool:
    """Tell whether a node is an operator's call."""
    return isinstance(node, Node) and node.op == "call_function"


def calls(program: GraphModule) -> list[Node]:
    """Return the operators of a program, bodies apart, in graph order."""
    return [node for node in program.graph.nodes if node.op == "call_function"]


def content_of(read: Node) -> Any:
    """Return what a get_attr node reads: a tensor, a body, or whatever else stands there."""
    return get_attribute(owner_of(read), str(read.target))


def same_content(one: Any, other: Any) -> bool:
    """Tell whether two programs read the same: the same memory, equal values, or equal bodies."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _kind(one) == _kind(other) and (
            layout_of(one) == layout_of(other) or torch.equal(one, other)
        )
    if isinstance(one, GraphModule) and isinstance(other, GraphModule):
        return same_body(one, other)
    return False


def _kind(constant: Tensor) -> tuple[object, ...]:
    return constant.dtype, tuple(constant.shape), constant.device, constant.layout


def same_body(one: GraphModule, other: GraphModule) -> bool:
    """Tell whether two graphs do the same, node by node; their names do not matter."""
    pairs = list(zip(one.graph.nodes, other.graph.nodes, strict=False))
    twins = dict(pairs)
    same_length = len(one.graph.nodes) == len(other.graph.nodes)
    return same_length and all(_same_node(first, second, twins) for first, second in pairs)


def _same_node(one: Node, other: Node, twins: Mapping[Node, Node]) -> bool:
    if one.op != other.op:
        return False
    if one.op == "get_attr":
        return same_content(content_of(one), content_of(other))
    if one.op == "placeholder":
        return difference(value_of(one), value_of(other)) is None
    first, second = spelled(one), spelled(other)
    same_target = one.op == "output" or one.target == other.target
    pairs = zip(first.operands, second.operands, strict=False)
    return same_target and first.key == second.key and all(_same(a, b, twins) for a, b in pairs)


def _same(one: Any, other: Any, twins: Mapping[Node, Node]) -> bool:
    return twins.get(one) is other if isinstance(one, Node) else same_number(one, other)


def same_number(one: Any, other: Any) -> bool:
    """Tell whether two symbolic numbers, or nodes that give some, are one expression; adds no guards."""
    first, second = expression_of(one), expression_of(other)
    return first is not None and first == second


def expression_of(operand: Any) -> Any:
    """Return the expression of a symbolic number, or of a node that gives one; None for all else."""
    value = value_of(operand) if isinstance(operand, Node) else operand
    return value.node.expr if isinstance(value, SYMBOLIC) else None


class Constants:
    """The parameters, buffers and bodies that a program reads, found by what they hold."""

    def __init__(self, program: GraphModule) -> None:
        self._by_layout: dict[Hashable, Node] = {}
        self._by_kind: dict[Hashable, list[Node]] = defaultdict(list)
        for read in program.graph.nodes:
            if read.op == "get_attr":
                content = content_of(read)
                self._by_layout.setdefault(_identity(content), read)
                self._by_kind[_sort(content)].append(read)

    def find(self, read: Node) -> Node | None:
        """Return the program's first node that reads what `read` does: the same memory, or else equal."""
        content = content_of(read)
        same = self._by_layout.get(_identity(content))
        if same is not None:
            return same
        alike = self._by_kind.get(_sort(content), [])
        return next((node for node in alike if same_content(content_of(node), content)), None)


def _identity(content: Any) -> Hashable:
    is_stored = isinstance(content, Tensor) and content.numel()
    return layout_of(content) if is_stored else id(content)


def _sort(content: Any) -> Hashable:
    return _kind(content) if isinstance(content, Tensor) else (type(content),)


def difference(one: Any, other: Any) -> str | None:
    """Return how the kinds of two values differ, None where they do not or one is not known."""
    if one is None or other is None:
        return None
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        if len(one) != len(other):
            return f"{len(one)} values became {len(other)}"
        parts = (difference(a, b) for a, b in zip(one, other, strict=True))
        return next((part for part in parts if part is not None), None)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and _sizes(one) == _sizes(other)
    else:
        same = _number_type(one) is _number_type(other)
    return None if same else f"{_described(one)} became {_described(other)}"


def _sizes(tensor: Tensor) -> list[object]:
    """Return sizes as values that compare without adding guards; what a symbol is called does not matter."""
    return [_size(size) for size in tensor.shape]


def _size(size: Any) -> object:
    if not isinstance(size, SYMBOLIC):
        return int(size)
    return size.node.hint if size.node.has_hint() else str(size.node.expr), "symbolic"


_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _number_type(value: Any) -> type:
    return Tensor if isinstance(value, Tensor) else _NUMBERS.get(type(value), type(value))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind} of shape ({', '.join(str(size) for size in value.shape)})"
    return type(value).__name__
