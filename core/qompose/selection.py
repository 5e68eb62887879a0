# SPDX-License-Identifier: Apache-2.0
"""Selection: the settings of a quantizer applied to one program, once, in the order of its operators."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cached_property

from torch.fx import GraphModule, Node

from qompose.errors import SelectorError, blaming, near_names
from qompose.graph import describe, module_path, module_stack, tag_of
from qompose.nested import bodies_of, is_nested_call, nodes_in
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
    Kind,
    Selection,
    Selectors,
    Setting,
    Subgraph,
    names_of,
)


class Program:
    """What selectors read of an exported program."""

    def __init__(self, exported: GraphModule) -> None:
        self.nodes = [node for node in nodes_in(exported) if node.op == "call_function"]
        self.by_name = {node.name: node for node in self.nodes}

    @cached_property
    def inside(self) -> dict[str, list[Node]]:
        """Return the operators inside each module, by its path, in graph order."""
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for path in paths_of(node):
                found[path].append(node)
        return dict(found)

    def named(self, name: str) -> list[Node]:
        """Return the operator of a name, or the operators inside the module of a path.

        Raises:
            SelectorError: the program has neither.
        """
        if name in self.by_name:
            return [self.by_name[name]]
        if name not in self.inside:
            known = {*self.by_name, *self.inside} - {""}
            raise SelectorError(
                f"{name!r} is no operator and no module of the exported program{near_names(name, known)}"
            )
        return self.inside[name]


def paths_of(node: Node) -> set[str]:
    """Return the paths of the modules around an operator; "" is the model."""
    return {"", *(path for path, _ in module_stack(node))}


def _everything(setting: Setting, program: Program) -> Iterable[Node]:
    return program.nodes


def _of_kind(setting: Setting, program: Program) -> Iterable[Node]:
    return [node for node in program.nodes if is_of_kind(setting.key, node)]


def is_of_kind(kind: Kind, node: Node) -> bool:
    """Tell whether a module of the type is around a node, or it calls (or comes from) the operator."""
    if kind.modules:
        return not kind.modules.isdisjoint(name for _, name in module_stack(node))
    origin = tag_of(node, "origin")  # the operator that a rewrite took apart
    return kind.is_call(node) or bool(origin and not kind.operators.isdisjoint(names_of(origin)))


def _matching(setting: Setting, program: Program) -> Iterable[Node]:
    paths = [path for path in program.inside if re.fullmatch(setting.key, path)]
    return [node for path in paths for node in program.inside[path]]


def _accepted(setting: Setting, program: Program) -> Iterable[Node]:
    return [node for node in program.nodes if _asked(setting.key, setting.label, node)]


def _asked(predicate: Callable[[Node], object], label: str, node: Node) -> bool:
    with blaming(f"{label}, asked about {describe(node)},"):
        return bool(predicate(node))


def _in_module(setting: Setting, program: Program) -> Iterable[Node]:
    name = setting.key
    if name not in program.inside:
        raise SelectorError(
            f"set_module_name({name!r}, ...) names no module of the exported program that computes anything"
            f"{near_names(name, set(program.inside) - {''})}"
        )
    return program.inside[name]


def _between(setting: Setting, program: Program) -> Iterable[Node]:
    key: Subgraph = setting.key
    first = [node for name in key.inputs for node in program.named(name)]
    last = [node for name in key.outputs for node in program.named(name)]
    forward = _reached(first, lambda node: node.users)
    backward = _reached(last, lambda node: node.all_input_nodes)
    between = [node for node in program.nodes if node in forward and node in backward]
    if not between:
        raise SelectorError(
            f"set_subgraph: no path leads {setting.label.removeprefix('subgraph ')}"
        )
    return [inner for node in between for inner in _with_bodies(node)]


def _reached(start: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    reached, waiting = set(start), list(start)
    while waiting:
        new = [node for node in step(waiting.pop()) if node not in reached]
        reached.update(new)
        waiting += new
    return reached


def _with_bodies(node: Node) -> list[Node]:
    bodies = bodies_of(node) if is_nested_call(node) else []
    return [node, *(inner for body in bodies for inner in nodes_in(body))]


def _called(setting: Setting, program: Program) -> Iterable[Node]:
    call: Call = setting.key
    if call.module not in program.inside:
        raise SelectorError(
            f"set_module_name_object_type_order({call.module!r}, ...) names no module of the exported "
            f"program{near_names(call.module, set(program.inside) - {''})}"
        )
    calls = _calls(call, program.inside[call.module])
    if call.index >= len(calls):
        made = ", ".join(nodes[0].name for nodes in calls) or "none"
        raise SelectorError(
            f"set_module_name_object_type_order: {call.module or 'the model'} itself has {len(calls)} calls "
            f"of {call.kind.label} ({made}), and number {call.index} is asked for, counted from 0. "
            "Calls inside its submodules do not count: name those."
        )
    return calls[call.index]


def _calls(call: Call, inside: Iterable[Node]) -> list[list[Node]]:
    """Return the operators of each call that a module itself makes, in the order of the calls."""
    if call.kind.operators:
        return [[n] for n in inside if module_path(n) == call.module and call.kind.is_call(n)]
    calls: dict[tuple[str, ...], list[Node]] = defaultdict(list)
    for node in inside:
        stack = list((node.meta.get("nn_module_stack") or {}).items())
        paths = list(module_stack(node))
        depth = max((i for i, (path, _) in enumerate(paths) if path == call.module), default=-1) + 1
        if depth < len(paths) and paths[depth][1] in call.kind.modules:
            calls[tuple(str(key) for key, _ in stack[: depth + 1])].append(
                node
            )  # of this very call
    return list(calls.values())


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


class Assignment:
    """Which configuration each operator of one program has.

    Predicates are asked once about every operator, in graph order. Operators that stand there after a
    rewrite are looked up by the operator they come from.

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
        self._barred = self._narrowed(selectors)
        self._known: dict[str, Selection] = {}
        for setting, names in zip(self._settings, self._picked, strict=True):
            self._known.update(dict.fromkeys(names, Selection(setting.config, setting.label)))
        self._known.update(dict.fromkeys(self._barred, Selection(None, "filter function")))

    def _narrowed(self, selectors: Selectors) -> Collection[str]:
        function = selectors.filter_function
        if function is None:
            return frozenset()
        return {n.name for n in self._program.nodes if not _asked(function, "filter function", n)}

    def select(self, node: Node) -> Selection:
        """Return what the most specific selector says of an operator."""
        original = self._program.by_name.get(node.name)
        if original is not None and original.target is node.target:
            return self._known.get(node.name, NOTHING)
        return self._select_new(node)

    def _select_new(self, node: Node) -> Selection:
        """Answer for an operator that a rewrite made."""
        source = tag_of(node, "source") or node.name
        if source in self._barred:
            return Selection(None, "filter function")
        found = NOTHING
        for setting, names in zip(self._settings, self._picked, strict=True):
            if source in names if setting.level in _BY_PLACE else _applies(setting, node):
                found = Selection(setting.config, setting.label)
        return found

    def notes(self) -> list[str]:
        """Return the settings that pick no operator, and those that decide about none they pick."""
        deciding = {selection.selector for selection in self._known.values()}
        return [
            _complaint(setting, names)
            for setting, names in zip(self._settings, self._picked, strict=True)
            if not names or (setting.level != GLOBAL and setting.label not in deciding)
        ]


def _applies(setting: Setting, node: Node) -> bool:
    if setting.level == TYPE:
        return is_of_kind(setting.key, node)
    if setting.level == REGEX:
        return any(re.fullmatch(setting.key, path) for path in paths_of(node))
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
            "or later selectors do"
        )
    return _NO_MATCH[setting.level].format(**vars(setting))
