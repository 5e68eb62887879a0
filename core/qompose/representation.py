# SPDX-License-Identifier: Apache-2.0
"""The reference representation: a converted model whose quantized operators compute with integers, in aten.

Every operator that reads dequantized tensors, or whose output is quantized, is replaced by the arithmetic
of `qompose.reference`: those functions are called with fx proxies, so what runs in the graph is what tests
call with tensors. Quantize and dequantize operators that remain, where floats enter and leave and around
operators without a reference, become the float arithmetic that they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qompose import decomposed, reference
from qompose.graph import (
    arguments_of,
    dtype_of,
    hand_over,
    is_float_tensor,
    operator_name,
    remove_dead,
    value_of,
    without_readers,
)
from qompose.nested import graphs_in
from qompose.operands import Emitter, Site, border_grid, grid_of
from qompose.reference import Grid, Integers, Sum
from qompose.rules import NotLowerable

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
    give for the same inputs. Buffers that nothing reads any longer stay until `qompose.graph.refresh`.
    Bodies of control flow must read their parameters themselves (`qompose.nested.sink_constants`).
    """
    result = Representation()
    for part in list(graphs_in(model)):
        with torch.no_grad():  # buffers are made of parameters
            _Rewriter(part, result).rewrite()
        part.recompile()
    return result


