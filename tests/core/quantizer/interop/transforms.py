# SPDX-License-Identifier: Apache-2.0
"""Transforms as foreign quantizers make them: in place, or as a new program under other names."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from qompose.program.graph import free_attribute, get_attribute, set_attribute
from qompose.program.meta import tag_of
from qompose.quantizer.interop.correspondence import STAMP
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

Transform = Callable[[GraphModule], GraphModule]


def insert(site: Node, target: Any, *args: Any, stamped: bool = True) -> Node:
    """Insert a call before a site; with the site's meta, or none."""
    with site.graph.inserting_before(site):
        node = site.graph.call_function(target, args)
    node.meta = dict(site.meta) if stamped else {}
    return node


def constant(module: GraphModule, site: Node, value: Tensor) -> Node:
    path = free_attribute(module, "_tensor_constant0")
    set_attribute(module, path, value)
    with module.graph.inserting_before(site):
        return module.graph.get_attr(path)


def replace(site: Node, value: Node) -> None:
    site.replace_all_uses_with(value)
    site.graph.erase_node(site)


def sites(module: GraphModule, *targets: Any) -> list[Node]:
    return [node for node in module.graph.nodes if node.target in targets]


def split_gelu(module: GraphModule, stamped: bool = True) -> GraphModule:
    """gelu(x) as x * 0.5 * (1 + erf(x / sqrt(2))), with a new constant."""
    for site in sites(module, aten.gelu.default):
        x = site.args[0]
        half = constant(module, site, torch.tensor(0.5))
        scaled = insert(site, aten.mul.Tensor, x, 2**-0.5, stamped=stamped)
        erf = insert(site, aten.erf.default, scaled, stamped=stamped)
        one = insert(site, aten.add.Tensor, erf, 1.0, stamped=stamped)
        weighted = insert(site, aten.mul.Tensor, x, half, stamped=stamped)
        replace(site, insert(site, aten.mul.Tensor, weighted, one, stamped=stamped))
    return module


def split_linear(module: GraphModule, stamped: bool = True) -> GraphModule:
    """linear(x, w, b) as matmul(x, w^T) + b; its parameters are read by its pieces."""
    for site in sites(module, aten.linear.default):
        x, weight, *bias = site.args
        across = insert(site, aten.permute.default, weight, [1, 0], stamped=stamped)
        product = insert(site, aten.matmul.default, x, across, stamped=stamped)
        if bias:
            product = insert(site, aten.add.Tensor, product, bias[0], stamped=stamped)
        replace(site, product)
    return module


def split_chunk(module: GraphModule, stamped: bool = True) -> GraphModule:
    """chunk(x, 2, 1) and its getitems as slices, for x of six columns."""
    half = 3
    for site in sites(module, aten.chunk.default):
        for item in list(site.users):
            start = item.args[1] * half  # type: ignore[operator]
            arguments = (site.args[0], 1, start, start + half)
            replace(item, insert(item, aten.slice.Tensor, *arguments, stamped=stamped))
        module.graph.erase_node(site)
    return module


def fuse_relu(module: GraphModule, stamped: bool = True) -> GraphModule:
    """relu(add(x, y)) as _add_relu(x, y), where nothing else reads the sum."""
    for site in sites(module, aten.relu.default):
        add = site.args[0]
        alone = isinstance(add, Node) and len(add.users) == 1 and add.target is aten.add.Tensor
        if alone and isinstance(add.args[1], Node):
            # stamped as the add, as passes do that keep the first of what they fuse
            replace(site, insert(add, aten._add_relu.Tensor, *add.args, stamped=stamped))
            module.graph.erase_node(add)
    return module


def drop_identities(module: GraphModule, stamped: bool = True) -> GraphModule:
    """Remove dropout, clone and multiplication by one."""
    for site in sites(module, aten.dropout.default, aten.clone.default):
        replace(site, site.args[0])  # type: ignore[arg-type]
    for site in sites(module, aten.mul.Tensor):
        if site.args[1] == 1.0:
            replace(site, site.args[0])  # type: ignore[arg-type]
    return module


def scalars_to_constants(module: GraphModule, stamped: bool = True) -> GraphModule:
    """x + 2.0 as x + constant."""
    for site in sites(module, aten.add.Tensor, aten.mul.Tensor):
        if isinstance(site.args[1], float):
            site.args = (site.args[0], constant(module, site, torch.tensor(site.args[1])))
    return module


def cast_edges(module: GraphModule, stamped: bool = True) -> GraphModule:
    """Put a clone on every other edge of additions: some readers of a value read it, others do not."""
    for site in sites(module, aten.add.Tensor)[::2]:
        site.replace_input_with(
            site.args[0],  # type: ignore[arg-type]
            insert(site, aten.clone.default, site.args[0], stamped=stamped),
        )
    return module


def cast_values(module: GraphModule, stamped: bool = True) -> GraphModule:
    """Put a pair of casts behind every softmax: all readers read the second."""
    for site in sites(module, aten.softmax.int):
        readers = list(site.users)
        wide = insert(site.next, aten.to.dtype, site, torch.float64, stamped=False)
        back = insert(site.next.next, aten.to.dtype, wide, torch.float32, stamped=False)
        for reader in readers:
            reader.replace_input_with(site, back)
        if stamped:
            wide.meta, back.meta = dict(site.meta), dict(site.meta)
    return module


def rebuild(
    module: GraphModule, unstamp: Callable[[Node], bool] = lambda node: False
) -> GraphModule:
    """Return a new program: no node survives, names are others, each read of a constant is a node.

    Args:
        unstamp: the nodes that come without a stamp.
    """
    new, graph, number = GraphModule({}, Graph()), Graph(), itertools.count()
    graph._codegen = module.graph._codegen
    copies: dict[Node, Node] = {}

    def read(node: Node) -> Node:
        if node.op != "get_attr":
            return copies[node]
        value = get_attribute(module, str(node.target))
        path = f"_param_constant{next(number)}"
        set_attribute(new, path, value)
        copy = graph.get_attr(path)
        copy.meta = dict(node.meta)
        return copy

    for node in module.graph.nodes:
        if node.op == "get_attr":
            continue
        kind = str(node.target).split(".")[-1]
        if node.op == "output":
            copy = graph.output(torch.fx.node.map_arg(node.args[0], read))
        else:
            copies[node] = copy = graph.node_copy(node, read)
            copy._rename(f"{kind}_{next(number)}")
        copy.meta = {} if unstamp(node) else dict(node.meta)
    new.graph = graph
    new.recompile()
    return new


def stamped_name(node: Node) -> str | None:
    name: str | None = tag_of(node, STAMP)
    return name


REWRITES: dict[str, Callable[..., GraphModule]] = {
    function.__name__: function
    for function in (
        split_gelu,
        split_linear,
        split_chunk,
        fuse_relu,
        drop_identities,
        scalars_to_constants,
        cast_edges,
        cast_values,
    )
}
"""Transforms in place; `stamped` says whether new operators carry the stamp of the one they replace."""
