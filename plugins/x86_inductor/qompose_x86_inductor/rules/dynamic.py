# SPDX-License-Identifier: Apache-2.0
"""The rules for linears that are dynamically quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from qompose.backend import Guard, Kernel, Pattern, Rule, TensorConstraint

from qompose_x86_inductor.kernels.dynamic import PerTensorEmitter, per_token
from qompose_x86_inductor.kernels.static import product_kernel
from qompose_x86_inductor.patterns import Activation, linear
from qompose_x86_inductor.rules import guards
from qompose_x86_inductor.rules.static import ACCEPTS, ACTIVATIONS

PER_TOKEN = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_affine, torch.per_channel_symmetric}),
    quant_range=(-128, 127),
    block_sizes=frozenset({(-1,)}),
)


def linear_rule(
    name: str,
    patterns: tuple[Pattern, ...],
    accepts: Mapping[str, TensorConstraint],
    kernel: Kernel,
    *,
    drawing: str = "linear",
    guard: Guard | Sequence[Guard] = guards.float32,
) -> Rule:
    """Return a rule for a linear that reads and returns floats; without an activation, weight-only."""
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


def _per_tensor(activation: Activation | None) -> Rule:
    """Return the rule of a linear whose input has one scale, fused with what follows it."""
    names = [activation.name] if activation is not None else []
    kernel = product_kernel("linear_dynamic", PerTensorEmitter(activation), float_output=True)
    return linear_rule(
        "_".join(("linear_dynamic", *names)),
        linear(activation),
        ACCEPTS,
        kernel,
        drawing=" -> ".join(("linear", *names)),
    )


DYNAMIC_RULES: tuple[Rule, ...] = (
    *map(_per_tensor, (*ACTIVATIONS["linear"], None)),
    linear_rule(
        "linear_dynamic_per_token",
        linear(),
        {"activation": PER_TOKEN, "weight": ACCEPTS["weight"]},
        product_kernel("linear_dynamic_per_token", per_token, float_output=True),
    ),
)
