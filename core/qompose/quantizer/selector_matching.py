# SPDX-License-Identifier: Apache-2.0
"""The selectors of a quantizer applied to one program: which of them decides for each operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from operator import getitem

from torch import SymBool
from torch.fx import GraphModule, Node

from qompose.errors import SelectorError, blaming, brief, near_names
from qompose.program.control_flow import bodies_of, borders, is_nested_call
from qompose.program.graph import describe, module_path, module_stack, reached
from qompose.program.meta import tag_of
from qompose.spec.selectors import (
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
    compiled,
    names_of,
)


def _matching(setting: Setting, program: Program) -> Iterable[Node]:
    match = compiled(setting.key).match
    return [node for node in program.nodes if match(module_path(node))]


def _asked(predicate: Callable[[Node], object], label: str, node: Node) -> bool:
    where = f"{label} (called on {describe(node)})"
    with blaming(where):
        answer = predicate(node)
        if isinstance(answer, (bool, SymBool)):  # the latter of sizes that are open
            return bool(answer)
    # Text such as "no" would be true.
    raise SelectorError(f"{where} must return True or False, got {brief(answer)}")


def _in_module(setting: Setting, program: Program) -> Iterable[Node]:
    if setting.key not in program.inside:
        raise SelectorError(
            f"the exported program has no operators in the module {setting.key!r}"
            f"{program.hint(setting.key)}"
        )
    return program.inside[setting.key]


def _between(setting: Setting, program: Program) -> Iterable[Node]:
    key: Subgraph = setting.key
    first = [node for name in key.inputs for node in program.named(name)]
    last = [node for name in key.outputs for node in program.named(name)]
    found = between(program, first, last)
    if not found:
        raise SelectorError(
            f"set_subgraph: there is no path {setting.label.removeprefix('subgraph ')}"
        )
    return found


def _called(setting: Setting, program: Program) -> Iterable[Node]:
    call: Call = setting.key
    if call.module and call.module not in program.inside:
        raise SelectorError(
            f"call {call.index} of {call.kind.label} in {call.module!r}: the exported program "
            f"has no operators in that module{program.hint(call.module)}"
        )
    calls = calls_of(call, program.inside.get(call.module, ()))
    if call.index >= len(calls):
        made = ", ".join(nodes[0].name for nodes in calls) or "none"
        raise SelectorError(
            f"call index {call.index} is out of range. Calls "
            f"of {call.kind.label} directly in {call.module or 'the model'}: {made}. Indices start "
            "at 0. Calls in submodules do not count; to select one of them, pass the path of "
            "its submodule instead."
        )
    return calls[call.index]


_PICKS: dict[str, Callable[[Setting, Program], Iterable[Node]]] = {
    GLOBAL: lambda setting, program: program.nodes,
    TYPE: lambda setting, program: [n for n in program.nodes if is_of_kind(setting.key, n)],
    REGEX: _matching,
    FILTER: lambda setting, program: [
        n for n in program.nodes if _asked(setting.key, setting.label, n)
    ],
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
        SelectorError: an exact name, path or call is not in the program, or a predicate returned neither True
            nor False.
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
    TYPE: "{label} does not occur in the model",
    REGEX: "{level} {key!r} matches no module path",
    FILTER: "{label} matches no operator",
}


def _complaint(setting: Setting, names: Collection[str]) -> str:
    if names:
        return (
            f"{setting.label} has no effect on the {len(names)} operators it matches: more "
            "specific or later selectors, or the filter function, decide about them"
        )
    return _NO_MATCH[setting.level].format(
        level=setting.level, key=setting.key, label=setting.label
    )


_OPERATOR, _MODULE = "operator:", "module:"


class Program:
    """What selectors read of an exported program. A body's operators stand where the body is called."""

    def __init__(self, exported: GraphModule) -> None:
        self.calls = list(_in_order(exported, set()))
        self.nodes: list[Node] = [node for node in self.calls if not _is_border(node)]
        self.by_name = {node.name: node for node in self.nodes}

    @cached_property
    def inside(self) -> dict[str, list[Node]]:
        """Return the operators inside each module, by its path, in order."""
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for path in paths_of(node):
                found[path].append(node)
        return dict(found)

    def hint(self, name: str) -> str:
        """Return modules whose paths are near a name, or else the first ones there are."""
        paths = [path for path in self.inside if path]
        top = sorted({path.partition(".")[0] for path in paths})
        there = f" (modules: {', '.join(top[:8])}{', ...' if top[8:] else ''})" if top else ""
        return near_names(name, paths) or there

    def named(self, name: str) -> list[Node]:
        """Return the operator of a name, or the operators inside the module of a path.

        Raises:
            SelectorError: the program has neither, or both and they are not the same.
        """
        if name.startswith((_OPERATOR, _MODULE)):
            kind, _, bare = name.partition(":")
            operator, inside = (kind == "operator", kind == "module")
        else:
            bare, operator, inside = name, True, True
        one = [self.by_name[bare]] if operator and bare in self.by_name else []
        several = self.inside.get(bare, []) if inside else []
        if one and several and one != several:
            raise SelectorError(
                f"{bare!r} is both the operator {describe(one[0])} and a module; write "
                f"'{_OPERATOR}{bare}' or '{_MODULE}{bare}'"
            )
        if not one and not several:
            known = {*self.by_name, *self.inside} - {""}
            raise SelectorError(
                f"the exported program has no operator or module {name!r}"
                f"{near_names(bare, known) or self.hint(bare)}"
            )
        return one or several


