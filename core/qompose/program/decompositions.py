# SPDX-License-Identifier: Apache-2.0
"""Operators taken apart into those that rules know, such as attention and recurrent cells.

Each decomposition is a function over a `Recorder`, and a row of `DECOMPOSITIONS`. make_fx would take
linear, matmul and softmax apart as well, and rules would not know the pieces. So the function calls a
`Recorder`, which writes each operator as torch.export would, and runs it on example values, symbolic sizes
included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import getitem
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from qompose.program.aliasing import unsafe_values
from qompose.program.graph import arguments_of, call, example_of, value_of
from qompose.program.meta import EXPERT_TAG, hand_over, tag, tag_of

aten = torch.ops.aten
MAX_STEPS = 64
"""Longest sequence that is unrolled: each step adds about a dozen operators to the program."""
MAX_EXPERTS = 64
"""Most matrices of a grouped product that is taken apart: each of them reads all rows."""
States = list[Node]
_SAME = {"transformers.grouped_mm_fallback.default": aten._grouped_mm.default}
"""By name: operators of packages that are not imported here, which compute what one of torch's does."""


@dataclass(frozen=True)
class Decomposition:
    """How an operator is taken apart.

    `obstacle` says, of the operator's arguments, why the pieces would not compute the same, or returns None.
    `product` is the piece that multiplies with parameters or activations, None where there is none.
    """

    build: Build
    obstacle: Callable[..., str | None] = lambda **_: None
    product: Any = None


def row_of(name: str, site: Node) -> Decomposition | None:
    """Return the row of the decomposition `name` for a call; None if it has none."""
    return DECOMPOSITIONS[name].get(known_as(site))


def known_as(site: Node) -> Any:
    """Return what a call calls; of an operator that computes what one of torch's does, that one."""
    return _SAME.get(str(site.target), site.target)


def obstacle_of(name: str, site: Node) -> str | None:
    """Return why the decomposition `name` cannot take a call apart, None where it can."""
    row = row_of(name, site)
    assert row is not None
    return recording_obstacle(site) or row.obstacle(site=site, **_arguments(site))


def decompose(name: str, site: Node) -> tuple[str, ...]:
    """Replace a call by its pieces, in place, and return their names."""
    row = row_of(name, site)
    assert row is not None
    return replace_call(site, lambda do, **_: row.build(do, **_arguments(site)))


def _arguments(site: Node) -> dict[str, Any]:
    """Return the arguments of a call by the names that torch's own operator has for them."""
    arguments = arguments_of(site)
    if (same := _SAME.get(str(site.target))) is None:
        return arguments
    names = (argument.name for argument in same._schema.arguments)
    return dict(zip(names, arguments.values(), strict=False))


def _widened(do: Recorder, node: Node) -> Node:
    """Return a half-precision value as float32, in which torch's kernels compute inside."""
    is_half = value_of(node).dtype in (torch.float16, torch.bfloat16)
    return do(aten.to.dtype, node, torch.float32) if is_half else node


def _narrowed(do: Recorder, node: Node, like: Node) -> Node:
    kind = value_of(like).dtype
    return node if value_of(node).dtype == kind else do(aten.to.dtype, node, kind)


def _attention_obstacle(
    query: Node, key: Node, dropout_p: Any, scale: Any, enable_gqa: bool, **_: Any
) -> str | None:
    width, *heads = (value_of(query).shape[-1], *(value_of(n).shape[-3:-2] for n in (query, key)))
    if dropout_p != 0.0:
        return "it uses dropout"
    if isinstance(scale, Node):
        return "its scale is not a constant"
    if scale is None and isinstance(width, torch.SymInt):
        return "the size of its heads is dynamic"
    if enable_gqa and any(isinstance(count, torch.SymInt) for (count,) in heads):
        return "the number of its heads is dynamic"
    return None


