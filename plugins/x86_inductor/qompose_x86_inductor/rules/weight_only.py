# SPDX-License-Identifier: Apache-2.0
"""The rules for linears whose weight alone is quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from qompose.backend import Kernel, Match, Pattern, Region, Rule, TensorConstraint
from torch.fx import Node

from qompose_x86_inductor.kernels.weight_only import float16_weight, int4_weight, int8_weight
from qompose_x86_inductor.operators.linear_weight_only import FLOATS, GROUP_SIZES
from qompose_x86_inductor.patterns import linear
from qompose_x86_inductor.rules.dynamic import linear_rule
from qompose_x86_inductor.rules.static import ACCEPTS

INT4_GROUPS = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_symmetric, torch.per_channel_affine}),
    quant_min_lower_bound=-8,
    quant_max_upper_bound=7,
    block_sizes=frozenset((size,) for size in GROUP_SIZES),
)
FLOAT16 = TensorConstraint(dtypes=frozenset({torch.float16}), qschemes=frozenset({None}))


def _floats(match: Match) -> str | None:
    dtype, source = match.output.meta["val"].dtype, match.node("input")
    given = dtype if source is None else source.meta["val"].dtype
    if dtype is not given:  # under autocast
        return f"the kernel gives {given}, the type of its input, not {dtype}"
    return None if dtype in FLOATS else f"the kernel does not support {dtype}"


def _kernel(name: str, emit: Callable[[Region], Node]) -> Kernel:
    return Kernel(f"qompose_x86.{name}", emit, float_output=True, float_arithmetic=True)


def _grouped() -> tuple[Pattern, ...]:
    """Return the variants of linear with examples that groups of every size divide."""
    rows = max(GROUP_SIZES)
    shapes = ((2, rows), (2, rows), (2,))
    return tuple(replace(one, shapes=shapes[: len(one.shapes)]) for one in linear())


WEIGHT_ONLY_RULES: tuple[Rule, ...] = (
    linear_rule(
        "linear_int8_weight",
        linear(),
        {"weight": ACCEPTS["weight"]},
        _kernel("linear_int8_weight", int8_weight),
        guard=_floats,
    ),
    linear_rule(
        "linear_int4_weight",
        _grouped(),
        {"weight": INT4_GROUPS},
        _kernel("linear_int4_weight", int4_weight),
        guard=_floats,
    ),
    linear_rule(
        "linear_float16_weight",
        linear(),
        {"weight": FLOAT16},
        _kernel("linear_float16_weight", float16_weight),
    ),
)
