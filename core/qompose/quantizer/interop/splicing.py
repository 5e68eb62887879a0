# SPDX-License-Identifier: Apache-2.0
"""Pieces of one program, put into another in place of the operators for which they stand."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from qompose.errors import InternalError, UserError
from qompose.program.aliasing import unsafe_values
from qompose.program.graph import (
    copy_graph_module,
    free_attribute,
    get_attribute,
    holds,
    layout_of,
    set_attribute,
)
from qompose.program.meta import tag, tag_of
from qompose.quantizer.interop.comparing import SYMBOLIC, content_of
from qompose.quantizer.interop.naming import set_name
from qompose.spec.claim import Change

_FROM_OPERATOR = ("nn_module_stack", "stack_trace")
"""Entries of an operator's meta that its pieces get where a transform left none."""


@dataclass(frozen=True)
class Place:
    """What a change does, by names, so that it can be done to any copy of the program.

    Args:
        change: the operators that go and those that come.
        pieces: all nodes that come, reads of new constants among them.
        owners: for each of them the operator of which it is a piece.
        results: the operators that go and whose values are read elsewhere.
        returned: by position, the node of the transformed program that the program returns now.
    """

    change: Change
    pieces: tuple[str, ...]
    owners: tuple[str, ...]
    results: tuple[str, ...]
    returned: tuple[tuple[int, str], ...]


def splice(
    program: GraphModule, source: GraphModule, place: Place, called: Mapping[str, str]
) -> None:
    """Put copies of a place's pieces into a program, in place.

    Args:
        called: how the program calls values that the place names otherwise.

    Raises:
        InternalError: the program has not the operators that go, or has what is called like a piece.
        UserError: a piece needs a size that no value of the program has.
    """
    _Splice(program, source, place, called).make()


class _Splice:
    def __init__(
        self,
        program: GraphModule,
        source: GraphModule,
        place: Place,
        called: Mapping[str, str],
    ) -> None:
        self._program, self._source, self._place = program, source, place
        self._here: dict[str, Node] = {node.name: node for node in program.graph.nodes}
        self._here.update(
            {name: self._here[other] for name, other in called.items() if other in self._here}
        )
        self._there = {node.name: node for node in source.graph.nodes}
        self._gone = [self._find(name) for name in place.change.nodes]
        position = {node: number for number, node in enumerate(program.graph.nodes)}
        output = program.graph.output_node()
        self._before = max(self._gone, key=position.__getitem__, default=output)
        self._copies: dict[Node, Node] = {}

    def _find(self, name: str) -> Node:
        if name not in self._here:
            raise InternalError(f"{name}, which a transform changed, is no longer in the program")
        return self._here[name]

    def make(self) -> None:
        for name, owner in zip(self._place.pieces, self._place.owners, strict=True):
            self._copy(self._there[name], self._here.get(owner))
        for name in self._place.results:
            self._here[name].replace_all_uses_with(self._copies[self._there[name]])
        self._return()
        for node in reversed(self._gone):
            self._program.graph.erase_node(node)
            del self._here[node.name]
        for piece, copy in self._copies.items():
            if piece.name in self._here:
                raise InternalError(
                    f"a piece of a transform and another node are called {piece.name}"
                )
            set_name(copy, piece.name)

    def _copy(self, piece: Node, owner: Node | None) -> None:
        graph = self._program.graph
        with graph.inserting_before(self._before):
            if piece.op == "get_attr":
                copy = graph.get_attr(self._attribute(str(piece.target), content_of(piece)))
            else:
                args, kwargs = map_aggregate((piece.args, piece.kwargs), self._argument)
                copy = graph.call_function(piece.target, args, kwargs)  # type: ignore[arg-type]
        copy.meta = _meta(piece, owner)
        if owner is not None and piece.op != "get_attr" and tag_of(copy, "source") is None:
            tag(copy, origin=str(owner.target), source=owner.name)
        self._copies[piece] = copy

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, SYMBOLIC):
            return self._size(leaf)
        return self._operand(leaf) if isinstance(leaf, Node) else leaf

    def _operand(self, node: Node) -> Node:
        """Return the value here that a node of the transformed program stands for."""
        if node in self._copies:
            return self._copies[node]
        if node.name in self._here:
            return self._here[node.name]
        if node.op != "get_attr":
            raise InternalError(
                f"{node.name}, which a piece of a transform reads, is not in the program"
            )
        with self._program.graph.inserting_before(self._before):  # what read it went
            read = self._program.graph.get_attr(self._attribute(str(node.target), content_of(node)))
        read.meta = _meta(node, None)
        set_name(read, node.name)
        self._here[node.name] = read
        return read

    def _attribute(self, path: str, content: Any) -> str:
        """Return where the program has a constant, after putting it there if it has not."""
        if holds(self._program, path) and _is_one(get_attribute(self._program, path), content):
            return path
        path = free_attribute(self._program, path)
        copied = copy_graph_module(content) if isinstance(content, GraphModule) else content
        set_attribute(self._program, path, copied)
        return path

    def _size(self, size: Any) -> int | Node:
        """Return what computes a size that a transform wrote down as a symbol, which programs cannot hold."""
        graph = self._program.graph
        try:
            with graph.inserting_before(self._before):
                return graph.materialize_symint(size)
        except (AssertionError, TypeError) as error:  # it is not computed from the inputs' sizes
            raise UserError(
                f"the transform wrote {size} into an operator in place of "
                f"{', '.join(self._place.change.nodes)}, and the program has no value that gives it "
                f"({error}). Export the program with a fixed size there."
            ) from error

    def _return(self) -> None:
        output = self._program.graph.output_node()
        values, structure = pytree.tree_flatten(output.args[0])
        for position, name in self._place.returned:
            values[position] = self._operand(self._there[name])
        if self._place.returned:
            output.args = (pytree.tree_unflatten(values, structure),)


