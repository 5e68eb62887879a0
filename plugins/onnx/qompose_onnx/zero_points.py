# SPDX-License-Identifier: Apache-2.0
"""Zero points of weights, of which each weight is to have its own.

On processors without VNNI, ONNX Runtime's option `session.x64quantprecision` makes uint8 of int8 weights, of
which the sums are exact. ONNX Runtime 1.32 names what it makes after what was there: of zero points that two
weights share it would make the same name twice, and refuses the file.
"""

from __future__ import annotations

import onnx_ir as ir

from qompose_onnx.initializers import added_constant


def settle(model: ir.Model) -> None:
    """Give each int8 weight zero points of its own, in place."""
    taken = set[ir.Value]()
    for node in model.graph.all_nodes():
        zeros = node.inputs[2] if _dequantizes_weight(node) else None
        if zeros is None or zeros.const_value is None:
            continue
        if zeros in taken:
            array = zeros.const_value.numpy()
            name = f"{node.outputs[0].name}_zero"
            node.replace_input_with(2, added_constant(node, name, array))
        taken.add(zeros)


def _dequantizes_weight(node: ir.Node) -> bool:
    weight = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    if weight is None or not weight.is_initializer():
        return False
    return len(node.inputs) > 2 and weight.dtype is ir.DataType.INT8
