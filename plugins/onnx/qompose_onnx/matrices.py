# SPDX-License-Identifier: Apache-2.0
"""Products of linears stay matrices up to the next linear, where all between computes by elements.

Linears are products of matrices (`qompose_onnx.regions`), whose results take their leading dimensions again
at once. Where the next linear makes a matrix of them, both reshapes go: OpenVINO then computes all between as
part of the product, which gives integers, and would otherwise write and read floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import onnx_ir as ir

from qompose_onnx.initializers import added_constant

OF_ONE: Final = frozenset((
    "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh",
    "Erf", "Exp", "Log", "Sqrt", "Abs", "Neg", "Softplus", "Softsign", "Mish",
))  # fmt: skip
"""Operators of one value."""
OF_TWO: Final = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators of two, of which one may be a constant: a number, or one for each column."""
PAIR: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})
WITH_NUMBERS: Final = PAIR | {"Clip", "Pow"}
"""Operators of one value, whose other inputs are single numbers here."""


@dataclass
class _Stretch:
    """What lies between the reshape of a product and those that make matrices of it again.

    Attributes:
        nodes: that compute by elements.
        ends: the reshapes that undo the first.
    """

    nodes: list[ir.Node]
    ends: list[ir.Node]


def settle(model: ir.Model) -> None:
    """Take out reshapes behind products that others undo, in place."""
    for node in [*model.graph.all_nodes()]:
        width = _width_of_matrix(node)
        stretch = None if width is None else _stretch_behind(node, width)
        if stretch is not None and stretch.ends and _stays_fused(node, stretch):
            _take_out(node, stretch)


def _width_of_matrix(node: ir.Node) -> int | None:
    """Return the last size of a matrix that a node reshapes into more dimensions without changing it."""
    if node.op_type != "Reshape":
        return None
    before, after = _shape(node.inputs[0]), _shape(node.outputs[0])
    if len(before) != 2 or len(after) < 3 or before[-1] != after[-1]:
        return None
    return before[-1] if isinstance(before[-1], int) else None


def _shape(value: ir.Value | None) -> list[Any]:
    return [] if value is None or value.shape is None else [*value.shape]


def _stretch_behind(first: ir.Node, width: int) -> _Stretch | None:
    """Return what is between a reshape and others, None where something else reads of it."""
    values, found = [first.outputs[0]], _Stretch([], [])
    for value in values:  # it grows
        if value.is_graph_output():
            return None
        for node in dict.fromkeys(use.node for use in value.uses()):
            if _undoes(node, value, width):
                found.ends.append(node)
            elif node.graph is not first.graph or not _is_by_elements(node):
                return None
            elif node not in found.nodes:
                found.nodes.append(node)
                values.append(node.outputs[0])
    read = (value for node in found.nodes for value in node.inputs if value not in values)
    return found if all(_fits(value, width) for value in read) else None


def _stays_fused(first: ir.Node, stretch: _Stretch) -> bool:
    """Tell whether ONNX Runtime 1.32 fuses a product whose result is quantized at once.

    It does where nothing computes with the integers before they are multiplied again.
    """
    at_once = any(use.node.op_type == "QuantizeLinear" for use in first.outputs[0].uses())
    return not at_once or PAIR.issuperset(node.op_type for node in stretch.nodes)


def _undoes(node: ir.Node, value: ir.Value, width: int) -> bool:
    """Tell whether a node reshapes a value into the matrix that it was."""
    shape = _shape(node.outputs[0]) if node.op_type == "Reshape" and value is node.inputs[0] else []
    return len(shape) == 2 and shape[-1] == width and not node.outputs[0].is_graph_output()


def _is_by_elements(node: ir.Node) -> bool:
    if node.op_type in WITH_NUMBERS:
        return all(value is None or _size(value) == 1 for value in node.inputs[1:])
    return node.op_type in OF_ONE or node.op_type in OF_TWO


def _held(value: ir.Value) -> Any:
    constant = ir.convenience.get_const_tensor(value)
    return None if constant is None else constant.numpy()


def _size(value: ir.Value) -> int | None:
    held = _held(value)
    return None if held is None else int(held.size)


def _fits(value: ir.Value | None, width: int) -> bool:
    """Tell whether a value is left out, or a constant: a number, or one for each column."""
    if value is None:
        return True
    held = _held(value)
    return held is not None and (held.size == 1 or held.shape[-1] == held.size == width)


def _take_out(first: ir.Node, stretch: _Stretch) -> None:
    matrix: Any = first.inputs[0]
    for node in stretch.nodes:
        node.outputs[0].shape = matrix.shape
        for place, row in _rows(node):
            array = _held(row).reshape(-1 if _size(row) != 1 else ())
            node.replace_input_with(place, added_constant(node, f"{node.name}_row_{place}", array))
    for end in stretch.ends:
        ir.convenience.replace_all_uses_with(end.outputs[0], end.inputs[0])
    ir.convenience.replace_all_uses_with(first.outputs[0], matrix)
    for node in (first, *stretch.ends):
        node.graph.remove(node, safe=True)


def _rows(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """Yield the constants that have leading dimensions of their own, with their places."""
    for place, value in enumerate(node.inputs):
        held = None if value is None or node.op_type in PAIR else _held(value)
        if held is not None and held.ndim > 1:
            yield place, value
