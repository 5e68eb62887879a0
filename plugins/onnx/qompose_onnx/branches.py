# SPDX-License-Identifier: Apache-2.0
"""Weights of branches, which are to be constants of the branch that reads them.

torch's exporter makes all constants those of the whole model. ONNX Runtime 1.32 fuses the dequantized weight
of a product into MatMulNBits from opset 21 on, seeks it in the branch alone, and refuses the file without it.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir


def settle(model: ir.Model) -> None:
    """Let each branch hold the weights that it dequantizes, in place; what others read as well is copied."""
    for graph in model.graph.subgraphs():
        copies: dict[str, ir.Value] = {}
        for node, place, value in _from_outside(graph):
            name = str(value.name)
            if name not in copies:
                copies[name] = _owned(graph, value)
            node.replace_input_with(place, copies[name])
    for value in [*model.graph.initializers.values()]:
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[str(value.name)]


def _from_outside(graph: ir.Graph) -> Iterator[tuple[ir.Node, int, ir.Value]]:
    """Yield the constants of weights that a branch reads and another graph holds, with their readers."""
    for node in graph:
        if node.op_type != "DequantizeLinear":
            continue
        weight = node.inputs[0]
        if weight is not None and weight.is_initializer():
            for place, value in enumerate(node.inputs):
                if value is not None and value.is_initializer() and value.graph is not graph:
                    yield node, place, value


def _owned(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Return a constant of a branch that is equal to one of another graph."""
    name = f"{value.name}_{graph.name}"
    copy = ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
    graph.register_initializer(copy)
    return copy
