# SPDX-License-Identifier: Apache-2.0
"""The rule for linears whose input and weight are float8."""

from __future__ import annotations

import torch
from qompose.backend import Kernel, Rule, TensorConstraint, kit

from qompose_x86_inductor.kernels import float8
from qompose_x86_inductor.operators.linear_float8 import DTYPES
from qompose_x86_inductor.patterns import anchor_of

_KERNEL = Kernel(
    "qompose_x86.linear_float8", float8.linear, float_output=True, float_arithmetic=True
)

FLOAT8_RULES: tuple[Rule, ...] = (
    kit.product_rule(
        "linear",
        name="linear_float8",
        operator=anchor_of("linear"),
        output=False,
        accepts={
            "activation": TensorConstraint(
                dtypes=frozenset(DTYPES),
                qschemes=frozenset({torch.per_tensor_symmetric, torch.per_tensor_affine}),
            ),
            "weight": TensorConstraint(
                dtypes=frozenset(DTYPES),
                qschemes=frozenset({torch.per_channel_symmetric, torch.per_tensor_symmetric}),
                ch_axis=0,
            ),
        },
        max_depth=None,  # sums are floats
        kernels={"torch": _KERNEL},
    ),
)
