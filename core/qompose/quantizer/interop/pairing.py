# SPDX-License-Identifier: Apache-2.0
"""Finding which operators of a transformed program are those of the program that it was made from.

Nodes are stamped with their names before the transform, and most passes hand on what they find in a node's
meta. A stamped operator with the same target, literals and operands is unchanged. Its operands say more:
what it reads now stands for what it read before. Both are hypotheses; `equivalence` tests
what follows from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from qompose.errors import UserError
from qompose.program.graph import describe, value_of
from qompose.program.meta import tag_of
from qompose.quantizer.interop.comparing import Constants, calls, difference, is_call
from qompose.quantizer.interop.correspondence import STAMP, Correspondence, returned
from qompose.quantizer.interop.examples import Examples


def correspond(before: GraphModule, after: GraphModule) -> Correspondence:
    """Find the values of `after` that stand for values of `before`.

    Raises:
        UserError: the programs differ in their inputs or outputs, or `after` calls modules.
    """
    found = Correspondence(before, after)
    _pair_inputs(found)
    _pair_outputs(found)
    _Matcher(found).match()
    _check_outputs(found)
    return found


def _pair_inputs(found: Correspondence) -> None:
    ones, others = _placeholders(found.before), _placeholders(found.after)
    if len(ones) != len(others):
        raise UserError(
            f"it changed the program's inputs: {_names(ones)} became {_names(others)}. "
            "A transform for annotation keeps inputs and outputs."
        )
    names = {node.name for node in ones}
    for one, other in zip(ones, others, strict=True):
        mark = tag_of(other, STAMP)
        if mark in names and mark != one.name:
            raise UserError(
                f"it changed the order of the program's inputs: {mark} stands for {one.name}"
            )
        _check("input", one, value_of(one), value_of(other))
        found.pair(one, other)
        found.given.add(other)


def _placeholders(program: GraphModule) -> list[Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def _names(nodes: list[Node]) -> str:
    return f"({', '.join(node.name for node in nodes)})"


def _pair_outputs(found: Correspondence) -> None:
    ones, others = returned(found.before), returned(found.after)
    if len(ones) != len(others):
        raise UserError(
            f"it changed the program's outputs: {len(ones)} became {len(others)}. "
            "A transform for annotation keeps inputs and outputs."
        )
    for position, (one, other) in enumerate(zip(ones, others, strict=True)):
        _pair_output(found, position, one, other)


def _pair_output(found: Correspondence, position: int, one: Any, other: Any) -> None:
    if not isinstance(one, Node) or not isinstance(other, Node):
        if one is not other and repr(one) != repr(other):
            raise UserError(f"it changed output {position} of the program: {one} became {other}")
    elif is_call(one) and is_call(other) and not {one, other} & {*found.after_of, *found.given}:
        found.pair(one, other)
        found.given.add(other)
    elif not found.same(one, other):
        found.returned[position] = (one, other)


def _check_outputs(found: Correspondence) -> None:
    for one, other in zip(returned(found.before), returned(found.after), strict=True):
        if isinstance(one, Node) and isinstance(other, Node):
            _check("output", one, value_of(one), found.values.get(other))


def _check(what: str, node: Node, one: Any, other: Any) -> None:
    change = difference(one, other)
    if change is not None:
        raise UserError(
            f"it changed the program's {what} {describe(node)}: {change}. "
            "A transform for annotation keeps inputs and outputs."
        )


class _Matcher:
    """Pairs operators in the order of the transformed program, so that operands are known before readers."""

    def __init__(self, found: Correspondence) -> None:
        self._found = found
        self._examples = Examples(found.before)
        self._by_name = {node.name: node for node in calls(found.before)}
        self._unstamped: _Index | None = None

    def match(self) -> None:
        for node in self._found.after.graph.nodes:
            if node.op in ("call_module", "call_method"):
                raise UserError(
                    f"it made {describe(node)}, a {node.op} node: programs consist of call_function nodes"
                )
            if node.op == "placeholder":
                self._found.values[node] = value_of(self._found.before_of[node])
            elif node.op == "get_attr":
                self._found.values[node] = self._examples.of_constant(node)
            elif node.op == "call_function":
                self._place(node)
        unstamped = {node for node in calls(self._found.after) if tag_of(node, STAMP) is None}
        for name, pieces in self._pieces().items():
            self._pair_result(self._by_name[name], pieces, unstamped)

    def _place(self, node: Node) -> None:
        found = self._found
        one = self._by_name.get(tag_of(node, STAMP))
        if one is None or not self._pair_call(one, node):
            self._pair_unstamped(node)
        one = found.before_of.get(node)
        value = value_of(one) if one is not None and found.is_unchanged(node) else None
        found.values[node] = self._examples.of_call(node, found.values) if value is None else value

    def _pair_call(self, one: Node, other: Node) -> bool:
        """Pair two operators, and what they read, if they can be one operator that did not change."""
        found = self._found
        first, second = found.spelled(one), found.spelled(other)
        if first.key != second.key or not self._is_free(one, other):
            return False
        new: dict[Node, Node] = {}
        for a, b in zip(first.operands, second.operands, strict=True):
            if found.same(a, b) or new.get(a) is b:
                continue
            if a in new or b in new.values() or not self._may_stand_for(a, b):
                return False
            new[a] = b
        for a, b in new.items():
            found.pair(a, b)
        found.pair(one, other)
        return True

    def _is_free(self, one: Node, other: Node) -> bool:
        found = self._found
        paired = found.after_of.get(one), found.before_of.get(other)
        return paired in ((None, None), (other, one))

    def _may_stand_for(self, one: Any, other: Any) -> bool:
        """Tell whether a value of `after` that an unchanged operator reads may be what was read before.

        Where one of the two has a pair already, they may be only if that is all of it that is read: a pass
        dropped or put in an operator behind the one that has the pair.
        """
        found = self._found
        if not is_call(one) or not is_call(other) or other in found.given:
            return False
        if difference(value_of(one), found.values.get(other)) is not None:
            return False
        twin, original = found.after_of.get(one), found.before_of.get(other)
        if twin is None:
            return original is None or _leads_only_to(original, one)
        return original is None and twin not in found.given and _leads_only_to(twin, other)

    def _pair_unstamped(self, node: Node) -> None:
        """Pair an operator that carries no stamp, or a wrong one, with one of the same operands."""
        if node in self._found.before_of:
            return
        if self._unstamped is None:
            self._unstamped = _Index(self._found)
        one = self._unstamped.find(node)
        if one is not None:
            self._found.pair(one, node)

    def _pieces(self) -> dict[str, list[Node]]:
        """Return the operators that carry an operator's stamp, where neither it nor they have a pair."""
        pieces: dict[str, list[Node]] = defaultdict(list)
        for node in calls(self._found.after):
            one = self._by_name.get(tag_of(node, STAMP))
            if one is not None and one not in self._found.after_of:
                pieces[one.name].append(node)
        return pieces

    def _pair_result(self, one: Node, pieces: list[Node], unstamped: Collection[Node]) -> None:
        """Pair a decomposed operator with the one piece that is read outside, its last."""
        found, own = self._found, {*pieces}
        read = [p for p in pieces if any(u not in own and u not in unstamped for u in p.users)]
        last = read[0] if len(read) == 1 else pieces[-1]
        if len(read) > 1 or last in found.before_of:
            return
        if difference(value_of(one), found.values.get(last)) is None:
            found.pair(one, last)


