# SPDX-License-Identifier: Apache-2.0
"""The rules for linears whose weight alone is quantized."""

from __future__ import annotations

from collections.abc import Callable

import torch
from qompose.backend import Kernel, Region, TensorConstraint, kit
from torch.fx import Node

from qompose_x86_inductor.kernels.weight_only import float16_weight, int4_weight, int8_weight
from qompose_x86_inductor.operators.linear_weight_only import FLOATS, GROUP_SIZES
from qompose_x86_inductor.rules.dynamic import linear_rule
from qompose_x86_inductor.rules.static import ACCEPTS

INT4_GROUPS = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_symmetric, torch.per_channel_affine}),
    quant_min_lower_bound=-8,
    quant_max_upper_bound=7,
    block_sizes=frozenset((size,) for size in GROUP_SIZES),
)
FLOAT16 = TensorConstraint(dtypes=frozenset({torch.float16}), qschemes=frozenset({None}))


def _kernel(name: str, emit: Callable[[Region], Node]) -> Kernel:
    return Kernel(f"qompose_x86.{name}", emit, float_output=True, float_arithmetic=True)


WEIGHT_ONLY_RULES = (
    linear_rule(
        "linear_int8_weight",
        {"weight": ACCEPTS["weight"]},
        _kernel("linear_int8_weight", int8_weight),
        guard=(kit.float_types(*FLOATS),),
    ),
    linear_rule(
        "linear_int4_weight",
        {"weight": INT4_GROUPS},
        _kernel("linear_int4_weight", int4_weight),
        guard=(kit.float_types(*FLOATS),),
        width=max(GROUP_SIZES),  # which groups of every size divide
    ),
    linear_rule(
        "linear_float16_weight",
        {"weight": FLOAT16},
        _kernel("linear_float16_weight", float16_weight),
        guard=(kit.float32,),
    ),
)
