# SPDX-License-Identifier: Apache-2.0
"""Averages that count padding, which OpenVINO is to read from an operator of its own.

OpenVINO 2026.4 pads integers with 0 rather than their zero point, without a word. Behind a Pad it averages
floats, rightly. With `ceil_mode` the sizes would differ: those stay.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx_ir as ir

ALMOST_ZERO: Final = 1e-30
"""What is padded: OpenVINO puts a Pad of 0 back into the pool."""


def settle(model: ir.Model) -> bool:
    """Let averages read what is padded, in place, and tell whether there were any."""
    found = [node for node in model.graph.all_nodes() if _counts_padding(node)]
    for node in found:
        _pad_before(node)
    return bool(found)


def _counts_padding(node: ir.Node) -> bool:
    if node.op_type != "AveragePool":
        return False
    facts = node.attributes
    return (
        facts.get_int("count_include_pad", 0) == 1
        and facts.get_int("ceil_mode", 0) == 0
        and any(facts.get_ints("pads", ()))
    )


def _pad_before(node: ir.Node) -> None:
    graph: Any = node.graph
    ends = list(node.attributes["pads"].as_ints())
    half, name = len(ends) // 2, f"{node.outputs[0].name}_padded"
    pads = np.asarray([0, 0, *ends[:half], 0, 0, *ends[half:]], np.int64)
    sizes = ir.Value(name=f"{name}_pads", const_value=ir.tensor(pads, name=f"{name}_pads"))
    graph.register_initializer(sizes)
    zero = np.asarray(ALMOST_ZERO, node.inputs[0].dtype.numpy())
    value = ir.Value(name=f"{name}_value", const_value=ir.tensor(zero, name=f"{name}_value"))
    graph.register_initializer(value)
    made = ir.node("Pad", [node.inputs[0], sizes, value])
    made.name, made.outputs[0].name = f"{node.name}_padded", name
    graph.insert_before(node, made)
    node.replace_input_with(0, made.outputs[0])
    node.attributes["pads"] = ir.AttrInt64s("pads", [0] * len(ends))