def _leads_only_to(start: Node, end: Node) -> bool:
    """Tell whether a value is read by nothing but a chain of operators up to `end`."""
    while len(start.users) == 1:
        (start,) = start.users
        if start is end:
            return True
    return False


class _Index:
    """Operators of the first program by what they call and read; stamped ones are left to their stamps."""

    def __init__(self, found: Correspondence) -> None:
        self._found = found
        self._constants = Constants(found.before)
        marks = {tag_of(node, STAMP) for node in calls(found.after)}
        self._nodes: dict[Hashable, list[Node]] = defaultdict(list)
        for node in calls(found.before):
            if node.name not in marks:
                key = self._key(node, {})
                self._nodes[key].append(node)

    def find(self, node: Node) -> Node | None:
        """Return the first operator without a pair that has the same key, None where there is none."""
        key = self._key(node, self._found.before_of)
        candidates = self._nodes.get(key, ()) if key is not None else ()
        return next((one for one in candidates if one not in self._found.after_of), None)

    def _key(self, node: Node, before_of: Mapping[Node, Node]) -> Hashable | None:
        spelling = self._found.spelled(node)
        operands = [self._operand(operand, before_of) for operand in spelling.operands]
        return None if None in operands else (spelling.key, *operands)

    def _operand(self, operand: Any, before_of: Mapping[Node, Node]) -> Hashable | None:
        if not isinstance(operand, Node):
            return str(operand.node.expr)
        if operand.op == "get_attr":
            return self._constants.find(operand)
        return before_of.get(operand) if operand.graph is self._found.after.graph else operand
