# SPDX-License-Identifier: Apache-2.0
"""Rewrites of a program: found, made on a copy, and kept where a claim covers what they leave.

Each changes one place. Folding re-associates arithmetic, and so does taking operators apart: neither is
bit-identical, and the plan lists each. A weight that is computed from parameters alone (slices, transposes,
norms, sums with low-rank products) is the same whatever the inputs are, so it is folded into a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from qompose.errors import UserError, near_names
from qompose.program.aliasing import written_buffers, written_values
from qompose.program.batch_norm_folding import (
    FOLDABLE,
    constant_or_none,
    fold_batch_norm,
    fold_obstacle,
    sharing_weight,
)
from qompose.program.control_flow import bodies_of, count_readers, graphs_in, nodes_in
from qompose.program.decompositions import DECOMPOSITIONS, decompose, obstacle_of, row_of
from qompose.program.graph import (
    address_of,
    constant_of,
    describe,
    example_of,
    free_attribute,
    is_float_tensor,
    read_attribute,
    set_attribute,
    value_of,
)

aten = torch.ops.aten
PRODUCTS: dict[Any, tuple[int, int, int | None]] = {
    aten.addmm.default: (1, 2, 0),
    aten.mm.default: (0, 1, None),
    aten.matmul.default: (0, 1, None),
}
"""Products that are linear layers where the second factor is a matrix of parameters: the positions of input,
weight (inputs x outputs) and bias.
"""


def computed_values(module: GraphModule) -> frozenset[Node]:
    """Return what a program and its bodies compute from nothing but parameters, buffers and numbers."""
    found: set[Node] = set()
    for node in nodes_in(module):
        if _is_pure(node) and all(n in found or _is_constant(n) for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_constant(node: Node) -> bool:
    return constant_of(node) is not None


def _expression(value: Node) -> list[Node] | None:
    """Return the nodes that lead to a value, in graph order; None where they read or change anything else."""
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        if not _is_constant(node) and not _is_pure(node):
            return None
        found.add(node)
        waiting += node.all_input_nodes
    return [node for node in value.graph.nodes if node in found]


def _is_pure(node: Node) -> bool:
    """Tell whether a call gives the same tensors for the same arguments, and does nothing else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return getattr(target, "__name__", "") == "getitem"
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    known = all(isinstance(size, int) for size in getattr(node.meta.get("val"), "shape", ()))
    return known and not seeded and not target._schema.is_mutable


def obstacle_of_weight(weight: Node) -> str | None:
    """Return why what a weight is computed from is not the same in every call, None where it is."""
    written = written_buffers(weight.graph)
    reads = [str(node.target) for node in _expression(weight) or () if node.op == "get_attr"]
    return next((f"the program writes to {path}" for path in reads if path in written), None)


def is_the_same_in_every_call(value: Node, kept: Container[str]) -> bool:
    """Tell whether a value is computed from parameters that nothing writes to, by no operator of `kept`."""
    expression = _expression(value)
    return (
        expression is not None
        and not any(node.name in kept for node in expression)
        and obstacle_of_weight(value) is None
    )


def evaluated(value: Node) -> Tensor:
    """Return what a parameter, or a value computed from parameters alone, is in every call: a copy."""
    values: dict[Node, Any] = {}
    with torch.no_grad():
        for node in _expression(value) or [value]:
            constant = constant_of(node)
            if constant is not None:
                values[node] = constant.detach()
                continue
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        result: Tensor = values[value].clone(memory_format=torch.contiguous_format)
    return result


_MOST_STORED, _MOST_AT_ONCE = 1 << 24, 1 << 22
"""Bytes of all computed values that are stored, and of one. Causal masks of long caches are larger."""


def store_computed(module: GraphModule) -> None:
    """Store what is computed from numbers and parameters, the same in every call, as buffers, in place.

    Masks that a network makes of `arange`, for example. A compiler folds what comes from parameters alone,
    but computes numbers anew in each call. What only pointwise operators read is left to it: computing that
    on the way takes less time than reading memory. Values that are equal are stored once.
    """
    computed, changed = computed_values(module), _changed_by_others(module.graph)
    stored, room = dict[str, Tensor](), _MOST_STORED
    for node in [node for node in module.graph.nodes if node in computed]:
        read = any(user not in computed and _stores_inputs(user) for user in node.users)
        while node.target is aten.expand.default:  # of which memory has but one line
            node = node.args[0]
        if not (read and _is_worth_storing(node) and changed.isdisjoint(_expression(node) or ())):
            continue
        value = evaluated(node)
        path = next((path for path, known in stored.items() if _same(known, value)), None)
        if path is None and value.nbytes <= room:
            path, room = free_attribute(module, f"{node.name}_computed"), room - value.nbytes
            stored[path] = value
            set_attribute(module, path, value)
        if path is not None:
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(read_attribute(module, path, node))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _changed_by_others(graph: Graph) -> set[Node]:
    """Return what a program writes to, and what its results are or may be views of."""
    names, results = written_values(graph), graph.output_node().all_input_nodes
    given = {part for value in results for part in (value, *(_expression(value) or ()))}
    return given | {node for node in graph.nodes if node.name in names}


