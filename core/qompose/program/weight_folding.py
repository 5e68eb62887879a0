# SPDX-License-Identifier: Apache-2.0
"""Folding weights that a program computes from its parameters alone.

Slices of one parameter, transposes, norms and standardisations of weights, sums with low-rank products:
whatever the inputs are, they come to the same values, and rules take such a weight once it is a parameter.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qompose.program.aliasing import written_buffers
from qompose.program.control_flow import nodes_in
from qompose.program.graph import (
    constant_of,
    describe,
    example_of,
    free_attribute,
    is_float_tensor,
    set_attribute,
    value_of,
)

aten = torch.ops.aten
PRODUCTS: dict[Any, tuple[int, int, int | None]] = {
    aten.addmm.default: (1, 2, 0),
    aten.mm.default: (0, 1, None),
    aten.matmul.default: (0, 1, None),
}
"""Products that are linear layers where the second factor is a matrix of parameters: the positions of input,
weight (inputs x outputs) and bias.
"""


def computed_values(module: GraphModule) -> frozenset[Node]:
    """Return what a program and its bodies compute from nothing but parameters, buffers and numbers."""
    found: set[Node] = set()
    for node in nodes_in(module):
        if _is_pure(node) and all(n in found or _is_constant(n) for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_constant(node: Node) -> bool:
    return constant_of(node) is not None


def _expression(value: Node) -> list[Node] | None:
    """Return the nodes that lead to a value, in graph order; None where they read or change anything else."""
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        if not _is_constant(node) and not _is_pure(node):
            return None
        found.add(node)
        waiting += node.all_input_nodes
    return [node for node in value.graph.nodes if node in found]


def _is_pure(node: Node) -> bool:
    """Tell whether a call gives the same tensors for the same arguments, and does nothing else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return getattr(target, "__name__", "") == "getitem"
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    known = all(isinstance(size, int) for size in getattr(node.meta.get("val"), "shape", ()))
    return known and not seeded and not target._schema.is_mutable


def obstacle_of_weight(weight: Node) -> str | None:
    """Return why what a weight is computed from is not the same in every call, None where it is."""
    written = written_buffers(weight.graph)
    reads = [str(node.target) for node in _expression(weight) or () if node.op == "get_attr"]
    return next((f"the program writes to {path}" for path in reads if path in written), None)


def evaluated(value: Node) -> Tensor:
    """Return what a parameter, or a value computed from parameters alone, is in every call: a copy."""
    values: dict[Node, Any] = {}
    with torch.no_grad():
        for node in _expression(value) or [value]:
            constant = constant_of(node)
            if constant is not None:
                values[node] = constant.detach()
                continue
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        result: Tensor = values[value].clone(memory_format=torch.contiguous_format)
    return result


def read_by(node: Node) -> list[Node]:
    """Return what an operator's weight and bias, or a product's factors, are computed from; see `drop`."""
    found = [_expression(argument) or [] for argument in node.all_input_nodes]
    return [part for expression in found for part in expression]


def drop(unread: Iterable[Node]) -> None:
    """Remove those of some nodes that nothing reads any more, and then those that they alone have read."""
    waiting = list(unread)
    while waiting:
        node = waiting.pop()
        if not node.users and not node._erased:
            waiting += node.all_input_nodes
            node.graph.erase_node(node)


def fold_weight(module: GraphModule, node: Node) -> tuple[str, ...]:
    """Let an operator read its weight, and its bias if that is computed too, as parameters of their own."""
    arguments = list(node.args)
    for position, argument in enumerate(arguments[1:3], 1):
        if isinstance(argument, Node) and not _is_constant(argument) and _expression(argument):
            arguments[position] = _kept(module, node, evaluated(argument))
    node.args = tuple(arguments)
    return (node.name,)


def _kept(module: GraphModule, node: Node, value: Tensor) -> Node:
    path = free_attribute(module, "_weight_0")
    set_attribute(module, path, value)
    with module.graph.inserting_before(node):
        read = module.graph.get_attr(path)
    read.meta["val"] = example_of(value, node)
    return read


def is_product(node: Node, computed: Container[Node]) -> bool:
    """Tell whether a call multiplies rows by a matrix of parameters, or by one of `computed_values`."""
    if node.target not in PRODUCTS:
        return False
    x, weight, bias = _factors(node)
    matrix = is_float_tensor(weight) and (_is_constant(weight) or weight in computed)
    if not matrix or value_of(weight).dim() != 2 or not is_float_tensor(x) or value_of(x).dim() < 2:
        return False
    return bias is None or value_of(bias).dim() == 1


def obstacle_of_product(node: Node) -> str | None:
    """Return why a product is no linear layer after all, None where it is one."""
    factors = [name for name in ("beta", "alpha") if node.kwargs.get(name, 1) != 1]
    if factors:
        return f"{describe(node)} has a factor, {factors[0]}={node.kwargs[factors[0]]}"
    return obstacle_of_weight(_factors(node)[1])


def product_to_linear(module: GraphModule, node: Node) -> tuple[str, ...]:
    """Let a product be the linear layer that it is, its weight transposed."""
    x, weight, bias = _factors(node)
    transposed = _kept(module, node, evaluated(weight).t().contiguous())
    node.target, node.kwargs = aten.linear.default, {}
    node.args = (x, transposed) if bias is None else (x, transposed, bias)
    return (node.name,)


def _factors(node: Node) -> tuple[Any, Any, Any]:
    x, weight, bias = PRODUCTS[node.target]
    return node.args[x], node.args[weight], None if bias is None else node.args[bias]
