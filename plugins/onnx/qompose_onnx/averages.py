# SPDX-License-Identifier: Apache-2.0
"""Averages with `ceil_mode`, whose last windows may end outside of the image.

Of integers, ONNX Runtime 1.32 divides the sum of such a window by the size of a whole one where the padding
counts: wrong numbers, without a word. Of floats it divides rightly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from qompose_onnx.initializers import added_constant, graph_of


def settle(model: ir.Model) -> None:
    """Let averages without padding count none, and others read floats, in place."""
    for node in [*model.graph.all_nodes()]:
        facts = node.attributes
        if node.op_type != "AveragePool" or not facts.get_int("ceil_mode", 0):
            continue
        if not any(facts.get_ints("pads", ())):
            facts["count_include_pad"] = ir.AttrInt64("count_include_pad", 0)
        elif facts.get_int("count_include_pad", 0) and _reads_float32(node):
            _read_floats(node)


def _reads_float32(node: ir.Node) -> bool:
    """Tell whether a node may read dequantized integers, moved through what is in front or not."""
    return node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT


def _read_floats(node: ir.Node) -> None:
    """Put a bound that no float exceeds in front: ONNX Runtime does not move integers through it."""
    floats: Any = node.inputs[0]
    name = f"{node.outputs[0].name}_bounded"
    lowest = added_constant(node, f"{name}_lowest", np.finfo(np.float32).min)
    bounded = ir.node("Clip", [floats, lowest])
    bounded.name, bounded.outputs[0].name = f"{node.name}_bounded", name
    bounded.outputs[0].shape, bounded.outputs[0].type = floats.shape, floats.type
    graph_of(node).insert_before(node, bounded)
    node.replace_input_with(0, bounded.outputs[0])
