# SPDX-License-Identifier: Apache-2.0
"""Conditions of rules on dtypes, shapes and literals: a guard returns why it refuses a match."""

from __future__ import annotations

from typing import Any

import torch
from qompose.backend import Guard, Match
from torch.fx import Node


def float32(match: Match) -> str | None:
    """Require float32, which the int8 operators return."""
    dtype = match.output.meta["val"].dtype
    return None if dtype is torch.float32 else f"the int8 operators give float32, not {dtype}"


def rank(name: str, expected: int) -> Guard:
    """Require a number of dimensions of an input."""

    def guard(match: Match) -> str | None:
        found = len(_shape(match.node(name)))
        return (
            None
            if found == expected
            else f"{name} has {found} dimensions, and the kernel takes {expected}"
        )

    return guard


def plain_sum(product: str) -> Guard:
    """Require a summand of the product's shape and dtype, without a factor."""

    def guard(match: Match) -> str | None:
        other, alpha = match.node("other"), match.argument("add", "alpha")
        if _shape(match.node(product)) != _shape(other):
            return "the summand is broadcast"
        if other is None or other.meta["val"].dtype is not torch.float32:
            return "the summand is not float32"
        return None if alpha == 1 else f"the summand is scaled by alpha={alpha}"

    return guard


def separate_inputs(match: Match) -> str | None:
    """Require that a float summand is not what the product reads in eight bits."""
    same = match.node("input") is match.node("other")
    return "the product reads what is added, which stays in float" if same else None


def computed_factors(match: Match) -> str | None:
    """Require computed factors: eight bits for a parameter that multiplies would cost accuracy."""
    factors = (match.node("self"), match.node("other"))
    if any(factor is None or factor.op == "get_attr" for factor in factors):
        return "a factor that is a number or a parameter stays in float"
    kinds = {factor.meta["val"].dtype for factor in factors if factor is not None}
    return None if kinds == {torch.float32} else "a factor is not float32"


def over_dimensions(match: Match) -> str | None:
    """Require a float32 mean over dimensions that the graph names."""
    dims: Any = match.captures.get("dim")
    if not isinstance(dims, (list, tuple)) or not dims:
        return "a mean over everything stays in float"
    if match.argument("output", "dtype") not in (None, torch.float32):
        return "the mean is asked for in another dtype"
    return None


def not_training(name: str) -> Guard:
    """Require that a dropout, if there is one, is not in training mode."""

    def guard(match: Match) -> str | None:
        drops = match.node(name) is not None and match.argument(name, "train")
        return "it drops values, in training" if drops else None

    return guard


def _shape(node: Node | None) -> tuple[Any, ...]:
    return () if node is None else tuple(node.meta["val"].shape)
