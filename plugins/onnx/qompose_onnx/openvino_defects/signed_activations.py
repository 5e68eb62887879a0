# SPDX-License-Identifier: Apache-2.0
"""Signed integers of activations, which OpenVINO is to read unsigned.

Where a convolution reads what is concatenated and quantized to int8, OpenVINO 2026.4 quantizes before the
concatenation, and to a few steps alone; and without VNNI a convolution whose input stays int8 is some
hundredths off. Both without a word. Of uint8, with integers and a zero point that are larger by 128, it
computes what int8 stands for. Queries and keys of attention it reads rightly, and as int8 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qompose_onnx.initializers import added_constant, graph_of

MOVES: Final = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")


def settle(model: ir.Model) -> bool:
    """Let integers that are dequantized be unsigned, in place, and tell whether any were signed."""
    found = [*_signed(model)]
    for node in found:
        _read_unsigned(node)
    return bool(found)


def _signed(model: ir.Model) -> Iterator[ir.Node]:
    """Yield what quantizes activations to int8: weights stay signed, as OpenVINO wants them.

    Zero points that are computed are left alone: in these files they are of uint8.
    """
    fixed = _constants(model)
    for node in model.graph.all_nodes():
        if node.op_type != "QuantizeLinear" or node.outputs[0].dtype is not ir.DataType.INT8:
            continue
        zeros = _signed_zeros(node)
        is_known = _zero_point(node) is None or zeros is not None
        symmetric = is_known and (zeros is None or not zeros.any())
        if symmetric and _is_multiplied(node.outputs[0], fixed):
            continue
        if is_known and node.inputs[0] not in fixed and any(_dequantizers(node)):
            yield node


def _is_multiplied(integers: ir.Value, fixed: set[ir.Value | None]) -> bool:
    """Tell whether integers are multiplied by another activation, as queries by keys, and nothing else."""
    readers = [use.node for use in integers.uses()]
    while readers and all(node.op_type in ("DequantizeLinear", *MOVES) for node in readers):
        readers = [use.node for node in readers for use in node.outputs[0].uses()]
    return bool(readers) and all(
        node.op_type == "MatMul" and fixed.isdisjoint(node.inputs) for node in readers
    )


def _constants(model: ir.Model) -> set[ir.Value | None]:
    """Return what operators compute of constants alone, and the constants that they read."""
    found: set[ir.Value | None] = {None}
    for node in model.graph.all_nodes():
        found.update(value for value in node.inputs if value is not None and value.is_initializer())
        if not any(map(_is_graph, node.attributes.values())) and found.issuperset(node.inputs):
            found.update(node.outputs)
    return found


def _is_graph(fact: ir.Attr) -> bool:
    return fact.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _dequantizers(node: ir.Node) -> Iterator[ir.Node]:
    uses = (use.node for use in node.outputs[0].uses())
    yield from (reader for reader in uses if reader.op_type == "DequantizeLinear")


def _zero_point(node: ir.Node) -> ir.Value | None:
    return node.inputs[2] if len(node.inputs) > 2 else None


def _signed_zeros(node: ir.Node) -> Any:
    """Return the zero points as an array of numpy, None where they are computed or left out (0)."""
    zeros = _zero_point(node)
    held = None if zeros is None else ir.convenience.get_const_tensor(zeros)
    return None if held is None else held.numpy()


def _unsigned_zeros(node: ir.Node) -> Any:
    """Return the zero points of uint8, of the shape that the scales have where they are left out."""
    signed = _signed_zeros(node)
    if signed is None:
        scale: Any = node.inputs[1]
        signed = np.zeros([] if scale.shape is None else [int(size) for size in scale.shape])
    return np.asarray(signed.astype(np.int16) + 128, np.uint8)


def _read_unsigned(node: ir.Node) -> None:
    """Put an operator that gives uint8 beside one that gives int8, for those that dequantize."""
    name = f"{node.outputs[0].name}_uint8"
    zeros = added_constant(node, f"{name}_zero", _unsigned_zeros(node))
    facts = {key: fact for key, fact in node.attributes.items() if key != "output_dtype"}
    made = ir.node("QuantizeLinear", [*node.inputs[:2], zeros], attributes=facts)
    made.name, made.outputs[0].name = f"{node.name}_uint8", name
    made.outputs[0].shape, made.outputs[0].dtype = node.outputs[0].shape, ir.DataType.UINT8
    made.metadata_props.update(node.metadata_props)
    graph_of(node).insert_before(node, made)
    for reader in [*_dequantizers(node)]:
        reader.resize_inputs(3)
        reader.replace_input_with(0, made.outputs[0])
        reader.replace_input_with(2, zeros)
    if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
        graph_of(node).remove(node, safe=True)
