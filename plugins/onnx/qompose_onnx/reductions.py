# SPDX-License-Identifier: Apache-2.0
"""Reductions that drop dimensions, which OpenVINO is to read as ones that keep them, and a squeeze.

Of a linear without a bias that is reduced and quantized, OpenVINO 2026.4 moves the scales of channels behind
the reduction, in the shape that they had before: wrong numbers, without a word.
"""

from __future__ import annotations

from typing import Any, Final

import onnx_ir as ir

REDUCTIONS: Final = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")
"""Those that OpenVINO moves scales behind."""


def settle(model: ir.Model) -> bool:
    """Let reductions keep their dimensions, in place, and tell whether any dropped them."""
    nodes = [*model.graph.all_nodes()]
    if not any(node.op_type == "QuantizeLinear" for node in nodes):
        return False
    found = [node for node in nodes if _drops_dimensions(node)]
    for node in found:
        _squeeze_behind(node)
    return bool(found)


def _drops_dimensions(node: ir.Node) -> bool:
    facts = node.attributes
    drops = node.op_type in REDUCTIONS and facts.get_int("keepdims", 1) == 0
    return drops and not facts.get_int("noop_with_empty_axes", 0)


def _squeeze_behind(node: ir.Node) -> None:
    """Let all that reads a reduction read it without the dimensions that it now keeps."""
    whole, name, graph = node.outputs[0], str(node.outputs[0].name), _graph(node)
    node.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
    made = ir.node("Squeeze", [whole, *node.inputs[1:]])
    made.name, dropped = f"{node.name}_squeezed", made.outputs[0]
    dropped.shape, dropped.type = whole.shape, whole.type
    ir.convenience.replace_all_uses_with(whole, dropped, replace_graph_outputs=True)
    made.replace_input_with(0, whole)
    whole.name, dropped.name, whole.shape = f"{name}_kept", name, None
    graph.insert_after(node, made)


def _graph(node: ir.Node) -> Any:
    """Return the graph of a node, which has one."""
    return node.graph
