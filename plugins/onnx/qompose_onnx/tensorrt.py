# SPDX-License-Identifier: Apache-2.0
"""Whether a file keeps the rules that TensorRT documents for networks with Q/DQ; it has never run one here.

They are in "Working with Quantized Types" of NVIDIA's documentation: int8, zero points of 0, scales that are
constants, one per tensor for activations and one per tensor or output channel for weights, and no quantized
bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx_ir as ir

REMEDY: Final = "Quantize with get_onnx_quantization_config(tensorrt=True)"
_QDQ: Final = ("QuantizeLinear", "DequantizeLinear")
_OTHERS: Final = ("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")


def faults(model: ir.Model) -> Iterator[tuple[ir.Node, str]]:
    """Yield the nodes that TensorRT would refuse, each with why."""
    for node in model.graph.all_nodes():
        if node.op_type in _OTHERS:
            yield node, f"TensorRT has no {node.op_type}"
        elif node.op_type in _QDQ:
            reason = _objection(node)
            if reason:
                yield node, reason


def _objection(node: ir.Node) -> str | None:
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return "it has no zero point to identify its integers as int8"
    scales, zeros = _numbers(node.inputs[1]), _numbers(node.inputs[2])
    if scales is None or zeros is None:
        return "its scale is not a constant"
    if zeros.dtype == np.int32:
        return "a bias is quantized"
    if zeros.dtype != np.int8:
        return f"its integers are {zeros.dtype}, not int8"
    if zeros.any():
        return f"its zero point is {zeros[zeros != 0].flat[0]}, not 0"
    source = node.inputs[0]
    is_weight = source is not None and source.is_initializer()
    if scales.size > 1 and not is_weight:
        return "an activation has several scales"
    return None


def _numbers(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Return the numbers of a constant, which is an initializer or a node."""
    held = None if value is None else ir.convenience.get_const_tensor(value)
    return None if held is None else held.numpy()