def _attention(
    do: Recorder,
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> Node:
    queries, keys, values = (_widened(do, node) for node in (query, key, value))
    if enable_gqa:
        keys, values = (_per_head(do, node, query) for node in (keys, values))
    scale = 1 / math.sqrt(value_of(query).shape[-1]) if scale is None else scale
    scores = do(aten.matmul.default, queries, do(aten.transpose.int, keys, -2, -1))
    scores = do(aten.mul.Tensor, scores, scale)
    if is_causal:
        lengths = [do.size(query, -2), do.size(key, -2)]
        ones = do(aten.ones.default, lengths, dtype=torch.bool, device=value_of(query).device)
        attn_mask = do(aten.tril.default, ones)
    attended = _softmax(do, scores, attn_mask, is_causal)
    result = do(aten.matmul.default, _narrowed(do, attended, values), values)
    return _narrowed(do, result, query)


def _per_head(do: Recorder, shared: Node, query: Node) -> Node:
    """Repeat keys or values for the heads that share them."""
    times = value_of(query).shape[-3] // value_of(shared).shape[-3]
    return shared if times == 1 else do(aten.repeat_interleave.self_int, shared, times, -3)


def _softmax(do: Recorder, scores: Node, mask: Node | None, is_causal: bool) -> Node:
    """Return the softmax of masked scores; rows that are masked throughout become 0, as torch has them.

    They never hold NaN on the way, which an observer would refuse.
    """
    if mask is None:
        return do(aten.softmax.int, scores, -1)
    keep = mask
    if value_of(mask).dtype == torch.bool:
        lowest = torch.finfo(value_of(scores).dtype).min  # its exponential is 0 beside any score
        scores = do(aten.where.ScalarOther, mask, scores, lowest)
    else:
        keep = do(aten.any.dim, do(aten.ne.Scalar, mask, -math.inf), -1, True)
        scores = do(aten.add.Tensor, scores, do(aten.where.ScalarOther, keep, mask, 0.0))
    weights = do(aten.softmax.int, scores, -1)
    if is_causal:  # the first key is never masked
        return weights
    return do(aten.where.ScalarOther, keep, weights, 0.0)


def _hardswish(do: Recorder, self: Node, **_: Any) -> Node:
    # Of the ways to write it, the one with no numbers among the operands, which int8 rules do not take,
    # and with a gate in [0, 1], whose scale is known beforehand.
    return do(aten.mul.Tensor, self, do(aten.hardsigmoid.default, self))


def _write_obstacle(site: Node, **_: Any) -> str | None:
    if site.name in unsafe_values(site.graph):
        return "it writes to a tensor that is also read under another name"
    return None


def _layer_norm(
    do: Recorder,
    input: Node,
    normalized_shape: Sequence[int],
    weight: Node | None,
    bias: Node | None,
    eps: float,
    **_: Any,
) -> Node:
    dims = list(range(-len(normalized_shape), 0))
    x = _widened(do, input)
    centred = do(aten.sub.Tensor, x, do(aten.mean.dim, x, dims, True))
    variance = do(aten.mean.dim, do(aten.mul.Tensor, centred, centred), dims, True)
    scale = do(aten.rsqrt.default, do(aten.add.Tensor, variance, eps))
    result = do(aten.mul.Tensor, centred, scale)
    if weight is not None:
        result = do(aten.mul.Tensor, result, weight)
    if bias is not None:
        result = do(aten.add.Tensor, result, bias)
    return _narrowed(do, result, input)


def _linear(do: Recorder, x: Node, weight: Node, bias: Node | None) -> Node:
    return do(aten.linear.default, x, weight, *([] if bias is None else [bias]))


def _parts(do: Recorder, gates: Node, count: int) -> list[Node]:
    width = value_of(gates).shape[-1] // count
    return [do(aten.slice.Tensor, gates, -1, i * width, (i + 1) * width) for i in range(count)]


class Recorder:
    """Writes the operators that a decomposition calls before a site, with its provenance.

    A piece is called after the site and its operator, so that names in reports say where it is from; it
    is tagged with the operator too, so that selectors of that operator's type apply to it.
    """

    def __init__(self, site: Node) -> None:
        self.site = site
        self.nodes: list[Node] = []
        self._mode = getattr(_tensors(site)[0], "fake_mode", None)

    def __call__(self, operator: torch._ops.OpOverload, *args: Any, **options: Any) -> Node:
        """Write one call and return its node."""
        values, named = map_arg((args, options), self._example)
        with self._mode or nullcontext(), torch.no_grad():
            value = operator(*values, **named)
        with self.site.graph.inserting_before(self.site):
            node = call(self.site.graph, operator, args, self.site, value)
        node.kwargs = options
        tag(node, origin=str(self.site.target), source=self.site.name)
        node._rename(f"{self.site.name}_{operator._schema.name.partition('::')[2]}")
        self.nodes.append(node)
        return node

    def size(self, node: Node, dim: int) -> int | Node:
        """Return a dimension: a number, or a node where it is symbolic."""
        size = value_of(node).shape[dim]
        return self(aten.sym_size.int, node, dim) if isinstance(size, torch.SymInt) else int(size)

    def _example(self, node: Node) -> Any:
        value = value_of(node)
        is_real = isinstance(value, Tensor) and not hasattr(value, "fake_mode")
        return example_of(value, self.site) if is_real and self._mode else value


# A step takes the product of its input, the states, and the weight and bias of the recurrent product.
Step = Callable[[Recorder, Node, States, Node, Node | None], States]


def _lstm_step(
    do: Recorder, product: Node, states: States, weight: Node, bias: Node | None
) -> States:
    hidden, cell = states
    gates = do(aten.add.Tensor, product, _linear(do, hidden, weight, bias))
    parts = _parts(do, gates, 4)
    entry, keep, leave = (do(aten.sigmoid.default, parts[i]) for i in (0, 1, 3))
    new = do(aten.mul.Tensor, entry, do(aten.tanh.default, parts[2]))
    cell = do(aten.add.Tensor, do(aten.mul.Tensor, keep, cell), new)
    return [do(aten.mul.Tensor, leave, do(aten.tanh.default, cell)), cell]


def _gru_step(
    do: Recorder, product: Node, states: States, weight: Node, bias: Node | None
) -> States:
    (hidden,) = states
    inputs = _parts(do, product, 3)
    recurrent = _parts(do, _linear(do, hidden, weight, bias), 3)
    reset, update = (
        do(aten.sigmoid.default, do(aten.add.Tensor, inputs[i], recurrent[i])) for i in (0, 1)
    )
    gated = do(aten.mul.Tensor, reset, recurrent[2])
    new = do(aten.tanh.default, do(aten.add.Tensor, inputs[2], gated))
    kept = do(aten.mul.Tensor, update, do(aten.sub.Tensor, hidden, new))
    return [do(aten.add.Tensor, new, kept)]


def _plain_step(activation: torch._ops.OpOverload) -> Step:
    def step(
        do: Recorder, product: Node, states: States, weight: Node, bias: Node | None
    ) -> States:
        sum_ = do(aten.add.Tensor, product, _linear(do, states[0], weight, bias))
        return [do(activation, sum_)]

    return step


_STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _plain_step(aten.tanh.default),
    "rnn_relu": _plain_step(aten.relu.default),
}


