# SPDX-License-Identifier: Apache-2.0
"""Which values of a transformed program stand for which values of the program that it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.program.control_flow import nodes_in
from qompose.program.graph import value_of
from qompose.program.meta import tag
from qompose.quantizer.interop.comparing import (
    Spelling,
    content_of,
    difference,
    is_call,
    same_content,
    same_number,
    spelled,
)

STAMP = "stamp"


def stamp(model: GraphModule) -> None:
    """Mark every node of a program, and of the bodies inside it, with its own name."""
    for node in nodes_in(model):
        tag(node, **{STAMP: node.name})


class Correspondence:
    """Pairs of values, one of each program, that stand for each other: one to one.

    Attributes:
        before, after: the programs.
        after_of, before_of: the pairs, both ways; parameters are compared instead.
        given: the values of `after` whose pairs are no hypotheses: inputs, and what the program returns.
        returned: by position, what each program returns where the two are not a pair.
        values: example values of `after`.
    """

    def __init__(self, before: GraphModule, after: GraphModule) -> None:
        self.before, self.after = before, after
        self.after_of: dict[Node, Node] = {}
        self.before_of: dict[Node, Node] = {}
        self.given: set[Node] = set()
        self.returned: dict[int, tuple[Any, Any]] = {}
        self.values: dict[Node, Any] = {}
        self._spelled: dict[Node, Spelling] = {}
        self._same_content: dict[tuple[Node, Node], bool] = {}

    def pair(self, one: Node, other: Node) -> None:
        """Let a value of `after` stand for one of `before`; what either stood for before, it does no more."""
        self.drop(self.before_of.get(other))
        self.drop(one)
        self.after_of[one], self.before_of[other] = other, one

    def drop(self, one: Node | None) -> None:
        """Let nothing stand for a value of `before`."""
        if one in self.after_of:
            del self.before_of[self.after_of.pop(one)]

    def pairs(self) -> dict[Node, Node]:
        """Return the pairs as they are, for `restore`."""
        return dict(self.after_of)

    def restore(self, pairs: Mapping[Node, Node]) -> None:
        """Make the pairs what they were."""
        self.after_of = dict(pairs)
        self.before_of = {other: one for one, other in pairs.items()}

    def drop_behind(self, ones: Iterable[Node]) -> None:
        """Let nothing stand for values of `before`, nor for what is computed from them and not returned."""
        waiting = list(ones)
        reached = set(waiting)
        while waiting:
            one = waiting.pop()
            if self.after_of.get(one) not in self.given:
                self.drop(one)
            new = [user for user in one.users if user not in reached]
            reached.update(new)
            waiting += new

    def shift(self, one: Node) -> None:
        """Let what stands for a value stand for what is made of that one alone, if nothing does yet.

        A pass that fuses operators keeps the stamp of one of them, which need not be the last.
        """
        other = self.after_of[one]
        self.drop(one)
        if len(one.users) != 1:
            return
        (reader,) = one.users
        is_free = is_call(reader) and reader not in self.after_of
        if is_free and difference(value_of(reader), self.values.get(other)) is None:
            self.pair(reader, other)

    def spelled(self, node: Node) -> Spelling:
        if node not in self._spelled:
            self._spelled[node] = spelled(node)
        return self._spelled[node]

    def same(self, one: Any, other: Any) -> bool:
        """Tell whether operands of the two programs are the same value, as far as is known."""
        if not (isinstance(one, Node) and isinstance(other, Node)):
            return same_number(one, other)
        if one.op == other.op == "get_attr":
            key = one, other
            if key not in self._same_content:
                self._same_content[key] = same_content(content_of(one), content_of(other))
            return self._same_content[key]
        return self.before_of.get(other) is one

    def is_unchanged(self, other: Node) -> bool:
        """Tell whether an operator of `after` is the one that it stands for, on the same values."""
        one = self.before_of.get(other)
        if one is None or not is_call(one):
            return False
        first, second = self.spelled(one), self.spelled(other)
        pairs = zip(first.operands, second.operands, strict=False)
        return first.key == second.key and all(self.same(a, b) for a, b in pairs)


def returned(program: GraphModule) -> list[Any]:
    """Return the values that a program returns, in order: nodes, and literals."""
    return pytree.tree_leaves(program.graph.output_node().args[0])