def _operator(node: Node) -> OpOverload[Any, Any] | None:
    return node.target if isinstance(node.target, OpOverload) else None


def _stores_inputs(node: Node) -> bool:
    operator = _operator(node)
    return operator is not None and torch.Tag.pointwise not in operator.tags


def _is_worth_storing(node: Node) -> bool:
    value = value_of(node)
    if not isinstance(value, Tensor) or value.nbytes > _MOST_AT_ONCE:
        return False
    parts = [(part, _operator(part)) for part in _expression(node) or ()]
    # Operators of others may give something else in each call.
    if any(operator is not None and operator.namespace != "aten" for _, operator in parts):
        return False
    numbers = (
        part for part, operator in parts if operator is not None and not part.all_input_nodes
    )
    return any(part is not node for part in numbers) and is_the_same_in_every_call(node, ())


def read_by(node: Node) -> list[Node]:
    """Return what an operator's weight and bias, or a product's factors, are computed from; see `drop`."""
    found = [_expression(argument) or [] for argument in node.all_input_nodes]
    return [part for expression in found for part in expression]


def drop(unread: Iterable[Node]) -> None:
    """Remove those of some nodes that nothing reads any more, and then those that they alone have read."""
    waiting = list(unread)
    while waiting:
        node = waiting.pop()
        if not node.users and not node._erased:
            waiting += node.all_input_nodes
            node.graph.erase_node(node)


def fold_weight(module: GraphModule, node: Node) -> tuple[str, ...]:
    """Let an operator read its weight, and its bias if that is computed too, as parameters of their own."""
    arguments = list(node.args)
    for position, argument in enumerate(arguments[1:3], 1):
        if isinstance(argument, Node) and not _is_constant(argument) and _expression(argument):
            arguments[position] = _kept(module, node, evaluated(argument))
    node.args = tuple(arguments)
    return (node.name,)


def _kept(module: GraphModule, node: Node, value: Tensor, path: str = "_weight_0") -> Node:
    path = free_attribute(module, path)
    set_attribute(module, path, value)
    with module.graph.inserting_before(node):
        read = module.graph.get_attr(path)
    read.meta["val"] = example_of(value, node)
    return read


def is_product(node: Node, computed: Container[Node]) -> bool:
    """Tell whether a call multiplies rows by a matrix of parameters, or by one of `computed_values`."""
    if node.target not in PRODUCTS:
        return False
    x, weight, bias = _factors(node)
    matrix = is_float_tensor(weight) and (_is_constant(weight) or weight in computed)
    if not matrix or value_of(weight).dim() != 2 or not is_float_tensor(x) or value_of(x).dim() < 2:
        return False
    return bias is None or value_of(bias).dim() == 1


def obstacle_of_product(node: Node) -> str | None:
    """Return why a product is not a linear layer after all, None where it is one."""
    factors = [name for name in ("beta", "alpha") if node.kwargs.get(name, 1) != 1]
    if factors:
        return f"{describe(node)} is scaled by {factors[0]}={node.kwargs[factors[0]]}"
    return obstacle_of_weight(_factors(node)[1])


def product_to_linear(module: GraphModule, node: Node) -> tuple[str, ...]:
    """Let a product be the linear layer that it is, its weight transposed."""
    x, weight, bias = _factors(node)
    transposed = _kept(module, node, evaluated(weight).t().contiguous())
    node.target, node.kwargs = aten.linear.default, {}
    node.args = (x, transposed) if bias is None else (x, transposed, bias)
    return (node.name,)


def _factors(node: Node) -> tuple[Any, Any, Any]:
    x, weight, bias = PRODUCTS[node.target]
    return node.args[x], node.args[weight], None if bias is None else node.args[bias]


FOLD_BATCH_NORM = "fold_batch_norm"
SCALAR_TO_TENSOR = "scalar_to_tensor"
ADD_BIAS = "add_bias"
"""A product without a bias gets one of zeros, for algorithms to change."""
FOLD_WEIGHT = "fold_weight"
PRODUCT_TO_LINEAR = "product_to_linear"
SPLIT_EXPERTS = "split_experts"
REPLACING = (FOLD_WEIGHT, PRODUCT_TO_LINEAR, SPLIT_EXPERTS)
"""Those that put other parameters in the place of what the model has."""


@dataclass(frozen=True)
class Candidate:
    """A rewrite that is possible, and which operators it concerns.

    `obstacle` is the reason why it would change more than rounding, and so is not made. Those of one `group`
    share a parameter: all of them are made, or none.
    """

    rewrite: str
    nodes: tuple[str, ...]
    obstacle: str | None = None
    group: str = ""


