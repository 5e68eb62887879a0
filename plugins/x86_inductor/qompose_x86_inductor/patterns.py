# SPDX-License-Identifier: Apache-2.0
"""Patterns of products with what oneDNN fuses into them, generated from a table of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from qompose.backend import Pattern
from torch import Tensor

aten = torch.ops.aten

Form: TypeAlias = "tuple[Callable[..., Tensor], Any]"
"""A function of tensors, and the operator that it is exported as."""
Shape: TypeAlias = "tuple[int, ...]"

# name -> forms, each with the shape of its result; shapes of input, weight and bias
PRODUCTS: dict[str, tuple[tuple[tuple[Form, Shape], ...], tuple[Shape, Shape, Shape]]] = {
    "conv2d": (
        (
            ((F.conv2d, aten.conv2d.default), (1, 2, 3, 3)),
            ((partial(F.conv2d, padding="same"), aten.conv2d.padding), (1, 2, 5, 5)),
        ),
        ((1, 2, 5, 5), (2, 2, 3, 3), (2,)),
    ),
    "conv1d": (
        (
            ((F.conv1d, aten.conv1d.default), (1, 2, 3)),
            ((partial(F.conv1d, padding="same"), aten.conv1d.padding), (1, 2, 5)),
        ),
        ((1, 2, 5), (2, 2, 3), (2,)),
    ),
    "linear": ((((F.linear, aten.linear.default), (2, 2)),), ((2, 2), (2, 2), (2,))),
}

ADDITIONS: tuple[Form, ...] = (
    (torch.add, aten.add.Tensor),
    (lambda result, other: torch.add(other, result), aten.add.Tensor),
    (Tensor.add_, aten.add_.Tensor),
    (lambda result, other: other.add_(result), aten.add_.Tensor),
)

DROPOUT: Form = (lambda x: F.dropout(x, 0.5, training=False), aten.dropout.default)


@dataclass(frozen=True)
class Activation:
    """A function that follows a product: its name in rules, oneDNN's name for it, and its forms.

    `arguments` name the operator's schema arguments that oneDNN expects as numbers, `numbers` are those
    that the operator lacks; `algorithm` names the argument that chooses a variant.
    """

    name: str
    post_op: str
    forms: tuple[Form, ...]
    arguments: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()
    algorithm: str | None = None


def _in_two_forms(name: str, function: Callable[..., Tensor]) -> tuple[Form, ...]:
    return (
        (function, getattr(aten, name).default),
        (partial(function, inplace=True), getattr(aten, f"{name}_").default),
    )


RELU = Activation("relu", "relu", _in_two_forms("relu", F.relu))
HARDTANH = Activation(
    "hardtanh", "hardtanh", _in_two_forms("hardtanh", F.hardtanh), ("min_val", "max_val")
)
RELU6 = Activation("relu6", "hardtanh", _in_two_forms("relu6", F.relu6), numbers=(0.0, 6.0))
HARDSWISH = Activation("hardswish", "hardswish", _in_two_forms("hardswish", F.hardswish))
SILU = Activation("silu", "swish", _in_two_forms("silu", F.silu))
GELU = Activation("gelu", "gelu", ((F.gelu, aten.gelu.default),), algorithm="approximate")
LEAKY_RELU = Activation(
    "leaky_relu", "leaky_relu", _in_two_forms("leaky_relu", F.leaky_relu), ("negative_slope",)
)
TANH = Activation(
    "tanh", "tanh", ((torch.tanh, aten.tanh.default), (torch.tanh_, aten.tanh_.default))
)


def linear(activation: Activation | None = None) -> tuple[Pattern, ...]:
    """Return the variants of linear (-> activation)."""
    return fused("linear", activation)


def anchor_of(name: str) -> str:
    """Return what the operator of a product is called in its patterns."""
    return "linear" if name == "linear" else "conv"


def fused(
    name: str, activation: Activation | None = None, *, add: bool = False
) -> tuple[Pattern, ...]:
    """Return the variants of a product (+ another tensor) (-> activation).

    Their names are "input", "weight", "bias", "other"; and `anchor_of`, "drop", "add", "act" of the
    operators. A dropout, which does nothing once a model is trained, comes in transformers between a
    linear and what is added to it.
    """
    return tuple(_fused(name, activation, add))


def _fused(name: str, activation: Activation | None, add: bool) -> Iterator[Pattern]:
    forms, shapes = PRODUCTS[name]
    # `other` of a linear stays in float: writing to it in place would write to an input.
    written = ADDITIONS if name != "linear" else ADDITIONS[:3]
    additions = written if add else (None,)
    drops = (None, DROPOUT) if add and name == "linear" else (None,)
    activations = activation.forms if activation is not None else (None,)
    for bias, (form, result), drop, addition, act in product(
        (False, True), forms, drops, additions, activations
    ):
        named = ((anchor_of(name), form), ("drop", drop), ("add", addition), ("act", act))
        multiply = form[0] if drop is None else _followed(form[0], drop[0])
        yield Pattern(
            _function(multiply, addition, act, bias),
            (*shapes[: 2 + bias], *([result] if add else [])),
            tuple((role, found[1]) for role, found in named if found is not None),
        )


def _followed(first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: second(first(*tensors))


def _function(
    multiply: Callable[..., Tensor], addition: Form | None, act: Form | None, with_bias: bool
) -> Callable[..., Tensor]:
    behind = act[0] if act is not None else lambda x: x
    if addition is None:
        if with_bias:
            return lambda input, weight, bias: behind(multiply(input, weight, bias))
        return lambda input, weight: behind(multiply(input, weight))
    plus = addition[0]
    if with_bias:
        return lambda input, weight, bias, other: behind(plus(multiply(input, weight, bias), other))
    return lambda input, weight, other: behind(plus(multiply(input, weight), other))
