# SPDX-License-Identifier: Apache-2.0
"""Patterns of two or three operators that XNNPACK runs as one, generated from two small tables."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from qompose import Pattern
from torch import Tensor

aten = torch.ops.aten

RELUS: tuple[tuple[Callable[[Tensor], Tensor], Any], ...] = (
    (F.relu, aten.relu.default),
    (torch.relu_, aten.relu_.default),
)

# name -> (function, its operator, shapes of input, weight and bias)
WEIGHTED: dict[str, tuple[Callable[..., Tensor], Any, tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, aten.linear.default, ((2, 2), (2, 2), (2,))),
    "conv1d": (F.conv1d, aten.conv1d.default, ((1, 2, 5), (2, 2, 3), (2,))),
    "conv2d": (F.conv2d, aten.conv2d.default, ((1, 2, 5, 5), (2, 2, 3, 3), (2,))),
}

# name -> forms in which the operation occurs
PAIRWISE: dict[str, tuple[tuple[Callable[[Tensor, Tensor], Tensor], Any], ...]] = {
    "add": ((torch.add, aten.add.Tensor), (Tensor.add_, aten.add_.Tensor)),
    "mul": ((torch.mul, aten.mul.Tensor), (Tensor.mul_, aten.mul_.Tensor)),
}


def weighted(name: str, *, relu: bool) -> tuple[Pattern, ...]:
    """Return the variants of a weighted operation, with bias and without, behind it a relu or nothing."""
    function, operator, shapes = WEIGHTED[name]
    return tuple(
        Pattern(_weighted(function, act, bias), shapes[: 2 + bias], (("op", operator), *named))
        for bias, (act, named) in product((False, True), _behind(relu))
    )


def pairwise_relu(name: str) -> tuple[Pattern, ...]:
    """Return the variants of an operation on two tensors with a relu behind it."""
    return tuple(
        Pattern(_pairwise(function, act), ((2, 2), (2, 2)), (("op", operator), *named))
        for (function, operator), (act, named) in product(PAIRWISE[name], _behind(True))
    )


def _behind(relu: bool) -> list[tuple[Callable[[Tensor], Tensor], tuple[tuple[str, Any], ...]]]:
    return [(act, (("act", operator),)) for act, operator in RELUS] if relu else [(lambda x: x, ())]


def _weighted(function: Callable[..., Tensor], act: Any, with_bias: bool) -> Callable[..., Tensor]:
    if with_bias:
        return lambda input, weight, bias: act(function(input, weight, bias))
    return lambda input, weight: act(function(input, weight))


def _pairwise(function: Callable[..., Tensor], act: Any) -> Callable[..., Tensor]:
    return lambda self, other: act(function(self, other))
