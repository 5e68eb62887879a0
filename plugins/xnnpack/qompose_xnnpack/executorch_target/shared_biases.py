# SPDX-License-Identifier: Apache-2.0
"""Biases that several operators share, of which XNNPACK's serializer writes only one integer form."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from qompose.backend import graphs_in
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose_xnnpack.executorch_target.executorch_imports import quiet


def with_own_biases(graph: GraphModule) -> GraphModule:
    """Return `graph` with a bias of its own for every operator that shares one; weights stay shared.

    An int8 operator adds its bias in steps of input scale times weight scale. The serializer (executorch
    1.5.1) writes these integers once per tensor, in the steps of whichever operator comes first, so that
    an operator with other steps would add wrong numbers.

    `graph` is not changed: if biases are shared, the result is a copy around the same tensors.
    """
    if not list(_shared(graph)):
        return graph
    tensors = (*graph.parameters(), *graph.buffers())
    with quiet():  # a graph that was exported holds tree specifications
        result = copy.deepcopy(graph, {id(tensor): tensor for tensor in tensors})
    for part, node, read in list(_shared(result)):
        _copy_bias(part, node, read)
    return result


def _shared(graph: GraphModule) -> Iterator[tuple[GraphModule, Node, Node]]:
    """Yield each operator whose bias has other readers: the graph it is in, itself, and the bias."""
    found = [
        (part, read)
        for part in graphs_in(graph)
        for read in part.graph.nodes
        if read.op == "get_attr" and isinstance(_value(part, read), Tensor)
    ]
    readers: Counter[int] = Counter()
    for part, read in found:
        readers[id(_value(part, read))] += len(read.users)
    for part, read in found:
        if readers[id(_value(part, read))] > 1:
            users: list[Node] = [user for user in read.users if _bias(user) is read]
            yield from ((part, user, read) for user in users)


def _bias(node: Node) -> object:
    """Return what an operator reads as its bias; None where it has none."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    name = "self" if node.target is torch.ops.aten.addmm.default else "bias"
    if name not in names:
        return None
    place = names.index(name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _copy_bias(part: GraphModule, node: Node, read: Node) -> None:
    """Let an operator read a copy of its bias."""
    name = f"{str(read.target).replace('.', '_')}_of_{node.name}"
    while hasattr(part, name):
        name += "_"
    part.register_buffer(name, _value(part, read).detach().clone())
    with part.graph.inserting_before(node):
        own = part.graph.get_attr(name)
    own.meta = dict(read.meta)
    node.replace_input_with(read, own)
    part.recompile()


def _value(part: GraphModule, read: Node) -> Any:
    """Return what a `get_attr` node reads: an attribute of the module or of one inside it."""
    value: Any = part
    for name in str(read.target).split("."):
        value = getattr(value, name)
    return value
