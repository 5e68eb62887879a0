# SPDX-License-Identifier: Apache-2.0
"""How a file finds the sizes that are open: by constants where these can say it, else from integers.

Whatever asks for the size of a float value reads it. ONNX Runtime then does not fuse what computes it, and
OpenVINO 2026.4 gives wrong numbers, without a word: for a convolution behind which a reshape takes computed
sizes, for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qompose_onnx.initializers import added_constant

KEPT: Final = {"Reshape": 0, "Expand": 1}
"""By operator, what stands in the shape that it takes for the size of its input in that place."""


def settle(model: ir.Model) -> None:
    """Let no operator ask for sizes that constants can say, and others ask integers, in place."""
    for node in [*model.graph.all_nodes()]:
        if node.op_type in KEPT:
            _take_constants(node)
    RemoveUnusedNodesPass()(model)
    for node in model.graph.all_nodes():
        value = node.inputs[0] if node.op_type == "Shape" else None
        integers = None if value is None else next(_integers_of(value, node.graph), None)
        if integers is not None:
            node.replace_input_with(0, integers)
    model.graph.sort()


def _take_constants(node: ir.Node) -> None:
    """Give a node a constant shape where that says the same as the computed one."""
    source, computed = node.inputs[:2]
    assert source is not None and computed is not None  # both are required
    before, after = source.shape, node.outputs[0].shape
    if ir.convenience.get_const_tensor(computed) is not None or before is None or after is None:
        return
    # a reshape counts from the first dimension, an expansion from the last
    moved = 0 if node.op_type == "Reshape" else len(after) - len(before)
    sizes = [
        _constant(node, size, before[place - moved] if 0 <= place - moved < len(before) else None)
        for place, size in enumerate(after)
    ]
    unknown = sizes.count(None)
    if unknown > (node.op_type == "Reshape") or 0 in [*before, *after]:
        return
    shape = np.asarray([-1 if size is None else size for size in sizes], np.int64)
    node.replace_input_with(1, added_constant(node, f"{node.outputs[0].name}_shape", shape))
    if node.op_type == "Reshape":
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)


def _constant(node: ir.Node, size: Any, given: Any) -> int | None:
    """Return what says a size in a shape, None where no number does."""
    if isinstance(size, int):
        return size
    return KEPT[node.op_type] if size.value is not None and size == given else None


def _integers_of(value: ir.Value, graph: Any) -> Iterator[ir.Value]:
    """Yield the integers into which a value is quantized, at once or behind activations."""
    readers = [use.node for use in value.uses() if use.idx == 0 and use.node.graph is graph]
    for node in readers:
        if node.op_type == "QuantizeLinear":
            yield node.outputs[0]
    for node in readers:
        if node.op_type in ("Relu", "Clip"):
            yield from _integers_of(node.outputs[0], graph)