def _states(hx: Node | Sequence[Node]) -> States:
    return [hx] if isinstance(hx, Node) else list(hx)


def _cell(step: Step) -> Decomposition:
    def build(
        do: Recorder, input: Node, hx: Any, w_ih: Node, w_hh: Node, b_ih: Any, b_hh: Any
    ) -> Node | list[Node]:
        states = step(do, _linear(do, input, w_ih, b_ih), _states(hx), w_hh, b_hh)
        return states if len(states) > 1 else states[0]

    return Decomposition(build, product=aten.linear.default)


def _recurrent_obstacle(
    input: Node,
    params: Sequence[Node],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    **_: Any,
) -> str | None:
    steps = value_of(input).shape[1 if batch_first else 0]
    if len(params) != num_layers * (1 + bidirectional) * (4 if has_biases else 2):
        return "it has projections"
    if train and dropout and num_layers > 1:
        return "it uses dropout between its layers, in training mode"
    if isinstance(steps, torch.SymInt):
        return "the sequence length is dynamic"
    if steps > MAX_STEPS:
        return f"the sequence length is {steps}, and at most {MAX_STEPS} steps are unrolled"
    return None


def _recurrent(step: Step) -> Decomposition:
    def build(
        do: Recorder,
        input: Node,
        hx: Any,
        params: Sequence[Node],
        num_layers: int,
        bidirectional: bool,
        batch_first: bool,
        **_: Any,
    ) -> list[Node]:
        sequence = do(aten.transpose.int, input, 0, 1) if batch_first else input
        directions = 2 if bidirectional else 1
        size = len(params) // (num_layers * directions)
        last: list[States] = []
        for layer in range(num_layers):
            columns = []
            for direction in range(directions):
                index = layer * directions + direction
                first = [do(aten.select.int, state, 0, index) for state in _states(hx)]
                weights = params[index * size : (index + 1) * size]
                outputs, states = _run(do, step, sequence, first, weights, bool(direction))
                columns.append(do(aten.stack.default, outputs, 0))
                last.append(states)
            sequence = columns[0] if directions == 1 else do(aten.cat.default, columns, -1)
        output = do(aten.transpose.int, sequence, 0, 1) if batch_first else sequence
        finals = [do(aten.stack.default, list(states), 0) for states in zip(*last, strict=True)]
        return [output, *finals]

    return Decomposition(build, _recurrent_obstacle, aten.linear.default)


