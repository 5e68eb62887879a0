# SPDX-License-Identifier: Apache-2.0
"""Names of a program's nodes and attributes, given back to what a pass returned as a new program.

Passes that trace a program anew return one in which no node and no path of a parameter survives. Every
node bears its name while such code runs; whatever still calls the same operator gets it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from qompose.program.changes import identity_of
from qompose.program.control_flow import body_of, nodes_in, references_of
from qompose.program.graph import (
    example_of,
    get_attribute,
    operator_name,
    set_attribute,
    value_of,
)
from qompose.program.meta import NAME_TAG, tag, tag_of, untag


class SignatureError(Exception):
    """A program has other inputs or outputs than it had."""


@dataclass
class _Part:
    """A graph as it was: the program's, or that of a body."""

    codegen: Any
    inputs: list[tuple[str, Any]]
    output: str
    returned: int
    reads: list[tuple[str, str, Any]]
    targets: dict[str, object]
    bodies: dict[tuple[str, int], tuple[str, str, _Part]] = field(default_factory=dict)


class KeptNames:
    """The names of a program, whose nodes are marked in place with their own until `restored`."""

    def __init__(self, program: GraphModule) -> None:
        self._nodes = {node: node.name for node in nodes_in(program)}
        self._paths = {
            str(node.target) for node in self._nodes if node.op in ("get_attr", "call_module")
        }
        self._main = _part(program)
        self._taken: set[str] = set()
        for node, name in self._nodes.items():
            tag(node, **{NAME_TAG: name})

    def restored(self, result: GraphModule, known: Iterable[str] = ()) -> GraphModule:
        """Return what was made of the program with the names that the program had, and the marks taken away.

        Nodes that were there keep their names. Of those that are made of one operator, and bear its name, the
        last gets that, if it calls the same; other names are new, and none is in `known`.

        Raises:
            SignatureError: the inputs or the outputs are not those of the program.
        """
        self._taken = {*self._nodes.values(), *known}
        restored = self._restored(self._main, result)
        for node in nodes_in(restored):
            untag(node, NAME_TAG)
        return restored

    def _restored(self, part: _Part, result: GraphModule) -> GraphModule:
        graph = result.graph
        inputs = graph.find_nodes(op="placeholder")
        if len(inputs) != len(part.inputs):
            raise SignatureError(f"it has {len(inputs)} inputs, and had {len(part.inputs)}")
        returned = len(pytree.tree_leaves(graph.output_node().args[0]))
        if returned != part.returned:
            raise SignatureError(f"it returns {returned} values, and returned {part.returned}")
        names = {graph.output_node(): part.output}
        for node, (name, target) in zip(inputs, part.inputs, strict=True):
            names[node], node.target = name, target
        values = self._attributes(part, result, names)
        names |= {node: name for node, name in self._calls(part, graph) if node not in names}
        for node in graph.nodes:
            if node not in names:
                names[node] = self._new_name(node, part)
        for node, name in names.items():
            node.name = name
            graph._graph_namespace._rename_object(node, name)
        graph._codegen = part.codegen
        return _rebuilt(result, values)

    def _attributes(
        self, part: _Part, result: GraphModule, names: dict[Node, str]
    ) -> dict[str, Any]:
        """Let a graph read the tensors that the program read by its nodes and paths.

        Returns:
            what stands at each path that the graph reads.
        """
        bodies = {
            reference: (part.bodies.get((str(tag_of(call, NAME_TAG)), number)))
            for call in result.graph.nodes
            for number, reference in enumerate(references_of(call))
        }
        reads = [node for node in result.graph.nodes if node.op in ("get_attr", "call_module")]
        read = {node: get_attribute(result, str(node.target)) for node in reads}
        known = _Reads(part.reads, read.values())
        like = next((n for n in result.graph.nodes if value_of(n) is not None), None)
        values: dict[str, Any] = {}
        nodes: dict[str, Node] = {}
        for node, value in read.items():
            body = bodies.get(node)
            if body is not None:
                name, path, before = body
                value = self._restored(before, value)
            else:
                name, path, value = known.find(value)
            if node in self._nodes:  # it was there
                name, path = self._nodes[node], str(node.target)
            if nodes.setdefault(name or node.name, node) is not node:
                node.replace_all_uses_with(nodes[name or node.name])
                result.graph.erase_node(node)
                continue
            if name:
                names[node] = name
            if not path or values.get(path, value) is not value:
                path = self._free_path(str(node.target))
            node.target, values[path] = path, value
            if isinstance(value, Tensor) and value_of(node) is None and like is not None:
                node.meta["val"] = example_of(value, like)
        return values

    def _free_path(self, path: str) -> str:
        free = next(p for p in _numbered(path) if p not in self._paths)
        self._paths.add(free)
        return free

    def _calls(self, part: _Part, graph: Graph) -> Iterator[tuple[Node, str]]:
        """Yield the operators that are those of the program, with their names."""
        standing = {self._nodes[node] for node in graph.nodes if node in self._nodes}
        last: dict[str, Node] = {}
        for node in graph.nodes:
            mark = tag_of(node, NAME_TAG)
            if node in self._nodes:
                yield node, self._nodes[node]
            elif mark in part.targets and mark not in standing:
                last[mark] = node  # of its pieces, the one that gives its value
        for name, node in last.items():
            if node.target == part.targets[name]:
                yield node, name

    def _new_name(self, node: Node, part: _Part) -> str:
        """Return a name that nothing has or had; one that is taken gets that of what it is a piece of."""
        name, mark = node.name, tag_of(node, NAME_TAG)
        if name in self._taken and mark in part.targets:
            name = f"{mark}_{_short_name(node)}"
        free = next(n for n in _numbered(name) if n not in self._taken)
        self._taken.add(free)
        return free


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in count(1))


