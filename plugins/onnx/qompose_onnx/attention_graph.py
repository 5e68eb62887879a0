# SPDX-License-Identifier: Apache-2.0
"""Attention in a graph: torch's operator, or two products of matrices with a softmax between them."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.fx import Node

aten = torch.ops.aten
OPERATOR: Final = aten.scaled_dot_product_attention.default
PRODUCT: Final = aten.matmul.default
_SOFTMAX: Final = (aten.softmax.int, aten._softmax.default)
_CHECK: Final = aten._assert_tensor_metadata.default
"""What torch.export puts beside a conversion of types."""
_OF_TWO: Final = (aten.mul.Tensor, aten.mul_.Tensor, aten.add.Tensor, aten.add_.Tensor)
_PLACES: Final = {
    **dict.fromkeys(_OF_TWO, (0, 1)),
    **dict.fromkeys((aten.div.Tensor, aten.div_.Tensor, aten.to.dtype), (0,)),
    **dict.fromkeys(
        (aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.masked_fill.Tensor), (0,)
    ),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), (1, 2)),
}
"""By what may stand between queries times keys and the softmax, which of its arguments scores are."""
_PASSES: Final = (aten.dropout.default, aten.to.dtype)


def up_to_softmax(node: Node) -> list[Node]:
    """Return what alone reads a node, scales and masks it, up to a softmax over keys; [] if none does."""
    found: list[Node] = []
    while len(readers := _readers(node)) == 1:
        scores, node = node, readers[0]
        found.append(node)
        if node.target in _SOFTMAX:
            return found if node.args[1] in (-1, node.meta["val"].dim() - 1) else []
        places: tuple[int, ...] = _PLACES.get(node.target, ())  # type: ignore[call-overload]
        if not any(node.args[place] is scores for place in places):
            break
    return []


def attends(node: Node) -> bool:
    """Tell whether a node is attention, or one of its two products where it is written out."""
    product = node.target is PRODUCT and bool(up_to_softmax(node) or _reads_softmax(node))
    return product or node.target is OPERATOR


def _reads_softmax(node: Node) -> bool:
    weights: Any = node.args[0]
    while isinstance(weights, Node) and weights.target in _PASSES:
        weights = weights.args[0]
    return isinstance(weights, Node) and weights.target in _SOFTMAX


def _readers(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is not _CHECK]
