# SPDX-License-Identifier: Apache-2.0
"""Tentative rewrites: found in a program, made on a copy, kept where a claim covers them.

Each rewrite changes one place and leaves operators there, its pieces; it stays where a claim holds one of
them. Folding re-associates arithmetic, and so does taking operators apart: neither is bit-identical, and
the plan lists each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from qompose.errors import UserError, near_names
from qompose.program.batch_norm_folding import (
    FOLDABLE,
    constant_or_none,
    fold_batch_norm,
    fold_obstacle,
)
from qompose.program.control_flow import bodies_of, count_readers, graphs_in, nodes_in
from qompose.program.decompositions import DECOMPOSITIONS, decompose, obstacle_of
from qompose.program.graph import (
    constant_of,
    describe,
    example_of,
    free_attribute,
    is_float_tensor,
    read_attribute,
    set_attribute,
    value_of,
)
from qompose.program.weight_folding import (
    computed_values,
    drop,
    fold_weight,
    is_product,
    obstacle_of_product,
    obstacle_of_weight,
    product_to_linear,
    read_by,
)

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


def _find_batch_norm(node: Node, program: _Program) -> Iterator[Candidate]:
    if node.target is not aten.batch_norm.default:
        return
    producer = node.args[0]
    if isinstance(producer, Node) and producer.target in FOLDABLE:
        obstacle = fold_obstacle(node, producer, program.readers)
        yield Candidate(FOLD_BATCH_NORM, (producer.name, node.name), obstacle)


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
        computed = constant_or_none(node.args[1]) is None
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
    FOLD_BATCH_NORM: (_find_batch_norm, fold_batch_norm),
    SCALAR_TO_TENSOR: (_find_scalar, _scalar_to_tensor),
    ADD_BIAS: (_find_no_bias, _add_bias),
    FOLD_WEIGHT: (_find_computed_weight, fold_weight),
    PRODUCT_TO_LINEAR: (_find_product, product_to_linear),
    **{name: _split(name) for name in DECOMPOSITIONS},
}
