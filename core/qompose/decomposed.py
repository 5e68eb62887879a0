# SPDX-License-Identifier: Apache-2.0
"""The `quantized_decomposed` operators, taken from torch here and nowhere else.

ExecuTorch and Inductor know a quantized model by these operators, so they are torch's own; importing
the private module registers them.
"""

from __future__ import annotations

import torch
from torch.ao.quantization.fx import _decomposed as _registers  # noqa: F401
from torch.fx import Node

_ops = torch.ops.quantized_decomposed

quantize_per_tensor = _ops.quantize_per_tensor.default
dequantize_per_tensor = _ops.dequantize_per_tensor.default
quantize_per_tensor_dynamic = _ops.quantize_per_tensor.tensor
dequantize_per_tensor_dynamic = _ops.dequantize_per_tensor.tensor
quantize_per_channel = _ops.quantize_per_channel.default
dequantize_per_channel = _ops.dequantize_per_channel.default
choose_qparams = _ops.choose_qparams.tensor
choose_qparams_symmetric = _ops.choose_qparams_symmetric.tensor

QUANTIZE = frozenset({quantize_per_tensor, quantize_per_tensor_dynamic, quantize_per_channel})
DEQUANTIZE = frozenset(
    {dequantize_per_tensor, dequantize_per_tensor_dynamic, dequantize_per_channel}
)


def is_quantize(node: object) -> bool:
    """Tell whether an argument is a node that calls a quantize operator."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in QUANTIZE


def is_dequantize(node: object) -> bool:
    """Tell whether an argument is a node that calls a dequantize operator."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in DEQUANTIZE
