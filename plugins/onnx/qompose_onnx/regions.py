# SPDX-License-Identifier: Apache-2.0
"""What regions look like when runtimes are to fuse them: each stays, in place, but for what they cannot fuse.

An activation bounds the integers behind it, a bias becomes int32 between its own dequantize
operator, and the product of a linear with a bias is one of matrices, since QGemm takes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from qompose.backend import Region, kit
from torch import Tensor
from torch.fx import Node

aten = torch.ops.aten
quantized = torch.ops.quantized_decomposed

INT32: Final = (-(2**31), 2**31 - 1, torch.int32)


def for_runtimes(region: Region) -> None:
    """Rewrite a region in place, as far as its tensors are quantized."""
    _make_integer(region)
    if not _is_implied(region):
        _bound_integers(region)


def for_openvino(region: Region) -> None:
    """Rewrite it as `for_runtimes` does, but keep bounds: OpenVINO applies them before it rounds, once."""
    _make_integer(region)
    _is_implied(region)


def _make_integer(region: Region) -> None:
    bias = region.argument("op", "bias") if region.has("weight") else None
    is_linear = region.has("op") and region.node("op").target is aten.linear.default
    if bias is not None:
        _make_bias_integer(region, bias)
        if is_linear:
            _make_matrix(region)
    if is_linear and _is_read_both_ways(region):
        _keep_apart(region)


def _is_read_both_ways(region: Region) -> bool:
    """Tell whether some readers quantize the floats of a linear, at once or behind an activation.

    ONNX Runtime 1.32 fuses a linear whose readers are all of one kind.
    """
    readers = [*region.output_node.users]
    behind_them = [*readers, *(user for reader in readers for user in reader.users)]
    return len(readers) > 1 and any(
        node.target is quantized.quantize_per_tensor.default for node in behind_them
    )


def of_weights_alone(region: Region) -> None:
    """Keep a linear apart from a bound: ONNX Runtime 1.32 seeks integers behind that, and fuses neither."""
    readers = " ".join(str(user.target) for user in region.output_node.users)
    if any(name in readers for name in ("relu", "hardtanh", "clamp")):
        _keep_apart(region)


def _keep_apart(region: Region) -> None:
    """Put two operators before the readers that move nothing, and that no exporter or runtime takes out."""
    behind(region, lambda end: called(aten.squeeze.dim, called(aten.unsqueeze.default, end, 0), 0))


def _is_implied(region: Region) -> bool:
    """Drop an activation that the range of the integers implies; tell whether none is left."""
    output = region.output
    if not region.has("act") or output is None:
        return True
    if kit.integer_bounds(region, "act") != (output.low, output.high):
        return False
    act = region.node("act")
    act.replace_all_uses_with(act.all_input_nodes[0])
    act.graph.erase_node(act)  # one in place would stay otherwise, as a write that nobody reads
    return True


def _bound_integers(region: Region) -> None:
    """Let an activation bound integers: ONNX Runtime fuses a product that is quantized at once."""
    act = region.node("act")
    (before,) = act.all_input_nodes
    qparams = region.quantized("output").qparams[:5]
    rounded = region.step(quantized.quantize_per_tensor.default, before, *qparams)
    read = region.step(quantized.dequantize_per_tensor.default, rounded, *qparams)
    for node in (rounded, read):
        act.prepend(node)
    act.replace_input_with(before, read)


def _make_bias_integer(region: Region, bias: Node) -> None:
    """Put an int32 bias with a dequantize operator of its own in the place of a float one."""
    op, x, weight = region.node("op"), region.quantized("input"), region.quantized("weight")
    value = held(region, bias)
    if value is None:
        return
    scales = weight.scales.float() * torch.tensor(x.scale, dtype=torch.float32)
    integers = torch.round(value.double() / scales.double()).clamp(*INT32[:2]).to(torch.int32)
    path = f"{bias.target}_int32"
    op.replace_input_with(bias, dequantized_constant(region, path, integers, scales, INT32))


def held(region: Region, node: Node) -> Tensor | None:
    """Return the tensor that a node reads, None where it is computed."""
    if node.op != "get_attr":
        return None
    value: Tensor = attrgetter(str(node.target))(region.module)
    return value.detach()


def dequantized_constant(
    region: Region, path: str, integers: Tensor, scales: Tensor, bounds: tuple[Any, ...]
) -> Node:
    """Store integers with zero points of 0, and return what dequantizes them before the region's product.

    Args:
        scales: one for all, or one for each row of `integers`.
        bounds: of the integers, and their type.
    """
    made = [region.constant(path, integers)]
    if len(scales) == 1:
        facts = (float(scales), 0, *bounds)
        made.append(region.step(quantized.dequantize_per_tensor.default, *made, *facts))
    else:
        made.append(region.constant(f"{path}_scale", scales))
        facts = (None, 0, *bounds)
        made.append(region.step(quantized.dequantize_per_channel.default, *made, *facts))
    return before_op(region, *made)


def before_op(region: Region, *nodes: Node) -> Node:
    """Move nodes before the region's product, and return the last."""
    for node in nodes:
        region.node("op").prepend(node)
    return nodes[-1]


