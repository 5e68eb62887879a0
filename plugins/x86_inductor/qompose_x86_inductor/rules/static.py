# SPDX-License-Identifier: Apache-2.0
"""The rules for static quantization, longest fusion first, operators that only move values last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from qompose.backend import Guard, Kernel, OperatorPattern, Rule, TensorConstraint, on_integers

from qompose_x86_inductor.kernels.static import (
    ProductEmitter,
    UnaryEmitter,
    clamp,
    max_pool,
    multiply,
    product_kernel,
    unmoved,
)
from qompose_x86_inductor.patterns import (
    GELU,
    HARDSWISH,
    HARDTANH,
    LEAKY_RELU,
    PRODUCTS,
    RELU,
    RELU6,
    SILU,
    TANH,
    Activation,
    anchor_of,
    fused,
)
from qompose_x86_inductor.rules import guards

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
    of a transformer's layers, where eight bits cost accuracy.
    """
    kernel = ProductEmitter(operator, activation, add=add)
    quantizes_other = add and operator != "linear"
    following = activation.name if activation is not None else None
    return Rule(
        name="_".join(filter(None, (operator, "add" * add, following))),
        drawing=" -> ".join(filter(None, (operator + " + x" * add, following))),
        patterns=fused(operator, activation, add=add),
        anchor=anchor_of(operator),
        activations=("input", "other") if quantizes_other else ("input",),
        weight="weight",
        bias="bias",
        channels=None if quantizes_other else (-1, -1) if operator == "linear" else (1, 1),
        output=False,
        accepts=ACCEPTS,
        guard=(*_guards(operator, add),),
        kernels={"torch": product_kernel(kernel.name, kernel)},
    )


def _guards(operator: str, add: bool) -> Iterator[Guard]:
    yield guards.float32
    if operator != "linear":
        yield guards.rank("input", len(PRODUCTS[operator][1][0]))
    if add:
        yield guards.plain_sum(anchor_of(operator))
    if add and operator == "linear":
        yield guards.separate_inputs
        yield guards.not_training("drop")


def _products() -> Iterator[Rule]:
    for operator in PRODUCTS:
        yield _product(operator, RELU, add=True)
        yield _product(operator, add=True)
    for operator, activations in ACTIVATIONS.items():
        yield from (_product(operator, activation) for activation in activations)
    yield from map(_product, PRODUCTS)


IMAGE, SEQUENCE = (1, 2, 4, 4), (1, 2, 5)


def _one(target: Any, *literals: Any, shape: tuple[int, ...] = IMAGE) -> OperatorPattern:
    """Return the pattern of an operator on one tensor, and the literals of its example."""
    return OperatorPattern((target,), lambda self: target(self, *literals), (shape,))


def _averaged(name: str, pattern: OperatorPattern, names: tuple[str, ...], *, guard: Guard) -> Rule:
    """Return a rule for a mean: its values span less than its input's, so it has a scale of its own.

    That is the scale of its reader.
    """
    return Rule(
        name=name,
        patterns=(pattern,),
        activations=("self",),
        output=False,
        condition="all",
        accepts=ACCEPTS,
        guard=(guards.float32, guard),
        kernels={"torch": Kernel(f"qompose_x86.{name}", UnaryEmitter(name, names))},
    )


def _shared(
    name: str,
    *patterns: OperatorPattern,
    kernel: Kernel | None = None,
    guard: Guard | Sequence[Guard] = guards.float32,
    activation: str = "self",
    condition: str = "all",
    drawing: str = "",
    carries: bool = True,
) -> Rule:
    """Return a rule for an operator whose output has the scale of its input.

    Args:
        kernel: None: the operator only moves values, and moves integers as well.
        carries: apply only where something quantized reads the output; before a float operator eight bits
            would cost accuracy for nothing.
    """
    return Rule(
        name=name,
        drawing=drawing,
        patterns=patterns,
        activations=(activation,),
        shares=True,
        carries=carries,
        condition=condition,
        accepts=ACCEPTS,
        guard=guard,
        kernels={"torch": kernel or Kernel(f"{name} on integers", on_integers)},
    )


