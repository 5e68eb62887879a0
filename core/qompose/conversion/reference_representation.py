# SPDX-License-Identifier: Apache-2.0
"""The reference representation: a converted model whose quantized operators compute with integers, in aten.

Every operator that reads dequantized tensors, or whose output is quantized, is replaced by the arithmetic
of `qompose.backend.integer_arithmetic`: those functions are called with fx proxies, so what runs in the
graph is what tests call with tensors. Quantize and dequantize operators that remain, where floats enter and
leave and around operators without a reference, become the float arithmetic that they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.backend import integer_arithmetic
from qompose.backend.integer_arithmetic import Grid, Integers, Sum
from qompose.backend.integer_reference import (
    CLAMPS,
    REFERENCES,
    Emitter,
    Site,
    along,
    bounds_of,
    grid_of,
)
from qompose.backend.kernel import NotLowerable
from qompose.program.control_flow import graphs_in
from qompose.program.graph import (
    arguments_of,
    dtype_of,
    operator_name,
    remove_dead,
    value_of,
    without_readers,
)
from qompose.program.meta import hand_over
from qompose.spec import qdq

aten = torch.ops.aten


@dataclass(frozen=True)
class Representation:
    """What became of a converted model's operators.

    Args:
        replaced: node name -> reference, for each operator (and fused activation) that computes with
            integers now, and for each quantize, dequantize and choose_qparams operator that became float
            arithmetic.
        left: node name -> reason, for each operator that still computes in float on dequantized tensors,
            or whose float output is quantized.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


def represent(model: GraphModule) -> Representation:
    """Replace the Q/DQ operators of a converted model by integer arithmetic, in place.

    The graph, and those inside it, call nothing but aten operators then, save what they called outside
    aten before. Each output of an operator is within one quantization step of what the Q/DQ operators
    give for the same inputs. Code is of the graph as it was, and buffers that nothing reads any longer
    stay, until `qompose.program.graph.refresh`.
    Bodies of control flow must read their parameters themselves
    (`qompose.program.control_flow.sink_constants`).
    """
    result = Representation()
    for part in list(graphs_in(model)):
        with torch.no_grad():  # buffers are made of parameters
            _Rewriter(part, result).rewrite()
    return result


class _Rewriter:
    def __init__(self, model: GraphModule, result: Representation) -> None:
        self.graph, self.result = model.graph, result
        self.emitter = Emitter(model)
        self.sums: dict[Node, Sum] = {}
        self.gone: set[Node] = set()
        self.kept = without_readers(model)

    def rewrite(self) -> None:
        """Replace operators, in order; then the quantize and dequantize operators that remain."""
        for visit in (self._visit, self._border):
            for node in list(self.graph.nodes):
                if node.op == "call_function" and node not in self.gone:
                    self.emitter.start(node)
                    with self.graph.inserting_before(node):
                        visit(node)
            remove_dead(self.graph, self.kept)

    def _visit(self, node: Node) -> None:
        if node.target in qdq.CHOOSE:
            self._choose(node)
        elif qdq.is_quantize(node):
            self._requantize(node)
        elif node.target is aten.sym_size.int:
            _measure_integers(node)
        elif not qdq.is_dequantize(node) and _is_quantized(node):
            try:
                self._replace(node)
            except (NotLowerable, OverflowError) as reason:
                self.result.left[node.name] = str(reason)

    def _replace(self, node: Node) -> None:
        """Put the reference of an operator, and of an activation behind it, in its place."""
        if node.target not in REFERENCES:
            raise NotLowerable(f"{operator_name(node.target)} has no integer reference")
        name, build = REFERENCES[node.target]
        arguments = arguments_of(node)
        if node.target._schema.is_mutable and len(next(iter(arguments.values())).users) > 1:  # type: ignore[union-attr]
            raise NotLowerable("it modifies in place a value that other operators read")
        total, output = build(Site(node, arguments, self.emitter, self.sums)), node
        follower = None if total.is_clamped else _activation(node)
        if follower is not None:
            output, total = follower, integer_arithmetic.clamped(total, *bounds_of(follower))
        self._give(output, total)
        for replaced in dict.fromkeys((output, node)):
            self.result.replaced[replaced.name] = name
            self._erase(replaced)

    def _give(self, output: Node, total: Sum) -> None:
        """Give the readers of an operator its integers, or floats, as each wants."""
        integers: dict[Grid, Node] = {}
        for user in list(output.users):
            if user.target is qdq.quantize_per_tensor:
                grid = grid_of(user)
                if grid not in integers:
                    integers[grid] = _node(integer_arithmetic.to_integers(total, grid))
                    hand_over(
                        output, integers[grid], (grid.scale, grid.zero_point, grid.low, grid.high)
                    )
                user.replace_all_uses_with(integers[grid])
                self._erase(user)
        for user in list(output.users):
            if user.target is aten.sym_size.int and integers:
                user.replace_input_with(output, next(iter(integers.values())))
        if output.users:
            floats = _node(integer_arithmetic.to_floats(total, cast(torch.dtype, dtype_of(output))))
            output.replace_all_uses_with(floats)
            hand_over(output, floats)
            if not total.is_clamped:
                self.sums[floats] = total

    def _requantize(self, node: Node) -> None:
        """Go from one grid to another without floats in between."""
        if node.target is not qdq.quantize_per_tensor:
            return
        try:
            source = Site(node, {}, self.emitter, {}).integers(node.args[0])
        except NotLowerable:  # a border: floats enter here
            return
        total = integer_arithmetic.value_of_integers(source)
        node.replace_all_uses_with(_node(integer_arithmetic.to_integers(total, grid_of(node))))
        self.result.replaced[node.name] = "requantize"
        self._erase(node)

    def _choose(self, node: Node) -> None:
        x = self.emitter.proxied(cast(Node, node.args[0]))
        symmetric = node.target in qdq.CHOOSE_SYMMETRIC
        if node.target in qdq.CHOOSE_PER_TOKEN:
            chosen = integer_arithmetic.choose_per_token(x, symmetric=symmetric)
        else:
            low, high, eps, dtype = cast(Any, node.args[1:])
            chosen = integer_arithmetic.choose_qparams(
                x, low, high, eps, dtype, symmetric=symmetric
            )
        for user in list(node.users):  # operator.getitem
            user.replace_all_uses_with(_node(chosen[cast(int, user.args[1])]))
            self._erase(user)
        self.result.replaced[node.name] = "choose_qparams"
        self._erase(node)

    def _border(self, node: Node) -> None:
        """Replace a quantize or dequantize operator by float arithmetic."""
        enters = qdq.is_quantize(node)
        if not enters and not qdq.is_dequantize(node):
            return
        source = cast(Node, node.args[0])
        grid, shape, late = border_grid(node, self.emitter)
        x = self.emitter.proxied(source)
        x = x if shape is None else aten.view.default(x, shape)
        if enters:
            x = integer_arithmetic.quantize(x, replace(grid, dtype=value_of(node).dtype), late=late)
        else:
            late = late or node.target is qdq.dequantize_per_channel
            x = integer_arithmetic.dequantize(Integers(x, grid), value_of(node).dtype, late=late)
        x = x if shape is None else aten.view.default(x, list(value_of(node).shape))
        node.replace_all_uses_with(_node(x))
        self.result.replaced[node.name] = "quantize" if enters else "dequantize"
        self._erase(node)

    def _erase(self, node: Node) -> None:
        self.gone.add(node)
        self.graph.erase_node(node)


