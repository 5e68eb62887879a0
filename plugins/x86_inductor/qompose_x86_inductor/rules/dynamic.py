# SPDX-License-Identifier: Apache-2.0
"""The rules for linears that are dynamically quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from qompose.backend import Guard, Kernel, Rule, TensorConstraint, kit

from qompose_x86_inductor.kernels import packed
from qompose_x86_inductor.kernels.dynamic import PerTensorEmitter
from qompose_x86_inductor.kernels.static import product_kernel
from qompose_x86_inductor.operators.linear_packed import FOUR_BITS, GROUP_SIZES
from qompose_x86_inductor.patterns import Activation, anchor_of
from qompose_x86_inductor.rules.static import ACCEPTS, ACTIVATIONS

PER_TOKEN = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_affine, torch.per_channel_symmetric}),
    quant_range=(-128, 127),
    block_sizes=frozenset({(-1,)}),
)
INT4_GROUPS = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_symmetric, torch.per_channel_affine}),
    quant_min_lower_bound=FOUR_BITS[0],
    quant_max_upper_bound=FOUR_BITS[1],
    block_sizes=frozenset((size,) for size in GROUP_SIZES),
)


def linear_rule(
    name: str,
    accepts: Mapping[str, TensorConstraint],
    kernel: Kernel,
    *,
    activation: Activation | None = None,
    guard: Sequence[Guard] = (),
    width: int = 64,
) -> Rule:
    """Return a rule for a linear that reads and returns floats; without an activation, weight-only."""
    return kit.product_rule(
        "linear",
        name=name,
        after=() if activation is None else (activation.step,),
        operator=anchor_of("linear"),
        shapes=((2, width), (2, width), (2,)),
        mode="dynamic" if "activation" in accepts else "weight-only",
        accepts=accepts,
        guard=guard,
        kernels={"torch": kernel},
    )


def _per_tensor(activation: Activation | None) -> Rule:
    """Return the rule of a linear whose input has one scale, fused with what follows it."""
    names = [activation.name] if activation is not None else []
    kernel = product_kernel("linear_dynamic", PerTensorEmitter(activation), float_output=True)
    name = "_".join(("linear_dynamic", *names))
    return linear_rule(name, ACCEPTS, kernel, activation=activation)


def _per_token(name: str, weight: TensorConstraint, width: int) -> Rule:
    """Return the rule of a linear whose input has a scale for each row."""
    return linear_rule(
        name,
        {"activation": PER_TOKEN, "weight": weight},
        Kernel("qompose_x86.linear_packed", packed.per_token, float_output=True),
        width=width,
    )


DYNAMIC_RULES: tuple[Rule, ...] = (
    *map(_per_tensor, (*ACTIVATIONS["linear"], None)),
    _per_token("linear_dynamic_per_token", ACCEPTS["weight"], 64),
    # Groups of every size divide this.
    _per_token("linear_dynamic_per_token_groups", INT4_GROUPS, max(GROUP_SIZES)),
)
