# SPDX-License-Identifier: Apache-2.0
"""Rows of rule tables: products, functions of one and two tensors, and operators that only move values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch

from qompose.backend.kernel import Kernel, on_integers
from qompose.backend.kit import guards
from qompose.backend.kit.kernels import CLAMP_ON_INTEGERS, UNMOVED
from qompose.backend.kit.patterns import (
    ADD,
    ADD_FLOAT,
    DROPOUT,
    IMAGE,
    PAD,
    PRODUCTS,
    SEQUENCE,
    Step,
    binary,
    fused,
    one,
)
from qompose.backend.kit.reference import reference_kernel
from qompose.backend.pattern import OperatorPattern, Pattern
from qompose.backend.rule import STATIC, WEIGHT_ONLY, Guard, Rule, TensorConstraint
from qompose.errors import ConfigError, near_names

aten = torch.ops.aten

Accepts: TypeAlias = "Mapping[str, TensorConstraint]"
"""What the tensors of a rule may be, by role: "activation", "weight", "output"."""

Kernels: TypeAlias = "Mapping[str, Kernel]"
"""The kernels of a rule, by target."""


def product_rule(
    product: str,
    *,
    accepts: Accepts,
    kernels: Kernels | None = None,
    mode: str = STATIC,
    before: Sequence[Step] = (),
    after: Sequence[Step] = (),
    operator: str = "op",
    shapes: tuple[tuple[int, ...], ...] | None = None,
    groups: int = 1,
    guard: Sequence[Guard] = (),
    max_depth: int | None = guards.MAX_DEPTH,
    **fields: Any,
) -> Rule:
    """Return the rule of a linear or convolution with a weight, and with what stands before and after it.

    The names of its tensors are "input", "weight", "bias" and the operands of the steps. It asks for float32
    and for the rank of the product, for what its steps need, and for sums that fit into int32. A transposed
    convolution has its output channels in dimension 1 of its weight; `accepts` is for the others.

    Args:
        product: a name in `PRODUCTS`.
        accepts: of the rule.
        kernels: by target; None: the integer reference, in process, until there are better ones.
        mode: "static", "dynamic" or "weight-only"; the outputs of the last two stay in float.
        before, after: `RELU`, `ADD`, `PAD` and the like.
        operator: what the operator of the product is called.
        shapes, groups: of the example (`fused`).
        guard: further conditions.
        max_depth: the most products in a sum; None: any number. Weight-only rules have no limit.
        fields: of the rule: `name` and `drawing`, which are made of the steps; `output`, `integer_bias`;
            `channels`, None for products whose channels cannot be balanced.

    Raises:
        ConfigError: there is no such product, or a field is wrong.
    """
    steps, transposed = (*before, *after), "transpose" in product
    modes = fields.get("modes", frozenset({mode}))
    weight_only, output = modes == {WEIGHT_ONLY}, fields.get("output", STATIC in modes)
    kept = (
        guard if max_depth is None or weight_only else (guards.depth(max_depth, operator), *guard)
    )
    operands = [s.operand for s in steps if s.operand is not None and s.is_quantized]
    standard: dict[str, Any] = {
        "name": "_".join((*_names(before), *_named(product, mode), *_names(after))),
        "drawing": _drawing(product, before, after),
        "patterns": fused(
            operator, product, before=before, after=after, shapes=shapes, groups=groups
        ),
        "anchor": operator,
        "activations": ("input", *operands),
        "weight": "weight",
        "bias": "bias",
        "channels": _channels(product, after, output=output),
        "output": output,
        "modes": modes,
        "layout": {"weight": {"ch_axis": 1}} if transposed else {},
        "accepts": _across(accepts) if transposed else accepts,
        "guard": (*_asked(product, operator, steps, weight_only=weight_only), *kept),
        "kernels": _usual_kernels(mode) if kernels is None else kernels,
    }
    return Rule(**{**standard, **fields})


def _usual_kernels(mode: str) -> Kernels:
    """Return the integer reference in process; weights alone have none."""
    return {} if mode == WEIGHT_ONLY else {"torch": reference_kernel(float_output=mode != STATIC)}


def _named(product: str, mode: str) -> list[str]:
    return [product] if mode == STATIC else [product, mode.replace("-", "_")]


def _names(steps: Sequence[Step]) -> list[str]:
    return [step.name for step in steps if not step.is_optional]


def _drawing(product: str, before: Sequence[Step], after: Sequence[Step]) -> str:
    drawn = " -> ".join((*_names(before), product))
    for step in after:
        drawn += "" if step.is_optional else f" {step.drawing or f'-> {step.name}'}"
    return drawn


def _channels(product: str, after: Sequence[Step], *, output: bool) -> tuple[int, int] | None:
    """Return the dimensions of channels, None where factors of channels would not pass through.

    A bound behind a product whose output is quantized would have to grow with its channels.
    """
    bounded = any(step.role == "act" and step.name != "relu" for step in after)
    reads_more = any(step.is_quantized for step in after)
    if "transpose" in product or reads_more or (bounded and output):
        return None
    return (-1, -1) if product == "linear" else (1, 1)


def _across(accepts: Accepts) -> Accepts:
    """Return constraints of a weight whose output channels are in dimension 1."""
    weight = accepts.get("weight")
    if weight is None or weight.ch_axis is None:
        return accepts
    return {**accepts, "weight": replace(weight, ch_axis=1)}


def _asked(
    product: str, operator: str, steps: Sequence[Step], *, weight_only: bool
) -> Iterator[Guard]:
    """Yield what a rule asks for because of its patterns."""
    if not weight_only:
        yield guards.float32
    if product != "linear":
        yield guards.rank("input", len(PRODUCTS[product].shapes[0]))
    for step in steps:
        if step in (ADD, ADD_FLOAT):
            yield guards.plain_sum(operator)
        if step == ADD_FLOAT:
            yield guards.separate_inputs
        if step == DROPOUT:
            yield guards.not_training(step.role)
        if step == PAD:
            yield guards.spatial_zero_padding


def unary_rule(
    name: str,
    *patterns: Pattern | OperatorPattern,
    accepts: Accepts,
    kernels: Kernels | None = None,
    guard: Sequence[Guard] = (),
    activation: str = "self",
    **fields: Any,
) -> Rule:
    """Return the rule of a function of one tensor that is quantized already: pools, means, activations.

    Args:
        guard: conditions besides float32.
        activation: what the tensor is called.
        fields: of the rule: `shares` for values that the input has too, `carries`, `drawing`, `output`.

    Raises:
        ConfigError: a field is wrong.
    """
    standard: dict[str, Any] = {"condition": "all"}
    return Rule(
        name=name,
        patterns=patterns,
        activations=(activation,),
        accepts=accepts,
        guard=(guards.float32, *guard),
        kernels=_usual_kernels(STATIC) if kernels is None else kernels,
        **{**standard, **fields},
    )


def binary_rule(
    name: str,
    *,
    accepts: Accepts,
    kernels: Kernels | None = None,
    after: Sequence[Step] = (),
    guard: Sequence[Guard] = (),
    **fields: Any,
) -> Rule:
    """Return the rule of the sum, difference or product of two tensors that do not come from float code.

    Args:
        name: "add", "sub" or "mul".
        after: the functions after it.
        guard: conditions besides float32 and no factor `alpha`.
        fields: of the rule.

    Raises:
        ConfigError: there is no such function, or a field is wrong.
    """
    standard: dict[str, Any] = {
        "name": "_".join((name, *_names(after))),
        "drawing": _drawing(name, (), after) if after else "",
        "anchor": "op" if after else "output",
        "condition": "no_float",
    }
    return Rule(
        patterns=binary(name, after=after),
        activations=("self", "other"),
        accepts=accepts,
        guard=(guards.float32, guards.without_alpha(), *guard),
        kernels=_usual_kernels(STATIC) if kernels is None else kernels,
        **{**standard, **fields},
    )


@dataclass(frozen=True)
class Move:
    """An operator whose values are those of its input, or the ends of a range.

    Attributes:
        kernel: that runs it on integers.
        activation: the name of its input.
        condition: of the rule.
        guard: besides float32.
    """

    patterns: tuple[OperatorPattern, ...]
    kernel: Kernel
    drawing: str = ""
    activation: str = "self"
    condition: str = "all"
    guard: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class Pool:
    """A pool or mean of one tensor.

    Attributes:
        rank: the dimensions of its input; None: any.
        shares: whether its values are those of its input, so that the output has the same scale.
        guard: besides float32 and the rank.
    """

    patterns: tuple[OperatorPattern, ...]
    rank: int | None
    shares: bool = False
    guard: tuple[Guard, ...] = ()


POOLS: Final[dict[str, Pool]] = {
    "max_pool1d": Pool(
        (one(aten.max_pool1d.default, [3], [2], [1], shape=SEQUENCE),), 3, shares=True
    ),
    "max_pool2d": Pool((one(aten.max_pool2d.default, [3, 3], [2, 2], [1, 1]),), 4, shares=True),
    "avg_pool2d": Pool((one(aten.avg_pool2d.default, [2, 2]),), 4),
    "adaptive_avg_pool2d": Pool((one(aten.adaptive_avg_pool2d.default, [1, 1]),), 4),
    "mean": Pool(
        (one(aten.mean.dim, [2, 3], True), one(aten.mean.dim, [2, 3])),
        None,
        guard=(guards.over_dimensions,),
    ),
}
"""Pools and means, by the names of their rules."""


def pool_rule(
    name: str,
    *,
    accepts: Accepts,
    kernels: Kernels | None = None,
    patterns: tuple[OperatorPattern, ...] = (),
    guard: Sequence[Guard] = (),
    **fields: Any,
) -> Rule:
    """Return the rule of a pool or mean, where its input is quantized already.

    An average spans less than its input, so its output has a scale of its own.

    Args:
        name: in `POOLS`.
        kernels: by target; None: the integer reference, in process. `pool_arguments` has what they need.
        patterns: with other examples than those of the table.
        guard: further conditions.
        fields: of the rule.

    Raises:
        ConfigError: there is no such pool, or a field is wrong.
    """
    if name not in POOLS:
        raise ConfigError(f"unknown pool {name!r}{near_names(name, POOLS)}. Known: {[*POOLS]}")
    pool = POOLS[name]
    ranked = () if pool.rank is None else (guards.rank("self", pool.rank),)
    return unary_rule(
        name,
        *(patterns or pool.patterns),
        accepts=accepts,
        kernels=kernels,
        guard=(*ranked, *pool.guard, *guard),
        **{"shares": pool.shares, **fields},
    )


def _targets(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(aten, name).default for name in names)


def _moved(name: str, *patterns: OperatorPattern, **facts: Any) -> Move:
    return Move(patterns, Kernel(f"{name} on integers", on_integers), **facts)


_DROPOUT = OperatorPattern(
    (aten.dropout.default,), lambda input: aten.dropout(input, 0.5, False), (IMAGE,)
)

MOVES: Final[dict[str, Move]] = {
    "relu": Move((OperatorPattern(_targets("relu", "relu_")),), CLAMP_ON_INTEGERS),
    "clamp": Move(
        (
            *map(one, _targets("hardtanh", "hardtanh_", "relu6", "relu6_")),
            *(one(t, -0.5, 0.5) for t in _targets("clamp", "clamp_", "clip", "clip_")),
            *(one(t, -0.5) for t in _targets("clamp_min", "clamp_min_")),
            *(one(t, 0.5) for t in _targets("clamp_max", "clamp_max_")),
        ),
        CLAMP_ON_INTEGERS,
        drawing="hardtanh | relu6 | clamp",
    ),
    "cat": _moved(
        "cat", OperatorPattern((aten.cat.default,)), activation="tensors", condition="any"
    ),
    "view": _moved(
        "view",
        one(aten.view.default, [-1]),
        one(aten.reshape.default, [-1]),
        one(aten.flatten.using_ints, 1),
        drawing="view | reshape | flatten",
    ),
    "permute": _moved(
        "permute",
        one(aten.permute.default, [0, 2, 3, 1]),
        one(aten.transpose.int, 1, 2),
        drawing="permute | transpose",
    ),
    "slice": _moved("slice", one(aten.slice.Tensor, 1, 0, 1)),
    "squeeze": _moved("squeeze", one(aten.squeeze.dim, 2, shape=(1, 2, 1))),
    "unsqueeze": _moved("unsqueeze", one(aten.unsqueeze.default, 1)),
    "select": _moved("select", one(aten.select.int, 1, 0)),
    "expand": _moved("expand", one(aten.expand.default, [3, 2, 4, 4])),
    "copy": Move(
        tuple(map(one, _targets("clone", "contiguous", "detach", "alias"))),
        UNMOVED,
        drawing="clone | contiguous | detach",
    ),
    "dropout": Move(
        (_DROPOUT,), UNMOVED, activation="input", guard=(guards.not_training("output"),)
    ),
}
"""The operators that only move values, copies and clamps among them, by the names of their rules."""


def move_rules(
    accepts: Accepts,
    *,
    kernels: Callable[[str, Kernel], Kernels] | None = None,
    only: Collection[str] | None = None,
    carries: Collection[str] | None = None,
    guard: Mapping[str, Sequence[Guard]] = MappingProxyType({}),
) -> tuple[Rule, ...]:
    """Return the rules of `MOVES`: the output has the scale of the input, and the operator runs on integers.

    Args:
        kernels: takes the name of a rule and its kernel on integers, and returns the kernels by target. None:
            that one, in process.
        only: the names of the rules. None: all.
        carries: the names of those that apply only where something quantized reads the output: before an
            operator in float eight bits would cost accuracy for nothing. None: all.
        guard: further conditions, by the name of a rule. Where products give floats, `keeps_half` is for
            "select" and "slice".

    Raises:
        ConfigError: a kernel is wrong.
    """
    return tuple(
        unary_rule(
            name,
            *move.patterns,
            accepts=accepts,
            kernels={"torch": move.kernel} if kernels is None else kernels(name, move.kernel),
            guard=(*move.guard, *guard.get(name, ())),
            activation=move.activation,
            condition=move.condition,
            drawing=move.drawing,
            shares=True,
            carries=carries is None or name in carries,
        )
        for name, move in MOVES.items()
        if only is None or name in only
    )
