# SPDX-License-Identifier: Apache-2.0
"""The export of a Q/DQ graph for ExecuTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError
from qompose_xnnpack.executorch_target.graph_passes import EXPORT_PASSES
from qompose_xnnpack.executorch_target.method_interface import check_inputs
from qompose_xnnpack.executorch_target.nodes import DEQUANTIZE, QUANTIZE, has_prefix
from qompose_xnnpack.executorch_target.shared_biases import with_own_biases


def export(
    graph: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """Export a Q/DQ graph for `to_edge_transform_and_lower`.

    Raises:
        ExecutorchInputError: an input that the runtime cannot take.
        ExecutorchTargetError: a dynamic size without a bound, zero points that XNNPACK would ignore, or
            integers that are read with two scales.
    """
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
    exported = torch.export.export(
        with_own_biases(graph), args, kwargs, dynamic_shapes=dynamic_shapes
    )
    check_inputs(exported)
    _check_bounds(exported)
    _check_zero_points(exported)
    for rewrite in EXPORT_PASSES:
        rewrite(exported.graph)
    exported.graph.eliminate_dead_code()
    _check_scales(exported.graph)
    return exported


def _check_bounds(exported: ExportedProgram) -> None:
    """Raise ``ExecutorchTargetError`` for dynamic dimensions without an upper bound."""
    unbounded = [
        str(symbol)
        for symbol, bounds in exported.range_constraints.items()
        if not bounds.upper < 2**31
    ]
    if unbounded:
        raise ExecutorchTargetError(
            f"dynamic dimensions {unbounded} must have an upper bound, because the runtime "
            "reserves memory for the largest input. Set one, for example "
            "torch.export.Dim('batch', max=32)"
        )


def _check_zero_points(exported: ExportedProgram) -> None:
    """Raise ``ExecutorchTargetError`` for zero points per channel, which XNNPACK would ignore."""
    constants = {**exported.state_dict, **exported.constants}
    buffers = exported.graph_signature.inputs_to_buffers
    for node in exported.graph.nodes:
        if not str(node.target).startswith(f"{DEQUANTIZE}per_channel"):
            continue
        zero_points = constants.get(buffers.get(getattr(node.args[2], "name", ""), ""))
        if zero_points is None or bool(zero_points.any()):
            raise ExecutorchTargetError(
                f"{node.name}: XNNPACK only supports per-channel weights whose zero points "
                "are all zero; quantize this weight symmetrically"
            )


def _check_scales(graph: Graph) -> None:
    """Raise ``ExecutorchTargetError`` for integers that stand for different real values.

    XNNPACK keeps one scale and zero point per tensor, those that it meets first (executorch 1.5.1).
    """
    readings: dict[Node, dict[tuple[Any, ...], str]] = {}
    for node in graph.nodes:
        if has_prefix(node, f"{DEQUANTIZE}per_tensor"):
            known = readings.setdefault(node.all_input_nodes[0], {})
        elif has_prefix(node, f"{QUANTIZE}per_tensor"):
            known = readings.setdefault(node, {})
        else:
            continue
        known.setdefault(_scale_and_zero_point(node), node.name)
    for source, known in readings.items():
        if len(known) > 1:
            each = ", ".join(f"{pair} in {name}" for pair, name in known.items())
            raise ExecutorchTargetError(
                f"{source.name} is used with different scales or zero points ({each}), "
                "but XNNPACK supports one pair per tensor. Pass one input for each pair, or "
                "a float input that the model quantizes separately for each pair"
            )


def _scale_and_zero_point(node: Node) -> tuple[Any, ...]:
    named = (node.kwargs[name] for name in ("scale", "zero_point") if name in node.kwargs)
    return (*node.args[1:3], *named)