def _is_quantized(node: Node) -> bool:
    """Tell whether an operator reads dequantized tensors, or its output is quantized."""
    reads = any(qdq.is_dequantize(source) for source in node.all_input_nodes)
    return reads or any(qdq.is_quantize(user) for user in node.users)


def _measure_integers(node: Node) -> None:
    """Let an operator that reads a size take it of the integers."""
    for source in node.all_input_nodes:
        if qdq.is_dequantize(source):
            node.replace_input_with(source, cast(Node, source.args[0]))


def _activation(node: Node) -> Node | None:
    """Return the clamping operator that alone reads a node's value."""
    users = list(node.users)
    if len(users) != 1 or users[0].target not in CLAMPS or users[0].args[0] is not node:
        return None
    try:
        bounds_of(users[0])
    except NotLowerable:
        return None
    return users[0]


def _node(proxy: Tensor) -> Node:
    return cast(Any, proxy).node  # type: ignore[no-any-return]


def border_grid(node: Node, emitter: Emitter) -> tuple[Grid, list[int] | None, bool]:
    """Return the grid of a quantize or dequantize operator.

    Also the shape in which the tensor broadcasts against it, None for its own, and whether the operator
    rounds behind the zero point.
    """
    grid, target, shape, late = grid_of(node), node.target, None, True
    views: list[int] | None = None
    if target in (qdq.quantize_per_tensor, qdq.dequantize_per_tensor):
        return grid, None, False
    source = value_of(cast(Node, node.args[0]))
    if target in (qdq.quantize_per_channel, qdq.dequantize_per_channel):
        _, scale, zero_point, axis, low, high, dtype = cast(Any, node.args[:7])
        grid, late = Grid(scale, zero_point or 0, low, high, dtype), False
        views = along(axis % source.dim(), source.dim())
    elif target in (qdq.quantize_per_group, qdq.dequantize_per_group):
        shape, views = [-1, min(cast(int, node.args[6]), source.shape[-1])], [-1, 1]
    elif target in (qdq.quantize_per_block, qdq.dequantize_per_block):
        counts, late = value_of(cast(Node, node.args[1])).shape, False
        shape = [n for size, k in zip(source.shape, counts, strict=True) for n in (k, size // k)]
        views = [n for count in counts for n in (count, 1)]
    elif target not in (qdq.quantize_per_token, qdq.dequantize_per_token):
        views, late = [], False

    def arranged(number: Any) -> Any:
        if not isinstance(number, Node):
            return number
        proxy = emitter.proxied(number)
        return proxy if views is None else aten.view.default(proxy, views)

    grid = replace(grid, scale=arranged(grid.scale), zero_point=arranged(grid.zero_point))
    return grid, shape, late
