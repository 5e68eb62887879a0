# SPDX-License-Identifier: Apache-2.0
"""Who reads the tensor of a group: what an observer goes by that chooses ranges by the error of readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.fx import Node

from qompose.algorithms.products import channel_dim, groups_of, product_node
from qompose.observers.auto_range import VALUES, AutoRangeObserver, Reader
from qompose.plan.plan import Group
from qompose.program.batch_norm_folding import TRANSPOSED
from qompose.program.graph import constant_of, value_of
from qompose.spec.claim import Claim, Point


def tell_readers(
    observer: AutoRangeObserver, group: Group, claims: Sequence[Claim], nodes: Mapping[str, Node]
) -> None:
    """Tell an observer which of its group's tensors to keep rows of, and who reads that one.

    It is one that a product reads, or gives; else the one with the most channels. Nobody is named where its
    rows could not be told from those of another producer's tensor, such as one that it is concatenated with,
    and where all its sizes are open.
    """
    members = [claims[number] for number in group.claims]
    products = [(claim, product_node(claim, nodes)) for claim in members]
    read = [node for _, node in products if node is not None and _reads(node, group)]
    given = {
        claim.output: node
        for claim, node in products
        if node is not None and Point(claim.output) in group.points
    }
    widest = max(read, key=_inputs, default=None)
    source = _source(widest) if widest else nodes[next(iter(given), _widest(group, nodes))]
    value = value_of(source)
    if not isinstance(value, Tensor) or not value.dim():
        return
    readers = [node for node in read if node.args[0] is source]
    one = (*readers, *(node for output, node in given.items() if output == source.name))
    observer.channel_dim = _dim(one[0]) if one else _last_known(value)
    if group.balance is not None:
        observer.channel_dim = group.balance.dim
    size = value.shape[observer.channel_dim]
    observer.channels = size if isinstance(size, int) else None
    several = len(_producers(members, group, nodes)) > 1
    if observer.channels is None or (several and not _is_apart(source, observer, group, nodes)):
        observer.readers = ()
        return
    others = {*source.users} - {*readers}
    observer.readers = [*map(_reader, readers), *([VALUES] if others or not readers else [])]


def _producers(members: Sequence[Claim], group: Group, nodes: Mapping[str, Node]) -> set[str]:
    """Return the tensors of a group that no operator makes of others of them, as a view or a pool does."""
    sources = {point.source for point in group.points}
    made = {
        claim.output
        for claim in members
        if product_node(claim, nodes) is None
        and any(spec.point.user and spec.point.source in sources for spec in claim.specs)
    }
    return sources - made


def _is_apart(
    source: Node, observer: AutoRangeObserver, group: Group, nodes: Mapping[str, Node]
) -> bool:
    """Tell whether no other tensor of a group has as many channels as the one whose rows are kept."""
    dim = observer.channel_dim
    others = {point.source for point in group.points} - {source.name}
    shapes = [value_of(nodes[name]).shape for name in others]
    return not any(observer.channels in shape[dim:][:1] for shape in shapes)


def _last_known(value: Tensor) -> int:
    """Return the last dimension whose size is not open, or the last one."""
    last = value.dim() - 1
    return next((d for d in range(last, -1, -1) if isinstance(value.shape[d], int)), last)


def _inputs(product: Node) -> int:
    """Return how many channels a product reads."""
    return _reader(product).channels or 0


def _source(product: Node) -> Node:
    source = product.args[0]
    assert isinstance(source, Node)
    return source


def _reads(node: Node, group: Group) -> bool:
    """Tell whether a product reads a tensor of a group, and its weight is a parameter."""
    source, weight = node.args[0], node.args[1]
    if not isinstance(source, Node) or not isinstance(weight, Node) or constant_of(weight) is None:
        return False
    return not {Point(source.name), Point(source.name, node.name)}.isdisjoint(group.points)


def _dim(node: Node) -> int:
    weight = node.args[1]
    assert isinstance(weight, Node)
    return channel_dim(node, weight)


def _reader(node: Node) -> Reader:
    weight = node.args[1]
    assert isinstance(weight, Node)
    return Reader(constant_of(weight), groups_of(node), node.target in TRANSPOSED)


def _widest(group: Group, nodes: Mapping[str, Node]) -> str:
    """Name the tensor of a group that has the most channels, of equals the first."""

    def width(name: str) -> int:
        value = value_of(nodes[name])
        last = value.shape[-1] if isinstance(value, Tensor) and value.dim() else 0
        return last if isinstance(last, int) else 0

    return max((point.source for point in group.points), key=width)