def _make_matrix(region: Region) -> None:
    """Multiply the rows of all leading dimensions as one matrix, and let integers take their shape again.

    The floats of the input change theirs: ONNX Runtime moves that before its pair of operators.
    """
    op, source = region.node("op"), region.inputs("input")[0]
    shape = op.meta["val"].shape
    if len(shape) == 2:
        return
    sizes = _sizes(region, source, shape)
    rows = region.step(aten.reshape.default, source, [-1, source.meta["val"].shape[-1]])
    before = [size for size in sizes if isinstance(size, Node)]
    op.replace_input_with(source, before_op(region, *before, rows))
    for node in (op, region.output_node):
        node.meta["val"] = node.meta["val"].flatten(0, -2)
    behind(region, lambda end: called(aten.reshape.default, end, sizes, shape=shape))


def mean_over_image(region: Region) -> None:
    """Let a mean over height and width keep them, as GlobalAveragePool does; its integers lose them."""
    node = region.node("output")
    if region.argument("output", "keepdim"):
        return
    shape = node.meta["val"].shape
    source = region.inputs("self")[0]
    sizes = _sizes(region, source, shape)
    node.args, node.kwargs = (source, [2, 3], True), {}
    node.meta["val"] = node.meta["val"].reshape(*shape, 1, 1)
    behind(region, lambda end: called(aten.reshape.default, end, sizes, shape=shape))


def _sizes(region: Region, source: Node, shape: Sequence[Any]) -> list[Any]:
    """Return the sizes of a shape, which an input has in the same places where they are open."""
    return [
        size if isinstance(size, int) else region.step(aten.sym_size.int, source, dim)
        for dim, size in enumerate(shape)
    ]


def behind(region: Region, lay_out: Callable[[Node], Node]) -> None:
    """Let readers of the output read what `lay_out` makes of it, in integers where it is quantized.

    Each quantize operator has its dequantize operator right behind it: ONNX Runtime makes uint8 of int8 in
    such pairs alone, and fuses no product whose input and output differ in type.
    """
    last = region.output_node
    for end in [last] if region.output is None else list(last.users):
        readers, value = list(end.users), last.meta["val"]
        end.meta["val"] = value.to(end.meta["val"].dtype)
        with last.graph.inserting_before(end.next):
            if region.output is None:
                found = lay_out(end)
            else:
                qparams = end.args[1:]
                read = called(quantized.dequantize_per_tensor.default, end, *qparams)
                laid_out = lay_out(read)
                found = called(quantized.quantize_per_tensor.default, laid_out, *qparams)
        for reader in readers:
            reader.replace_input_with(end, found)


def called(target: Any, node: Node, *args: Any, shape: Sequence[Any] | None = None) -> Node:
    """Insert a call on a node; where sizes are nodes too, `shape` is that of its value."""
    made = node.graph.call_function(target, (node, *args))
    value = node.meta["val"]
    made.meta = {"val": target(value, *args) if shape is None else value.reshape(shape)}
    return made
