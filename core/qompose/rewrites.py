# SPDX-License-Identifier: Apache-2.0
"""Tentative rewrites: made on a copy before annotation, and kept only where a claim covers them.

Each rewrite changes one place and leaves operators there, its pieces; it stays where a claim holds one of
them. Folding re-associates arithmetic, and so does taking operators apart: neither is bit-identical, and
the plan lists each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from qompose.aliases import written_buffers
from qompose.computed_weights import (
    computed_values,
    drop,
    fold_weight,
    is_product,
    obstacle_of_product,
    obstacle_of_weight,
    product_to_linear,
    read_by,
)
from qompose.decompositions import DECOMPOSITIONS, decompose, obstacle_of
from qompose.errors import UserError, near_names
from qompose.graph import (
    VALUE_TAG,
    address_of,
    constant_of,
    describe,
    example_of,
    free_attribute,
    is_float_tensor,
    read_attribute,
    set_attribute,
    tag,
    value_of,
    values_of,
)
from qompose.nested import bodies_of, count_readers, graphs_in, nodes_in

aten = torch.ops.aten

FOLD_BATCH_NORM = "fold_batch_norm"
SCALAR_TO_TENSOR = "scalar_to_tensor"
ADD_BIAS = "add_bias"
"""A product without a bias gets one of zeros, for repairs to change."""
FOLD_WEIGHT = "fold_weight"
PRODUCT_TO_LINEAR = "product_to_linear"
_REPLACING = (FOLD_WEIGHT, PRODUCT_TO_LINEAR)
FOR_EVALUATION = (ADD_BIAS, *_REPLACING)
"""Those that put other parameters in the place of what is trained."""


@dataclass(frozen=True)
class Candidate:
    """A rewrite that is possible, and which operators it concerns.

    `obstacle` is the reason why it would change more than rounding, and so is not made.
    """

    rewrite: str
    nodes: tuple[str, ...]
    obstacle: str | None = None


def find_rewrites(module: GraphModule, wanted: Collection[str]) -> list[Candidate]:
    """Return the places where the `wanted` rewrites apply, in graph order.

    Raises:
        UserError: there is no rewrite of a name.
    """
    for name in wanted:
        if name not in _REWRITES:
            raise UserError(f"there is no rewrite {name!r}{near_names(name, _REWRITES)}")
    cast = _graphs_under_autocast(module)
    program = _Program(count_readers(module), computed_values(module))
    return [
        replace(candidate, obstacle=_AUTOCAST)
        if splits(candidate) and node.graph in cast
        else candidate
        for node in nodes_in(module)
        if node.op == "call_function"
        for name, (find, _) in _REWRITES.items()
        if name in wanted
        for candidate in find(node, program)
    ]


def apply_rewrites(module: GraphModule, candidates: Iterable[Candidate]) -> list[tuple[str, ...]]:
    """Make rewrites, in place, on a graph that has the candidates' nodes.

    Returns:
        the names of each one's pieces: the operators that stand there afterwards.
    """
    nodes = {node.name: node for node in nodes_in(module)}
    pieces: list[tuple[str, ...]] = []
    replaced: list[Node] = []
    for candidate in candidates:
        _, apply = _REWRITES[candidate.rewrite]
        places = [nodes[name] for name in candidate.nodes]
        if candidate.rewrite in _REPLACING:
            replaced += read_by(places[0])
        pieces.append(apply(places[0].graph.owning_module, *places))
    drop(replaced)  # at the end: other rewrites may be of what computes a weight
    return pieces


def is_rewrite(name: str) -> bool:
    """Tell whether the engine makes rewrites of a name; others are quantizers' own."""
    return name in _REWRITES


def splits(candidate: Candidate) -> bool:
    """Tell whether a rewrite takes one operator apart."""
    return candidate.rewrite in DECOMPOSITIONS


_AUTOCAST = "it is under autocast, which chooses the types of its pieces by their operators"


def _graphs_under_autocast(module: GraphModule) -> set[Graph]:
    return {
        part.graph
        for node in nodes_in(module)
        if node.target is torch.ops.higher_order.wrap_with_autocast and node.args[2]
        for body in bodies_of(node)
        for part in graphs_in(body)
    }


@dataclass(frozen=True)
class _Program:
    """What finding needs to know of all of a program.

    `readers` are the numbers of operators that read a parameter, by its address; `computed` are the values
    that come from parameters alone.
    """

    readers: dict[int, int]
    computed: Container[Node]


Find = Callable[[Node, _Program], Iterator[Candidate]]
Apply = Callable[..., tuple[str, ...]]

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


def _find_batch_norm(node: Node, program: _Program) -> Iterator[Candidate]:
    if node.target is not aten.batch_norm.default:
        return
    producer = node.args[0]
    if isinstance(producer, Node) and producer.target in FOLDABLE:
        obstacle = _fold_obstacle(node, producer, program)
        yield Candidate(FOLD_BATCH_NORM, (producer.name, node.name), obstacle)


