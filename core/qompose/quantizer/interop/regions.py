# SPDX-License-Identifier: Apache-2.0
"""The places where two programs differ: each can be changed alone, whatever the others are.

A place has operators of either program, and meets the rest in values that stand for each other. No path,
in either program or in any mixture of the two, leaves a place and comes back to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from qompose.program.aliasing import unsafe_values
from qompose.quantizer.interop.comparing import calls, is_call
from qompose.quantizer.interop.correspondence import Correspondence

Pair = tuple[Node, Node]


@dataclass(frozen=True)
class Region:
    """Operators that stand in the place of others; all in graph order.

    Args:
        before, after: operators of either program.
        pairs: the values, made here, that stand for each other.
        returned: positions where the program returns another value, which stands for none.
    """

    before: tuple[Node, ...]
    after: tuple[Node, ...]
    pairs: tuple[Pair, ...]
    returned: tuple[int, ...] = ()


def regions_of(found: Correspondence) -> list[Region]:
    """Return the places where the programs differ, as small as the correspondence allows."""
    ones, others = calls(found.before), calls(found.after)
    same = {node for node in others if found.is_unchanged(node)}
    if len(same) == len(ones) == len(others) and not found.returned:
        return []
    sets = _DisjointSets()
    for node in others:
        one = found.before_of.get(node)
        sets.join(node, *([one] if one is not None else filter(is_call, node.users)))
    for node in ones:
        if node not in found.after_of:
            sets.join(node, *filter(is_call, node.users))
    for position, values in found.returned.items():
        sets.join(position, *(node for node in values if _is_lone(node, found)))
    changed = [n for n in others if n not in same]
    changed += [n for n in ones if found.after_of.get(n) not in same]
    _join_writes(found, sets, changed)
    _join_cycles(sets, [*ones, *others])
    return _collect(found, sets, [*changed, *found.returned])


def _is_lone(node: object, found: Correspondence) -> bool:
    return is_call(node) and node not in found.after_of and node not in found.before_of


class _DisjointSets:
    """A union of sets of nodes and positions of outputs, each known by one member."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, member: Hashable) -> Hashable:
        root = self._parent.setdefault(member, member)
        while self._parent[root] != root:
            self._parent[root] = root = self._parent[self._parent[root]]
        return root

    def join(self, first: Hashable, *others: Hashable) -> None:
        for other in others:
            self._parent[self.find(other)] = self.find(first)


def _join_writes(found: Correspondence, sets: _DisjointSets, changed: Iterable[Node]) -> None:
    """Keep together what reads or writes memory in an order that no edge shows, if any of it changed."""
    touching = [*_touching(found.before), *_touching(found.after)]
    if not {*touching}.isdisjoint(changed):
        sets.join(touching[0], *touching[1:])


def _touching(program: GraphModule) -> list[Node]:
    unsafe = unsafe_values(program.graph)
    return [
        node
        for node in calls(program)
        if any(value.name in unsafe for value in (node, *node.all_input_nodes))
    ]


def _join_cycles(sets: _DisjointSets, nodes: Iterable[Node]) -> None:
    """Join sets that lie on a cycle of sets, through the edges of both programs."""
    readers: dict[Hashable, set[Hashable]] = defaultdict(set)
    sources: dict[Hashable, set[Hashable]] = defaultdict(set)
    for node in nodes:
        reader = sets.find(node)
        for operand in filter(is_call, node.all_input_nodes):
            source = sets.find(operand)
            if source != reader:
                readers[source].add(reader)
                sources[reader].add(source)
    for cycle in _strongly_connected(readers, sources):
        sets.join(*cycle)


def _strongly_connected(
    readers: Mapping[Hashable, set[Hashable]], sources: Mapping[Hashable, set[Hashable]]
) -> list[list[Hashable]]:
    """Return sets of vertices of which each reaches every other (Kosaraju)."""
    finished: list[Hashable] = []
    seen: set[Hashable] = set()
    for start in readers:
        finished += _reached(start, readers, seen)
    seen = set()
    return [_reached(start, sources, seen) for start in reversed(finished) if start not in seen]


def _reached(
    start: Hashable, edges: Mapping[Hashable, set[Hashable]], seen: set[Hashable]
) -> list[Hashable]:
    """Return what a depth-first search reaches and had not seen, each after all that it leads to."""
    if start in seen:
        return []
    seen.add(start)
    reached = []
    path = [(start, iter(edges.get(start, ())))]
    while path:
        vertex, ahead = path[-1]
        following = next((v for v in ahead if v not in seen), None)
        if following is None:
            reached.append(vertex)
            path.pop()
        else:
            seen.add(following)
            path.append((following, iter(edges.get(following, ()))))
    return reached


def _collect(
    found: Correspondence, sets: _DisjointSets, changed: Iterable[Hashable]
) -> list[Region]:
    """Return the sets in which anything changed, in the order of the first program's operators."""
    ones: dict[Hashable, list[Node]] = defaultdict(list)
    others: dict[Hashable, list[Node]] = defaultdict(list)
    for program, members in ((found.before, ones), (found.after, others)):
        for node in calls(program):
            members[sets.find(node)].append(node)
    outputs: dict[Hashable, list[int]] = defaultdict(list)
    for position in found.returned:
        outputs[sets.find(position)].append(position)
    roots = {sets.find(member): None for member in changed}
    ordered = [root for root in ones if root in roots]
    ordered += [root for root in roots if root not in ones]
    return [_region(found, ones[root], others[root], outputs[root]) for root in ordered]


def _region(
    found: Correspondence, ones: list[Node], others: list[Node], outputs: list[int]
) -> Region:
    pairs = [(one, found.after_of[one]) for one in ones if one in found.after_of]
    return Region(tuple(ones), tuple(others), tuple(pairs), tuple(outputs))
