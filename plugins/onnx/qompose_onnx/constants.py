# SPDX-License-Identifier: Apache-2.0
"""Constants in the form that runtimes fuse: weights laid out as MatMul reads them, and of four bits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir


def fit_constants(model: ir.Model, four_bits: Collection[str]) -> None:
    """Rewrite what reads constants, in place.

    Args:
        four_bits: the names of what is dequantized of integers of four bits.
    """
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Cast":
            _fold_cast(model, node)
    for node in list(model.graph.all_nodes()):
        if node.op_type == "DequantizeLinear" and node.outputs[0].name in four_bits:
            _make_four_bits(model, node)
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Transpose":
            _fold_transpose(model, node)
        elif node.op_type == "ReduceMean":
            _name_global_average(node)
    _drop_unread(model)


def _drop_unread(model: ir.Model) -> None:
    """Drop constants that nothing reads any more: what was transposed or cast would be in the file twice."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del graph.initializers[name]


def _constant(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Return the numbers of an initializer."""
    held = value.const_value if value is not None and value.is_initializer() else None
    return None if held is None else held.numpy()


def _initializer(
    model: ir.Model, name: str, numbers: np.ndarray[Any, Any], of: ir.Node
) -> ir.Value:
    """Return the initializer of a name, which is stored in the graph of a node when it is first asked for."""
    graph = of.graph
    assert graph is not None
    known = graph.initializers.get(name)
    if known is not None:
        return known
    held = ir.tensor(np.ascontiguousarray(numbers), name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(numbers.shape), type=ir.TensorType(held.dtype), const_value=held
    )
    graph.register_initializer(value)
    return value


def _fold_cast(model: ir.Model, node: ir.Node) -> None:
    """Put a constant of another type in the place of a cast: zero points have 64 bits in torch."""
    numbers = _constant(node.inputs[0])
    source, result = node.inputs[0], node.outputs[0]
    if numbers is None or source is None or result.is_graph_output():
        return
    kind = ir.DataType(node.attributes.get_int("to"))
    made = _initializer(
        model, f"{source.name}_{kind.name.lower()}", numbers.astype(kind.numpy()), node
    )
    _replace(node, made)


def _make_four_bits(model: ir.Model, node: ir.Node) -> None:
    """Store integers of four bits as such, with their zero points."""
    for place in (0, 2):
        held = node.inputs[place]
        numbers = _constant(held)
        if held is None or numbers is None:
            return
        four = _initializer(
            model, f"{held.name}_int4", numbers.astype(ir.DataType.INT4.numpy()), node
        )
        node.replace_input_with(place, four)


def _fold_transpose(model: ir.Model, node: ir.Node) -> None:
    """Transpose a constant, or the constants of its DequantizeLinear, once and for all."""
    order = list(node.attributes.get_ints("perm"))
    source = node.inputs[0]
    reader = None if source is None else source.producer()
    numbers = _constant(source)
    if source is not None and numbers is not None:
        _replace(
            node, _initializer(model, f"{source.name}_transposed", numbers.transpose(order), node)
        )
    elif reader is not None and reader.op_type == "DequantizeLinear":
        _transpose_integers(model, node, reader, order)


def _transpose_integers(model: ir.Model, node: ir.Node, reader: ir.Node, order: list[int]) -> None:
    inputs = []
    for place, held in enumerate(reader.inputs):
        numbers = _constant(held)
        if held is None or numbers is None:
            return
        if numbers.ndim == len(order):
            held = _initializer(model, f"{held.name}_transposed", numbers.transpose(order), node)
        elif place == 0:
            return
        inputs.append(held)
    axis = reader.attributes.get_int("axis", 1)
    attributes = [
        ir.AttrInt64("axis", order.index(axis)) if name == "axis" else value
        for name, value in reader.attributes.items()
    ]
    made = ir.Node(
        "", "DequantizeLinear", inputs, attributes, name=f"{node.name}_of_integers",
        metadata_props=dict(reader.metadata_props),
    )  # fmt: skip
    made.outputs[0].name = f"{node.outputs[0].name}_of_integers"
    made.outputs[0].shape, made.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
    graph = node.graph
    assert graph is not None
    graph.insert_before(node, made)
    _replace(node, made.outputs[0])
    if not reader.outputs[0].uses():
        reader.graph.remove(reader, safe=True)


def _name_global_average(node: ir.Node) -> None:
    """Call a mean over the whole image what runtimes fuse: torch's exporter knows means alone."""
    source, axes = node.inputs[0], _constant(node.inputs[1] if len(node.inputs) > 1 else None)
    rank = None if source is None or source.shape is None else len(source.shape)
    keeps = node.attributes.get_int("keepdims", 1)
    if axes is None or rank is None or not keeps or rank < 3:
        return
    if sorted(int(axis) % rank for axis in axes) != list(range(2, rank)):
        return
    made = ir.Node(
        "", "GlobalAveragePool", [source], name=node.name, metadata_props=dict(node.metadata_props)
    )
    result = node.outputs[0]
    made.outputs[0].name, made.outputs[0].shape = f"{result.name}_pooled", result.shape
    made.outputs[0].type = result.type
    assert node.graph is not None
    node.graph.insert_before(node, made)
    _replace(node, made.outputs[0])


def _replace(node: ir.Node, value: ir.Value) -> None:
    """Let the readers of a node read a value, and remove the node."""
    ir.convenience.replace_all_uses_with(node.outputs[0], value)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
