# SPDX-License-Identifier: Apache-2.0
"""Masks that hide nothing, which go: ONNX Runtime would apply them to all scores of attention, twice.

Encoders of `transformers` make one, where they are given none, of which the exporter makes a constant.
"""

from __future__ import annotations

import onnx_ir as ir


def settle(model: ir.Model) -> None:
    """Remove each Where whose mask is a constant of True, in place."""
    for node in [*model.graph.all_nodes()]:
        if node.op_type == "Where" and not node.outputs[0].is_graph_output() and _keeps_all(node):
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[1])
            node.graph.remove(node, safe=True)


def _keeps_all(node: ir.Node) -> bool:
    """Tell whether a choice gives its first tensor as it is."""
    mask, chosen = node.inputs[:2]
    held = None if mask is None else ir.convenience.get_const_tensor(mask)
    shape = None if chosen is None else chosen.shape
    if held is None or shape is None or shape != node.outputs[0].shape:
        return False
    if any(isinstance(size, ir.SymbolicDim) and size.value is None for size in shape):
        return False  # two sizes of which nothing is known count as equal
    return bool(held.numpy().all())
