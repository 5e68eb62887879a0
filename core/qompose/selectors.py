# SPDX-License-Identifier: Apache-2.0
"""Selectors: which configuration applies to which operator. The most specific one wins.

===========================  =====================================================
level (least specific first)  picks
===========================  =====================================================
``global``                   every operator
``type``                     a module type (any enclosing module), or an aten operator
``regex``                    module paths that the expression matches entirely
``name``                     one module path, with all that is inside it
===========================  =====================================================

Within a level the later setting wins, except that the longer module path wins among names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import Node

from qompose.errors import SelectorError, near_names
from qompose.graph import module_path, module_stack, operator_name, tag_of
from qompose.specs import QuantizationConfig

TypeKey = "type[nn.Module] | torch._ops.OpOverload | torch._ops.OpOverloadPacket"


@dataclass(frozen=True)
class Selection:
    """The configuration that applies to an operator, and the selector that gave it.

    `selected` is False where no selector speaks of the operator; a `config` of None means float.
    """

    config: QuantizationConfig | None
    selector: str
    selected: bool = True


NOTHING = Selection(None, "", selected=False)


@dataclass
class Selectors:
    """The settings of one quantizer."""

    everything: QuantizationConfig | None = None
    has_global: bool = False
    types: dict[object, QuantizationConfig | None] = field(default_factory=dict)
    regexes: dict[str, QuantizationConfig | None] = field(default_factory=dict)
    names: dict[str, QuantizationConfig | None] = field(default_factory=dict)
    filter_function: Callable[[Node], bool] | None = None

    def select(self, node: Node) -> Selection:
        """Return what the most specific selector says of an operator."""
        if self.filter_function is not None and not self.filter_function(node):
            return Selection(None, "filter function")
        path = module_path(node)
        for level in (self._by_name, self._by_regex, self._by_type):
            found = level(node, path)
            if found is not None:
                return found
        return Selection(self.everything, "global") if self.has_global else NOTHING

    def _by_name(self, node: Node, path: str) -> Selection | None:
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            if name in self.names:
                return Selection(self.names[name], f"module name {name}")
        return None

    def _by_regex(self, node: Node, path: str) -> Selection | None:
        for regex, config in reversed(self.regexes.items()):
            if re.fullmatch(regex, path):
                return Selection(config, f"module name regex {regex}")
        return None

    def _by_type(self, node: Node, path: str) -> Selection | None:
        enclosing = {kind for _, kind in module_stack(node)}
        for key, config in reversed(self.types.items()):
            if _is_type(key, node, enclosing):
                return Selection(config, f"type {_type_name(key)}")
        return None

    def unmatched(self, nodes: Iterable[Node]) -> list[str]:
        """Return the selectors, other than exact names, that pick no operator of a program."""
        nodes = list(nodes)
        paths = {module_path(node) for node in nodes}
        missing = [
            f"module name regex {regex!r} matches no module path"
            for regex in self.regexes
            if not any(re.fullmatch(regex, path) for path in paths)
        ]
        stacks = [{kind for _, kind in module_stack(node)} for node in nodes]
        for key in self.types:
            if not any(
                _is_type(key, node, stack) for node, stack in zip(nodes, stacks, strict=True)
            ):
                missing.append(f"type {_type_name(key)} occurs nowhere in the model")
        return missing

    def check_names(self, nodes: Iterable[Node], owner: str) -> None:
        """Check that every exact module name is a module of the program.

        Raises:
            SelectorError: one is not; the message has near names.
        """
        known = {path for node in nodes for path, _ in module_stack(node)} - {""}
        for name in self.names:
            if name not in known:
                raise SelectorError(
                    f"{owner}: set_module_name({name!r}, ...) names no module of the exported program"
                    f"{near_names(name, known)}"
                )


def check_type_key(key: object) -> None:
    """Raise SelectorError unless `key` is a module type or an aten operator."""
    is_module = isinstance(key, type) and issubclass(key, nn.Module)
    if not is_module and not isinstance(key, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        raise SelectorError(
            f"{key!r} is neither a torch.nn.Module type nor an aten operator such as "
            "torch.ops.aten.linear.default"
        )


def check_regex(regex: str) -> None:
    """Raise SelectorError unless `regex` compiles."""
    try:
        re.compile(regex)
    except re.error as error:
        raise SelectorError(f"{regex!r} is not a regular expression: {error}") from error


def _is_type(key: object, node: Node, enclosing: set[str]) -> bool:
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}" in enclosing
    packet = getattr(node.target, "overloadpacket", None)
    origin = tag_of(node, "origin") or ""  # the operator that a rewrite took apart
    return key in (node.target, packet) or str(key) in (origin, origin.rpartition(".")[0])


def _type_name(key: object) -> str:
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else operator_name(key)
