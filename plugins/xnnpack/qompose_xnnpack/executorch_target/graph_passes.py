# SPDX-License-Identifier: Apache-2.0
"""Graph passes for what XNNPACK would compute wrongly, fail at, or leave to portable kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.infra.pass_base import PassResult

from qompose_xnnpack.executorch_target.attention import split_attention
from qompose_xnnpack.executorch_target.nodes import (
    DEQUANTIZE,
    add_before,
    has_known_sizes,
    has_prefix,
    is_computation,
    keeps_strides,
    operator_name,
    writes,
)

aten = torch.ops.aten
_DYNAMIC_DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.tensor
_EXPAND, _UNSQUEEZE, _CAT = (f"aten.{n}.default" for n in ("expand_copy", "unsqueeze_copy", "cat"))


def keep_per_tensor_scales(graph: Graph) -> None:
    """Keep linears with one run-time scale for several rows from ExecuTorch's partitioner, in place.

    It would take such a linear, and XNNPACK would quantize each row by itself (executorch 1.5.1). It leaves
    the graph as it is if a view is between the operator that computes the scale and those that read it.
    """
    for node in list(graph.nodes):
        if node.target is not aten.linear.default:
            continue
        read: Any = node.args[0]
        if read.target is _DYNAMIC_DEQUANTIZE and any(
            size != 1 for size in read.meta["val"].shape[:-1]
        ):
            scale = read.args[1]
            with graph.inserting_before(read.args[0]):
                view = graph.call_function(aten.view.default, (scale, [1]))
            view.meta = {"val": scale.meta["val"].view(1)}  # it belongs to no module
            scale.replace_all_uses_with(
                view, delete_user_cb=lambda user, view=view: user is not view
            )


def _drop_aliases(graph: Graph) -> None:
    """Let the readers of an alias read the tensor itself, in place.

    The edge program has no aliases and would copy, with a portable kernel, in float, between two delegates.
    Once the alias is gone, ExecuTorch drops the quantize operator behind it, if that restores the integers
    that were dequantized before.
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
        if not has_prefix(node, DEQUANTIZE):
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))


def _copy_views(graph: Graph) -> None:
    """Make one copy of each reshape to a known size, which it becomes in the edge program anyway, in place.

    Export makes two operators of a reshape behind a transpose, a clone and a view. The clone is between the
    view and its dequantize operator, and XNNPACK would compute both in float.
    """
    if any(writes(node) for node in graph.nodes):  # perhaps through a view, to its base
        return
    for node in graph.nodes:
        sizes = list(getattr(node.meta.get("val"), "shape", ()))
        if node.target in RESHAPES and all(isinstance(size, int) for size in sizes):
            node.target, node.args, node.kwargs = aten.view_copy.default, (node.args[0], sizes), {}


RESHAPES = frozenset({aten.reshape.default, aten.flatten.using_ints})


def _widen_int4(graph: Graph) -> None:
    """Declare 4-bit weights other than matrices as int8, in place; their integers stay the same.

    XNNPACK packs two weights into a byte if they have a scale per channel and the bounds -8 and 7. It can do
    so for linears alone and fails for a kernel of more dimensions (executorch 1.5.1).
    """
    for node in graph.nodes:
        int4 = has_prefix(node, f"{DEQUANTIZE}per_channel") and node.args[4:6] == (-8, 7)
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
    """Replace the lower bound of a clamp by the upper one if it is greater, in place.

    torch then returns the upper bound everywhere, and XNNPACK either, depending on its vector instructions.
    """
    for node in graph.nodes:
        low, high = node.args[1:3] if node.target in CLAMPS and len(node.args) > 2 else (None, None)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            node.update_arg(1, high)


PADS = frozenset({aten.pad.default, aten.constant_pad_nd.default})


