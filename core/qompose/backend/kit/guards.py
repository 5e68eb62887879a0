# SPDX-License-Identifier: Apache-2.0
"""Conditions of rules on dtypes, shapes and literals: a guard returns why it refuses a match."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.fx import Node

from qompose.backend.pattern import Match
from qompose.backend.rule import Guard

MAX_DEPTH: Final = (2**31 - 1) // (255 * 128)
"""The most products of an eight-bit activation, less its zero point, and an int8 weight in an int32 sum."""


def float32(match: Match) -> str | None:
    """Require float32, which int8 operators give."""
    dtype = match.output.meta["val"].dtype
    return None if dtype is torch.float32 else f"its kernels return float32, not {dtype}"


def float_types(*dtypes: torch.dtype) -> Guard:
    """Return a guard that requires one of some types, and that of the input.

    Under autocast an operator gives another type than it reads.
    """

    def guard(match: Match) -> str | None:
        dtype, source = match.output.meta["val"].dtype, match.node("input")
        given = dtype if source is None else source.meta["val"].dtype
        if dtype is not given:
            return f"the kernel returns {given}, the dtype of its input, not {dtype}"
        return None if dtype in dtypes else f"the kernel does not support {dtype}"

    return guard


def rank(name: str, *expected: int) -> Guard:
    """Return a guard that requires a tensor to have one of some numbers of dimensions."""

    def guard(match: Match) -> str | None:
        found = len(shape_of(match.node(name)))
        wanted = " or ".join(map(str, expected))
        fits = found in expected
        return None if fits else f"{name} has {found} dimensions, but the kernel requires {wanted}"

    return guard


def depth(limit: int = MAX_DEPTH, operator: str = "op") -> Guard:
    """Return a guard that refuses sums of more than `limit` products, which may leave int32.

    Args:
        operator: the name of the product.
    """

    def guard(match: Match) -> str | None:
        weight, node = shape_of(match.node("weight")), match.node(operator)
        transposed = node is not None and "transpose" in str(node.target)
        terms = [weight[0], *weight[2:]] if transposed else weight[1:]
        found = math.prod(terms)
        if transposed:
            found //= match.argument(operator, "groups")
        if found <= limit:
            return None
        return f"a sum of {found} products may overflow int32 (at most {limit} are safe)"

    return guard


def one_group(operator: str = "op") -> Guard:
    """Return a guard that requires a convolution without groups."""

    def guard(match: Match) -> str | None:
        groups = match.argument(operator, "groups")
        return None if groups == 1 else f"it has {groups} groups, but the kernel supports only one"

    return guard


def several_groups(operator: str = "op") -> Guard:
    """Return a guard that requires a convolution in groups."""
    return lambda match: None if match.argument(operator, "groups") > 1 else "it has only one group"


def not_training(name: str = "output") -> Guard:
    """Return a guard that requires that a dropout, if there is one, is not in training mode."""

    def guard(match: Match) -> str | None:
        drops = match.node(name) is not None and match.argument(name, "train")
        return "it is a dropout in training mode" if drops else None

    return guard


def without_alpha(name: str = "output") -> Guard:
    """Return a guard that requires a sum or difference without the factor `alpha`.

    Where the operator has no such factor, it passes.
    """

    def guard(match: Match) -> str | None:
        factors = [node.kwargs["alpha"] for node in match.nodes if "alpha" in node.kwargs]
        scaled = any(factor != 1 for factor in factors)
        return f"its {name} is scaled by alpha" if scaled else None

    return guard


def plain_sum(operator: str = "op") -> Guard:
    """Return a guard that requires a summand of the product's shape, in float32, without a factor."""

    def guard(match: Match) -> str | None:
        other, alpha = match.node("other"), match.argument("add", "alpha")
        if shape_of(match.node(operator)) != shape_of(other):
            return "the added tensor is broadcast"
        if other is None or other.meta["val"].dtype is not torch.float32:
            return "the added tensor is not float32"
        return None if alpha == 1 else f"the added tensor is scaled by alpha={alpha}"

    return guard


def separate_inputs(match: Match) -> str | None:
    """Require that a float summand is not what the product reads in eight bits."""
    same = match.node("input") is match.node("other")
    return (
        "the linear or convolution also reads the added tensor, which stays in float"
        if same
        else None
    )


def computed_factors(match: Match) -> str | None:
    """Require computed factors: eight bits for a parameter that multiplies would cost accuracy."""
    factors = (match.node("self"), match.node("other"))
    if any(factor is None or factor.op == "get_attr" for factor in factors):
        return "a factor is a number or a parameter"
    kinds = {factor.meta["val"].dtype for factor in factors if factor is not None}
    return None if kinds == {torch.float32} else "a factor is not float32"


def over_dimensions(match: Match) -> str | None:
    """Require a float32 mean over dimensions that the graph names."""
    dims: Any = match.captures.get("dim")
    if not isinstance(dims, (list, tuple)) or not dims:
        return "it is a mean over all elements"
    if match.argument("output", "dtype") not in (None, torch.float32):
        return "the mean has another output dtype"
    return None


def keeps_half(match: Match) -> str | None:
    """Require that an operator keeps at least half of the values of `self`.

    A class token among patches has a range of its own, by which its reader quantizes it, and little to
    quantize. Of a size that is open one index is less than half.
    """
    before, after = shape_of(match.node("self")), shape_of(match.output)
    is_open = len(_known(after)) - len(_known(before)) > len(after) - len(before)
    if is_open or 2 * math.prod(_known(after)) < math.prod(_known(before)):
        return "it keeps less than half of the values, which would need a separate range"
    return None


def _known(shape: Sequence[Any]) -> list[int]:
    return [size for size in shape if isinstance(size, int)]


def spatial_zero_padding(match: Match) -> str | None:
    """Require a `patterns.PAD` that puts zeros around height and width, and cuts nothing off."""
    pads, value = match.argument("pad", "pad"), match.argument("pad", "value")
    spatial = len(shape_of(match.node("input"))) - 2
    if not _pads_with_a_constant(match) or value not in (None, 0):
        return "only zero padding can be fused into the convolution"
    if not all(isinstance(n, int) and n >= 0 for n in pads):
        return (
            "padding that crops, or whose size is known only at run time, cannot be fused into the "
            "convolution"
        )
    if any(pads[2 * spatial :]):
        return "padding along the batch or channel dimension cannot be fused into the convolution"
    return None


def _pads_with_a_constant(match: Match) -> bool:
    pad = match.node("pad")
    constant = pad is not None and pad.target is torch.ops.aten.constant_pad_nd.default
    return constant or match.argument("pad", "mode") == "constant"


def first_of(*guards: Guard) -> Guard:
    """Return a guard with the first reason of several."""
    return lambda match: next(filter(None, (guard(match) for guard in guards)), None)


def shape_of(node: Node | None) -> tuple[Any, ...]:
    """Return the sizes of a node's tensor, symbols among them; () where there is no node."""
    return () if node is None else tuple(node.meta["val"].shape)


def sizes(given: int | Sequence[int], count: int) -> list[Any]:
    """Return a size for each of `count` axes, from one for each or one for all."""
    found = [*given] if isinstance(given, (list, tuple)) else [given]
    return found * count if len(found) == 1 else found
