# SPDX-License-Identifier: Apache-2.0
"""The integer reference: for each operator between Q/DQ operators, the arithmetic that stands for it.

The functions of `qompose.backend.integer_arithmetic` are called with fx proxies, so what runs in a graph is
what tests call with tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from qompose.backend import integer_arithmetic
from qompose.backend.integer_arithmetic import Grid, Integers, Real, Sum
from qompose.backend.kernel import NotLowerable, QuantizedTensor, dequantized
from qompose.program.graph import (
    arguments_of,
    call,
    constant_of,
    example_of,
    free_attribute,
    is_float_tensor,
    read_attribute,
    result_of,
    set_attribute,
    value_of,
)
from qompose.spec import qdq

aten = torch.ops.aten


@dataclass(frozen=True)
class _Product:
    """A row for an operator with a weight: where its output channels are, and how it accumulates."""

    spatial: int = 0
    transposed: bool = False
    accumulator: torch.dtype = torch.float64

    def __call__(self, site: Site) -> Sum:
        """Multiply by a weight, and add a bias."""
        read, groups = site.arguments, site.arguments.get("groups", 1)
        if qdq.is_dequantize(read["weight"]) and not qdq.is_dequantize(read["input"]):
            raise NotLowerable("it is weight-only, so its activation is float")
        w = site.weight(read["weight"], transposed=self.transposed, groups=groups)
        x = site.integers(read["input"], by_token=not self.spatial)
        shape = value_of(read["weight"]).shape
        terms = [shape[0] // groups, *shape[2:]] if self.transposed else shape[1:] or shape
        names = [name for name in read if name not in ("input", "weight", "bias")]
        rest = (None, *(read[name] for name in names)) if self.spatial else ()
        return integer_arithmetic.product(
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
    return integer_arithmetic.product(site.node.target, x, y, depth=depth, accumulator=kind)


def _mul(site: Site) -> Sum:
    first, second = site.arguments["self"], site.arguments["other"]
    for one, other in ((first, second), (second, first)):
        factor = site.real(other)
        if factor is not None:
            return integer_arithmetic.scaled(site.integers(one), factor)
    x, y = site.integers(first), site.integers(second)
    return integer_arithmetic.product(aten.mul.Tensor, x, y, depth=1)


def _add(site: Site, sign: int = 1) -> Sum:
    x, y = site.sum_of(site.arguments["self"]), site.sum_of(site.arguments["other"])
    alpha = site.arguments["alpha"]
    if not isinstance(alpha, (int, float)):
        raise NotLowerable(f"its factor {alpha} is not a constant")
    return integer_arithmetic.added(x, y, sign * alpha)


def _max_pool(site: Site) -> Sum:
    x, *rest = site.arguments.values()
    return integer_arithmetic.pooled(site.node.target, site.integers(x), *rest)


def _embedding(site: Site) -> Sum:
    table, indices, *rest = site.arguments.values()
    integers, by_row = site.table(table)
    return integer_arithmetic.gathered(
        integers, site.emitter.proxied(indices), *rest, by_row=by_row
    )


def _move(site: Site) -> Sum:
    """Call an operator that moves values on the integers."""
    if site.arguments.get("train"):
        raise NotLowerable("it drops values at random")
    sources = {a: site.integers(a) for a in site.node.all_input_nodes if is_float_tensor(a)}
    first, *others = sources.values()
    if not all(integer_arithmetic.same_grid(first.grid, other.grid) for other in others):
        raise NotLowerable("its inputs have different quantization parameters")

    def operand(node: Node) -> Any:
        return sources[node].values if node in sources else site.emitter.proxied(node)

    args, kwargs = map_arg((site.node.args, site.node.kwargs), operand)
    moved = cast(Any, site.node.target)(*args, **kwargs)
    return integer_arithmetic.value_of_integers(replace(first, values=moved))


def _mean(site: Site) -> Sum:
    """Sum integers over dimensions of known size; the mean is in units of so many parts of the scale."""
    x, dims = site.integers(site.arguments["self"]), site.arguments["dim"]
    keepdim, dtype = site.arguments["keepdim"], site.arguments["dtype"]
    shape = value_of(site.arguments["self"]).shape
    if not dims or dtype not in (None, torch.float32):
        raise NotLowerable("it is a mean over all elements, or its dtype is not float32")
    count = math.prod(shape[dim] for dim in dims)
    if not isinstance(count, int) or count == 0:
        raise NotLowerable("the number of values it averages is zero or unknown until run time")
    return integer_arithmetic.averaged(x, count, aten.sum.dim_IntList, dims, keepdim)


def _adaptive_average(site: Site) -> Sum:
    x, size = site.integers(site.arguments["self"]), list(site.arguments["output_size"])
    count = math.prod(value_of(site.arguments["self"]).shape[-2:])
    if any(n != 1 for n in size) or not isinstance(count, int) or count == 0:
        raise NotLowerable(f"it requires output size [1, 1] (here {size}) and a fixed input size")
    return integer_arithmetic.averaged(x, count, aten.sum.dim_IntList, [-2, -1], True)


def _average_pool(site: Site) -> Sum:
    """Sum windows in float64, which is exact; all of them have one divisor."""
    read = site.arguments
    kernel, pads = list(read["kernel_size"]), list(read["padding"])
    kernel = kernel * 2 if len(kernel) == 1 else kernel
    partial_windows = read["ceil_mode"] or (any(pads) and not read["count_include_pad"])
    if partial_windows and read["divisor_override"] is None:
        raise NotLowerable("its windows have different divisors")
    count = read["divisor_override"] or math.prod(kernel)
    rest = (read["stride"] or kernel, pads, read["ceil_mode"], True, 1)
    x = site.integers(read["self"])
    return integer_arithmetic.averaged(x, count, aten.avg_pool2d.default, kernel, *rest)


def _pad(site: Site) -> Sum:
    """Put zeros around integers, which are their zero point."""
    x = site.integers(site.arguments["self"])
    mode, value = site.arguments.get("mode", "constant"), site.arguments["value"]
    if mode != "constant" or value not in (None, 0) or not isinstance(x.grid.zero_point, int):
        raise NotLowerable("it does not pad with zeros, or the zero point of its input is unknown")
    pad = cast(Any, aten.constant_pad_nd.default)
    padded = pad(x.values, site.arguments["pad"], x.grid.zero_point)
    return integer_arithmetic.value_of_integers(replace(x, values=padded))


def _clamp(site: Site) -> Sum:
    minimum, maximum = bounds_of(site.node)
    x = integer_arithmetic.value_of_integers(site.integers(site.arguments["self"]))
    return integer_arithmetic.clamped(x, minimum, maximum)


def bounds_of(node: Node) -> tuple[float | None, float | None]:
    """Return the bounds of a clamping operator.

    Raises:
        NotLowerable: they are computed.
    """
    read = arguments_of(node)
    fixed = _FIXED_BOUNDS.get(node.target)
    least, most = fixed or tuple(read.get(n, read.get(f"{n}_val")) for n in ("min", "max"))
    if any(isinstance(bound, (Node, torch.SymFloat)) for bound in (least, most)):
        raise NotLowerable("its bounds are not constants")
    return (None if least is None else float(least), None if most is None else float(most))


@dataclass(frozen=True)
class Site:
    """One operator that is being replaced.

    Args:
        arguments: by name in its schema, defaults filled in.
        sums: what earlier operators computed, by the node that gives it in float.
    """

    node: Node
    arguments: Mapping[str, Any]
    emitter: Emitter
    sums: Mapping[Node, Sum]

    def integers(self, argument: Any, *, by_token: bool = False) -> Integers:
        """Return the integers of an operand that has one scale, or, where allowed, one for each row.

        Raises:
            NotLowerable: it arrives in float, or has more scales.
        """
        moved = self.sums[argument].source if self._is_ours(argument) else None
        if moved is not None:
            return moved
        tensor = quantized(argument)
        number = self.emitter.proxied
        scale, zero_point = tensor.scale, tensor.zero_point
        if argument.target is qdq.dequantize_per_token and by_token:
            zero_point = aten.to.dtype(number(zero_point), torch.int64)
            return self._holding(tensor, number(scale), zero_point)
        if argument.target not in _PER_TENSOR:
            raise NotLowerable(f"its operand {tensor.node.name} has more than one scale")
        if isinstance(scale, Node):
            scale, zero_point = (
                cast(Tensor, aten.view.default(number(n), [])) for n in (scale, zero_point)
            )
        return self._holding(tensor, _real(scale), zero_point)

    def _holding(self, tensor: QuantizedTensor, scale: Real, zero_point: int | Tensor) -> Integers:
        grid = Grid(scale, zero_point, tensor.low, tensor.high, tensor.dtype)
        return Integers(self.emitter.proxied(tensor.node), grid)

    def weight(self, argument: Any, *, transposed: bool, groups: int) -> Integers:
        """Return the integers of a weight, its scale arranged for the operator's output.

        Raises:
            NotLowerable: it arrives in float, has a scale for each term of a sum, or zero points that are
                not integers.
        """
        tensor = quantized(argument)
        if argument.target is not qdq.dequantize_per_channel:
            return self.integers(argument)
        assert tensor.axis is not None
        shape = tuple(value_of(tensor.node).shape)
        axis = tensor.axis % len(shape)
        scale = integer_arithmetic.for_output(
            tensor.scales.double(), axis, shape, transposed=transposed, groups=groups
        )
        if scale is None:
            raise NotLowerable(f"it sums over weight dimension {axis}, which has several scales")
        if tensor.zero_point is not None and tensor.zero_points.is_floating_point():
            raise NotLowerable("its weight has non-integer zero points")
        return self._holding(tensor, scale, _zero_point(tensor, along(axis, len(shape))))

    def table(self, argument: Any) -> tuple[Integers, bool]:
        """Return a table of rows, and whether each row has a scale and zero point, of shape `(N, 1)`.

        Raises:
            NotLowerable: it arrives in float, or in blocks.
        """
        tensor = quantized(argument)
        if argument.target is not qdq.dequantize_per_channel:
            return self.integers(argument), False
        by_row = tensor.axis in (0, -2)
        shape = [-1, 1] if by_row else [-1]
        scale = tensor.scales.reshape(shape)
        return self._holding(tensor, scale, _zero_point(tensor, shape)), by_row

    def bias(self, argument: Any, spatial: int) -> Real | None:
        """Return a bias, float or quantized, as a real tensor that broadcasts against the output."""
        if argument is None:
            return None
        shape = [-1, *[1] * spatial]
        constant = _constant_value(argument)
        if constant is not None:
            return constant.reshape(shape) if spatial else constant
        bias = aten.to.dtype(self.emitter.proxied(argument), torch.float64)
        return cast(Tensor, aten.view.default(bias, shape) if spatial else bias)

    def real(self, argument: Any) -> Real | None:
        """Return a number or a float parameter, None for anything else."""
        if isinstance(argument, (int, float)):
            return float(argument)
        constant = constant_of(argument) if isinstance(argument, Node) else None
        return constant.double() if constant is not None and is_float_tensor(argument) else None

    def sum_of(self, argument: Any) -> Sum:
        """Return a quantized operand, or what an earlier operator computed for this one alone."""
        if self._is_ours(argument):
            return self.sums[argument]
        return integer_arithmetic.value_of_integers(self.integers(argument))

    def _is_ours(self, argument: Any) -> bool:
        """Tell whether an earlier operator computed this for the one alone: nothing wrote to it since."""
        return argument in self.sums and len(argument.users) == 1


Builder: TypeAlias = Callable[[Site], Sum]
_FIXED_BOUNDS: dict[Any, tuple[float | None, float | None]] = {
    aten.relu.default: (0.0, None),
    aten.relu_.default: (0.0, None),
    aten.relu6.default: (0.0, 6.0),
    aten.relu6_.default: (0.0, 6.0),
}
_CLAMPS = """relu.default relu_.default relu6.default relu6_.default hardtanh.default hardtanh_.default
    clamp.default clamp_.default clip.default clip_.default clamp_min.default clamp_min_.default
    clamp_max.default clamp_max_.default"""
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
    ("sub", partial(_add, sign=-1), "sub.Tensor sub_.Tensor"),
    ("mul", _mul, "mul.Tensor mul_.Tensor"),
    ("max_pool", _max_pool, "max_pool1d.default max_pool2d.default max_pool3d.default"),
    ("embedding", _embedding, "embedding.default"),
    ("mean", _mean, "mean.dim"),
    ("adaptive_avg_pool", _adaptive_average, "adaptive_avg_pool2d.default"),
    ("avg_pool", _average_pool, "avg_pool2d.default"),
    ("pad", _pad, "pad.default constant_pad_nd.default"),
    ("clamp", _clamp, _CLAMPS),
    ("move", _move, _MOVES),
)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload)


REFERENCES: dict[Any, tuple[str, Builder]] = {
    _overload(name): (row, builder) for row, builder, names in _ROWS for name in names.split()
}
CLAMPS = frozenset(_overload(name) for name in _CLAMPS.split())


class Emitter(GraphAppendingTracer):
    """Turns calls on proxies into nodes, with an example value and the provenance of `like`."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model.graph)
        self.model = model
        self.start(next(iter(model.graph.nodes)))

    def start(self, like: Node) -> None:
        """Take provenance from a node, and names of buffers from its first parameter."""
        self.like = like
        sources = [a.args[0] if qdq.is_dequantize(a) else a for a in like.all_input_nodes]
        paths = [str(a.target) for a in sources if isinstance(a, Node) and a.op == "get_attr"]
        self.base = paths[0].removesuffix("_q") if paths else like.name

    def proxied(self, node: Node) -> Tensor:
        """Return what stands for a node's value in the functions of `reference`."""
        return cast(Tensor, Proxy(node, self))

    def create_arg(self, a: Any) -> Any:
        """Make a buffer of a tensor that was computed while rewriting: it depends on constants only."""
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        kind = "real" if a.is_floating_point() else "integer"
        target = free_attribute(self.model, f"{self.base}_{kind}")
        set_attribute(self.model, target, a)
        return read_attribute(self.model, target, self.like)

    def create_node(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: str | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Insert a call at the insertion point, save one that changes nothing. Nothing else is traced."""
        assert kind == "call_function"
        values, options = map_arg((args, kwargs), self._example)
        value = result_of(target, *values, **options)
        same = target is aten.to.dtype and values[0].dtype is value.dtype
        if same or (target is aten.view.default and values[0].dim() == value.dim() == 0):
            return cast(Node, args[0])
        node = call(self.model.graph, target, args, self.like, value)
        node.kwargs = kwargs
        return node

    def _example(self, node: Node) -> Any:
        value = value_of(node)
        constant = constant_of(node) if value is None else None
        return value if constant is None else example_of(constant, self.like)


_PER_TENSOR = frozenset({qdq.dequantize_per_tensor, qdq.dequantize_per_tensor_dynamic})
BLOCKS = frozenset({qdq.dequantize_per_group, qdq.dequantize_per_block})


def quantized(argument: Any) -> QuantizedTensor:
    """Return what is behind an operand.

    Raises:
        NotLowerable: it arrives in float, is a number, or quantized in blocks.
    """
    if not isinstance(argument, Node) or isinstance(value_of(argument), torch.SymInt):
        raise NotLowerable(f"its operand {argument} is a number")
    if argument.op == "call_function" and argument.target in BLOCKS:
        raise NotLowerable(f"its operand {argument.args[0]} is quantized in blocks")
    return dequantized(argument)


def along(axis: int, rank: int) -> list[int]:
    """Return the shape in which a vector lies along one of `rank` dimensions."""
    return [-1 if dim == axis else 1 for dim in range(rank)]


def _zero_point(tensor: QuantizedTensor, shape: list[int]) -> int | Tensor:
    """Return zero points in a shape that broadcasts against the integers; 0 where all are."""
    if tensor.zero_point is None or not bool(tensor.zero_points.any()):
        return 0
    return tensor.zero_points.reshape(shape)


def _constant_value(node: Node) -> Tensor | None:
    """Return the float64 value of a vector of parameters, through its dequantize operator if it has one."""
    constant = constant_of(node)
    if constant is not None or not qdq.is_dequantize(node):
        return None if constant is None else constant.double()
    if node.target in BLOCKS or node.target is qdq.dequantize_per_token:
        return None
    tensor = dequantized(node)
    integers = constant_of(tensor.node)
    numbers = [_number(n) for n in (tensor.scale, tensor.zero_point)]
    if integers is None or integers.dim() > 1 or numbers[0] is None or numbers[1] is None:
        return None
    return (integers.double() - numbers[1]) * numbers[0]


def _number(value: Any) -> Tensor | None:
    constant = constant_of(value) if isinstance(value, Node) else torch.tensor(value or 0.0)
    return None if constant is None else constant.double()


def grid_of(node: Node) -> Grid:
    """Return the grid of a quantize or dequantize operator that is per tensor."""
    _, scale, zero_point, low, high, dtype = cast(Any, node.args[:6])
    return Grid(_real(scale), zero_point, low, high, dtype)


def _real(number: Any) -> Any:
    """Return an int as a float, and anything else as it is."""
    return float(number) if isinstance(number, int) else number
