# SPDX-License-Identifier: Apache-2.0
"""Tentative rewrites: made on a copy before annotation, and kept only where a claim covers them.

Each rewrite changes one place and names the operator that a claim must hold for it to stay. Folding a
batch norm re-associates arithmetic, so it is never bit-identical: what is folded is listed in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from qompose.graph import (
    address_of,
    constant_of,
    count_readers,
    describe,
    example_of,
    free_attribute,
    is_float_tensor,
    set_attribute,
    value_of,
)

aten = torch.ops.aten

FOLD_BATCH_NORM = "fold_batch_norm"
SCALAR_TO_TENSOR = "scalar_to_tensor"


@dataclass(frozen=True)
class Candidate:
    """A rewrite that is possible: which operators it concerns, and which one a claim must cover.

    `obstacle` is the reason why it would change more than rounding, and so is not made.
    """

    rewrite: str
    nodes: tuple[str, ...]
    into: str
    obstacle: str | None = None


def find_rewrites(module: GraphModule, wanted: Collection[str]) -> list[Candidate]:
    """Return the places where the `wanted` rewrites apply, in graph order."""
    consumers = count_readers(module)
    return [
        candidate
        for node in module.graph.nodes
        if node.op == "call_function"
        for name, (find, _) in _REWRITES.items()
        if name in wanted
        for candidate in find(node, consumers)
    ]


def apply_rewrites(module: GraphModule, candidates: Iterable[Candidate]) -> None:
    """Make rewrites, in place, on a graph that has the candidates' nodes."""
    nodes = {node.name: node for node in module.graph.nodes}
    for candidate in candidates:
        _, apply = _REWRITES[candidate.rewrite]
        apply(module, *(nodes[name] for name in candidate.nodes))


Consumers = dict[int, int]

_TRANSPOSED = {
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
}
_FOLDABLE = {
    aten.linear.default,
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    *_TRANSPOSED,
}


_IMAGE_RANK: dict[Any, int] = {
    **dict.fromkeys([aten.conv1d.default, aten.conv1d.padding, aten.conv_transpose1d.default], 1),
    **dict.fromkeys([aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input], 2),
    **dict.fromkeys([aten.conv3d.default, aten.conv3d.padding, aten.conv_transpose3d.input], 3),
}


def _find_batch_norm(node: Node, consumers: Consumers) -> Iterator[Candidate]:
    if node.target is not aten.batch_norm.default:
        return
    producer = node.args[0]
    if isinstance(producer, Node) and producer.target in _FOLDABLE:
        obstacle = _fold_obstacle(node, producer, consumers)
        yield Candidate(FOLD_BATCH_NORM, (producer.name, node.name), producer.name, obstacle)


def _fold_obstacle(norm: Node, producer: Node, consumers: Consumers) -> str | None:
    weight = producer.args[1]
    constant = constant_of(weight) if isinstance(weight, Node) else None
    if norm.args[5]:
        return "the batch norm is in training mode"
    if any(argument is None for argument in norm.args[3:5]):
        return "the batch norm has no running statistics"
    if len(producer.users) > 1:
        return f"{describe(producer)} has other consumers"
    if value_of(producer).dim() < 2 + _IMAGE_RANK.get(producer.target, 0):
        return f"the input of {describe(producer)} has no batch dimension"
    if constant is None:
        return f"the weight of {describe(producer)} is computed"
    if consumers[address_of(constant)] > 1:
        return f"the weight of {describe(producer)} is shared"
    if producer.target is aten.linear.default and value_of(producer).dim() != 2:
        return "the batch norm is not over the features of the linear layer"
    groups = producer.args[6] if len(producer.args) > 6 else 1
    if producer.target in _TRANSPOSED and groups != 1:
        return "a grouped transposed convolution keeps its channels in another order"
    return None


def _fold_batch_norm(module: GraphModule, producer: Node, norm: Node) -> None:
    weight_node = producer.args[1]
    assert isinstance(weight_node, Node)
    weight = constant_of(weight_node)
    bias_node = producer.args[2] if len(producer.args) > 2 else None
    bias = constant_of(bias_node) if isinstance(bias_node, Node) else None
    scale, shift, mean, variance = (_constant_or_none(a) for a in norm.args[1:5])
    eps = norm.args[7]
    assert weight is not None and mean is not None and variance is not None
    with torch.no_grad():
        folded = _fold(producer.target, weight, bias, mean, variance, eps, scale, shift)
    path = str(weight_node.target)
    set_attribute(module, path, folded[0])
    bias_path = free_attribute(module, f"{path.rpartition('.')[0]}.bias".lstrip("."))
    set_attribute(module, bias_path, folded[1])
    with module.graph.inserting_before(producer):
        new_bias = module.graph.get_attr(bias_path)
    new_bias.meta["val"] = example_of(folded[1], norm)
    producer.args = (*producer.args[:2], new_bias, *producer.args[3:])
    norm.replace_all_uses_with(producer)
    module.graph.erase_node(norm)


def _fold(
    target: object,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: object,
    scale: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor]:
    assert isinstance(eps, float)
    scale = torch.ones_like(mean) if scale is None else scale
    shift = torch.zeros_like(mean) if shift is None else shift
    bias = torch.zeros_like(mean) if bias is None else bias
    if target is aten.linear.default:
        return fuse_linear_bn_weights(weight, bias, mean, variance, eps, scale, shift)
    transpose = target in _TRANSPOSED
    return fuse_conv_bn_weights(weight, bias, mean, variance, eps, scale, shift, transpose)


def _constant_or_none(argument: object) -> Tensor | None:
    return constant_of(argument) if isinstance(argument, Node) else None


_ELEMENTWISE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def _find_scalar(node: Node, consumers: Consumers) -> Iterator[Candidate]:
    if node.target in _ELEMENTWISE and len(node.args) == 2:
        tensor, scalar = node.args
        if is_float_tensor(tensor) and isinstance(scalar, (int, float)):
            yield Candidate(SCALAR_TO_TENSOR, (node.name,), node.name)


def _scalar_to_tensor(module: GraphModule, node: Node) -> None:
    tensor, scalar = node.args
    assert isinstance(tensor, Node) and isinstance(scalar, (int, float))
    constant = torch.tensor(scalar, dtype=value_of(tensor).dtype)
    path = free_attribute(module, "_scalar_0")
    set_attribute(module, path, constant)
    with module.graph.inserting_before(node):
        read = module.graph.get_attr(path)
    read.meta["val"] = example_of(constant, node)
    node.args = (tensor, read)


_REWRITES: dict[
    str, tuple[Callable[[Node, Consumers], Iterator[Candidate]], Callable[..., None]]
] = {
    FOLD_BATCH_NORM: (_find_batch_norm, _fold_batch_norm),
    SCALAR_TO_TENSOR: (_find_scalar, _scalar_to_tensor),
}