def _run(
    do: Recorder,
    step: Step,
    sequence: Node,
    states: States,
    weights: Sequence[Node],
    backwards: bool,
) -> tuple[list[Node], States]:
    """Return the hidden state at each step, in order of the sequence, and the states after the last."""
    input_weight, weight, *biases = weights
    input_bias, bias = biases or (None, None)
    products = _linear(do, sequence, input_weight, input_bias)
    order = range(value_of(sequence).shape[0])
    outputs: dict[int, Node] = {}
    for t in reversed(order) if backwards else order:
        states = step(do, do(aten.select.int, products, 0, t), states, weight, bias)
        outputs[t] = states[0]
    return [outputs[t] for t in order], states


def _experts_obstacle(mat2: Node, offs: Node | None, bias: Any = None, **other: Any) -> str | None:
    experts = value_of(mat2).shape[0]
    if offs is None or value_of(mat2).dim() != 3 or value_of(other["self"]).dim() != 2:
        return (
            "it is no product of rows in groups with a matrix for each; call it with rows (tokens, inputs), "
            "matrices (experts, inputs, outputs) and offs="
        )
    if bias is not None or other.get("out_dtype") is not None:
        return "it has a bias or out_dtype; add the bias, or convert the result, behind it"
    if isinstance(experts, torch.SymInt):
        return "the number of its matrices is dynamic; export it with a fixed one"
    if experts > MAX_EXPERTS:
        return (
            f"it has {experts} matrices, and at most {MAX_EXPERTS} are split, since each reads all rows; "
            "divide them among several calls, each with its rows"
        )
    return None


def _experts(do: Recorder, mat2: Node, offs: Node, **other: Any) -> Node:
    """Give each expert all rows, and take from its results those of the rows that were routed to it.

    Observers see what any expert may be given: one to which calibration routed nothing has a range, too.
    """
    rows = other["self"]
    places = do(aten.arange.default, do.size(rows, 0), device=value_of(rows).device)
    behind = do(aten.ge.Tensor, do(aten.unsqueeze.default, places, 1), offs)
    expert_of = do(aten.sum.dim_IntList, behind, [1], True)
    result = None
    for expert in range(value_of(mat2).shape[0]):
        own = do(aten.eq.Scalar, expert_of, expert)
        weight = do(aten.transpose.int, do(aten.select.int, mat2, 0, expert), 0, 1)
        product = do(aten.linear.default, rows, weight)
        product._rename(f"{do.site.name}_expert_{expert}")
        tag(product, **{EXPERT_TAG: expert})
        result = (
            do(aten.where.ScalarOther, own, product, 0.0)
            if result is None
            else do(aten.where.self, own, product, result)
        )
    assert result is not None
    return result


@dataclass(frozen=True)
class Routed:
    """Which rows of its input an expert's product is for, in the pieces of `split_experts`.

    Attributes:
        expert: its number.
        own: the mask of its rows, `(rows, 1)`.
        behind: tells of each row which experts' rows end before it, `(rows, experts)`.
        site: name of the product of all experts, which is not there any more.
    """

    expert: int
    own: Node
    behind: Node
    site: str


def routed(product: Node) -> Routed | None:
    """Return what tells which rows a product is for, behind observers; None of one that is for all rows."""
    expert = tag_of(product, EXPERT_TAG)
    if expert is None or product.target is not aten.linear.default:
        return None
    readers = list(product.users)
    for reader in readers:
        if reader.op == "call_module":
            readers.extend(reader.users)
    for reader in readers:
        own = reader.args[0]
        if reader.target in _CHOOSING and isinstance(own, Node) and own.target is aten.eq.Scalar:
            (expert_of,) = own.all_input_nodes
            return Routed(expert, own, expert_of.all_input_nodes[0], str(tag_of(product, "source")))
    return None


_CHOOSING = (aten.where.self, aten.where.ScalarOther)