def _crop_by_slices(graph: Graph) -> None:
    """Replace a padding that crops by slices and a padding of what they leave, in place.

    XNNPACK leaves it to a portable kernel, which fails at run time (executorch 1.5.1).
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
    for cut in _cuts(source.meta["val"].shape, pads):
        source = add_before(node, crop, source, *cut)
    node.args = (source, [max(0, size) for size in pads], *node.args[2:])


def _cuts(shape: Sequence[Any], pads: Sequence[int]) -> Iterator[tuple[int, int, int | None]]:
    """Yield dimension, start and end of each slice: sizes are given from the last dimension on."""
    sides = zip(pads[::2], pads[1::2], strict=True)
    for dim, (before, behind) in zip(reversed(range(len(shape))), sides, strict=False):
        if min(before, behind) < 0:
            known = shape[dim] if isinstance(shape[dim], int) else 0
            yield dim, max(0, -before), known + behind if behind < 0 else None


def _flatten_means(graph: Graph) -> None:
    """Take the mean of each row as that of an image with one channel, in place, as a norm of rows needs it.

    XNNPACK takes means over the two last of four dimensions alone. Rows of unknown size are left: their
    method would need a first run with the largest sizes.
    """
    for node in list(graph.nodes):
        if node.target is aten.mean.dim and _is_mean_of_rows(node):
            source = node.all_input_nodes[0]
            value = source.meta["val"]
            image = add_before(node, aten.view_copy.default, source, [-1, 1, 1, value.shape[-1]])
            mean = add_before(node, aten.mean.dim, image, [2, 3], True)
            sizes = list(node.meta["val"].shape)
            node.target, node.args, node.kwargs = aten.view_copy.default, (mean, sizes), {}


def _is_mean_of_rows(node: Node) -> bool:
    source = node.all_input_nodes[0]
    value, dims = source.meta["val"], cast("Any", node.args[1])
    return (
        isinstance(dims, list | tuple)
        and [int(dim) % max(value.dim(), 1) for dim in dims] == [value.dim() - 1]
        and node.kwargs.get("dtype") is None
        and value.dtype == torch.float32
        and has_known_sizes(value)
        and not has_prefix(source, DEQUANTIZE)
    )


def _sort_by_top(graph: Graph) -> None:
    """Write a sort whose ties have no order as the largest or smallest of all, in place.

    The runtime has a kernel for those alone. Routers of experts sort rows by their expert.
    """
    for node in graph.nodes:
        if node.target is aten.sort.default and not node.kwargs:
            source = node.all_input_nodes[0]
            dim: Any = node.args[1] if len(node.args) > 1 else -1
            descending = node.args[2] if len(node.args) > 2 else False
            value = source.meta["val"]
            known = value.dim() and isinstance(size := value.shape[dim], int)
            if known and not any(map(keeps_strides, node.users)):
                node.target, node.args = aten.topk.default, (source, size, dim, descending, True)


def _fill_what_is_empty(graph: Graph) -> None:
    """Let tensors made without values hold zeros, in place: the edge dialect has no such operator."""
    for node in graph.nodes:
        if node.target is aten.empty_like.default:
            kept = {"dtype": node.kwargs["dtype"]} if "dtype" in node.kwargs else {}
            node.target, node.kwargs = aten.zeros_like.default, kept


def _count_by_comparison(graph: Graph) -> None:
    """Write a histogram as comparisons and a sum, in place: the runtime has no operator for it.

    Routers of experts count their rows with one. Bounds that depend on data are left, and so are several
    dimensions.
    """
    for node in list(graph.nodes):
        if node.target is aten.histc.default and len(node.args) > 3 and _is_counted(*node.args[:4]):
            _count(node, *node.args[:4])


def _is_counted(values: Node, bins: int, low: float, high: float) -> bool:
    return low < high and bool(values.meta["val"].dim() == 1)


def _count(node: Node, values: Node, bins: int, low: float, high: float) -> None:
    add = partial(add_before, node)
    kind = values.meta["val"].dtype
    scaled = add(aten.mul.Tensor, add(aten.sub.Tensor, values, low), float(bins))  # as torch rounds
    numbers = add(aten.floor.default, add(aten.div.Tensor, scaled, float(high - low)))
    numbers = add(aten.clamp.default, numbers, None, bins - 1)  # the last bin has its upper bound
    outside = add(aten.gt.Scalar, values, high)
    numbers = add(aten.where.self, outside, add(aten.full.default, [], -1.0, dtype=kind), numbers)
    places = add(aten.arange.default, bins, dtype=kind)
    own = add(aten.eq.Tensor, add(aten.unsqueeze.default, numbers, 1), places)
    node.target, node.args = aten.sum.dim_IntList, (add(aten.to.dtype, own, kind), [0])


EXPORT_PASSES: tuple[Callable[[Graph], None], ...] = (
    split_attention,  # before the copies of keys become other operators
    _widen_int4,
    _order_bounds,
    _crop_by_slices,
    _copy_views,
    _drop_aliases,
    _split_dequantize,
    _flatten_means,
    _count_by_comparison,
    _fill_what_is_empty,
    _sort_by_top,
)


def _replace(node: Node, source: Node) -> None:
    """Let the readers of a node read another, except the output, which has names of its own."""
    for user in list(node.users):
        if user.op != "output":
            user.replace_input_with(node, source)


def remove_idle_expands(module: GraphModule) -> PassResult:
    """Remove from an edge program, in place, the expands to the size that their input already has.

    The decomposition of a matrix product leaves one at each operand. XNNPACK has no such operator, so it
    would end a delegate at each product, to copy the operand with a portable kernel.
    """
    idle = [node for node in module.graph.nodes if _is_idle(node)]
    for node in idle:
        node.replace_all_uses_with(node.all_input_nodes[0])
        module.graph.erase_node(node)
    return PassResult(module, bool(idle))


def _is_idle(node: Node) -> bool:
    if not is_computation(node) or operator_name(node) != _EXPAND or _is_returned(node):
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return before.dim() == after.dim() and all(
        statically_known_true(old == new)
        for old, new in zip(
            (*before.shape, *before.stride()), (*after.shape, *after.stride()), strict=True
        )
    )


def reshape_for_xnnpack(module: GraphModule, *, view: Any) -> PassResult:
    """Write with reshapes, in an edge program and in place, what XNNPACK takes in no other form.

    These are a dimension of size 1 that is not the last, and a concatenation of a tensor with itself, whose
    second reading becomes a reshape to the size it has. Integers and unknown sizes are left.

    Args:
        view: the edge dialect's operator ``aten.view_copy.default``.
    """
    changed = False
    for node in list(module.graph.nodes):
        if not is_computation(node) or not _has_known_floats(node):
            continue
        if operator_name(node) == _UNSQUEEZE:
            node.target, node.args = view, (node.args[0], list(node.meta["val"].shape))
            changed = True
        elif operator_name(node) == _CAT and len(node.all_input_nodes) == 1:
            node.update_arg(0, [node.all_input_nodes[0], *_reshaped(node, view)])
            changed = True
    return PassResult(module, changed)


def _has_known_floats(node: Node) -> bool:
    value = node.meta["val"]
    return (
        isinstance(value, torch.Tensor) and value.dtype == torch.float32 and has_known_sizes(value)
    )


def _reshaped(cat: Node, view: Any) -> Iterator[Node]:
    """Yield a reshape to the same size for each tensor of a concatenation but the first."""
    for tensor in list(cat.args[0])[1:]:  # type: ignore[arg-type]
        yield add_before(cat, view, tensor, list(tensor.meta["val"].shape))


def _is_returned(node: Node) -> bool:
    """Whether a node is an output, which has a name of its own."""
    return any(user.op == "output" for user in node.users)