@dataclass(frozen=True)
class _Product:
    """A row for an operator with a weight: where its output channels are, and how it accumulates."""

    spatial: int = 0
    transposed: bool = False
    accumulator: torch.dtype = torch.float64

    def __call__(self, site: Site) -> Sum:
        """Multiply by a weight, and add a bias."""
        read, groups = site.arguments, site.arguments.get("groups", 1)
        if decomposed.is_dequantize(read["weight"]) and not decomposed.is_dequantize(read["input"]):
            raise NotLowerable("weight-only: the activation is float")
        w = site.weight(read["weight"], transposed=self.transposed, groups=groups)
        x = site.integers(read["input"], by_token=not self.spatial)
        shape = value_of(read["weight"]).shape
        terms = [shape[0] // groups, *shape[2:]] if self.transposed else shape[1:] or shape
        names = [name for name in read if name not in ("input", "weight", "bias")]
        rest = (None, *(read[name] for name in names)) if self.spatial else ()
        return reference.product(
            site.node.target, x, w, rest,
            depth=math.prod(map(_depth, terms)),
            bias=site.bias(read["bias"], self.spatial),
            accumulator=_accumulator(site, self.accumulator),
        )  # fmt: skip


def _accumulator(site: Site, wanted: torch.dtype) -> torch.dtype:
    """Return float64 on devices that have no integer product."""
    return wanted if value_of(site.node).device.type == "cpu" else torch.float64


def _depth(size: Any) -> int:
    """Return a bound on a length: one that is chosen at run time is below 2**20 here."""
    return int(size) if isinstance(size, int) else 2**20


def _matmul(site: Site) -> Sum:
    first, second = list(site.arguments.values())[:2]
    x, y = site.integers(first), site.integers(second)
    depth, kind = _depth(value_of(first).shape[-1]), _accumulator(site, torch.int64)
    return reference.product(site.node.target, x, y, depth=depth, accumulator=kind)


def _mul(site: Site) -> Sum:
    first, second = site.arguments["self"], site.arguments["other"]
    for one, other in ((first, second), (second, first)):
        factor = site.real(other)
        if factor is not None:
            return reference.scaled(site.integers(one), factor)
    x, y = site.integers(first), site.integers(second)
    return reference.product(aten.mul.Tensor, x, y, depth=1)


def _add(site: Site, sign: int = 1) -> Sum:
    x, y = site.sum_of(site.arguments["self"]), site.sum_of(site.arguments["other"])
    alpha = site.arguments["alpha"]
    if not isinstance(alpha, (int, float)):
        raise NotLowerable(f"its factor {alpha} is computed")
    return reference.added(x, y, sign * alpha)


def _sub(site: Site) -> Sum:
    return _add(site, -1)


def _max_pool(site: Site) -> Sum:
    x, *rest = site.arguments.values()
    return reference.pooled(site.node.target, site.integers(x), *rest)


def _embedding(site: Site) -> Sum:
    table, indices, *rest = site.arguments.values()
    integers, by_row = site.table(table)
    return reference.gathered(integers, site.emitter.proxied(indices), *rest, by_row=by_row)


def _move(site: Site) -> Sum:
    """Call an operator that moves values on the integers."""
    if site.arguments.get("train"):
        raise NotLowerable("it drops values at random")
    sources = {a: site.integers(a) for a in site.node.all_input_nodes if is_float_tensor(a)}
    first, *others = sources.values()
    if not all(reference.same_grid(first.grid, other.grid) for other in others):
        raise NotLowerable("its inputs differ in scale or zero point")

    def operand(node: Node) -> Any:
        return sources[node].values if node in sources else site.emitter.proxied(node)

    args, kwargs = map_arg((site.node.args, site.node.kwargs), operand)
    moved = cast(Any, site.node.target)(*args, **kwargs)
    return reference.value_of_integers(replace(first, values=moved))


def _clamp(site: Site) -> Sum:
    minimum, maximum = _bounds(site.node)
    x = reference.value_of_integers(site.integers(site.arguments["self"]))
    return reference.clamped(x, minimum, maximum)


def _bounds(node: Node) -> tuple[float | None, float | None]:
    """Return the bounds of a clamping operator.

    Raises:
        NotLowerable: they are no numbers.
    """
    read = arguments_of(node)
    fixed = _FIXED_BOUNDS.get(node.target)
    least, most = fixed or tuple(read.get(n, read.get(f"{n}_val")) for n in ("min", "max"))
    if any(isinstance(bound, (Node, torch.SymFloat)) for bound in (least, most)):
        raise NotLowerable("its bounds are computed")
    return (None if least is None else float(least), None if most is None else float(most))


Builder: TypeAlias = Callable[[Site], Sum]

_FIXED_BOUNDS: dict[Any, tuple[float | None, float | None]] = {
    aten.relu.default: (0.0, None),
    aten.relu_.default: (0.0, None),
    aten.relu6.default: (0.0, 6.0),
    aten.relu6_.default: (0.0, 6.0),
}

_CLAMPS = """relu.default relu_.default relu6.default relu6_.default hardtanh.default hardtanh_.default
    clamp.default clamp_.default clamp_min.default clamp_min_.default clamp_max.default
    clamp_max_.default"""

# Operators whose output holds values of their inputs and no others.
_MOVES = """view.default _unsafe_view.default reshape.default permute.default transpose.int t.default
    cat.default stack.default slice.Tensor select.int squeeze.default squeeze.dim squeeze.dims
    unsqueeze.default expand.default clone.default contiguous.default flatten.using_ints unflatten.int
    repeat.default flip.default alias.default detach.default dropout.default narrow.default
    movedim.int index_select.default roll.default pixel_shuffle.default channel_shuffle.default
    repeat_interleave.self_int"""

# Builder by overload, a row for each reference.
_ROWS: tuple[tuple[str, Builder, str], ...] = (
    ("linear", _Product(accumulator=torch.int64), "linear.default"),
    ("conv1d", _Product(1), "conv1d.default conv1d.padding"),
    ("conv2d", _Product(2), "conv2d.default conv2d.padding"),
    ("conv3d", _Product(3), "conv3d.default conv3d.padding"),
    ("conv_transpose1d", _Product(1, transposed=True), "conv_transpose1d.default"),
    ("conv_transpose2d", _Product(2, transposed=True), "conv_transpose2d.input"),
    ("conv_transpose3d", _Product(3, transposed=True), "conv_transpose3d.input"),
    ("matmul", _matmul, "matmul.default mm.default bmm.default"),
    ("add", _add, "add.Tensor add_.Tensor"),
    ("sub", _sub, "sub.Tensor sub_.Tensor"),
    ("mul", _mul, "mul.Tensor mul_.Tensor"),
    ("max_pool", _max_pool, "max_pool1d.default max_pool2d.default max_pool3d.default"),
    ("embedding", _embedding, "embedding.default"),
    ("clamp", _clamp, _CLAMPS),
    ("move", _move, _MOVES),
)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload)


