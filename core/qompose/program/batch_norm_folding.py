# SPDX-License-Identifier: Apache-2.0
"""Folding a batch norm into the convolution or linear before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from qompose.program.aliasing import written_buffers
from qompose.program.graph import (
    address_of,
    arguments_of,
    constant_of,
    describe,
    example_of,
    free_attribute,
    layout_of,
    set_attribute,
    value_of,
)
from qompose.program.meta import VALUE_TAG, give_source, tag, values_of

aten = torch.ops.aten

TRANSPOSED = {
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
}
FOLDABLE = {
    aten.linear.default,
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    *TRANSPOSED,
}
"""The operators into whose parameters a batch norm behind them is folded."""
_IMAGE_RANK: dict[Any, int] = {
    **dict.fromkeys([aten.conv1d.default, aten.conv1d.padding, aten.conv_transpose1d.default], 1),
    **dict.fromkeys([aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input], 2),
    **dict.fromkeys([aten.conv3d.default, aten.conv3d.padding, aten.conv_transpose3d.input], 3),
}


def sharing_weight(producer: Node) -> list[Node]:
    """Return the operators of a graph that read the same weight as a product, it included, in graph order."""
    weight = constant_or_none(producer.args[1])
    if weight is None:
        return [producer]
    layout = layout_of(weight)
    reads = producer.graph.find_nodes(op="get_attr")
    tied = (
        read for read in reads if (c := constant_of(read)) is not None and layout_of(c) == layout
    )
    return sorted({user for read in tied for user in read.users})


def fold_obstacle(norm: Node, producer: Node, readers: Mapping[int, int]) -> str | None:
    """Return why folding `norm` into `producer` would change more than rounding, or None.

    `readers` has the number of operators that read each parameter, by its address.
    """
    return _obstacle(norm, producer) or _sharing_obstacle(norm, producer, readers)


def _obstacle(norm: Node, producer: Node) -> str | None:
    if norm.args[5]:
        return "the batch norm is in training mode"
    if any(argument is None for argument in norm.args[3:5]):
        return "the batch norm has no running statistics"
    if len(producer.users) > 1:
        return f"the output of {describe(producer)} has other readers"
    if value_of(producer).dim() < 2 + _IMAGE_RANK.get(producer.target, 0):
        return f"the input of {describe(producer)} has no batch dimension"
    if producer.target is aten.linear.default and value_of(producer).dim() != 2:
        return "the batch norm is not over the output features of the linear layer"
    if producer.target in TRANSPOSED and arguments_of(producer)["groups"] != 1:
        return "a grouped transposed convolution has its channels in a different order"
    return _parameter_obstacle(norm, producer)


def _parameter_obstacle(norm: Node, producer: Node) -> str | None:
    weight, *others = (*producer.args[1:3], *norm.args[1:5])
    if constant_or_none(weight) is None:
        return f"the weight of {describe(producer)} is not a parameter"
    written = written_buffers(norm.graph)
    for node in (argument for argument in others if isinstance(argument, Node)):
        if constant_of(node) is None:
            return f"{describe(node)}, which would be folded, is not a parameter"
        if str(node.target) in written:
            return f"the program writes to {node.target}"
    return None


def _sharing_obstacle(norm: Node, producer: Node, readers: Mapping[int, int]) -> str | None:
    """Return why one folded weight would not be right for all that read a weight, or None."""
    weight = constant_or_none(producer.args[1])
    assert weight is not None
    if len(_places_of(weight, producer)) > 1:
        return f"{describe(producer)} reads its weight as another argument, too"
    if readers[address_of(weight)] == 1:
        return None
    products, shared = sharing_weight(producer), f"the weight of {describe(producer)} is shared"
    if readers[address_of(weight)] != len(products):
        return f"{shared} with a part of the program that cannot be folded with it"
    for other in products:
        behind = _norm_behind(other, weight)
        if behind is None or (other.target in TRANSPOSED) != (producer.target in TRANSPOSED):
            return f"{shared} with {describe(other)}, into which no batch norm can be folded"
        if _folded(other, behind) != _folded(producer, norm):
            return f"{shared} with {describe(other)}, which has another bias or batch norm"
        obstacle = _obstacle(behind, other)
        if obstacle is not None:
            return f"{shared} with {describe(other)}, where {obstacle}"
    return None


def _norm_behind(product: Node, weight: Tensor) -> Node | None:
    """Return the batch norm that reads what a reader of a weight gives, None where none can be folded."""
    if product.target not in FOLDABLE or _places_of(weight, product) != [1]:
        return None
    found = (user for user in product.users if user.target is aten.batch_norm.default)
    return next((norm for norm in found if norm.args[0] is product), None)


def _places_of(weight: Tensor, product: Node) -> list[int]:
    """Return which arguments of a product are a weight."""
    reads = [constant_or_none(argument) for argument in product.args]
    return [i for i, c in enumerate(reads) if c is not None and layout_of(c) == layout_of(weight)]


def _folded(producer: Node, norm: Node) -> list[object]:
    """Return what is folded into a weight: the same for two products whose folded weights are the same."""
    arguments = (arguments_of(producer)["bias"], *norm.args[1:5])
    constants = map(constant_or_none, arguments)
    return [None if c is None else layout_of(c) for c in constants] + [norm.args[7]]


def fold_batch_norm(module: GraphModule, producer: Node, norm: Node) -> tuple[str, ...]:
    """Fold `norm` into the parameters of `producer`, in place, and return the names of what is left.

    Products that share the weight read the folded one, and lose their batch norms at once: once for all.
    """
    if norm._erased:  # with another reader of the weight
        return (producer.name,)
    products = sharing_weight(producer)
    weight, bias = _folded_parameters(producer, norm)
    path = str(products[0].args[1].target)  # type: ignore[union-attr]
    bias_path = free_attribute(module, f"{path.rpartition('.')[0]}.bias".lstrip("."))
    set_attribute(module, bias_path, bias)
    with module.graph.inserting_before(products[0]):
        new_bias = module.graph.get_attr(bias_path)
    new_bias.meta["val"] = example_of(bias, norm)
    for product in products:
        read: Any = product.args[1]
        set_attribute(module, str(read.target), weight)
        (behind,) = product.users
        product.args = (*product.args[:2], new_bias, *product.args[3:])
        behind.replace_all_uses_with(product)
        tag(product, **{VALUE_TAG: values_of(behind)})  # its own is not computed any more
        give_source(behind, product)
        module.graph.erase_node(behind)
    return (producer.name,)


def _folded_parameters(producer: Node, norm: Node) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a product with a batch norm folded into them."""
    weight = constant_or_none(producer.args[1])
    bias = constant_or_none(arguments_of(producer)["bias"])
    scale, shift, mean, variance = (constant_or_none(a) for a in norm.args[1:5])
    eps = norm.args[7]
    assert weight is not None and mean is not None and variance is not None
    assert isinstance(eps, float)
    scale = torch.ones_like(mean) if scale is None else scale
    shift = torch.zeros_like(mean) if shift is None else shift
    bias = torch.zeros_like(mean) if bias is None else bias
    parameters = (weight, bias, mean, variance, eps, scale, shift)
    with torch.no_grad():
        if producer.target is aten.linear.default:
            return fuse_linear_bn_weights(*parameters)
        return fuse_conv_bn_weights(*parameters, producer.target in TRANSPOSED)


def constant_or_none(argument: object) -> Tensor | None:
    """Return the tensor behind an argument that reads a parameter or buffer."""
    return constant_of(argument) if isinstance(argument, Node) else None
