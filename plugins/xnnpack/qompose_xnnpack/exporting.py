# SPDX-License-Identifier: Apache-2.0
"""From a Q/DQ graph to the exported program that ExecuTorch is given: mended where it would go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from qompose_xnnpack.biases import with_own_biases
from qompose_xnnpack.executorch_api import ExecutorchTargetError
from qompose_xnnpack.interface import check_inputs
from qompose_xnnpack.partitioning import DEQUANTIZE, QUANTIZE

aten = torch.ops.aten


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
    for mend in MENDINGS:
        mend(exported.graph)
    exported.graph.eliminate_dead_code()
    _check_readings(exported.graph)
    exported.graph_module.recompile()
    return exported


def _drop_aliases(graph: Graph) -> None:
    """Let what reads an alias read the tensor itself, in place.

    The edge program has no aliases, and would copy: with a portable kernel, in float, between a delegate
    and the next. Once it is gone, ExecuTorch drops the quantize operator behind it, where that gives back
    the integers that were dequantized before it.
    """
    for node in list(graph.nodes):
        if node.target in (aten.alias.default, aten.detach.default):
            _replace(node, node.all_input_nodes[0])


def _split_dequantize(graph: Graph) -> None:
    """Give every user of a dequantized tensor a dequantize node of its own, in place.

    XNNPACK's partitioner marks a dequantize node as folded for all its users as soon as one folds
    it, and a float operator beside that one makes the program unloadable (executorch 1.5.1).
    """
    for node in list(graph.nodes):
        if not _is(node, DEQUANTIZE):
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))


def _copy_views(graph: Graph) -> None:
    """Let reshapes of a known size be what they are in the edge program anyway, one copy, in place.

    Export makes two operators of a reshape behind a transpose, a clone and a view. The clone stands between
    the view and its dequantize operator, and XNNPACK would compute both in float.
    """
    if any(
        _writes(node) for node in graph.nodes
    ):  # perhaps through a view, to what it was taken of
        return
    for node in graph.nodes:
        sizes = list(getattr(node.meta.get("val"), "shape", ()))
        if node.target in RESHAPES and all(isinstance(size, int) for size in sizes):
            node.target, node.args, node.kwargs = aten.view_copy.default, (node.args[0], sizes), {}


RESHAPES = frozenset({aten.reshape.default, aten.flatten.using_ints})


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _widen_int4(graph: Graph) -> None:
    """Let 4-bit weights that are no matrices be called int8, in place; their integers stay what they are.

    XNNPACK packs two weights into a byte where a scale per channel stands beside the bounds -8 and 7, and
    does so for linears alone: of a kernel of more dimensions it fails (executorch 1.5.1).
    """
    for node in graph.nodes:
        int4 = _is(node, f"{DEQUANTIZE}per_channel") and node.args[4:6] == (-8, 7)
        if int4 and node.meta["val"].ndim != 2:
            node.args = (*node.args[:4], -128, 127, *node.args[6:])


CLAMPS = frozenset(
    {
        aten.clamp.default,
        aten.clamp_.default,
        aten.clip.default,
        aten.clip_.default,
        aten.hardtanh.default,
        aten.hardtanh_.default,
    }
)


def _order_bounds(graph: Graph) -> None:
    """Let no clamp have its least bound above its greatest, in place.

    torch gives the greatest everywhere then; XNNPACK one or the other, as its vector instructions go.
    """
    for node in graph.nodes:
        low, high = node.args[1:3] if node.target in CLAMPS and len(node.args) > 2 else (None, None)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            node.update_arg(1, high)


PADS = frozenset({aten.pad.default, aten.constant_pad_nd.default})


def _crop_by_slices(graph: Graph) -> None:
    """Let padding that crops be slices, and a padding of what they leave, in place.

    XNNPACK leaves it to a portable kernel, which fails when it runs (executorch 1.5.1).
    """
    for node in list(graph.nodes):
        if node.target not in PADS or not _is_constant(node):
            continue
        pads: Any = node.args[1]
        if all(isinstance(size, int) for size in pads) and any(size < 0 for size in pads):
            _crop(node, pads)


def _is_constant(pad: Node) -> bool:
    return pad.target is aten.constant_pad_nd.default or [*pad.args[2:3]] in ([], ["constant"])


def _crop(node: Node, pads: Sequence[int]) -> None:
    source, crop = node.all_input_nodes[0], aten.slice.Tensor
    value = source.meta["val"]
    for cut in _cuts(value.shape, pads):
        with node.graph.inserting_before(node):
            source = node.graph.call_function(crop, (source, *cut))
        with value.fake_mode:
            value = crop(value, *cut)
        source.meta = {**node.meta, "val": value}
    node.args = (source, [max(0, size) for size in pads], *node.args[2:])


def _cuts(shape: Sequence[Any], pads: Sequence[int]) -> Iterator[tuple[int, int, int | None]]:
    """Yield dimension, start and end of each slice: sizes are given from the last dimension on."""
    sides = zip(pads[::2], pads[1::2], strict=True)
    for dim, (before, behind) in zip(reversed(range(len(shape))), sides, strict=False):
        if min(before, behind) < 0:
            known = shape[dim] if isinstance(shape[dim], int) else 0
            yield dim, max(0, -before), known + behind if behind < 0 else None


MENDINGS: tuple[Callable[[Graph], None], ...] = (
    _widen_int4,
    _order_bounds,
    _crop_by_slices,
    _copy_views,
    _drop_aliases,
    _split_dequantize,
)


def _replace(node: Node, source: Node) -> None:
    """Let the readers of a node read another, but for the output, which has names of its own."""
    for user in list(node.users):
        if user.op != "output":
            user.replace_input_with(node, source)


def _is(node: Node, kind: str) -> bool:
    return str(node.target).startswith(kind)


def _check_bounds(exported: ExportedProgram) -> None:
    """Raise ``ExecutorchTargetError`` for dynamic dimensions that can grow without limit."""
    endless = [
        str(symbol)
        for symbol, bounds in exported.range_constraints.items()
        if not bounds.upper < 2**31
    ]
    if endless:
        raise ExecutorchTargetError(
            f"dynamic dimensions {endless} have no upper bound, and the runtime reserves memory "
            "for the largest input: give one, as in torch.export.Dim('batch', max=32)"
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
                f"{node.name}: XNNPACK takes only weights whose zero points per channel are "
                "a buffer of zeros; quantize this weight symmetrically"
            )


def _check_readings(graph: Graph) -> None:
    """Raise ``ExecutorchTargetError`` for integers that stand for different real values.

    XNNPACK keeps one scale and zero point per tensor, those that it meets first (executorch 1.5.1).
    """
    readings: dict[Node, dict[tuple[Any, ...], str]] = {}
    for node in graph.nodes:
        if _is(node, f"{DEQUANTIZE}per_tensor"):
            known = readings.setdefault(node.all_input_nodes[0], {})
        elif _is(node, f"{QUANTIZE}per_tensor"):
            known = readings.setdefault(node, {})
        else:
            continue
        known.setdefault(_scale_and_zero_point(node), node.name)
    for source, known in readings.items():
        if len(known) > 1:
            each = ", ".join(f"{pair} in {name}" for pair, name in known.items())
            raise ExecutorchTargetError(
                f"the integers of {source.name} have different scales or zero points: {each}. XNNPACK "
                "would use one for all; make them inputs of their own, or quantize their real values for each"
            )


def _scale_and_zero_point(node: Node) -> tuple[Any, ...]:
    named = (node.kwargs[name] for name in ("scale", "zero_point") if name in node.kwargs)
    return (*node.args[1:3], *named)
