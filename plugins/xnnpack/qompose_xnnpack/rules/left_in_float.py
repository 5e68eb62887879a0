# SPDX-License-Identifier: Apache-2.0
"""The operators that no rule takes, with the reason why they stay in float."""

from __future__ import annotations

from typing import Final

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

_OPERATORS: dict[str, tuple[OpOverload, ...]] = {
    "XNNPACK multiplies two activations only in float": (
        aten.matmul.default,
        aten.bmm.default,
        aten.mm.default,
        aten.baddbmm.default,
        aten.scaled_dot_product_attention.default,
    ),
    "XNNPACK has no 3-D convolution": (
        aten.conv3d.default,
        aten.conv_transpose3d.input,
    ),
    "XNNPACK computes it only in float": (aten.softmax.int,),
    "XNNPACK has no operator for it": (
        aten.layer_norm.default,
        aten.group_norm.default,
        aten.instance_norm.default,
        aten.rms_norm.default,
    ),
}
LEFT_IN_FLOAT: Final = {operator: why for why, group in _OPERATORS.items() for operator in group}