CLAMP = Kernel("clamp on integers", clamp)
UNMOVED = Kernel("no operator", unmoved)

_WINDOW = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")

MUL = Rule(
    name="mul",
    patterns=(OperatorPattern((aten.mul.Tensor, aten.mul_.Tensor)),),
    activations=("self", "other"),
    output=False,
    condition="no_float",
    accepts=ACCEPTS,
    guard=(guards.float32, guards.computed_factors),
    kernels={"torch": Kernel("qompose_x86.mul", multiply)},
)

STATIC_RULES: tuple[Rule, ...] = (
    *_products(),
    MUL,
    _averaged(
        "avg_pool2d", _one(aten.avg_pool2d.default, [2, 2]), _WINDOW, guard=guards.rank("self", 4)
    ),
    _averaged(
        "adaptive_avg_pool2d",
        _one(aten.adaptive_avg_pool2d.default, [1, 1]),
        ("output_size",),
        guard=guards.rank("self", 4),
    ),
    _averaged(
        "mean",
        _one(aten.mean.dim, [2, 3]),
        ("dim", "keepdim"),
        guard=guards.over_dimensions,
    ),
    _shared(
        "max_pool2d",
        _one(aten.max_pool2d.default, [3, 3], [2, 2], [1, 1]),
        kernel=Kernel("qompose_x86.max_pool2d", max_pool),
        guard=(guards.float32, guards.rank("self", 4)),
        carries=False,
    ),
    _shared(
        "max_pool1d",
        _one(aten.max_pool1d.default, [3], [2], [1], shape=SEQUENCE),
        kernel=Kernel("qompose_x86.max_pool2d", max_pool),
        guard=(guards.float32, guards.rank("self", 3)),
        carries=False,
    ),
    _shared("relu", OperatorPattern((aten.relu.default, aten.relu_.default)), kernel=CLAMP),
    _shared(
        "clamp",
        *(_one(target) for target in (aten.hardtanh.default, aten.hardtanh_.default)),
        *(_one(target) for target in (aten.relu6.default, aten.relu6_.default)),
        *(_one(t, -0.5, 0.5) for t in (aten.clamp.default, aten.clamp_.default, aten.clip.default)),
        _one(aten.clamp_min.default, -0.5),
        _one(aten.clamp_max.default, 0.5),
        kernel=CLAMP,
        drawing="hardtanh | relu6 | clamp",
    ),
    _shared(
        "cat",
        OperatorPattern((aten.cat.default,)),
        activation="tensors",
        condition="any",
    ),
    _shared(
        "view",
        _one(aten.view.default, [-1]),
        _one(aten.reshape.default, [-1]),
        _one(aten.flatten.using_ints, 1),
        drawing="view | reshape | flatten",
    ),
    _shared(
        "permute",
        _one(aten.permute.default, [0, 2, 3, 1]),
        _one(aten.transpose.int, 1, 2),
        drawing="permute | transpose",
    ),
    _shared("slice", _one(aten.slice.Tensor, 1, 0, 1)),
    _shared("squeeze", _one(aten.squeeze.dim, 2, shape=(1, 2, 1))),
    _shared("unsqueeze", _one(aten.unsqueeze.default, 1)),
    _shared("select", _one(aten.select.int, 1, 0)),
    _shared("expand", _one(aten.expand.default, [3, 2, 4, 4])),
    _shared(
        "copy",
        *(_one(t.default) for t in (aten.clone, aten.contiguous, aten.detach, aten.alias)),
        kernel=UNMOVED,
        drawing="clone | contiguous | detach",
    ),
    _shared(
        "dropout",
        OperatorPattern(
            (aten.dropout.default,), lambda input: aten.dropout(input, 0.5, False), (IMAGE,)
        ),
        activation="input",
        kernel=UNMOVED,
        guard=(guards.float32, guards.not_training("output")),
    ),
)
