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


def fold_obstacle(norm: Node, producer: Node, readers: Mapping[int, int]) -> str | None:
    """Return why folding `norm` into `producer` would change more than rounding, or None.

    `readers` has the number of operators that read each parameter, by its address.
    """
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
    return _parameter_obstacle(norm, producer, readers)


def _parameter_obstacle(norm: Node, producer: Node, readers: Mapping[int, int]) -> str | None:
    weight, *others = (*producer.args[1:3], *norm.args[1:5])
    constant = constant_of(weight) if isinstance(weight, Node) else None
    if constant is None:
        return f"the weight of {describe(producer)} is not a parameter"
    if readers[address_of(constant)] > 1:
        return f"the weight of {describe(producer)} is shared"
    written = written_buffers(norm.graph)
    for node in (argument for argument in others if isinstance(argument, Node)):
        if constant_of(node) is None:
            return f"{describe(node)}, which would be folded, is not a parameter"
        if str(node.target) in written:
            return f"the program writes to {node.target}"
    return None


def fold_batch_norm(module: GraphModule, producer: Node, norm: Node) -> tuple[str, ...]:
    """Fold `norm` into the parameters of `producer`, in place, and return the names of what is left."""
    weight_node = producer.args[1]
    assert isinstance(weight_node, Node)
    weight = constant_of(weight_node)
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
            folded = fuse_linear_bn_weights(*parameters)
        else:
            folded = fuse_conv_bn_weights(*parameters, producer.target in TRANSPOSED)
    path = str(weight_node.target)
    set_attribute(module, path, folded[0])
    bias_path = free_attribute(module, f"{path.rpartition('.')[0]}.bias".lstrip("."))
    set_attribute(module, bias_path, folded[1])
    with module.graph.inserting_before(producer):
        new_bias = module.graph.get_attr(bias_path)
    new_bias.meta["val"] = example_of(folded[1], norm)
    producer.args = (*producer.args[:2], new_bias, *producer.args[3:])
    norm.replace_all_uses_with(producer)
    tag(producer, **{VALUE_TAG: values_of(norm)})  # its own is not computed any more
    give_source(norm, producer)
    module.graph.erase_node(norm)
    return (producer.name,)


def constant_or_none(argument: object) -> Tensor | None:
    """Return the tensor behind an argument that reads a parameter or buffer."""
    return constant_of(argument) if isinstance(argument, Node) else None
