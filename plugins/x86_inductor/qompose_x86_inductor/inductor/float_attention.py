# SPDX-License-Identifier: Apache-2.0
"""Attention in float as graphs hold it: torch's operator, or two products of matrices around a softmax.

Models write it out whose probabilities somebody may want, transformers with ``attn_implementation="eager"``
among them. Where nothing reads those, one pass over the keys can compute it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from qompose.backend import arguments_of
from torch import fx

from qompose_x86_inductor.inductor.graphs import is_written_between, value_of

aten = torch.ops.aten
OPERATOR: Final = aten.scaled_dot_product_attention.default
_PRODUCTS: Final = (aten.matmul.default, aten.bmm.default)
_ADDITIONS: Final = (aten.add.Tensor, aten.add_.Tensor)
_DIVISIONS: Final = (aten.div.Tensor, aten.div_.Tensor)
_FACTORS: Final = (aten.mul.Tensor, aten.mul_.Tensor, *_DIVISIONS)
_CHECK: Final = aten._assert_tensor_metadata.default
"""What export puts before a conversion of dtypes, of what the example showed."""
_FILLS: Final = (aten.masked_fill.Scalar, aten.masked_fill_.Scalar)


class Mask(NamedTuple):
    """What changes scores: floats that are added to them, of one or two tensors, or booleans.

    Where these are false, or true with ``hides``, a score becomes ``hidden``.
    """

    nodes: tuple[fx.Node, ...]
    hidden: float = -math.inf
    hides: bool = False


class FloatAttention(NamedTuple):
    """The arguments of attention that ends at a node, and the other nodes that compute it.

    With ``swapped``, the axes of ``key`` are (..., width, keys). A row all of whose scores are -inf is 0 with
    ``safe_softmax``, as torch's operator has it, and NaN without.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: Mask | None
    scale: float
    is_causal: bool = False
    grouped: bool = False
    swapped: bool = False
    safe_softmax: bool = True
    inside: tuple[fx.Node, ...] = ()


def read(node: fx.Node) -> FloatAttention | None:
    """Return the attention that ends at a node, without dropout and of a known scale; None if none does."""
    if node.target is OPERATOR:
        return _operator(node)
    return _written_out(node) if node.target in _PRODUCTS else None


def _operator(node: fx.Node) -> FloatAttention | None:
    given = arguments_of(node)
    query, mask, scale = value_of(given["query"]), given["attn_mask"], given["scale"]
    if query is None or given["dropout_p"]:
        return None
    if scale is None:
        width = query.shape[-1]
        scale = 1 / math.sqrt(width) if type(width) is int and width else None
    if not isinstance(scale, (int, float)):
        return None  # only the run tells it
    operands = (given["query"], given["key"], given["value"])
    masked = None if mask is None else Mask((mask,))
    return FloatAttention(*operands, masked, float(scale), given["is_causal"], given["enable_gqa"])


def _written_out(end: fx.Node) -> FloatAttention | None:
    probabilities, value = arguments_of(end).values()
    way = _Way(probabilities)
    way.back_over((aten.to.dtype,), _keeps_its_dtype)
    way.back_over((aten.dropout.default,), lambda node: not arguments_of(node)["train"], "input")
    way.back_over((aten.to.dtype,), _keeps_its_dtype)
    if way.back_over((aten.softmax.int,), _is_over_keys) is None:
        return None
    mask = _mask(way)
    factor = way.back_over(_FACTORS, lambda node: _can_divide(arguments_of(node)["other"]))
    scores = way.back_over(_PRODUCTS)
    if scores is None or is_written_between(scores, end, but=way.nodes):
        return None
    query, key = arguments_of(scores).values()
    return FloatAttention(
        query, key, value, mask, _scale(factor),
        swapped=True, safe_softmax=False, inside=tuple(way.nodes),
    )  # fmt: skip


class _Way:
    """The way back from a node to what it is computed from, along nodes of one reader, besides checks."""

    def __init__(self, start: Any) -> None:
        self.at, self.nodes = start, list[fx.Node]()

    def back_over(
        self,
        targets: tuple[Any, ...],
        fits: Callable[[fx.Node], bool] = lambda node: True,
        to: str = "self",
    ) -> fx.Node | None:
        """Step back over a node of one of these operators, if it fits, to its argument `to`; return it."""
        node = self.at
        if not isinstance(node, fx.Node) or node.target not in targets or not fits(node):
            return None
        checks = [user for user in node.users if user.target is _CHECK]
        if len(node.users) - len(checks) > 1:
            return None
        self.nodes.extend((*checks, node))
        self.at = arguments_of(node)[to]
        return node


def _mask(way: _Way) -> Mask | None:
    """Step back over what masks scores, if anything does."""
    if node := way.back_over(_FILLS, lambda node: _is_number(arguments_of(node)["value"])):
        given = arguments_of(node)
        return Mask((given["mask"],), float(given["value"]), hides=True)
    chosen = (aten.where.ScalarOther,)
    if node := way.back_over(chosen, lambda node: _is_number(arguments_of(node)["other"])):
        given = arguments_of(node)
        return Mask((given["condition"],), float(given["other"]))
    added = [node for node in (_added(way), _added(way)) if node is not None]
    return Mask(tuple(added)) if added else None


def _added(way: _Way) -> fx.Node | None:
    """Step back over a sum, to the scores; return what it adds to them."""
    for scores, mask in (("self", "other"), ("other", "self")):
        if node := way.back_over(_ADDITIONS, functools.partial(_adds_to, operand=scores), scores):
            found: fx.Node = arguments_of(node)[mask]
            return found
    return None


def _adds_to(node: fx.Node, operand: str) -> bool:
    """Return whether a sum adds floats to an operand that is made of a product.

    A sum in place writes to what it adds to: that must be the scores. Booleans count as 0 and 1.
    """
    given = arguments_of(node)
    if given["alpha"] != 1 or (node.target is aten.add_.Tensor and operand != "self"):
        return False
    mask = value_of(given["other" if operand == "self" else "self"])
    floats = mask is not None and mask.is_floating_point()
    return floats and _are_scores(given[operand], sums=1)


def _are_scores(node: Any, sums: int) -> bool:
    """Return whether a node is a product, a number times one, or a sum with such, up to so many."""
    if not isinstance(node, fx.Node):
        return False
    if node.target in _ADDITIONS:
        return sums > 0 and any(_are_scores(each, sums - 1) for each in node.args[:2])
    inside = arguments_of(node)["self"] if node.target in _FACTORS else node
    return isinstance(inside, fx.Node) and inside.target in _PRODUCTS


def _scale(factor: fx.Node | None) -> float:
    if factor is None:
        return 1.0
    number = float(arguments_of(factor)["other"])
    return 1 / number if factor.target in _DIVISIONS else number


def _can_divide(given: Any) -> bool:
    return _is_number(given) and given != 0


def _is_number(given: Any) -> bool:
    """Return whether an argument is a number, not a tensor or what only the run tells."""
    return isinstance(given, (int, float))


def _is_over_keys(node: fx.Node) -> bool:
    value = value_of(node)
    last = (-1,) if value is None else (-1, value.dim() - 1)
    return arguments_of(node)["dim"] in last and _keeps_its_dtype(node)


def _keeps_its_dtype(node: fx.Node) -> bool:
    after, before = value_of(node), value_of(arguments_of(node)["self"])
    return after is not None and before is not None and after.dtype == before.dtype