def _fold_obstacle(norm: Node, producer: Node, program: _Program) -> str | None:
    if norm.args[5]:
        return "the batch norm is in training mode"
    if any(argument is None for argument in norm.args[3:5]):
        return "the batch norm has no running statistics"
    if len(producer.users) > 1:
        return f"{describe(producer)} has other consumers"
    if value_of(producer).dim() < 2 + _IMAGE_RANK.get(producer.target, 0):
        return f"the input of {describe(producer)} has no batch dimension"
    if producer.target is aten.linear.default and value_of(producer).dim() != 2:
        return "the batch norm is not over the features of the linear layer"
    groups = producer.args[6] if len(producer.args) > 6 else 1
    if producer.target in TRANSPOSED and groups != 1:
        return "a grouped transposed convolution keeps its channels in another order"
    return _parameter_obstacle(norm, producer, program)


def _parameter_obstacle(norm: Node, producer: Node, program: _Program) -> str | None:
    weight, *others = (*producer.args[1:3], *norm.args[1:5])
    constant = constant_of(weight) if isinstance(weight, Node) else None
    if constant is None:
        return f"the weight of {describe(producer)} is computed"
    if program.readers[address_of(constant)] > 1:
        return f"the weight of {describe(producer)} is shared"
    written = written_buffers(norm.graph)
    for node in (argument for argument in others if isinstance(argument, Node)):
        if constant_of(node) is None:
            return f"{describe(node)}, which would be folded, is computed"
        if str(node.target) in written:
            return f"the program writes to {node.target}"
    return None


def _fold_batch_norm(module: GraphModule, producer: Node, norm: Node) -> tuple[str, ...]:
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
    tag(producer, **{VALUE_TAG: values_of(norm)})  # its own is not computed any more
    module.graph.erase_node(norm)
    return (producer.name,)


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
    transpose = target in TRANSPOSED
    return fuse_conv_bn_weights(weight, bias, mean, variance, eps, scale, shift, transpose)


def _constant_or_none(argument: object) -> Tensor | None:
    return constant_of(argument) if isinstance(argument, Node) else None


_ELEMENTWISE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def _find_scalar(node: Node, program: _Program) -> Iterator[Candidate]:
    if node.target in _ELEMENTWISE and len(node.args) == 2:
        tensor, scalar = node.args
        if is_float_tensor(tensor) and isinstance(scalar, (int, float)):
            yield Candidate(SCALAR_TO_TENSOR, (node.name,))


def _scalar_to_tensor(module: GraphModule, node: Node) -> tuple[str, ...]:
    tensor, scalar = node.args
    assert isinstance(tensor, Node) and isinstance(scalar, (int, float))
    constant = torch.tensor(scalar, dtype=value_of(tensor).dtype)
    path = free_attribute(module, "_scalar_0")
    set_attribute(module, path, constant)
    with module.graph.inserting_before(node):
        read = module.graph.get_attr(path)
    read.meta["val"] = example_of(constant, node)
    node.args = (tensor, read)
    return (node.name,)


def _find_no_bias(node: Node, program: _Program) -> Iterator[Candidate]:
    without = node.target in FOLDABLE and all(argument is None for argument in node.args[2:3])
    folds = any(user.target is aten.batch_norm.default for user in node.users)
    if without and "bias" not in node.kwargs and not folds:  # folding gives it one
        computed = _constant_or_none(node.args[1]) is None
        obstacle = f"the weight of {describe(node)} is computed" if computed else None
        yield Candidate(ADD_BIAS, (node.name,), obstacle)


def _add_bias(module: GraphModule, node: Node) -> tuple[str, ...]:
    weight_node = node.args[1]
    assert isinstance(weight_node, Node)
    weight = constant_of(weight_node)
    assert weight is not None
    linear = node.target is aten.linear.default
    channels = value_of(node).shape[-1 if linear else 1 - weight.dim()]
    path = f"{str(weight_node.target).rpartition('.')[0]}.bias".lstrip(".")
    path = free_attribute(module, path)
    set_attribute(module, path, weight.detach().new_zeros(channels))
    with module.graph.inserting_before(node):
        read = read_attribute(module, path, node)
    read.meta.pop("custom", None)  # what is known of the product is not known of its bias
    node.args = (*node.args[:2], read, *node.args[3:])
    return (node.name,)


def _find_computed_weight(node: Node, program: _Program) -> Iterator[Candidate]:
    if node.target in FOLDABLE and node.args[1] in program.computed:
        weight = node.args[1]
        assert isinstance(weight, Node)
        yield Candidate(FOLD_WEIGHT, (node.name,), obstacle_of_weight(weight))


def _find_product(node: Node, program: _Program) -> Iterator[Candidate]:
    if is_product(node, program.computed):
        yield Candidate(PRODUCT_TO_LINEAR, (node.name,), obstacle_of_product(node))


def _split(name: str) -> tuple[Find, Apply]:
    def find(node: Node, program: _Program) -> Iterator[Candidate]:
        if node.target in DECOMPOSITIONS[name]:
            yield Candidate(name, (node.name,), obstacle_of(name, node))

    return find, lambda module, node: decompose(name, node)


_REWRITES: dict[str, tuple[Find, Apply]] = {
    FOLD_BATCH_NORM: (_find_batch_norm, _fold_batch_norm),
    SCALAR_TO_TENSOR: (_find_scalar, _scalar_to_tensor),
    ADD_BIAS: (_find_no_bias, _add_bias),
    FOLD_WEIGHT: (_find_computed_weight, fold_weight),
    PRODUCT_TO_LINEAR: (_find_product, product_to_linear),
    **{name: _split(name) for name in DECOMPOSITIONS},
}
