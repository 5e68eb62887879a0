# SPDX-License-Identifier: Apache-2.0
"""Averages that count padding, which OpenVINO is to read from an operator of its own.

OpenVINO 2026.4 pads integers with 0 rather than their zero point, without a word. Behind a Pad it averages
floats, rightly. With `ceil_mode` there may then be a window more, that begins in the padding: it is cut off.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qompose_onnx.errors import ONNXTargetError
from qompose_onnx.initializers import added_constant, graph_of
from qompose_onnx.openvino_defects.inserting import cut_behind

ALMOST_ZERO: Final = 1e-30
"""What is padded: OpenVINO puts a Pad of 0 back into the pool."""


def settle(model: ir.Model) -> bool:
    """Let averages read what is padded, in place, and tell whether there were any.

    Raises:
        ONNXTargetError: one has `ceil_mode` and a result of open size, in a model with quantized activations.
    """
    nodes = [*model.graph.all_nodes()]
    found = [node for node in nodes if _counts_padding(node)]
    if not any(node.op_type == "QuantizeLinear" for node in nodes):
        return False
    for node in found:
        sizes = _sizes_to_keep(node)
        _pad_before(node)
        if sizes:
            cut_behind(node, dict(enumerate(sizes, 2)))
    return bool(found)


def _counts_padding(node: ir.Node) -> bool:
    facts = node.attributes
    counts = node.op_type == "AveragePool" and facts.get_int("count_include_pad", 0) == 1
    return counts and any(facts.get_ints("pads", ()))


def _sizes_to_keep(node: ir.Node) -> list[int]:
    """Return the sizes of a result that `ceil_mode` rounds up, without batch and channels."""
    if node.attributes.get_int("ceil_mode", 0) == 0:
        return []
    shape: Any = node.outputs[0].shape or ()
    sizes = [size for size in shape[2:] if isinstance(size, int)]
    if len(sizes) != len(node.attributes.get_ints("kernel_shape", ())):
        raise ONNXTargetError(
            f"OpenVINO would compute {node.name} wrongly, an average with ceil_mode=True that counts its "
            "padding and whose size is dynamic. Export with fixed sizes, use ceil_mode=False or "
            "count_include_pad=False, or lower the model for the target 'onnxruntime'"
        )
    return sizes


def _pad_before(node: ir.Node) -> None:
    ends = list(node.attributes["pads"].as_ints())
    half, name = len(ends) // 2, f"{node.outputs[0].name}_padded"
    pads = np.asarray([0, 0, *ends[:half], 0, 0, *ends[half:]], np.int64)
    value = np.asarray(ALMOST_ZERO, node.inputs[0].dtype.numpy())
    constants = (
        added_constant(node, f"{name}_pads", pads),
        added_constant(node, f"{name}_value", value),
    )
    made = ir.node("Pad", [node.inputs[0], *constants])
    made.name, made.outputs[0].name = f"{node.name}_padded", name
    graph_of(node).insert_before(node, made)
    node.replace_input_with(0, made.outputs[0])
    node.attributes["pads"] = ir.AttrInt64s("pads", [0] * len(ends))
