# SPDX-License-Identifier: Apache-2.0
"""Constants that are added to a model in the form of ONNX."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir


def added_constant(node: ir.Node, name: str, array: Any) -> ir.Value:
    """Return a new constant of the graph of a node, of the values and the type of an array of numpy."""
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    graph_of(node).register_initializer(value)
    return value


def graph_of(node: ir.Node) -> Any:
    """Return the graph of a node, which has one."""
    return node.graph
