# SPDX-License-Identifier: Apache-2.0
"""The kinds and names of the nodes of an exported program."""

from __future__ import annotations

from typing import Any

import torch
from qompose.backend import arguments_of
from torch.fx import Node
from torch.fx.node import map_arg

QUANTIZE = "quantized_decomposed.quantize_"
DEQUANTIZE = "quantized_decomposed.dequantize_"
CHOOSE_QPARAMS = "quantized_decomposed.choose_qparams"


def operator_name(node: Node) -> str:
    """Return the name of a call's operator: ``aten.linear.default``."""
    schema = node.target._schema  # type: ignore[union-attr]
    return f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"


def module_path(node: Node) -> str:
    """Return the path of the module that an operator comes from, "" if it is not known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("L['self'].").removeprefix("L['self']") if stack else ""


def is_conversion(node: Node) -> bool:
    """Whether a node quantizes or dequantizes."""
    return hasattr(node.target, "_schema") and operator_name(node).startswith(
        (QUANTIZE, DEQUANTIZE)
    )


def is_computation(node: Node) -> bool:
    """Whether a node is an operator on tensors, rather than a conversion or bookkeeping."""
    return (
        node.op == "call_function"
        and hasattr(node.target, "_schema")
        and not operator_name(node).startswith((QUANTIZE, DEQUANTIZE, CHOOSE_QPARAMS))
        and isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    )


def has_prefix(node: Node, prefix: str) -> bool:
    """Whether the name of a node's operator starts with a prefix."""
    return str(node.target).startswith(prefix)


def writes(node: Node) -> bool:
    """Whether a node is a call that writes to an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


_aten = torch.ops.aten
_MOVES = (
    *(_aten.alias, _aten.detach, _aten.expand, _aten.permute, _aten.select, _aten.slice),
    *(_aten.squeeze, _aten.t, _aten.transpose, _aten.unsqueeze),
)


def keeps_strides(node: Node) -> bool:
    """Whether a node's values have to lie in memory as they do: views were recorded that fail otherwise."""
    return not node.meta["val"].is_contiguous() and _is_viewed(node)


def _is_viewed(node: Node) -> bool:
    return any(
        user.target is _aten.view.default
        or (getattr(user.target, "overloadpacket", None) in _MOVES and _is_viewed(user))
        for user in node.users
    )


def written_by(node: Node) -> list[Node]:
    """Return the arguments that a call writes to."""
    found = list[Node]()
    if writes(node):
        aliases = {a.name: a.alias_info for a in node.target._schema.arguments}  # type: ignore[union-attr]
        given = arguments_of(node).items()
        written = [v for name, v in given if (alias := aliases[name]) and alias.is_write]
        map_arg(written, found.append)
    return found


def has_known_sizes(value: torch.Tensor) -> bool:
    """Whether the sizes of a tensor are numbers, none of them 0."""
    return all(isinstance(size, int) and size > 0 for size in value.shape)


def add_before(node: Node, operator: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call before a node, as a part of it, with example values."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(operator, args, kwargs)
    given, named = map_arg((args, kwargs), lambda read: read.meta["val"])
    with node.meta["val"].fake_mode:
        value = operator(*given, **named)
    made.meta = {**node.meta, "val": value}
    return made
