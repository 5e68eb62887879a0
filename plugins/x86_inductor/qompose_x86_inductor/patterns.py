# SPDX-License-Identifier: Apache-2.0
"""The operations that become one oneDNN operator, generated from a table of fused activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from qompose import Pattern
from torch import Tensor

aten = torch.ops.aten

IMAGE, FILTER, MATRIX, VECTOR = (1, 2, 5, 5), (2, 2, 3, 3), (2, 2), (2,)


@dataclass(frozen=True)
class Activation:
    """A function fused behind a product: oneDNN's name for it and the forms in which it occurs.

    `arguments` are the operator's schema arguments that oneDNN wants as numbers, `algorithm` the one
    that chooses a variant.
    """

    post_op: str
    forms: tuple[tuple[Callable[[Tensor], Tensor], Any], ...]
    arguments: tuple[str, ...] = ()
    algorithm: str | None = None


RELU = Activation("relu", ((F.relu, aten.relu.default), (torch.relu_, aten.relu_.default)))
HARDTANH = Activation(
    "hardtanh",
    (
        (F.hardtanh, aten.hardtanh.default),
        (lambda x: F.hardtanh(x, inplace=True), aten.hardtanh_.default),
    ),
    arguments=("min_val", "max_val"),
)
HARDSWISH = Activation(
    "hardswish",
    (
        (F.hardswish, aten.hardswish.default),
        (lambda x: F.hardswish(x, inplace=True), aten.hardswish_.default),
    ),
)
SILU = Activation(
    "swish",
    ((F.silu, aten.silu.default), (lambda x: F.silu(x, inplace=True), aten.silu_.default)),
)
GELU = Activation("gelu", ((F.gelu, aten.gelu.default),), algorithm="approximate")

ADDITIONS = ((torch.add, aten.add.Tensor), (Tensor.add_, aten.add_.Tensor))


def convolution(activation: Activation | None = None, *, add: bool = False) -> tuple[Pattern, ...]:
    """Return the variants of conv2d (+ another tensor) (+ activation)."""
    return tuple(_convolutions(activation, add))


def linear(activation: Activation | None = None) -> tuple[Pattern, ...]:
    """Return the variants of linear (+ activation)."""
    return tuple(
        Pattern(
            _linear(act, bias),
            (MATRIX, MATRIX, VECTOR)[: 2 + bias],
            (("linear", aten.linear.default), *named),
        )
        for bias, (act, named) in product((False, True), _forms(activation))
    )


def _forms(
    activation: Activation | None,
) -> list[tuple[Callable[[Tensor], Tensor], tuple[tuple[str, Any], ...]]]:
    if activation is None:
        return [(lambda x: x, ())]
    return [(function, (("act", operator),)) for function, operator in activation.forms]


def _convolutions(activation: Activation | None, add: bool) -> Iterator[Pattern]:
    additions: tuple[tuple[Any, Any], ...] = ADDITIONS if add else ((None, None),)
    for bias, (act, named), (plus, operator), swapped in product(
        (False, True), _forms(activation), additions, (False, True) if add else (False,)
    ):
        shapes = (IMAGE, FILTER, *([VECTOR] if bias else []), *([(1, 2, 3, 3)] if add else []))
        sums = (("add", operator),) if add else ()
        yield Pattern(
            _convolution(act, plus, swapped, bias),
            shapes,
            (("conv", aten.conv2d.default), *sums, *named),
        )


def _convolution(act: Any, plus: Any, swapped: bool, with_bias: bool) -> Callable[..., Tensor]:
    def finish(conv: Tensor, other: Tensor | None) -> Tensor:
        if plus is not None:
            conv = plus(other, conv) if swapped else plus(conv, other)
        return act(conv)  # type: ignore[no-any-return]

    if plus is None:
        if with_bias:
            return lambda input, weight, bias: finish(F.conv2d(input, weight, bias), None)
        return lambda input, weight: finish(F.conv2d(input, weight), None)
    if with_bias:
        return lambda input, weight, bias, other: finish(F.conv2d(input, weight, bias), other)
    return lambda input, weight, other: finish(F.conv2d(input, weight), other)


def _linear(act: Any, with_bias: bool) -> Callable[..., Tensor]:
    if with_bias:
        return lambda input, weight, bias: act(F.linear(input, weight, bias))
    return lambda input, weight: act(F.linear(input, weight))
