# SPDX-License-Identifier: Apache-2.0
"""What code of others did to a program: which operators it changed, and which names it lost.

A pass may return a new program for the one that it got. Nodes and attributes that are the same then get their
names back, so that later stages find them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from qompose.program.control_flow import body_of, graphs_in, nodes_in, references_of
from qompose.program.graph import (
    constant_of,
    example_of,
    get_attribute,
    layout_of,
    operator_name,
    result_on,
    set_attribute,
    value_of,
)
from qompose.program.meta import NAME_TAG, tag, tag_of, untag


@dataclass(frozen=True)
class _Reference:
    """An argument that is a node: by its name, or of a parameter or buffer by the tensor itself."""

    name: str
    tensor: object = None


@dataclass(frozen=True)
class Call:
    """What a node does, as values that compare across graphs; `live` tells whether results depend on it."""

    op: str
    target: object
    arguments: Any
    live: bool


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
    live = _live(model)
    return {
        node.name: Call(node.op, node.target, _arguments(node), node in live)
        for node in nodes_in(model)
        if node.op != "get_attr"
    }


def _live(model: GraphModule) -> set[Node]:
    """Return the nodes on which outputs depend, or that have an effect."""
    found: set[Node] = set()
    for node in reversed(list(nodes_in(model))):
        if node.op != "call_function" or node.is_impure() or not found.isdisjoint(node.users):
            found.add(node)
    return found


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


@dataclass(frozen=True)
class _Former:
    """What a node did before a transform, and an example of its value."""

    target: Any
    args: Any
    kwargs: Any
    value: Any


class Values:
    """Examples of a program's values, which a transform may not change.

    Later stages read shapes and dtypes from them, and callers know what the program returns.
    """

    def __init__(self, model: GraphModule) -> None:
        self._former = {
            node.name: _Former(node.target, node.args, node.kwargs, value_of(node))
            for node in nodes_in(model)
        }
        self._returned = [node.name for node in _returned(model)]

    def update(self, model: GraphModule) -> tuple[str, ...]:
        """Give new operators an example of their value, in place, and hold what is there to its own.

        A call whose result would be of another dtype reads again what it read: some transforms make a float
        tensor of each number, also of one that is added to integers.

        Returns:
            the names of those calls, and of values that are returned as they were.

        Raises:
            SignatureError: the program returns others, or what it returns has another dtype or shape.
        """
        nodes = {node.name: node for node in nodes_in(model)}
        kept = [n.name for n in nodes.values() if n.op == "call_function" and self._hold(n, nodes)]
        return (*kept, *self._hold_returned(model, nodes))

    def _hold(self, node: Node, nodes: Mapping[str, Node]) -> bool:
        """Give a call the example of its value, and tell whether it had to be put back for that."""
        former = self._former.get(node.name)
        now = node.target, node.args, node.kwargs
        if former is not None and now == (former.target, former.args, former.kwargs):
            return False
        found = _computed(node)
        if former is not None and not _alike(found, former.value):
            if self._put_back(node, former, nodes):
                return True
            node.meta["val"] = found  # another operator that bears the name
        elif value_of(node) is None and (found is not None or former is not None):
            node.meta["val"] = found if former is None else former.value
        return False

    def _put_back(self, node: Node, former: _Former, nodes: Mapping[str, Node]) -> bool:
        """Let a call be what it was, if all that it read is there, and gives its value again."""
        if any(read.name not in nodes for read in _read(former.args, former.kwargs)):
            return False
        given = node.target, node.args, node.kwargs
        node.target = former.target
        node.args, node.kwargs = map_arg(
            (former.args, former.kwargs), lambda read: nodes[read.name]
        )
        if _alike(_computed(node), former.value):
            return True
        node.target, node.args, node.kwargs = given
        return False

    def _hold_returned(self, model: GraphModule, nodes: Mapping[str, Node]) -> Iterator[str]:
        """Let the program return values of the dtypes and sizes that it returned, if they are still there."""
        output = model.graph.output_node()
        leaves, structure = pytree.tree_flatten(output.args[0])
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Node)]
        if len(places) != len(self._returned):
            raise SignatureError(
                "it returns numbers instead of tensors, or tensors instead of numbers"
            )
        for number, (was, place) in enumerate(zip(self._returned, places, strict=True)):
            now, alike = leaves[place], _alike(value_of(leaves[place]), self._former[was].value)
            moved = was in nodes and now.name != was and now.name in self._returned
            if moved:
                raise SignatureError(f"output {number} is {now.name}, expected {was}")
            if not (alike or was in nodes):
                raise SignatureError(
                    f"output {number} is now {now.name}, whose dtype or shape differs from {was}'s"
                )
            if not alike:
                leaves[place] = nodes[was]
                yield f"the returned {was}"
        output.args = (pytree.tree_unflatten(leaves, structure),)


def _returned(model: GraphModule) -> list[Node]:
    leaves = pytree.tree_leaves(model.graph.output_node().args[0])
    return [leaf for leaf in leaves if isinstance(leaf, Node)]


def _alike(one: object, other: object) -> bool:
    """Tell whether examples have the same dtype and sizes; where one is unknown, or a size is, they may."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return True
    sizes = zip(one.shape, other.shape, strict=False)
    known = [(a, b) for a, b in sizes if type(a) is int and type(b) is int]
    return (one.dtype, one.dim()) == (other.dtype, other.dim()) and all(a == b for a, b in known)


