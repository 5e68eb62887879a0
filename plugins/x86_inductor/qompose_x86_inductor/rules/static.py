# SPDX-License-Identifier: Apache-2.0
"""The rules for static quantization, longest fusion first, operators that only move values last."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from qompose.backend import Kernel, Match, Rule, TensorConstraint, kit
from torch.fx import Node

from qompose_x86_inductor.kernels.static import (
    ProductEmitter,
    UnaryEmitter,
    max_pool,
    multiply,
    product_kernel,
)
from qompose_x86_inductor.patterns import (
    GELU,
    HARDSWISH,
    HARDTANH,
    LEAKY_RELU,
    RELU,
    RELU6,
    SILU,
    TANH,
    Activation,
    anchor_of,
)

aten = torch.ops.aten

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

AFTER_CONVOLUTIONS = (RELU, RELU6, HARDTANH, HARDSWISH, SILU, GELU, LEAKY_RELU)
ACTIVATIONS = {
    "conv2d": AFTER_CONVOLUTIONS,
    "conv1d": AFTER_CONVOLUTIONS,
    "linear": (*AFTER_CONVOLUTIONS, TANH),
}
"""The functions that may follow each product."""


def _product(operator: str, activation: Activation | None = None, *, add: bool = False) -> Rule:
    """Return the rule of a product, fused with what follows it.

    What is added to a convolution is quantized, what is added to a linear stays in float: it is the sum
    of a transformer's layers, where eight bits cost accuracy. Transformers have a dropout before that sum.
    """
    kernel = ProductEmitter(operator, activation, add=add)
    added = (kit.DROPOUT, kit.ADD_FLOAT) if operator == "linear" else (kit.ADD,)
    return kit.product_rule(
        operator,
        after=(*(added if add else ()), *([activation.step] if activation is not None else [])),
        operator=anchor_of(operator),
        output=False,
        accepts=ACCEPTS,
        kernels={"torch": product_kernel(kernel.name, kernel)},
    )


def _products() -> Iterator[Rule]:
    for operator in ACTIVATIONS:
        yield _product(operator, RELU, add=True)
        yield _product(operator, add=True)
    for operator, activations in ACTIVATIONS.items():
        yield from (_product(operator, activation) for activation in activations)
    yield from map(_product, ACTIVATIONS)


def _averaged(name: str) -> Rule:
    """Return a rule for a mean, whose output has the scale of its reader."""
    kernel = Kernel(f"qompose_x86.{name}", UnaryEmitter(name))
    return kit.pool_rule(name, output=False, accepts=ACCEPTS, kernels={"torch": kernel})


def _not_of_linears(match: Match) -> str | None:
    """Leave the product of two linears in float, as their sum: what a transformer's gate multiplies.

    Rounding both factors costs more accuracy than rounding what the next linear reads, and no time is won:
    compiled code multiplies floats and quantizes the result in one pass.
    """
    if all(_is_of_linear(match.node(name)) for name in ("self", "other")):
        return "it multiplies outputs of linears, which return float at no extra cost"
    return None


def _is_of_linear(node: Node | None) -> bool:
    """Tell whether a linear gives a value, or does so before functions of that alone."""
    while node is not None and node.target is not aten.linear.default:
        node = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
    return node is not None


_MAX_POOL = {"torch": Kernel("qompose_x86.max_pool2d", max_pool)}

PRODUCT_RULES: tuple[Rule, ...] = tuple(_products())
STATIC_RULES: tuple[Rule, ...] = (
    kit.binary_rule(
        "mul",
        output=False,
        accepts=ACCEPTS,
        guard=(kit.computed_factors, _not_of_linears),
        kernels={"torch": Kernel("qompose_x86.mul", multiply)},
    ),
    *map(_averaged, ("avg_pool2d", "adaptive_avg_pool2d", "mean")),
    kit.pool_rule("max_pool2d", accepts=ACCEPTS, kernels=_MAX_POOL),
    kit.pool_rule("max_pool1d", accepts=ACCEPTS, kernels=_MAX_POOL),
    *kit.move_rules(ACCEPTS, guard=dict.fromkeys(("select", "slice"), (kit.keeps_half,))),
)
