# SPDX-License-Identifier: Apache-2.0
"""Names that mean the same place in a transformed program as in the one that it was made from.

What did not change, and what stands for the value of an operator, has its name; every other operator is
called after the one that it is a piece of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from qompose.program.control_flow import nodes_in
from qompose.program.graph import operator_name
from qompose.program.meta import ANNOTATION_KEY, tag_of
from qompose.quantizer.interop.comparing import Constants, content_of, is_call
from qompose.quantizer.interop.correspondence import STAMP, Correspondence
from qompose.quantizer.interop.references import Redirected, follow_references
from qompose.quantizer.interop.regions import Region


def give_names(found: Correspondence, regions: Iterable[Region]) -> dict[Node, str]:
    """Rename the nodes of the transformed program, in place, and let it read parameters as the other does.

    A parameter that the other program reads by one node is read by one here, and one that it reads by two
    by two. What only this program reads, each region reads for itself.

    Returns:
        the operator, or other value, of the first program that each piece is called after.
    """
    regions = list(regions)
    owners = {piece: owner for region in regions for piece, owner in _owners(region, found)}
    redirected: Redirected = {}
    homes = {node: region for region in regions for node in region.after}
    reads = _follow_reads(found, homes, redirected)
    _own_constants(found, owners, {*reads.values()}, redirected)
    follow_references(found.after.graph, redirected)
    names = {other: one.name for one, other in (*found.after_of.items(), *reads.items())}
    names[found.after.graph.output_node()] = found.before.graph.output_node().name
    _name_rest(found, names, owners)
    for node, name in names.items():
        set_name(node, name)
    for one, other in reads.items():
        _name_bodies(content_of(one), content_of(other))
    return owners


def set_name(node: Node, name: str) -> None:
    """Give a node a name that nothing in its graph has now, though something may have had it before."""
    node.name = name
    node.graph._graph_namespace._rename_object(node, name)


def _owners(region: Region, found: Correspondence) -> Iterator[tuple[Node, str]]:
    """Yield each operator of a region with the operator that it is a piece of: that of its stamp, if any.

    An operator without one belongs where its first reader does.
    """
    known = {other: one.name for one, other in region.pairs}
    names = {node.name for node in region.before}
    otherwise = region.before[-1].name if region.before else found.before.graph.output_node().name
    for node in reversed(region.after):
        mark = tag_of(node, STAMP)
        if node not in known:
            ahead = (known[user] for user in node.users if user in known)
            known[node] = mark if mark in names else next(ahead, otherwise)
        yield node, known[node]


def _redirect(reader: Node, old: Node, new: Node, redirected: Redirected) -> None:
    """Let an operator read a constant by another node, and its annotation speak of that."""
    reader.replace_input_with(old, new)
    edges = getattr(reader.meta.get(ANNOTATION_KEY), "input_qspec_map", None)
    if isinstance(edges, dict) and old in edges:
        edges[new] = edges.pop(old)
    redirected[old, reader] = (new, reader)
    if not old.users:
        redirected[old] = new
        if ANNOTATION_KEY in old.meta:
            new.meta.setdefault(ANNOTATION_KEY, old.meta[ANNOTATION_KEY])


def _follow_reads(
    found: Correspondence, homes: Mapping[Node, Region], redirected: Redirected
) -> dict[Node, Node]:
    """Return the nodes that read the first program's constants, by its own, after redirecting readers."""
    reads: dict[Node, Node] = {}
    constants = Constants(found.before)
    wanted = [
        (node, one, other)
        for node in found.after.graph.nodes
        for one, other in _constants_of(node, found, homes.get(node), constants)
    ]
    for node, one, other in wanted:
        if one not in reads:
            reads[one] = other if other not in reads.values() else _read_again(other)
        if reads[one] is not other:
            _redirect(node, other, reads[one], redirected)
    _follow_unread(found, reads, redirected)
    return reads


def _follow_unread(found: Correspondence, reads: dict[Node, Node], redirected: Redirected) -> None:
    """Pair constants that neither program uses; drop others that nothing reads, or reads any more."""
    theirs = [n for n in found.before.graph.nodes if n.op == "get_attr" and not n.users]
    for node in list(found.after.graph.nodes):
        if node.op != "get_attr" or node.users:
            continue
        twins = (one for one in theirs if one not in reads and found.same(one, node))
        one = None if node in redirected else next(twins, None)
        if one is None:
            found.after.graph.erase_node(node)
        else:
            reads[one] = node


def _constants_of(
    node: Node, found: Correspondence, home: Region | None, constants: Constants
) -> Iterator[tuple[Node, Node]]:
    """Yield what a node reads of the first program's constants: the node there, and the one here."""
    operands = [operand for operand in node.all_input_nodes if operand.op == "get_attr"]
    if home is not None or node.op == "output":
        own = home.before if home else [found.before.graph.output_node()]
        theirs = [read for one in own for read in one.all_input_nodes]
        for operand in operands:
            same = (read for read in theirs if found.same(read, operand))
            one = next(same, None) or constants.find(operand)
            if one is not None:
                yield one, operand
    elif is_call(node):
        pairs = zip(
            found.spelled(found.before_of[node]).operands, found.spelled(node).operands, strict=True
        )
        yield from ((one, other) for one, other in pairs if other in operands)


def _read_again(read: Node) -> Node:
    """Return another node that reads the same."""
    with read.graph.inserting_before(read):
        copy = read.graph.get_attr(str(read.target))
    copy.meta = dict(read.meta)
    return copy


def _own_constants(
    found: Correspondence, owners: dict[Node, str], known: set[Node], redirected: Redirected
) -> None:
    """Let the pieces of every operator read new constants by nodes of their own."""
    for read in list(found.after.graph.nodes):
        if read.op != "get_attr" or read in known:
            continue
        readers = {user: owners.get(user, user.name) for user in read.users}
        owners[read], *others = dict.fromkeys(readers.values())
        for owner in others:
            copy = _read_again(read)
            owners[copy] = owner
            for user in [user for user in readers if readers[user] == owner]:
                _redirect(user, read, copy, redirected)


def _name_rest(found: Correspondence, names: dict[Node, str], owners: Mapping[Node, str]) -> None:
    taken = {node.name for node in nodes_in(found.before)}
    for node in found.after.graph.nodes:
        if node in names:
            continue
        base = candidate = f"{owners[node]}_{_short_name(node)}"
        number = 0
        while candidate in taken:
            number += 1
            candidate = f"{base}_{number}"
        taken.add(candidate)
        names[node] = candidate


def _short_name(node: Node) -> str:
    """Return `mul` for aten.mul.Tensor, `constant0` for an attribute `_tensor.constant0`."""
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.partition("::")[2]
    else:
        name = str(node.target) if node.op == "get_attr" else operator_name(node.target)
    return re.sub(r"\W", "_", name.rpartition(".")[2]).strip("_") or node.op


def _name_bodies(one: object, other: object) -> None:
    """Give the nodes of an unchanged body, and of those inside it, the names that they had."""
    if not isinstance(one, GraphModule) or not isinstance(other, GraphModule) or one is other:
        return
    for first, second in zip(one.graph.nodes, other.graph.nodes, strict=True):
        set_name(second, first.name)
        if first.op == "get_attr":
            _name_bodies(content_of(first), content_of(second))
    other.recompile()