def _kind(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _read(*operands: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(operands, found.append)
    return found


def _computed(call: Node) -> Tensor | None:
    """Return an example of the tensor that a call gives, or None where examples do not tell."""
    like: Node | None = next((n for n in call.graph.nodes if isinstance(value_of(n), Tensor)), None)
    if like is None:
        return None

    constants = ((read, constant_of(read)) for read in call.all_input_nodes)
    known = {read: value_of(read) if c is None else example_of(c, like) for read, c in constants}
    result = result_on(call, {like: value_of(like), **known})
    return result if isinstance(result, Tensor) else None


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


def misplaced(model: GraphModule) -> tuple[Node, Node] | None:
    """Return a node that does not come behind one that it reads, and that one; None where all do."""
    known: set[Node] = set()
    for part in graphs_in(model):
        for node in part.graph.nodes:
            early = next((read for read in node.all_input_nodes if read not in known), None)
            if early is not None:
                return node, early
            known.add(node)
    return None


class SignatureError(Exception):
    """A program has other inputs or outputs than it had."""


@dataclass
class _Part:
    """A graph as it was: the program's, or that of a body."""

    codegen: Any
    inputs: list[tuple[str, Any]]
    output: str
    returned: Any
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
        last gets that, if it calls the same; other names are new, and none is in `known`. A graph made by
        `Graph.graph_copy`, which copies no output, returns what the program returned.

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
            raise SignatureError(f"found {len(inputs)} inputs, expected {len(part.inputs)}")
        if not graph.find_nodes(op="output"):
            _return_again(part, graph)
        returned, expected = (
            len(pytree.tree_leaves(v)) for v in (graph.output_node().args[0], part.returned)
        )
        if returned != expected:
            raise SignatureError(f"it returns {returned} outputs, expected {expected}")
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
                name, path, value = known.find(value, str(node.target))
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


def _return_again(part: _Part, graph: Graph) -> None:
    """Let a graph without an output node return the values that the program returned."""
    standing = {tag_of(node, NAME_TAG): node for node in graph.nodes}

    def found(leaf: Any) -> Any:
        if not isinstance(leaf, _Reference):
            return leaf
        if leaf.name not in standing:
            raise SignatureError(f"it has no output node, and no {leaf.name} to return")
        return standing[leaf.name]

    graph.output(pytree.tree_map(found, part.returned))


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
        returned=pytree.tree_map_only(Node, lambda node: _Reference(node.name), end.args[0]),
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

    def find(self, value: Any, path: str) -> tuple[str, str, Any]:
        """Return the name and the path by which a tensor was read, and the tensor that was there.

        Both are empty for what was not read, which is its own value. Of several tensors that hold the same
        numbers, a copy is that of the one at its own path.
        """
        if not isinstance(value, Tensor):
            return "", "", value
        key = identity_of(value)
        if key not in self._places:
            alike = [read for read in self._gone if _equal(value, read[2])]
            same = next((read for read in alike if read[1] == path), next(iter(alike), None))
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