REFERENCES: dict[Any, tuple[str, Builder]] = {
    _overload(name): (row, builder) for row, builder, names in _ROWS for name in names.split()
}
_CLAMP_TARGETS = frozenset(_overload(name) for name in _CLAMPS.split())


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
        if node.target in decomposed.CHOOSE:
            self._choose(node)
        elif decomposed.is_quantize(node):
            self._requantize(node)
        elif node.target is aten.sym_size.int:
            _measure_integers(node)
        elif not decomposed.is_dequantize(node) and _is_quantized(node):
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
            raise NotLowerable("it writes in place to what others read")
        total, output = build(Site(node, arguments, self.emitter, self.sums)), node
        follower = None if total.is_clamped else _activation(node)
        if follower is not None:
            output, total = follower, reference.clamped(total, *_bounds(follower))
        self._give(output, total)
        for replaced in dict.fromkeys((output, node)):
            self.result.replaced[replaced.name] = name
            self._erase(replaced)

    def _give(self, output: Node, total: Sum) -> None:
        """Give the readers of an operator its integers, or floats, as each wants."""
        integers: dict[Grid, Node] = {}
        for user in list(output.users):
            if user.target is decomposed.quantize_per_tensor:
                grid = grid_of(user)
                if grid not in integers:
                    integers[grid] = _node(reference.to_integers(total, grid))
                    hand_over(
                        output, integers[grid], (grid.scale, grid.zero_point, grid.low, grid.high)
                    )
                user.replace_all_uses_with(integers[grid])
                self._erase(user)
        for user in list(output.users):
            if user.target is aten.sym_size.int and integers:
                user.replace_input_with(output, next(iter(integers.values())))
        if output.users:
            floats = _node(reference.to_floats(total, cast(torch.dtype, dtype_of(output))))
            output.replace_all_uses_with(floats)
            hand_over(output, floats)
            if not total.is_clamped:
                self.sums[floats] = total

    def _requantize(self, node: Node) -> None:
        """Go from one grid to another without floats in between."""
        if node.target is not decomposed.quantize_per_tensor:
            return
        try:
            source = Site(node, {}, self.emitter, {}).integers(node.args[0])
        except NotLowerable:  # a border: floats enter here
            return
        total = reference.value_of_integers(source)
        node.replace_all_uses_with(_node(reference.to_integers(total, grid_of(node))))
        self.result.replaced[node.name] = "requantize"
        self._erase(node)

    def _choose(self, node: Node) -> None:
        x = self.emitter.proxied(cast(Node, node.args[0]))
        symmetric = node.target in decomposed.CHOOSE_SYMMETRIC
        if node.target in decomposed.CHOOSE_PER_TOKEN:
            chosen = reference.choose_per_token(x, symmetric=symmetric)
        else:
            low, high, eps, dtype = cast(Any, node.args[1:])
            chosen = reference.choose_qparams(x, low, high, eps, dtype, symmetric=symmetric)
        for user in list(node.users):  # operator.getitem
            user.replace_all_uses_with(_node(chosen[cast(int, user.args[1])]))
            self._erase(user)
        self.result.replaced[node.name] = "choose_qparams"
        self._erase(node)

    def _border(self, node: Node) -> None:
        """Replace a quantize or dequantize operator by float arithmetic."""
        enters = decomposed.is_quantize(node)
        if not enters and not decomposed.is_dequantize(node):
            return
        source = cast(Node, node.args[0])
        grid, shape, late = border_grid(node, self.emitter)
        x = self.emitter.proxied(source)
        x = x if shape is None else aten.view.default(x, shape)
        if enters:
            x = reference.quantize(x, replace(grid, dtype=value_of(node).dtype), late=late)
        else:
            late = late or node.target is decomposed.dequantize_per_channel
            x = reference.dequantize(Integers(x, grid), value_of(node).dtype, late=late)
        x = x if shape is None else aten.view.default(x, list(value_of(node).shape))
        node.replace_all_uses_with(_node(x))
        self.result.replaced[node.name] = "quantize" if enters else "dequantize"
        self._erase(node)

    def _erase(self, node: Node) -> None:
        self.gone.add(node)
        self.graph.erase_node(node)


def _is_quantized(node: Node) -> bool:
    """Tell whether an operator reads dequantized tensors, or its output is quantized."""
    reads = any(decomposed.is_dequantize(source) for source in node.all_input_nodes)
    return reads or any(decomposed.is_quantize(user) for user in node.users)


def _measure_integers(node: Node) -> None:
    """Let an operator that reads a size take it of the integers."""
    for source in node.all_input_nodes:
        if decomposed.is_dequantize(source):
            node.replace_input_with(source, cast(Node, source.args[0]))


def _activation(node: Node) -> Node | None:
    """Return the clamping operator that alone reads a node's value."""
    users = list(node.users)
    if len(users) != 1 or users[0].target not in _CLAMP_TARGETS or users[0].args[0] is not node:
        return None
    try:
        _bounds(users[0])
    except NotLowerable:
        return None
    return users[0]


def _node(proxy: Tensor) -> Node:
    return cast(Any, proxy).node  # type: ignore[no-any-return]
