# SPDX-License-Identifier: Apache-2.0
"""Operators that stand in a graph until Inductor's own passes are through, with what replaces them then.

``conv2d_sum`` is functional. oneDNN's operator for it overwrites the tensor that it adds to, so it can be put
only once Inductor has planned who reads that tensor last; elsewhere it gets a copy.

``unchanged`` keeps Inductor's patterns from oneDNN's operators in a graph that is frozen. Freezing looks for
a product followed by a function, to fuse them as its own quantization leaves them. It assumes that the
product has no function fused into it yet and returns floats, and fails where that does not hold (torch 2.13:
"assert kwargs['postop_name'] == 'none'", KeyError 'o_inv_scale').
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from qompose.backend import LateOperators
from torch import Tensor
from torch.fx import Node

from qompose_x86_inductor import operators as _operators  # noqa: F401 - registers
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.onednn.calls import CONVOLUTION_SUM, ConvolutionSum
from qompose_x86_inductor.operators.registration import register

register(
    NAMESPACE,
    {"unchanged": "(Tensor x) -> Tensor"},
    {"unchanged": (Tensor.clone, torch.empty_like)},
)
_OPS: Final = getattr(torch.ops, NAMESPACE)
_UNCHANGED: Final = _OPS.unchanged.default
_PRODUCTS: Final = ("onednn.qconv_pointwise.default", "onednn.qlinear_pointwise.default")


def needs_barrier(arguments: dict[str, Any]) -> bool:
    """Return whether Inductor misreads a product with these arguments, by name, and what follows it."""
    return arguments.get("post_op", "none") != "none" or arguments.get("out_dtype") is not None


def put_barrier(node: Node) -> None:
    """Let the readers of a product read it through ``unchanged``, in place."""
    with node.graph.inserting_after(node):
        barrier = node.graph.call_function(_UNCHANGED, (node,))
    barrier.meta.update({key: node.meta[key] for key in ("val",) if key in node.meta})
    node.replace_all_uses_with(barrier, delete_user_cb=lambda user: user is not barrier)


def remove_barrier(node: Node) -> None:
    """Let readers read the product itself, in Inductor's graph and in place."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def sum_in_place(node: Node) -> None:
    """Put oneDNN's operator for a ``conv2d_sum``, in Inductor's graph and in place."""
    arguments: Any = node.args
    sums = ConvolutionSum(*arguments)
    other: Any = sums.other
    with node.graph.inserting_before(node):
        if not _is_last_read(other, node):
            copied = node.graph.call_function(torch.ops.aten.clone.default, (other,))
            copied.meta["val"] = other.meta["val"]
            other = copied
        call = node.graph.call_function(CONVOLUTION_SUM, sums._replace(other=other).for_onednn())
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


def _is_last_read(value: Node, node: Node) -> bool:
    """Return whether a tensor has memory of its own, which a node reads once and last."""
    if not _is_fresh(value) or sum(argument is value for argument in node.args) != 1:
        return False
    readers = set(_readers(value))
    through_views = {reader for view in _views(value) for reader in _readers(view)}
    return node not in through_views and all(reader <= node for reader in readers)


def _is_fresh(value: Node) -> bool:
    return value.target is CONVOLUTION_SUM or (value.op == "call_function" and not _is_view(value))


def _readers(value: Node) -> Iterator[Node]:
    """Yield the nodes that read the memory of a tensor."""
    yield from value.users
    for view in _views(value):
        yield from _readers(view)


def _views(value: Node) -> Iterator[Node]:
    """Yield the users of a tensor whose results may be, or hold, its memory."""
    yield from (
        user for user in value.users if user.target is not CONVOLUTION_SUM and _is_view(user)
    )


def _is_view(node: Node) -> bool:
    """Return whether an operator may return memory of its arguments: its schema says so, or it is unknown."""
    schema = getattr(_operator(node), "_schema", None)
    if schema is None or schema.is_mutable:
        return True
    return any(result.alias_info is not None for result in schema.returns)


def _operator(node: Node) -> Any:
    """Return the operator of a call. Inductor has put functions of its own for oneDNN's products by now."""
    origin = node.meta.get("original_aten")
    return origin if isinstance(node.target, partial) and str(origin) in _PRODUCTS else node.target


LATE_OPERATORS: Final[LateOperators] = {
    _OPS.conv2d_sum.default: sum_in_place,
    _UNCHANGED: remove_barrier,
}
"""By operator, what replaces its calls."""
