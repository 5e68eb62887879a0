# SPDX-License-Identifier: Apache-2.0
"""Convolutions that add to a tensor in place, once a compiler has planned who reads it last.

oneDNN adds another tensor to a convolution by overwriting it ("sum"), which saves a tensor and a pass over
it. A functional graph cannot say that. So it holds ``qompose_x86::conv2d_sum``, which is functional too,
until Inductor's own passes are through; then `in_place` puts oneDNN's operator for it, and a copy of the
tensor before it wherever somebody else may still read that.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from qompose_x86_inductor.arguments import Geometry, Product
from qompose_x86_inductor.ops import NAMESPACE, Output
from qompose_x86_inductor.packing import Packed
from qompose_x86_inductor.registration import register

_SCHEMAS: Final = {
    "conv2d_sum": (
        "(Tensor x, float x_scale, int x_zp, Tensor packed, Tensor w_scale, Tensor w_zp, Tensor other,"
        " Tensor? bias, int[2] stride, int[2] padding, int[2] dilation, int groups, float out_scale,"
        " int out_zp, ScalarType out_dtype, float other_scale, int other_zp, str post_op) -> Tensor"
    )
}
_OTHER: Final = 6
_OVERWRITES: Final = torch.ops.onednn.qconv2d_pointwise.binary
_PRODUCTS: Final = ("onednn.qconv_pointwise.default", "onednn.qlinear_pointwise.default")


def _conv2d_sum(*arguments: Any) -> Tensor:
    other = arguments[_OTHER].clone(memory_format=torch.channels_last)
    result: Tensor = _OVERWRITES(*_arguments(arguments, other))
    return result


def _conv2d_sum_fake(*arguments: Any) -> Tensor:
    return torch.empty_like(arguments[_OTHER], memory_format=torch.channels_last)


def _arguments(arguments: tuple[Any, ...], other: Any) -> tuple[Any, ...]:
    """Return the arguments of oneDNN's operator from those of ours."""
    *before, post_op = arguments
    before[_OTHER] = other
    return (*before, "sum", 1.0, post_op, [None], "none")


_LIBRARY: Final = register(NAMESPACE, _SCHEMAS, {"conv2d_sum": (_conv2d_sum, _conv2d_sum_fake)})
# With a packed weight, which is what freezing makes of it, torch looks for this one.
_LIBRARY.impl("conv2d_sum", _conv2d_sum, "MkldnnCPU")  # type: ignore[no-untyped-call]
OPERATOR: Final = getattr(torch.ops, NAMESPACE).conv2d_sum.default


def conv2d_sum(
    product: Product,
    geometry: Geometry,
    packed: Packed,
    other: tuple[Tensor, float, int],
    out: Output,
) -> Tensor:
    """Compute a convolution and a uint8 summand of the result's shape, with a uint8 result.

    Args:
        product: `Product.unsigned` and, with ``geometry``, `placed`.
        other: the summand, with its scale and zero point.
    """
    summand, *qparams = other
    result: Tensor = OPERATOR(
        *product[:3], packed.weight, product.w_scale, packed.zero_points, summand, product.bias,
        *geometry, *out[:3], *qparams, out.post_op,
    )  # fmt: skip
    return result


def in_place(node: Node) -> None:
    """Put oneDNN's operator for a ``conv2d_sum``, in Inductor's graph and in place."""
    other = node.args[_OTHER]
    assert isinstance(other, Node)
    with node.graph.inserting_before(node):
        if not _is_last_read(other, node):
            copied = node.graph.call_function(torch.ops.aten.clone.default, (other,))
            copied.meta["val"] = other.meta["val"]
            other = copied
        call = node.graph.call_function(_OVERWRITES, _arguments(node.args, other))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


def _is_last_read(value: Node, node: Node) -> bool:
    """Whether a tensor has memory of its own, and a node, which reads it once, is the last to read it."""
    if not _is_fresh(value) or sum(argument is value for argument in node.args) != 1:
        return False
    readers = set(_readers(value))
    through_views = {reader for view in _views(value) for reader in _readers(view)}
    return node not in through_views and all(reader is node or reader < node for reader in readers)


def _is_fresh(value: Node) -> bool:
    return value.target is _OVERWRITES or (value.op == "call_function" and not _is_view(value))


def _readers(value: Node) -> Iterator[Node]:
    """Yield the nodes that read the memory of a tensor."""
    yield from value.users
    for view in _views(value):
        yield from _readers(view)


def _views(value: Node) -> Iterator[Node]:
    """Yield the users of a tensor whose results may be, or hold, its memory."""
    yield from (user for user in value.users if user.target is not _OVERWRITES and _is_view(user))


def _is_view(node: Node) -> bool:
    """Whether an operator may return memory of its arguments: its schema says so, or it is unknown."""
    schema = getattr(_operator(node), "_schema", None)
    if schema is None or schema.is_mutable:
        return True
    return any(result.alias_info is not None for result in schema.returns)


def _operator(node: Node) -> Any:
    """Return the operator of a call. Inductor has put functions of its own for oneDNN's products by now."""
    origin = node.meta.get("original_aten")
    return origin if isinstance(node.target, partial) and str(origin) in _PRODUCTS else node.target
