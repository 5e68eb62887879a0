# SPDX-License-Identifier: Apache-2.0
"""Signed integers of activations, which OpenVINO is to read unsigned.

Where a convolution reads what is concatenated and quantized to int8, OpenVINO 2026.4 quantizes before the
concatenation, and to a few steps alone; and without VNNI a convolution whose input stays int8 is some
hundredths off. Both without a word. Of uint8, with integers and a zero point that are larger by 128, it
computes what int8 stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from qompose_onnx.initializers import added_constant, graph_of


def settle(model: ir.Model) -> bool:
    """Let integers that are dequantized be unsigned, in place, and tell whether any were signed."""
    found = [*_signed(model)]
    for node in found:
        _read_unsigned(node)
    return bool(found)


def _signed(model: ir.Model) -> Iterator[ir.Node]:
    """Yield what quantizes to int8."""
    for node in model.graph.all_nodes():
        is_signed = node.op_type == "QuantizeLinear" and node.outputs[0].dtype is ir.DataType.INT8
        if is_signed and any(_dequantizers(node)):
            yield node


def _dequantizers(node: ir.Node) -> Iterator[ir.Node]:
    uses = (use.node for use in node.outputs[0].uses())
    yield from (reader for reader in uses if reader.op_type == "DequantizeLinear")


def _read_unsigned(node: ir.Node) -> None:
    """Put an operator that gives uint8 beside one that gives int8, for those that dequantize."""
    source, scale, zero_point = node.inputs[:3]
    name = f"{node.outputs[0].name}_uint8"
    signed: Any = None if zero_point is None else ir.convenience.get_const_tensor(zero_point)
    shifted = np.asarray(signed.numpy().astype(np.int16) + 128, np.uint8)
    zeros = added_constant(node, f"{name}_zero", shifted)
    made = ir.node("QuantizeLinear", [source, scale, zeros], attributes=dict(node.attributes))
    made.name, made.outputs[0].name = f"{node.name}_uint8", name
    made.outputs[0].shape, made.outputs[0].dtype = node.outputs[0].shape, ir.DataType.UINT8
    made.metadata_props.update(node.metadata_props)
    graph_of(node).insert_before(node, made)
    for reader in [*_dequantizers(node)]:
        reader.replace_input_with(0, made.outputs[0])
        reader.replace_input_with(2, zeros)
    if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
        graph_of(node).remove(node, safe=True)
