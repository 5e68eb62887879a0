# SPDX-License-Identifier: Apache-2.0
"""The operators that stay in float although they might be quantized, with the reason for reports."""

from __future__ import annotations

from typing import Final

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

# Measured: compiled, the int8 steps of an LSTM or GRU took one to four times as long as torch's float loop
# (128 and 256 wide, 32 steps, batches of 1 and 16). LSTM and GRU have kernels for whole layers.
_UNROLLED = "its int8 linears, run step by step, are slower than torch's float loop"
_TWO_ACTIVATIONS = "torch has no int8 CPU kernel for a product of two activations"

_OPERATORS: dict[str, tuple[OpOverload, ...]] = {
    _TWO_ACTIVATIONS: (
        aten.matmul.default,
        aten.bmm.default,
        aten.mm.default,
        aten.baddbmm.default,
    ),
    "torch's oneDNN int8 operators do not include transposed convolution": (
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
    ),
    "this backend has no rule for 3-D convolution": (aten.conv3d.default,),
    _UNROLLED: (aten.rnn_tanh.input, aten.rnn_relu.input),
    "torch has no int8 CPU kernel for it": (
        aten.softmax.int,
        aten.layer_norm.default,
        aten.group_norm.default,
        aten.instance_norm.default,
        aten.rms_norm.default,
    ),
}
LEFT_IN_FLOAT: Final = {operator: why for why, group in _OPERATORS.items() for operator in group}
