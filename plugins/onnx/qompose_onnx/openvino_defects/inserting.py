# SPDX-License-Identifier: Apache-2.0
"""Operators that are put behind a node of a model in the form of ONNX, for all that reads it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qompose_onnx.initializers import added_constant, graph_of


def put_behind(node: ir.Node, op_type: str, *more: ir.Value | None) -> None:
    """Let all that reads a node's result read what an operator makes of it, under the same name.

    Args:
        more: what the operator reads beside the result.
    """
    whole, name, graph = node.outputs[0], node.outputs[0].name, graph_of(node)
    made = ir.node(op_type, [whole, *more])
    made.name, result = f"{node.name}_{op_type}", made.outputs[0]
    result.shape, result.type = whole.shape, whole.type
    ir.convenience.replace_all_uses_with(whole, result, replace_graph_outputs=True)
    made.replace_input_with(0, whole)
    whole.name, result.name, whole.shape = f"{name}_before_{op_type}", name, None
    graph.insert_after(node, made)


def cut_behind(node: ir.Node, ends: Mapping[int, int]) -> None:
    """Let all that reads a node's result read it up to an end on some axes.

    Args:
        ends: by axis.
    """
    facts = {"first": [0] * len(ends), "last": [*ends.values()], "axes": [*ends]}
    constants = (
        added_constant(node, f"{node.outputs[0].name}_{what}", np.asarray(numbers, np.int64))
        for what, numbers in facts.items()
    )
    put_behind(node, "Slice", *constants)
