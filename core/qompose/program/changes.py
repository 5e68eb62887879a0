# SPDX-License-Identifier: Apache-2.0
"""What some code changed in a program: the operators that are gone or differ, and those that are new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qompose.program.control_flow import nodes_in
from qompose.program.graph import constant_of, layout_of


@dataclass(frozen=True)
class _Reference:
    """An argument that is a node: by its name, or of a parameter or buffer by the tensor itself."""

    name: str
    tensor: object = None


@dataclass(frozen=True)
class Call:
    """What a node does, as values that compare across graphs; `used` tells whether anything reads it."""

    op: str
    target: object
    arguments: Any
    used: bool


@dataclass(frozen=True)
class Changes:
    """How a program differs from what it was.

    `removed` are the operators that are gone or differ, `made` those that are new or differ, in the order
    of the graphs. `elsewhere` are other nodes that are gone, new or differ: inputs and what is returned.
    """

    removed: tuple[str, ...]
    made: tuple[str, ...]
    elsewhere: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.removed or self.made or self.elsewhere)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all nodes concerned."""
        return tuple(dict.fromkeys((*self.removed, *self.made, *self.elsewhere)))


def calls_of(model: GraphModule) -> dict[str, Call]:
    """Return what each node of a program and its bodies does, by name, but for reads of attributes.

    Which tensor is read shows in the arguments of its readers.
    """
    return {
        node.name: Call(node.op, node.target, _arguments(node), bool(node.users))
        for node in nodes_in(model)
        if node.op != "get_attr"
    }


def _arguments(node: Node) -> Any:
    return map_arg((node.args, dict(node.kwargs)), _reference)  # type: ignore[arg-type]


def _reference(node: Node) -> _Reference:
    if node.op != "get_attr":
        return _Reference(node.name)
    tensor = constant_of(node)
    return _Reference("", str(node.target) if tensor is None else identity_of(tensor))


def identity_of(tensor: Tensor) -> object:
    """Return what tied tensors have in common, and no others."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return id(tensor)
    return layout_of(tensor)


def changes(before: Mapping[str, Call], after: Mapping[str, Call]) -> Changes:
    """Return how a program differs from what it was, each as `calls_of` has it.

    An operator that reads something else where it read one that is gone does not differ by that.
    """
    gone = before.keys() - after.keys()
    differing = {n for n, c in before.items() if n in after and not _same_call(c, after[n], gone)}
    new = (after.keys() - before.keys()) | differing
    removed = [name for name in before if name in gone | differing]
    made = [name for name in after if name in new]
    return Changes(
        tuple(name for name in removed if before[name].op == "call_function"),
        tuple(name for name in made if after[name].op == "call_function"),
        tuple(
            name
            for name, call in chain(before.items(), after.items())
            if call.op != "call_function" and name in gone | new
        ),
    )


def _same_call(before: Call, after: Call, gone: set[str]) -> bool:
    same = (before.op, before.target) == (after.op, after.target)
    return same and _same(before.arguments, after.arguments, gone)


def _same(before: Any, after: Any, gone: set[str]) -> bool:
    if isinstance(before, _Reference):
        return before.name in gone or before == after
    if isinstance(before, (tuple, list)):
        alike = isinstance(after, (tuple, list)) and len(before) == len(after)
        return alike and all(_same(b, a, gone) for b, a in zip(before, after, strict=True))
    if isinstance(before, Mapping):
        alike = isinstance(after, Mapping) and before.keys() == after.keys()
        return alike and all(_same(before[key], after[key], gone) for key in before)
    return repr(before) == repr(after)