def _in_order(module: GraphModule, seen: set[int]) -> Iterator[Node]:
    """Yield calls as a run makes them; bodies that several calls share stand at the first."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        for body in bodies_of(node) if is_nested_call(node) else ():
            if id(body) not in seen:
                seen.add(id(body))
                yield from _in_order(body, seen)
        yield node


def _is_border(node: Node) -> bool:
    """Tell whether a node is the call of a body, or takes one of its results: neither computes."""
    source = node.args[0] if node.target is getitem else node
    return isinstance(source, Node) and is_nested_call(source)


def paths_of(node: Node) -> set[str]:
    """Return the paths of the modules around an operator, those of containers among them; "" is the model."""
    paths = {"", *(path for path, _ in module_stack(node))}
    for path in list(paths):
        parts = path.split(".")
        paths.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return paths


def is_of_kind(kind: Kind, node: Node) -> bool:
    """Tell whether a module of the type is around a node, or it calls (or comes from) the operator."""
    if kind.modules:
        return not kind.modules.isdisjoint(name for _, name in module_stack(node))
    origin = tag_of(node, "origin")  # the operator that a rewrite took apart
    return kind.is_call(node) or bool(origin and not kind.operators.isdisjoint(names_of(origin)))


def calls_of(call: Call, inside: Iterable[Node]) -> list[list[Node]]:
    """Return the operators of each call that a module itself makes, in the order of the calls."""
    if call.kind.operators:
        return [[n] for n in inside if module_path(n) == call.module and call.kind.is_call(n)]
    calls: dict[tuple[str, ...], list[Node]] = defaultdict(list)
    for node in inside:
        keys = [str(key) for key in (node.meta.get("nn_module_stack") or {})]
        stack = list(module_stack(node))
        depth = _depth_of_calls(call.module, [path for path, _ in stack])
        if depth < len(stack) and stack[depth][1] in call.kind.modules:
            calls[tuple(keys[: depth + 1])].append(node)  # of this very call
    return list(calls.values())


def _depth_of_calls(module: str, paths: list[str]) -> int:
    """Return where in a stack of paths the modules stand that `module`, or who holds it, calls."""
    own = [i for i, path in enumerate(paths) if path == module]
    if own:
        return own[-1] + 1
    within = (i for i, path in enumerate(paths) if path.startswith(f"{module}."))
    return next(within, len(paths))  # a container calls nothing, and its parent what it holds


def between(program: Program, first: Iterable[Node], last: Iterable[Node]) -> list[Node]:
    """Return the operators on the paths from `first` to `last`, into and out of bodies, in order."""
    forward: dict[Node, list[Node]] = defaultdict(list)
    backward: dict[Node, list[Node]] = defaultdict(list)
    for call in (node for node in program.calls if is_nested_call(node)):
        links = list(borders(call))
        links += _sliced(call, {node for link in links for node in link})
        for one, other in links:
            forward[one].append(other)
            backward[other].append(one)
    ahead = reached(first, lambda node: [*node.users, *forward[node]])
    behind = reached(last, lambda node: [*node.all_input_nodes, *backward[node]])
    return [node for node in program.nodes if node in ahead and node in behind]


def _sliced(call: Node, linked: set[Node]) -> Iterator[tuple[Node, Node]]:
    """Yield how values flow into and out of bodies by slices and stacked, which are other tensors."""
    for body in bodies_of(call):
        for node in body.graph.nodes:
            if node.op == "placeholder" and node not in linked:
                yield from ((operand, node) for operand in call.all_input_nodes)
            elif node.op == "output":
                yield from ((value, call) for value in node.all_input_nodes if value not in linked)