def _is_one(stored: object, content: object) -> bool:
    """Tell whether two constants are one, so that a change of either changes the other."""
    if isinstance(stored, Tensor) and isinstance(content, Tensor) and content.numel():
        return layout_of(stored) == layout_of(content)
    return stored is content


def _meta(piece: Node, owner: Node | None) -> dict[str, Any]:
    meta = dict(piece.meta)
    for key in _FROM_OPERATOR:
        if owner is not None and not meta.get(key) and key in owner.meta:
            meta[key] = owner.meta[key]
    return meta


def put_in_order(program: GraphModule) -> None:
    """Sort a program's nodes, in place, so that each stands behind what it reads; others keep their order.

    What reads or writes memory that is written to keeps its order too.

    Raises:
        InternalError: nodes read one another in a circle.
    """
    nodes = list(program.graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    if all(
        position[operand] < position[node] for node in nodes for operand in node.all_input_nodes
    ):
        return
    sources = {node: set(node.all_input_nodes) for node in nodes}
    unsafe = unsafe_values(program.graph)
    touching = [n for n in nodes if any(v.name in unsafe for v in (n, *n.all_input_nodes))]
    for earlier, later in pairwise(touching):
        sources[later].add(earlier)
    output, ordered = program.graph.output_node(), list(_sorted(nodes, sources))
    if len(ordered) < len(nodes):
        raise InternalError("pieces of a transform read what reads them: the program has no order")
    for node in ordered:
        if node is not output:
            output.prepend(node)


def _sorted(nodes: list[Node], sources: dict[Node, set[Node]]) -> Iterable[Node]:
    """Yield nodes behind their sources, and otherwise in the order in which they stand."""
    position = {node: number for number, node in enumerate(nodes)}
    readers: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for source in sources[node]:
            readers[source].append(node)
    missing = {node: len(sources[node]) for node in nodes}
    ready = [position[node] for node in nodes if not missing[node]]
    while ready:
        node = nodes[heapq.heappop(ready)]
        yield node
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, position[reader])
