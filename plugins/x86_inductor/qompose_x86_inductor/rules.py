# SPDX-License-Identifier: Apache-2.0
"""The rule table of the x86 backend, longest fusion first."""

from __future__ import annotations

import torch
from qompose import Kernel, Match, OperatorPattern, Rule, TensorConstraint

from qompose_x86_inductor.kernels import Product, max_pool
from qompose_x86_inductor.patterns import (
    GELU,
    HARDSWISH,
    HARDTANH,
    RELU,
    SILU,
    Activation,
    convolution,
    linear,
)

ACCEPTS = {
    "activation": TensorConstraint(
        dtypes=frozenset({torch.uint8}), qschemes=frozenset({torch.per_tensor_affine})
    ),
    "weight": TensorConstraint(
        dtypes=frozenset({torch.int8}),
        qschemes=frozenset({torch.per_channel_symmetric, torch.per_tensor_symmetric}),
        ch_axis=0,
    ),
}

GEOMETRY = ("stride", "padding", "dilation", "groups")


def _is_image(match: Match) -> str | None:
    return _not_float32(match) or _wrong_rank(match, "input", 4)


def _not_float32(match: Match) -> str | None:
    dtype = match.output.meta["val"].dtype
    return None if dtype is torch.float32 else f"oneDNN's int8 operators give float32, not {dtype}"


def _wrong_rank(match: Match, name: str, rank: int) -> str | None:
    node = match.node(name)
    actual = node.meta["val"].dim() if node is not None else 0
    return (
        None if actual == rank else f"{name} has {actual} dimensions, and the kernel takes {rank}"
    )


def _same_shapes(match: Match) -> str | None:
    """OneDNN adds tensors of one shape; anything else is not this fusion."""
    conv, other = match.node("conv"), match.node("other")
    if conv is None or other is None or conv.meta["val"].shape != other.meta["val"].shape:
        return "the summand is broadcast"
    addition = match.node("add")
    alpha = 1 if addition is None else addition.kwargs.get("alpha", 1)
    return _is_image(match) if alpha == 1 else f"the summand is scaled by alpha={alpha}"


def _conv(name: str, drawing: str, activation: Activation | None, *, add: bool = False) -> Rule:
    operator = "conv2d_add" if add else "conv2d"
    return Rule(
        name=name,
        drawing=drawing,
        patterns=convolution(activation, add=add),
        anchor="conv",
        activations=("input", "other") if add else ("input",),
        weight="weight",
        bias="bias",
        channels=None if add else (1, 1),
        output=False,
        accepts=ACCEPTS,
        guard=_same_shapes if add else _is_image,
        kernels={
            "torch": Kernel(
                f"qompose_x86.{operator}", Product(operator, "conv", activation, GEOMETRY)
            )
        },
    )


def _linear(name: str, drawing: str, activation: Activation | None) -> Rule:
    return Rule(
        name=name,
        drawing=drawing,
        patterns=linear(activation),
        anchor="linear",
        weight="weight",
        bias="bias",
        channels=(-1, -1),
        output=False,
        accepts=ACCEPTS,
        guard=_not_float32,
        kernels={"torch": Kernel("qompose_x86.linear", Product("linear", "linear", activation))},
    )


MAX_POOL = Rule(
    name="max_pool2d",
    drawing="max_pool2d",
    patterns=(
        OperatorPattern(
            (torch.ops.aten.max_pool2d.default,),
            example=lambda self: torch.nn.functional.max_pool2d(self, 3, 2, 1),
            shapes=((1, 2, 5, 5),),
        ),
    ),
    activations=("self",),
    shares=True,
    condition="all",
    accepts=ACCEPTS,
    guard=lambda match: _not_float32(match) or _wrong_rank(match, "self", 4),
    kernels={"torch": Kernel("qompose_x86.max_pool2d", max_pool)},
)

RULES: tuple[Rule, ...] = (
    _conv("conv2d_add_relu", "conv2d + x -> relu", RELU, add=True),
    _conv("conv2d_add", "conv2d + x", None, add=True),
    _conv("conv2d_relu", "conv2d -> relu", RELU),
    _conv("conv2d_hardtanh", "conv2d -> hardtanh", HARDTANH),
    _conv("conv2d_hardswish", "conv2d -> hardswish", HARDSWISH),
    _conv("conv2d_silu", "conv2d -> silu", SILU),
    _conv("conv2d", "conv2d", None),
    _linear("linear_relu", "linear -> relu", RELU),
    _linear("linear_gelu", "linear -> gelu", GELU),
    _linear("linear", "linear", None),
    MAX_POOL,
)
