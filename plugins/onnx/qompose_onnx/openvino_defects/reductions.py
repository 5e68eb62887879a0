# SPDX-License-Identifier: Apache-2.0
"""Reductions that drop dimensions, which OpenVINO is to read as ones that keep them, and a squeeze.

Of a linear without a bias that is reduced and quantized, OpenVINO 2026.4 moves the scales of channels behind
the reduction, in the shape that they had before: wrong numbers, without a word.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qompose_onnx.openvino_defects.inserting import put_behind

REDUCTIONS: Final = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")
"""Those that OpenVINO moves scales behind."""


def settle(model: ir.Model) -> bool:
    """Let reductions keep their dimensions, in place, and tell whether any dropped them."""
    nodes = [*model.graph.all_nodes()]
    if not any(node.op_type == "QuantizeLinear" for node in nodes):
        return False
    found = [node for node in nodes if _drops_dimensions(node)]
    for node in found:
        node.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
        put_behind(node, "Squeeze", *node.inputs[1:])
    return bool(found)


def _drops_dimensions(node: ir.Node) -> bool:
    facts = node.attributes
    drops = node.op_type in REDUCTIONS and facts.get_int("keepdims", 1) == 0
    return drops and not facts.get_int("noop_with_empty_axes", 0)
