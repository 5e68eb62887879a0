# SPDX-License-Identifier: Apache-2.0
"""Queries and keys, which are quantized before they are laid out by heads.

Right behind a linear the pair of operators is one with it in OpenVINO, which then returns integers. ONNX
Runtime 1.32 fuses no linear whose input and output differ in type.
"""

from __future__ import annotations

from typing import Any, Final

import onnx_ir as ir

from qompose_onnx.initializers import graph_of

_MOVES: Final = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")


def settle(model: ir.Model) -> None:
    """Quantize queries and keys before they are laid out by heads, in place: values do not change."""
    for node in [*model.graph.all_nodes()]:
        if node.op_type == "QuantizeLinear" and is_multiplied(node.outputs[0]):
            _quantize_before_moves(node)
    model.graph.sort()


def is_multiplied(integers: ir.Value) -> bool:
    """Tell whether integers are those of an activation that another one is multiplied by."""
    readers = [use.node for use in integers.uses()]
    while readers and all(node.op_type in ("DequantizeLinear", *_MOVES) for node in readers):
        readers = [use.node for node in readers for use in node.outputs[0].uses()]
    return bool(readers) and all(
        node.op_type == "MatMul" and not any(map(_is_weight, node.inputs)) for node in readers
    )


def _is_weight(value: Any) -> bool:
    node = value.producer()
    while node is not None and node.op_type in ("QuantizeLinear", "DequantizeLinear", *_MOVES):
        value, node = node.inputs[0], node.inputs[0].producer()
    return bool(value.is_initializer())


def _quantize_before_moves(node: ir.Node) -> None:
    """Put a pair of operators before the moves of the floats that it reads, if nothing else reads these."""
    moved: Any = node.inputs[0]
    source, last = moved, None
    while _moves_alone(source):
        last = source.producer()
        source = last.inputs[0]
    pairs = [use.node for use in node.outputs[0].uses()]
    if last is None or any(pair.op_type != "DequantizeLinear" for pair in pairs):
        return
    for pair in pairs:
        ir.convenience.replace_all_uses_with(pair.outputs[0], moved)
    node.replace_input_with(0, source)
    node.outputs[0].shape = pairs[0].outputs[0].shape = source.shape
    last.replace_input_with(0, pairs[0].outputs[0])
    for pair in pairs[1:]:
        graph_of(pair).remove(pair, safe=True)


def _moves_alone(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type in _MOVES and len(value.uses()) == 1
