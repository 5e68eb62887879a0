# SPDX-License-Identifier: Apache-2.0
"""The rules for linears whose weight alone is quantized."""

from __future__ import annotations

import torch
from qompose.backend import Kernel, TensorConstraint, kit

from qompose_x86_inductor.kernels import packed
from qompose_x86_inductor.kernels.weight_only import float16_weight
from qompose_x86_inductor.operators.linear_packed import FLOATS, GROUP_SIZES
from qompose_x86_inductor.rules.dynamic import INT4_GROUPS, linear_rule
from qompose_x86_inductor.rules.static import ACCEPTS

FLOAT16 = TensorConstraint(dtypes=frozenset({torch.float16}), qschemes=frozenset({None}))


PACKED = Kernel(
    "qompose_x86.linear_packed", packed.weight_only, float_output=True, float_arithmetic=True
)


WEIGHT_ONLY_RULES = (
    linear_rule(
        "linear_int8_weight",
        {"weight": ACCEPTS["weight"]},
        PACKED,
        guard=(kit.float_types(*FLOATS),),
    ),
    linear_rule(
        "linear_int4_weight",
        {"weight": INT4_GROUPS},
        PACKED,
        guard=(kit.float_types(*FLOATS),),
        width=max(GROUP_SIZES),  # which groups of every size divide
    ),
    linear_rule(
        "linear_float16_weight",
        {"weight": FLOAT16},
        Kernel(
            "qompose_x86.linear_float16_weight",
            float16_weight,
            float_output=True,
            float_arithmetic=True,
        ),
        guard=(kit.float32,),
    ),
)