DECOMPOSITIONS: dict[str, dict[Any, Decomposition]] = {
    "split_attention": {
        aten.scaled_dot_product_attention.default: Decomposition(
            _attention, _attention_obstacle, aten.matmul.default
        )
    },
    "split_cells": {getattr(aten, f"{k}_cell").default: _cell(s) for k, s in _STEPS.items()},
    "unroll_recurrent": {getattr(aten, k).input: _recurrent(s) for k, s in _STEPS.items()},
    "split_hardswish": {
        aten.hardswish.default: Decomposition(_hardswish),
        aten.hardswish_.default: Decomposition(_hardswish, _write_obstacle),
    },
    "split_layer_norm": {aten.layer_norm.default: Decomposition(_layer_norm)},
    "split_experts": {
        aten._grouped_mm.default: Decomposition(_experts, _experts_obstacle, aten.linear.default)
    },
}
"""By the name that a quantizer asks for: the operators that are taken apart, and how."""


Build = Callable[..., Node | list[Node]]
"""Gets a recorder and an operator's arguments by name, and returns its result or the list of its results."""


def recording_obstacle(site: Node) -> str | None:
    """Return why operators cannot be recorded in place of a call, None where they can."""
    if any(value_of(node) is None for node in (site, *site.all_input_nodes)):
        return "the export recorded no example values for it"
    if any(free_unbacked_symbols(tensor) for tensor in _tensors(site, *site.all_input_nodes)):
        return "its shapes depend on the data"
    several = isinstance(value_of(site), (tuple, list))
    if several and any(user.target is not getitem for user in site.users):
        return "its outputs are used together, as one value"
    return None


def replace_call(site: Node, build: Build) -> tuple[str, ...]:
    """Replace a call by the operators that `build` calls, in place, and return their names."""
    record = Recorder(site)
    built = build(record, **arguments_of(site))
    results = built if isinstance(built, list) else [built]
    results = [_as_wanted(record, r, v) for r, v in zip(results, _tensors(site), strict=True)]
    if isinstance(built, list):
        for user in list(site.users):
            result = results[user.args[1]]  # type: ignore[index]
            user.replace_all_uses_with(result)
            hand_over(user, result)
            site.graph.erase_node(user)
    else:
        site.replace_all_uses_with(results[0])
        hand_over(site, results[0])
    site.graph.erase_node(site)
    for node in reversed(record.nodes):
        if not node.users:
            site.graph.erase_node(node)
    return tuple(node.name for node in record.nodes if node.users)


def _tensors(*nodes: Node) -> list[Tensor]:
    values = [value_of(node) for node in nodes]
    flat = [v for value in values for v in (value if isinstance(value, (tuple, list)) else [value])]
    return [value for value in flat if isinstance(value, Tensor)]


def _as_wanted(do: Recorder, result: Node, wanted: Tensor) -> Node:
    """Copy a result where its strides are not those that export saw: recorded views could fail on it."""
    if same_layout(wanted, value_of(result)):
        return result
    order = order_of(wanted)
    assert order is not None  # see recording_obstacle
    return laid_out(do, result, order)


Value = TypeVar("Value", Tensor, Node)


def numbers(sizes: Sequence[Any]) -> list[int]:
    """Return sizes or strides as numbers, symbolic ones as they were in the example."""
    return [s.node.hint if isinstance(s, torch.SymInt) else int(s) for s in sizes]


def order_of(tensor: Tensor) -> list[int] | None:
    """Return the dimensions, outermost in memory first; None where that depends on data."""
    if free_unbacked_symbols(tensor):
        return list(range(tensor.dim())) if tensor.is_contiguous() else None
    strides = numbers(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape have the same strides, but for dimensions of one element."""
    pairs = zip(*map(numbers, (one.stride(), other.stride(), one.shape)), strict=True)
    return all(a == b or size == 1 for a, b, size in pairs)


def laid_out(do: Callable[..., Value], tensor: Value, order: Sequence[int]) -> Value:
    """Let a tensor lie in memory in an order of its dimensions; where it does already, this copies nothing.

    Args:
        do: calls an operator, or inserts a call of it in a graph.
    """
    if list(order) == sorted(order):
        return do(aten.contiguous.default, tensor)
    dense = do(aten.contiguous.default, do(aten.permute.default, tensor, list(order)))
    return do(aten.permute.default, dense, [order.index(dim) for dim in range(len(order))])
