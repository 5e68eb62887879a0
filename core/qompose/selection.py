# SPDX-License-Identifier: Apache-2.0
"""Selection: the settings of a quantizer applied to one program, once, in the order of its operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch.fx import GraphModule, Node

from qompose.errors import SelectorError, blaming
from qompose.graph import describe, module_path, tag_of
from qompose.places import Program, between, calls_of, is_of_kind, paths_of
from qompose.selectors import (
    CALL,
    FILTER,
    GLOBAL,
    NAME,
    NOTHING,
    REGEX,
    SUBGRAPH,
    TYPE,
    Call,
    Selection,
    Selectors,
    Setting,
    Subgraph,
    compiled,
)


def _everything(setting: Setting, program: Program) -> Iterable[Node]:
    return program.nodes


def _of_kind(setting: Setting, program: Program) -> Iterable[Node]:
    return [node for node in program.nodes if is_of_kind(setting.key, node)]


def _matching(setting: Setting, program: Program) -> Iterable[Node]:
    match = compiled(setting.key).match
    return [node for node in program.nodes if match(module_path(node))]


def _accepted(setting: Setting, program: Program) -> Iterable[Node]:
    return [node for node in program.nodes if _asked(setting.key, setting.label, node)]


def _asked(predicate: Callable[[Node], object], label: str, node: Node) -> bool:
    with blaming(f"{label}, asked about {describe(node)},"):
        return bool(predicate(node))


def _in_module(setting: Setting, program: Program) -> Iterable[Node]:
    if setting.key not in program.inside:
        raise SelectorError(
            f"set_module_name({setting.key!r}, ...) names no module of the exported program that computes "
            f"anything{program.hint(setting.key)}"
        )
    return program.inside[setting.key]


def _between(setting: Setting, program: Program) -> Iterable[Node]:
    key: Subgraph = setting.key
    first = [node for name in key.inputs for node in program.named(name)]
    last = [node for name in key.outputs for node in program.named(name)]
    found = between(program, first, last)
    if not found:
        raise SelectorError(
            f"set_subgraph: no path leads {setting.label.removeprefix('subgraph ')}; values flow the other "
            "way, or past each other"
        )
    return found


def _called(setting: Setting, program: Program) -> Iterable[Node]:
    call: Call = setting.key
    if call.module and call.module not in program.inside:
        raise SelectorError(
            f"set_module_name_object_type_order({call.module!r}, ...) names no module of the exported "
            f"program{program.hint(call.module)}"
        )
    calls = calls_of(call, program.inside.get(call.module, ()))
    if call.index >= len(calls):
        made = ", ".join(nodes[0].name for nodes in calls) or "none"
        raise SelectorError(
            f"set_module_name_object_type_order: {call.module or 'the model'} itself has {len(calls)} calls "
            f"of {call.kind.label} ({made}), and number {call.index} is asked for, counted from 0. "
            "Calls inside its submodules do not count: name those."
        )
    return calls[call.index]


_PICKS: dict[str, Callable[[Setting, Program], Iterable[Node]]] = {
    GLOBAL: _everything,
    TYPE: _of_kind,
    REGEX: _matching,
    FILTER: _accepted,
    NAME: _in_module,
    SUBGRAPH: _between,
    CALL: _called,
}
_BY_PLACE = (FILTER, SUBGRAPH, CALL)
"""Levels that speak of places in the exported program: what a rewrite puts there inherits from it."""

BARRED = Selection(None, "the filter function", selected=False)
"""What an operator has for which the filter function is false."""


class Assignment:
    """Which configuration each operator of one program has.

    Predicates are asked once about every operator, in the order in which a call runs them. Operators that
    stand there after a rewrite are looked up by the operator they come from.

    Raises:
        SelectorError: an exact name, path or call is not in the program.
        MemberError: a predicate raised.
    """

    def __init__(self, selectors: Selectors, exported: GraphModule) -> None:
        self._program = Program(exported)
        self._settings = list(selectors.by_precedence())
        self._picked = [
            {node.name for node in _PICKS[setting.level](setting, self._program)}
            for setting in self._settings
        ]
        self._deciding: dict[str, int] = {}
        for number, names in enumerate(self._picked):
            self._deciding.update(dict.fromkeys(names, number))
        self._barred = self._narrowed(selectors)
        self._reached_new: set[int] = set()

    def _narrowed(self, selectors: Selectors) -> Collection[str]:
        function = selectors.filter_function
        if function is None:
            return frozenset()
        return {n.name for n in self._program.nodes if not _asked(function, "filter function", n)}

    def select(self, node: Node) -> Selection:
        """Return what the most specific selector says of an operator."""
        original = self._program.by_name.get(node.name)
        known = original is not None and original.target is node.target
        source = node.name if known else tag_of(node, "source") or node.name
        if source in self._barred:
            return BARRED
        number = self._deciding.get(source) if known else self._decide_new(node, source)
        if number is None:
            return NOTHING
        return Selection(self._settings[number].config, self._settings[number].label)

    def _decide_new(self, node: Node, source: str) -> int | None:
        """Return the setting for an operator that a rewrite made from `source`."""
        found = None
        for number, (setting, names) in enumerate(zip(self._settings, self._picked, strict=True)):
            if source in names if setting.level in _BY_PLACE else _applies(setting, node):
                found = number
        if found is not None:
            self._reached_new.add(found)
        return found

    def notes(self) -> list[str]:
        """Return the settings that pick no operator, and those that decide about none they pick."""
        free = (number for name, number in self._deciding.items() if name not in self._barred)
        deciding = {*free, *self._reached_new}
        return [
            _complaint(setting, names)
            for number, (setting, names) in enumerate(
                zip(self._settings, self._picked, strict=True)
            )
            if number not in deciding and (setting.level != GLOBAL or not names)
        ]


def _applies(setting: Setting, node: Node) -> bool:
    if setting.level == TYPE:
        return is_of_kind(setting.key, node)
    if setting.level == REGEX:
        return compiled(setting.key).match(module_path(node)) is not None
    return setting.level == GLOBAL or setting.key in paths_of(node)


_NO_MATCH = {
    GLOBAL: "the program has no operators",
    TYPE: "{label} occurs nowhere in the model",
    REGEX: "{level} {key!r} matches no module path",
    FILTER: "{label} picks no operator",
}


def _complaint(setting: Setting, names: Collection[str]) -> str:
    if names:
        return (
            f"{setting.label} decides about none of the {len(names)} operators that it picks: more specific "
            "or later selectors do, or the filter function leaves them out"
        )
    return _NO_MATCH[setting.level].format(
        level=setting.level, key=setting.key, label=setting.label
    )
