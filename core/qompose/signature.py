# SPDX-License-Identifier: Apache-2.0
"""How a GraphModule is called, recovered from its own graph: argument tree, shapes, dynamic dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.backend import CallSignature
from qompose.graph import pytree_info, value_of
from qompose.input_checks import as_linear


def call_signature(module: GraphModule) -> CallSignature:
    """Return example inputs of the recorded shapes, with zeros for data, and the dynamic dimensions.

    A dimension that is a linear function of another, `2 * batch + 1`, stays tied to it. One that is
    computed otherwise, or from two others, is left for export to find.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    dims: dict[str, Any] = {}
    leaves = [_example(node) for node in placeholders]
    shapes = [_dynamic_dims(node, dims) for node in placeholders]
    info = pytree_info(module.graph)
    if info is None or info.in_spec is None:
        return CallSignature(tuple(leaves), {}, tuple(shapes) if any(shapes) else None)
    args, kwargs = pytree.tree_unflatten(leaves, info.in_spec)
    if not any(shapes):
        return CallSignature(tuple(args), kwargs, None)
    shape_args, shape_kwargs = pytree.tree_unflatten(shapes, info.in_spec)
    named = dict(zip(info.orig_args, shape_args, strict=False))
    return CallSignature(tuple(args), kwargs, {**named, **shape_kwargs})


def _example(node: Node) -> Any:
    value = value_of(node)
    if isinstance(value, Tensor):
        return torch.zeros(
            [_hint(size) for size in value.shape], dtype=value.dtype, device=value.device
        )
    return _hint(value)


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _dynamic_dims(node: Node, dims: dict[str, Any]) -> Any:
    value = value_of(node)
    if isinstance(value, torch.SymInt):
        return Dim.DYNAMIC  # an input that is a number itself; torch takes no range for those
    if not isinstance(value, Tensor):
        return None
    sizes: list[Any] = list(value.shape)
    return {i: _dim(s, dims) for i, s in enumerate(sizes) if isinstance(s, torch.SymInt)} or None


def _dim(size: torch.SymInt, dims: dict[str, Any]) -> Any:
    """Return one Dim per symbol, with its range, and a derived one for a linear function of a symbol."""
    linear = as_linear(size.node.expr)
    if linear is None:
        return Dim.AUTO
    symbol, factor, offset = linear
    root = _root(symbol, size.node.shape_env, dims)
    scaled = root if factor == 1 else factor * root
    return scaled if offset == 0 else scaled + offset


def _root(symbol: Any, env: Any, dims: dict[str, Any]) -> Any:
    name = str(symbol)
    if name not in dims:
        bounds = env.bound_sympy(symbol)
        upper = int(bounds.upper) if bounds.upper.is_Integer else None
        dims[name] = Dim(name, min=int(bounds.lower) or None, max=upper)
    return dims[name]
