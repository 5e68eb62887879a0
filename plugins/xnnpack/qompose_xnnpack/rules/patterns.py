# SPDX-License-Identifier: Apache-2.0
"""The patterns of one to three operators that XNNPACK runs as one, generated from small tables."""

from __future__ import annotations

from collections.abc import Callable
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

ACTIVATIONS: dict[str, tuple[Form, ...]] = {
    "relu": ((F.relu, aten.relu.default), (torch.relu_, aten.relu_.default)),
    "hardtanh": (
        (F.hardtanh, aten.hardtanh.default),
        (partial(F.hardtanh, inplace=True), aten.hardtanh_.default),
        (F.relu6, aten.relu6.default),
    ),
}
"""The activations behind an operator that become the bounds of its output."""

# name -> its forms; shapes of input, weight and bias
WEIGHTED: dict[str, tuple[tuple[Form, ...], tuple[tuple[int, ...], ...]]] = {
    "linear": (((F.linear, aten.linear.default),), ((2, 64), (2, 64), (2,))),  # two groups
    "conv1d": (
        (
            (F.conv1d, aten.conv1d.default),
            (partial(F.conv1d, padding="same"), aten.conv1d.padding),
        ),
        ((1, 2, 5), (2, 2, 3), (2,)),
    ),
    "conv2d": (
        (
            (F.conv2d, aten.conv2d.default),
            (partial(F.conv2d, padding="same"), aten.conv2d.padding),
        ),
        ((1, 2, 5, 5), (2, 2, 3, 3), (2,)),
    ),
    "conv_transpose1d": (
        ((F.conv_transpose1d, aten.conv_transpose1d.default),),
        ((1, 2, 5), (2, 2, 3), (2,)),
    ),
    "conv_transpose2d": (
        ((F.conv_transpose2d, aten.conv_transpose2d.input),),
        ((1, 2, 5, 5), (2, 2, 3, 3), (2,)),
    ),
}

# spatial dimensions -> forms of padding with zeros
PADS: dict[int, tuple[Form, ...]] = {
    dims: (
        (partial(F.pad, pad=(1, 1) * dims), aten.pad.default),
        (
            lambda x, dims=dims: aten.constant_pad_nd.default(x, [1, 1] * dims),
            aten.constant_pad_nd.default,
        ),
    )
    for dims in (1, 2)
}

# name -> forms in which the operation occurs
BINARY: dict[str, tuple[Form, ...]] = {
    "add": ((torch.add, aten.add.Tensor), (Tensor.add_, aten.add_.Tensor)),
    "sub": ((torch.sub, aten.sub.Tensor), (Tensor.sub_, aten.sub_.Tensor)),
    "mul": ((torch.mul, aten.mul.Tensor), (Tensor.mul_, aten.mul_.Tensor)),
}


def weighted(
    name: str, *, activation: str | None = None, padded: bool = False, groups: int = 1
) -> tuple[Pattern, ...]:
    """Return the variants of a weighted operation, with bias and without.

    Args:
        activation: a key of ``ACTIVATIONS``: the activation behind it.
        padded: whether zeros are put around its input first.
        groups: of the example; literals take no part in matching.
    """
    forms, shapes = WEIGHTED[name]
    if groups > 1:
        shapes = (shapes[0], (2, 1, *shapes[1][2:]), shapes[2])
    pads = PADS[len(shapes[0]) - 2] if padded else (None,)
    return tuple(
        Pattern(
            _weighted(form[0], act, pad, with_bias=bias, groups=groups),
            shapes[: 2 + bias],
            _named(("pad", pad), ("op", form), ("act", act)),
        )
        for bias, form, pad, act in product((False, True), forms, pads, _behind(activation))
    )


def binary(name: str, *, activation: str) -> tuple[Pattern, ...]:
    """Return the variants of an operation on two tensors with an activation behind it."""
    return tuple(
        Pattern(_binary(form[0], act[0]), ((2, 2), (2, 2)), _named(("op", form), ("act", act)))
        for form, act in product(BINARY[name], ACTIVATIONS[activation])
    )


def _behind(activation: str | None) -> tuple[Form | None, ...]:
    return (None,) if activation is None else ACTIVATIONS[activation]


def _named(*forms: tuple[str, Form | None]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, form[1]) for name, form in forms if form is not None)


def _weighted(
    function: Callable[..., Tensor],
    act: Form | None,
    pad: Form | None,
    *,
    with_bias: bool,
    groups: int,
) -> Callable[..., Tensor]:
    behind = act[0] if act is not None else lambda x: x
    before = pad[0] if pad is not None else lambda x: x
    options = {"groups": groups} if groups > 1 else {}
    if with_bias:
        return lambda input, weight, bias: behind(function(before(input), weight, bias, **options))
    return lambda input, weight: behind(function(before(input), weight, **options))


def _binary(function: Callable[..., Tensor], act: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, other: act(function(self, other))