def _short_name(node: Node) -> str:
    """Return `mul` for aten.mul.Tensor."""
    if isinstance(node.target, torch._ops.OpOverload):
        name: str = node.target._schema.name
        return name.partition("::")[2]
    return operator_name(node.target).rpartition(".")[2]


def _part(program: GraphModule) -> _Part:
    graph = program.graph
    end = graph.output_node()
    part = _Part(
        codegen=graph._codegen,
        inputs=[(node.name, node.target) for node in graph.find_nodes(op="placeholder")],
        output=end.name,
        returned=len(pytree.tree_leaves(end.args[0])),
        reads=[
            (node.name, str(node.target), get_attribute(program, str(node.target)))
            for node in graph.nodes
            if node.op == "get_attr" and node.users
        ],
        targets={node.name: node.target for node in graph.nodes if node.op == "call_function"},
    )
    for call in graph.nodes:
        for number, reference in enumerate(references_of(call)):
            body = _part(body_of(reference))
            part.bodies[call.name, number] = (reference.name, str(reference.target), body)
    return part


class _Reads:
    """The tensors that a graph read: found again by themselves, or else by what is in them."""

    def __init__(self, reads: Iterable[tuple[str, str, Any]], values: Iterable[Any]) -> None:
        kept = [read for read in reads if isinstance(read[2], Tensor)]
        standing = {identity_of(value) for value in values if isinstance(value, Tensor)}
        self._places = {identity_of(read[2]): read for read in reversed(kept)}
        self._gone = [read for read in kept if identity_of(read[2]) not in standing]

    def find(self, value: Any) -> tuple[str, str, Any]:
        """Return the name and the path by which a tensor was read, and the tensor that was there.

        Both are empty for what was not read, which is its own value.
        """
        if not isinstance(value, Tensor):
            return "", "", value
        key = identity_of(value)
        if key not in self._places and not isinstance(value, nn.Parameter):
            same = next((read for read in self._gone if _equal(value, read[2])), None)
            if same is not None:
                self._gone.remove(same)
                self._places[key] = same
        found: tuple[str, str, Any] = self._places.get(key, ("", "", value))
        return found


def _equal(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and not one.is_meta and bool(torch.equal(one, other))


def _rebuilt(result: GraphModule, values: Mapping[str, Any]) -> GraphModule:
    """Return a module with the graph of `result`, and these attributes and no others."""
    root = nn.Module()
    for path, value in values.items():
        set_attribute(root, path, value)
    clean = _LazyGraphModule(root, result.graph, "GraphModule")
    clean.meta = dict(result.meta)
    clean.train(result.training)
    return clean
