# SPDX-License-Identifier: Apache-2.0
"""Which values of a graph share memory, so that an in-place write to one changes the others.

A quantized tensor reaches its readers through copies, so a write to one of its names would be lost on the
others. `y.relu_()` whose result is read is harmless; `y[:, :2] = 0` with a later read of `y` is not, and
neither is a write to an input or a buffer. Bodies of `no_grad` and autocast regions write to the operands
of their calls; some operators write without saying so in their schema.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten
Item = TypeVar("Item", bound=Hashable)
_RUNNING_STATISTICS = (3, 4, 5)
"""Where normalisations have what they update, and the argument that says that they do."""
_UNSAID = {aten.batch_norm.default, aten.instance_norm.default}
_RETURNED = frozenset(
    {
        aten.dropout.default,
        aten.alpha_dropout.default,
        aten.feature_dropout.default,
        aten.feature_alpha_dropout.default,
        aten.type_as.default,
        aten.to_dense.default,
        aten.conj_physical.default,
        aten.atleast_1d.default,
        aten.atleast_2d.default,
        aten.atleast_3d.default,
        aten.atleast_1d.Sequence,
        aten.atleast_2d.Sequence,
        aten.atleast_3d.Sequence,
        aten.broadcast_tensors.default,
        aten.meshgrid.default,
        aten.meshgrid.indexing,
        aten.cartesian_prod.default,
        aten.sum_to_size.default,
        aten.linalg_diagonal.default,
        aten.unsafe_chunk.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten._unsafe_view.default,
    }
)
"""What may give back its first argument, or views of it, and does not say so in its schema."""


class DisjointSets(Generic[Item]):
    """A partition of items into sets, each of which is named by one of its items (union-find).

    networkx has one too, and takes a third of a second to import.
    """

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._parent: dict[Item, Item] = {item: item for item in items}

    def __contains__(self, item: Item) -> bool:
        return item in self._parent

    def __iter__(self) -> Iterator[Item]:
        return iter(self._parent)

    def find(self, item: Item) -> Item:
        """Return the name of an item's set; an item that is new has a set of its own."""
        root = self._parent.setdefault(item, item)
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[item] != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, one: Item, other: Item) -> None:
        """Put the sets of two items together, under the name of the other's."""
        self._parent[self.find(one)] = self.find(other)


