# SPDX-License-Identifier: Apache-2.0
"""Padding of one dimension, which OpenVINO is to read as padding of two, of which one is cut off again.

OpenVINO 2026.4 pads integers with 0, and moves their zero point behind, along the dimension that is padded:
wrong numbers before a convolution, without a word. Where two dimensions are padded, it pads floats.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from qompose_onnx.initializers import added_constant
from qompose_onnx.openvino_defects.inserting import cut_behind


def settle(model: ir.Model) -> bool:
    """Let constant padding of one dimension be of two, in place, and tell whether there was any."""
    nodes = [*model.graph.all_nodes()]
    if not any(node.op_type == "QuantizeLinear" for node in nodes):
        return False
    found = [*_of_one_dimension(nodes)]
    for node, ends, axis in found:
        _pad_another(node, ends, axis)
    return bool(found)


def _of_one_dimension(nodes: list[ir.Node]) -> Iterator[tuple[ir.Node, list[int], int]]:
    """Yield what pads one of several dimensions with a constant, with its ends and that dimension."""
    for node in nodes:
        if node.op_type != "Pad" or node.attributes.get_string("mode", "constant") != "constant":
            continue
        ends = _ends_of_all(node)
        rank = len(ends) // 2
        padded = [axis for axis in range(rank) if ends[axis] or ends[rank + axis]]
        if rank > 1 and len(padded) == 1:
            yield node, ends, padded[0]


def _ends_of_all(node: ir.Node) -> list[int]:
    """Return what is padded before all dimensions, then behind them; [] where that is computed."""
    ends = _numbers(node.inputs[1])
    if len(node.inputs) < 4 or node.inputs[3] is None:
        return ends
    axes, shape = _numbers(node.inputs[3]), node.outputs[0].shape
    if not axes or not ends or shape is None:
        return []
    rank, found = len(shape), [0] * 2 * len(shape)
    for axis, first, last in zip(axes, ends, ends[len(axes) :], strict=False):
        found[axis % rank], found[rank + axis % rank] = first, last
    return found


def _numbers(value: ir.Value | None) -> list[int]:
    held = None if value is None else ir.convenience.get_const_tensor(value)
    return [] if held is None else [int(number) for number in held.numpy()]


def _pad_another(node: ir.Node, ends: list[int], axis: int) -> None:
    """Pad another dimension behind its end, too, and cut that off."""
    rank = len(ends) // 2
    other = rank - 1 if axis < rank - 1 else rank - 2
    ends[rank + other] = 1
    name = f"{node.outputs[0].name}_pads_of_two"
    node.replace_input_with(1, added_constant(node, name, np.asarray(ends, np.int64)))
    if len(node.inputs) > 3:  # the ends of chosen axes
        node.replace_input_with(3, None)
    cut_behind(node, {other: -1})