def unknown_rewrite(name: object) -> str | None:
    """Return that there is no rewrite of a name, with those of a similar one; None where there is one."""
    if isinstance(name, str) and name in _REWRITES:
        return None
    hint = near_names(str(name), _REWRITES) or f". Available: {', '.join(_REWRITES)}"
    return f"unknown rewrite {name!r}{hint}"


def find_rewrites(module: GraphModule, wanted: Collection[str]) -> list[Candidate]:
    """Return the places where the `wanted` rewrites apply, in graph order.

    Raises:
        UserError: there is no rewrite of a name.
    """
    for name in wanted:
        fault = unknown_rewrite(name)
        if fault is not None:
            raise UserError(fault)
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
        if candidate.rewrite in REPLACING:
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


_AUTOCAST = (
    "it runs under autocast, which would choose different dtypes for the decomposed operators"
)


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
        names = (producer.name, node.name)
        yield Candidate(FOLD_BATCH_NORM, names, obstacle, _group(producer, program.readers))


def unfoldable_norms(module: GraphModule, found: Iterable[Candidate]) -> list[Candidate]:
    """Return the batch norms of a program that are not among the candidates, each with the reason."""
    known = {candidate.nodes[-1] for candidate in found if candidate.rewrite == FOLD_BATCH_NORM}
    return [
        Candidate(FOLD_BATCH_NORM, (node.name,), _obstacle_of_norm(node))
        for node in nodes_in(module)
        if node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _NORMS
        if node.name not in known
    ]


_NORMS = frozenset(
    {
        aten.batch_norm,
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_functional,
        aten._native_batch_norm_legit_no_training,
        aten._batch_norm_with_update,
        aten._batch_norm_with_update_functional,
        aten._batch_norm_no_update,
        aten._batch_norm_impl_index,
        aten.cudnn_batch_norm,
        aten.miopen_batch_norm,
    }
)
"""The operator that is exported, and those that decompositions make of it."""


def _obstacle_of_norm(norm: Node) -> str:
    if norm.target is not aten.batch_norm.default:
        return f"{norm.target} is a decomposed batch norm; prepare the program before run_decompositions()"
    if isinstance(norm.args[0], Node) and norm.args[0].target in FOLDABLE:
        return "it or the layer before it was quantized before"
    return "no convolution or linear layer is before it"


def _group(producer: Node, readers: Mapping[int, int]) -> str:
    """Name what products that share a weight have in common; "" of one that shares none."""
    weight = constant_or_none(producer.args[1])
    shared = weight is not None and readers[address_of(weight)] > 1
    return sharing_weight(producer)[0].name if shared else ""


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
    node.args = (tensor, _kept(module, node, constant, "_scalar_0"))
    return (node.name,)


def _find_no_bias(node: Node, program: _Program) -> Iterator[Candidate]:
    without = (
        node.target in FOLDABLE
        and all(argument is None for argument in node.args[2:3])
        and "bias" not in node.kwargs
        and constant_or_none(node.args[1]) is not None  # else whoever wants a bias says so
    )
    folds = any(user.target is aten.batch_norm.default for user in node.users)
    if without and not folds:  # folding gives it one
        yield Candidate(ADD_BIAS, (node.name,))


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
        if row_of(name, node) is not None:
            yield Candidate(name, (node.name,), obstacle_of(name, node))

    return find, lambda module, node: decompose(name, node)


def _find_experts(node: Node, program: _Program) -> Iterator[Candidate]:
    if row_of(SPLIT_EXPERTS, node) is not None:
        matrices = node.args[1]
        assert isinstance(matrices, Node)
        fixed = _is_constant(matrices) or matrices in program.computed
        obstacle = obstacle_of_weight(matrices) if fixed else _NO_PARAMETERS
        yield Candidate(SPLIT_EXPERTS, (node.name,), obstacle_of(SPLIT_EXPERTS, node) or obstacle)


_NO_PARAMETERS = (
    "its matrices depend on the program's inputs; only parameters become weights of linear layers"
)


def split_experts(module: GraphModule, node: Node) -> tuple[str, ...]:
    """Take a product of rows in groups apart: a linear layer, with its own weight, for each matrix."""
    graph, names = node.graph, {*decompose(SPLIT_EXPERTS, node)}
    for piece in [piece for piece in graph.nodes if piece.name in names]:
        if piece.target is aten.linear.default:
            read = read_by(piece)
            fold_weight(module, piece)
            drop(read)
    return tuple(piece.name for piece in graph.nodes if piece.name in names)


_REWRITES: dict[str, tuple[Find, Apply]] = {
    FOLD_BATCH_NORM: (_find_batch_norm, fold_batch_norm),
    SCALAR_TO_TENSOR: (_find_scalar, _scalar_to_tensor),
    ADD_BIAS: (_find_no_bias, _add_bias),
    FOLD_WEIGHT: (_find_computed_weight, fold_weight),
    PRODUCT_TO_LINEAR: (_find_product, product_to_linear),
    **{name: _split(name) for name in DECOMPOSITIONS},
    SPLIT_EXPERTS: (_find_experts, split_experts),
}
