# SPDX-License-Identifier: Apache-2.0
"""The rules for operators that are quantized when the model runs, or whose weights alone are quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from qompose.backend import Guard, Kernel, Match, Pattern, Region, Rule, TensorConstraint
from torch.fx import Node

from qompose_x86_inductor import guards
from qompose_x86_inductor.kernels import product_kernel
from qompose_x86_inductor.patterns import Activation, linear
from qompose_x86_inductor.rules import ACCEPTS, BEHIND
from qompose_x86_inductor.run_time_kernels import (
    PerTensor,
    float16_weight,
    int4_weight,
    int8_weight,
    per_token,
)
from qompose_x86_inductor.weight_only_ops import FLOATS, GROUP_SIZES

INT4_GROUPS = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_symmetric}),
    quant_range=(-8, 7),
    block_sizes=frozenset((size,) for size in GROUP_SIZES),
)
FLOAT16 = TensorConstraint(dtypes=frozenset({torch.float16}), qschemes=frozenset({None}))
PER_TOKEN = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_affine, torch.per_channel_symmetric}),
    quant_range=(-128, 127),
    block_sizes=frozenset({(-1,)}),
)


def _floats(match: Match) -> str | None:
    dtype, source = match.output.meta["val"].dtype, match.node("input")
    given = dtype if source is None else source.meta["val"].dtype
    if dtype is not given:  # under autocast
        return f"the kernel gives {given}, the type of its input, not {dtype}"
    return None if dtype in FLOATS else f"the kernel has no form for {dtype}"


def _rule(
    name: str,
    patterns: tuple[Pattern, ...],
    accepts: Mapping[str, TensorConstraint],
    kernel: Kernel,
    *,
    drawing: str = "linear",
    guard: Guard | Sequence[Guard] = guards.float32,
) -> Rule:
    return Rule(
        name=name,
        drawing=drawing,
        patterns=patterns,
        anchor="linear",
        weight="weight",
        bias="bias",
        channels=(-1, -1),
        output=False,
        modes=frozenset({"dynamic" if "activation" in accepts else "weight-only"}),
        accepts=accepts,
        guard=guard,
        kernels={"torch": kernel},
    )


def _dynamic(activation: Activation | None) -> Rule:
    """Return the rule of a linear whose input has one scale, fused with what stands behind it."""
    names = [activation.name] if activation is not None else []
    kernel = product_kernel("linear_dynamic", PerTensor(activation), float_output=True)
    return _rule(
        "_".join(("linear_dynamic", *names)),
        linear(activation),
        ACCEPTS,
        kernel,
        drawing=" -> ".join(("linear", *names)),
    )


def _weight_only(name: str, emit: Callable[[Region], Node]) -> Kernel:
    return Kernel(f"qompose_x86.{name}", emit, float_output=True, float_arithmetic=True)


def _grouped() -> tuple[Pattern, ...]:
    """Return the variants of linear with examples that groups of every size divide."""
    rows = max(GROUP_SIZES)
    shapes = ((2, rows), (2, rows), (2,))
    return tuple(replace(one, shapes=shapes[: len(one.shapes)]) for one in linear())


RUN_TIME_RULES: tuple[Rule, ...] = (
    *map(_dynamic, (*BEHIND["linear"], None)),
    _rule(
        "linear_dynamic_per_token",
        linear(),
        {"activation": PER_TOKEN, "weight": ACCEPTS["weight"]},
        product_kernel("linear_dynamic_per_token", per_token, float_output=True),
    ),
    _rule(
        "linear_int8_weight",
        linear(),
        {"weight": ACCEPTS["weight"]},
        _weight_only("linear_int8_weight", int8_weight),
        guard=_floats,
    ),
    _rule(
        "linear_int4_weight",
        _grouped(),
        {"weight": INT4_GROUPS},
        _weight_only("linear_int4_weight", int4_weight),
        guard=_floats,
    ),
    _rule(
        "linear_float16_weight",
        linear(),
        {"weight": FLOAT16},
        _weight_only("linear_float16_weight", float16_weight),
    ),
)