def unsafe_values(graph: Graph) -> frozenset[str]:
    """Return the names of values that share memory with one that is written and then read elsewhere."""
    memory = Memory(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    unsafe: set[str] = set()
    for root, writers in memory.writers.items():
        members = memory.members[root]
        stale = any(_reads_stale(writer, members, position) for writer in writers)
        if stale or any(node.op in ("placeholder", "get_attr") for node in members):
            unsafe.update(node.name for node in members)
    return frozenset(unsafe)


def written_buffers(graph: Graph) -> frozenset[str]:
    """Return the attribute paths of the buffers that a program writes to, under any of their names."""
    memory = Memory(graph)
    return frozenset(
        str(node.target)
        for root in memory.writers
        for node in memory.members[root]
        if node.op == "get_attr"
    )


def inputs_written(graph: Graph) -> list[int]:
    """Return the places, among all placeholders, of the inputs to whose memory a program writes."""
    memory = Memory(graph)
    inputs = enumerate(graph.find_nodes(op="placeholder"))
    return [place for place, node in inputs if memory.find(node) in memory.writers]


def buffers_written_by(graph: Graph) -> dict[Node, str]:
    """Return the calls that write to buffers of floats, each with the path of the buffer."""
    memory, found = Memory(graph), dict[Node, str]()
    for root, writers in memory.writers.items():
        for node in memory.members[root]:
            value = _attribute(node)
            if isinstance(value, Tensor) and value.is_floating_point():
                found |= dict.fromkeys(writers, str(node.target))
    return found


def read_before_written(graph: Graph) -> frozenset[str]:
    """Return the paths of written buffers of which the initial values count.

    They are read, or changed, before something that depends on an input is written to them.
    """
    memory, varying = Memory(graph), set[Node]()
    for node in graph.nodes:
        if node.op == "placeholder" or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    found: set[str] = set()
    for root, writers in memory.writers.items():
        members = {*memory.members[root]}
        paths = {str(node.target) for node in members if node.op == "get_attr"}
        if paths and _counts(members, writers, varying):
            found |= paths
    return frozenset(found)


def _counts(members: set[Node], writers: list[Node], varying: set[Node]) -> bool:
    """Tell whether the initial value of a memory is seen, by its first reader that is no view of it."""
    graph = next(iter(members)).graph
    for node in graph.nodes:
        if members.isdisjoint(node.all_input_nodes) or (node in members and node not in writers):
            continue
        written = {*node.all_input_nodes} - members
        return node not in writers or varying.isdisjoint(written)
    return False


def written_values(graph: Graph) -> frozenset[str]:
    """Return the names of the values in whose memory something is written."""
    memory = Memory(graph)
    return frozenset(node.name for root in memory.writers for node in memory.members[root])


def why_not_alone(writer: Node, buffer: Node, memory: Memory | None = None) -> str | None:
    """Return why a call is not the one that writes to a buffer before all that read it; None where it is.

    Args:
        memory: of the graph, for who asks about several calls.
    """
    memory = Memory(writer.graph) if memory is None else memory
    root = memory.find(buffer)
    members, writers = {*memory.members[root]}, memory.writers.get(root, [])
    holders = (n for n in members if n.op in ("get_attr", "placeholder") and n.users)
    names = {str(node.target) for node in holders}
    if len(names) > 1:
        return f"{' and '.join(sorted(names))} share memory"
    if writer not in writers:
        return f"{writer.name} does not write to {buffer.target}"
    if len(writers) > 1:
        others = ", ".join(node.name for node in writers if node is not writer)
        return f"{others} writes to {buffer.target} too"
    readers = (node for node in writer.graph.nodes if members & {*node.all_input_nodes})
    early = next(readers)  # the first in the graph; `writer` is one of them
    return None if early is writer else f"{early.name} reads {buffer.target} before it is written"


class Memory:
    """The values of a graph grouped by the memory they share, and what writes to each group.

    Attributes:
        members: by one value of each group, all of it in graph order.
        writers: by the same value, the calls that write; groups that nothing writes to are left out.
    """

    def __init__(self, graph: Graph) -> None:
        self._shared: DisjointSets[Node] = DisjointSets(graph.nodes)
        storages: dict[int, Node] = {}
        for node in graph.nodes:
            for other in aliased(node):
                self._shared.join(node, other)
            storage = _storage(node)
            if storage is not None:
                self._shared.join(node, storages.setdefault(storage, node))
        self.members: dict[Node, list[Node]] = defaultdict(list)
        self.writers: dict[Node, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            self.members[self.find(node)].append(node)
            for root in dict.fromkeys(self.find(written) for written in _written(node)):
                self.writers[root].append(node)

    def find(self, node: Node) -> Node:
        """Return the value that stands for a value's group."""
        return self._shared.find(node)


def _storage(node: Node) -> int | None:
    """Return the address of what a get_attr node reads, None for other nodes and for empty tensors."""
    value = _attribute(node)
    return value.untyped_storage().data_ptr() or None if isinstance(value, Tensor) else None


def _attribute(node: Node) -> Any:
    value: Any = node.graph.owning_module if node.op == "get_attr" else None
    for name in str(node.target).split(".") if value is not None else ():
        value = getattr(value, name, None)
    return value


def _arguments(node: Node) -> Iterator[tuple[Any, Node]]:
    """Yield (alias facts of the schema, argument) of a call."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return
    for i, argument in enumerate(schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if argument.alias_info is not None and isinstance(item, Node):
                yield argument.alias_info, item


def aliased(node: Node) -> Iterator[Node]:
    """Yield the arguments whose memory a call's value shares, or to which the call writes."""
    for _, value in _arguments(node):
        yield value
    yield from _given_back(node)
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], Node):
        yield node.args[0]
    for operand, _ in _touched_by_body(node):
        yield operand


def _given_back(node: Node) -> Iterator[Node]:
    """Yield the arguments that a call may give back, or views of them, where its schema does not say so."""
    if node.op != "call_function":
        return
    if node.target in _RETURNED:
        leaves = pytree.tree_leaves(node.args[:1])
        yield from (value for value in leaves if isinstance(value, Node))
    if node.target is aten.einsum.default and len(node.all_input_nodes) == 1:
        yield from node.all_input_nodes  # without a product, which permutes and takes diagonals


def _written(node: Node) -> Iterator[Node]:
    """Yield the arguments to whose memory a call writes."""
    for alias, value in _arguments(node):
        if alias.is_write:
            yield value
    unsaid = node.op == "call_function" and node.target in _UNSAID
    first, second, flag = _RUNNING_STATISTICS
    if unsaid and node.args[flag] is True:
        yield from (a for a in (node.args[first], node.args[second]) if isinstance(a, Node))
    for operand, written in _touched_by_body(node):
        if written:
            yield operand


def _touched_by_body(node: Node) -> Iterator[tuple[Node, bool]]:
    """Yield the operands that a region's body writes to or gives back, and whether it writes.

    Those are `no_grad` and autocast regions, which take the body and then its operands one by one. Bodies of
    control flow do neither: torch refuses them.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return
    bodies = [
        place
        for place, argument in enumerate(node.args)
        if isinstance(argument, Node) and isinstance(_attribute(argument), GraphModule)
    ]
    if len(bodies) != 1:
        return
    body = _attribute(node.args[bodies[0]])  # type: ignore[arg-type]
    memory = Memory(body.graph)
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    returned = {memory.find(n) for n in body.graph.output_node().all_input_nodes}
    operands = node.args[bodies[0] + 1 :]
    for operand, placeholder in zip(operands, placeholders, strict=False):
        root = memory.find(placeholder)
        if isinstance(operand, Node) and (root in memory.writers or root in returned):
            yield operand, root in memory.writers


def _reads_stale(writer: Node, members: list[Node], position: dict[Node, int]) -> bool:
    """Tell whether a value from before a write is read after it, other than by the write itself."""
    before = [node for node in members if position[node] < position[writer]]
    return any(position[user] > position[writer] for node in before for user in node.users)
