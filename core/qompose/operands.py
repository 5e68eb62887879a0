# SPDX-License-Identifier: Apache-2.0
"""Between a graph and the functions of `qompose.reference`: proxies in, nodes out, operands as integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from qompose import decomposed, reference
from qompose.graph import (
    call,
    constant_of,
    example_of,
    free_attribute,
    is_float_tensor,
    read_attribute,
    set_attribute,
    value_of,
)
from qompose.quantized_tensors import QuantizedTensor
from qompose.reference import Grid, Integers, Real, Sum
from qompose.region import dequantized
from qompose.rules import NotLowerable

aten = torch.ops.aten


class Emitter(GraphAppendingTracer):
    """Turns calls on proxies into nodes, with an example value and the provenance of `like`."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model.graph)
        self.model = model
        self.start(next(iter(model.graph.nodes)))

    def start(self, like: Node) -> None:
        """Take provenance from a node, and names of buffers from its first parameter."""
        self.like = like
        sources = [a.args[0] if decomposed.is_dequantize(a) else a for a in like.all_input_nodes]
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
        value = target(*values, **options)
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
        if argument.target is decomposed.dequantize_per_token and by_token:
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
                no integers.
        """
        tensor = quantized(argument)
        if argument.target is not decomposed.dequantize_per_channel:
            return self.integers(argument)
        assert tensor.axis is not None
        shape = tuple(value_of(tensor.node).shape)
        axis = tensor.axis % len(shape)
        scale = reference.for_output(
            tensor.scales.double(), axis, shape, transposed=transposed, groups=groups
        )
        if scale is None:
            raise NotLowerable(f"its sum runs over dimension {axis}, and each has a scale")
        if _has_float_zero_points(tensor):
            raise NotLowerable("its weight has zero points that are no integers")
        return self._holding(tensor, scale, _zero_point(tensor, _along(axis, len(shape))))

    def table(self, argument: Any) -> tuple[Integers, bool]:
        """Return a table of rows, and whether each row has a scale and zero point, of shape `(N, 1)`.

        Raises:
            NotLowerable: it arrives in float, or in blocks.
        """
        tensor = quantized(argument)
        if argument.target is not decomposed.dequantize_per_channel:
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
        return reference.value_of_integers(self.integers(argument))

    def _is_ours(self, argument: Any) -> bool:
        """Tell whether an earlier operator computed this for the one alone: nothing wrote to it since."""
        return argument in self.sums and len(argument.users) == 1


_PER_TENSOR = frozenset(
    {decomposed.dequantize_per_tensor, decomposed.dequantize_per_tensor_dynamic}
)
_BLOCKS = frozenset({decomposed.dequantize_per_group, decomposed.dequantize_per_block})


def quantized(argument: Any) -> QuantizedTensor:
    """Return what is behind an operand.

    Raises:
        NotLowerable: it arrives in float, is a number, or quantized in blocks.
    """
    if not isinstance(argument, Node) or isinstance(value_of(argument), torch.SymInt):
        raise NotLowerable(f"its operand {argument} is a number")
    if argument.op == "call_function" and argument.target in _BLOCKS:
        raise NotLowerable(f"its operand {argument.args[0]} is quantized in blocks")
    return dequantized(argument)


def _along(axis: int, rank: int) -> list[int]:
    return [-1 if dim == axis else 1 for dim in range(rank)]


def _has_float_zero_points(tensor: QuantizedTensor) -> bool:
    return tensor.zero_point is not None and tensor.zero_points.is_floating_point()


def _zero_point(tensor: QuantizedTensor, shape: list[int]) -> int | Tensor:
    """Return zero points in a shape that broadcasts against the integers; 0 where all are."""
    if tensor.zero_point is None or not bool(tensor.zero_points.any()):
        return 0
    return tensor.zero_points.reshape(shape)


def _constant_value(node: Node) -> Tensor | None:
    """Return the float64 value of a vector of parameters, through its dequantize operator if it has one."""
    constant = constant_of(node)
    if constant is not None or not decomposed.is_dequantize(node):
        return None if constant is None else constant.double()
    if node.target in _BLOCKS or node.target is decomposed.dequantize_per_token:
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
    """Return a float for any number, and what is no number as it is."""
    return float(number) if isinstance(number, int) else number


def border_grid(node: Node, emitter: Emitter) -> tuple[Grid, list[int] | None, bool]:
    """Return the grid of a quantize or dequantize operator.

    Also the shape in which the tensor broadcasts against it, None for its own, and whether the operator
    rounds behind the zero point.
    """
    grid, target, shape, late = grid_of(node), node.target, None, True
    views: list[int] | None = None
    if target in (decomposed.quantize_per_tensor, decomposed.dequantize_per_tensor):
        return grid, None, False
    source = value_of(cast(Node, node.args[0]))
    if target in (decomposed.quantize_per_channel, decomposed.dequantize_per_channel):
        _, scale, zero_point, axis, low, high, dtype = cast(Any, node.args[:7])
        grid, late = Grid(scale, zero_point or 0, low, high, dtype), False
        views = [-1 if dim == axis % source.dim() else 1 for dim in range(source.dim())]
    elif target in (decomposed.quantize_per_group, decomposed.dequantize_per_group):
        shape, views = [-1, min(cast(int, node.args[6]), source.shape[-1])], [-1, 1]
    elif target in (decomposed.quantize_per_block, decomposed.dequantize_per_block):
        counts, late = value_of(cast(Node, node.args[1])).shape, False
        shape = [n for size, k in zip(source.shape, counts, strict=True) for n in (k, size // k)]
        views = [n for count in counts for n in (count, 1)]
    elif target not in (decomposed.quantize_per_token, decomposed.dequantize_per_token):
        views, late = [], False

    def arranged(number: Any) -> Any:
        if not isinstance(number, Node):
            return number
        proxy = emitter.proxied(number)
        return proxy if views is None else aten.view.default(proxy, views)

    grid = replace(grid, scale=arranged(grid.scale), zero_point=arranged(grid.zero_point))
    return grid, shape, late
