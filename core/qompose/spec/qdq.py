# SPDX-License-Identifier: Apache-2.0
"""The quantize and dequantize operators, and which of them a scheme uses.

ExecuTorch and Inductor know a quantized model by the `quantized_decomposed` operators, so they are torch's
own; importing the private module registers them. Three are qompose's. Torch's only operators for blocks are
for groups within the rows of a matrix; `qompose::quantize_per_block` takes blocks of any shape and rank.
Behind a zero point that is not an integer, torch's operator rounds before it adds it and then truncates:
`qompose::quantize_per_channel_float` rounds the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization.fx import _decomposed as _registers
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qompose.program.control_flow import nodes_in
from qompose.program.graph import (
    constant_of,
    free_attribute,
    owner_of,
    read_attribute,
    set_attribute,
)
from qompose.program.rewrites import (
    computed_values,
    drop,
    evaluated as value_in_every_call,
    is_the_same_in_every_call,
)
from qompose.spec.qparams import (
    FLOAT8,
    PER_CHANNEL,
    SYMMETRIC,
    along,
    dequantize_blocks,
    quantize_blocks,
    quantize_float_zero_point,
)

_ops = torch.ops.quantized_decomposed
quantize_per_tensor = _ops.quantize_per_tensor.default
dequantize_per_tensor = _ops.dequantize_per_tensor.default
quantize_per_tensor_dynamic = _ops.quantize_per_tensor.tensor
dequantize_per_tensor_dynamic = _ops.dequantize_per_tensor.tensor
quantize_per_channel = _ops.quantize_per_channel.default
dequantize_per_channel = _ops.dequantize_per_channel.default
quantize_per_group = _ops.quantize_per_channel_group.default
dequantize_per_group = _ops.dequantize_per_channel_group.default
quantize_per_token = _ops.quantize_per_token.default
dequantize_per_token = _ops.dequantize_per_token.default
choose_qparams = _ops.choose_qparams.tensor
choose_qparams_symmetric = _ops.choose_qparams_symmetric.tensor
choose_qparams_per_token = _ops.choose_qparams_per_token_asymmetric.default
choose_qparams_per_token_symmetric = _ops.choose_qparams_per_token.default
convert_without_fusing = _ops.convert_element_type.no_fuse
"""A cast by which Inductor knows products of halves."""


def _dequantize_per_block(
    q: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    return dequantize_blocks(q, scale, zero_point, dtype)


_TENSORS = "Tensor input, Tensor scale, Tensor zero_point"
_BOUNDS = "SymInt low, SymInt high, ScalarType dtype"
for _name, _compute, _arguments in (
    ("quantize_per_block", quantize_blocks, f"{_TENSORS}, {_BOUNDS}"),
    ("dequantize_per_block", _dequantize_per_block, f"{_TENSORS}, {_BOUNDS}"),
    (
        "quantize_per_channel_float",
        quantize_float_zero_point,
        f"{_TENSORS}, SymInt axis, {_BOUNDS}",
    ),
):
    torch.library.custom_op(
        f"qompose::{_name}", _compute, mutates_args=(), schema=f"({_arguments}) -> Tensor"
    ).register_fake(lambda input, *rest: torch.empty_like(input, dtype=rest[-1]))
quantize_per_channel_float = torch.ops.qompose.quantize_per_channel_float.default
quantize_per_block = torch.ops.qompose.quantize_per_block.default
dequantize_per_block = torch.ops.qompose.dequantize_per_block.default
CHOOSE_PER_TOKEN = frozenset({choose_qparams_per_token, choose_qparams_per_token_symmetric})
CHOOSE_SYMMETRIC = frozenset({choose_qparams_symmetric, choose_qparams_per_token_symmetric})
CHOOSE = frozenset({choose_qparams, *CHOOSE_PER_TOKEN, *CHOOSE_SYMMETRIC})
QUANTIZE = frozenset(
    {
        quantize_per_tensor,
        quantize_per_tensor_dynamic,
        quantize_per_channel,
        quantize_per_channel_float,
        quantize_per_group,
        quantize_per_token,
        quantize_per_block,
    }
)
DEQUANTIZE = frozenset(
    {
        dequantize_per_tensor,
        dequantize_per_tensor_dynamic,
        dequantize_per_channel,
        dequantize_per_group,
        dequantize_per_token,
        dequantize_per_block,
    }
)
IN_ATEN: dict[Any, Callable[..., Any]] = {
    quantize_per_group: lambda x, scale, zero, low, high, dtype, size: quantize_blocks(
        x, scale, zero, low, high, dtype
    ),
    dequantize_per_group: lambda x, scale, zero, low, high, dtype, size, out=torch.float32: (
        dequantize_blocks(x, scale, zero, out)
    ),
    quantize_per_token: _registers.quantize_per_token,
    dequantize_per_token: _registers.dequantize_per_token,
    choose_qparams_per_token: _registers.choose_qparams_per_token_asymmetric,
    choose_qparams_per_token_symmetric: _registers.choose_qparams_per_token,
    quantize_per_block: quantize_blocks,
    dequantize_per_block: _dequantize_per_block,
    quantize_per_channel_float: quantize_float_zero_point,
}
"""What to trace for the operators that torch's compiler does not know: the same in aten's."""


def is_quantize(node: object) -> bool:
    """Tell whether an argument is a node that calls a quantize operator."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in QUANTIZE


def is_dequantize(node: object) -> bool:
    """Tell whether an argument is a node that calls a dequantize operator."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in DEQUANTIZE


def is_of_quantization(node: Node) -> bool:
    """Tell whether a node quantizes, dequantizes, or gives parameters that are chosen at run time."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and node.target in QUANTIZE | DEQUANTIZE | CHOOSE


_CHUNK = 2**18
"""How many values of a parameter are worked on at a time: the float temporaries stay at a few MB."""
Absorbed = Sequence[tuple[Tensor, int]]
"""Factors that a parameter took up: vectors, and the dimensions along which they multiply it."""


@dataclass(frozen=True)
class QParams:
    """Scale and zero point of a group, and its integers.

    Both are `()` per tensor, `(C,)` per channel along `axis`, and have the rank of the tensor per block.
    """

    scale: Tensor
    zero_point: Tensor
    low: int
    high: int
    dtype: torch.dtype
    axis: int | None = None
    blocks: bool = False

    @property
    def per_tensor(self) -> bool:
        """Tell whether there is one scale for all of the tensor."""
        return self.axis is None and not self.blocks

    def for_rank(self, rank: int) -> QParams:
        """Return the same for a tensor of a rank: float8 with channels in blocks.

        torch's operator for channels subtracts zero points from float8, which is not defined.
        """
        if self.dtype not in FLOAT8 or self.axis is None:
            return self
        scale, zero_point = (along(v, self.axis, rank) for v in (self.scale, self.zero_point))
        return replace(self, scale=scale, zero_point=zero_point, axis=None, blocks=True)


@dataclass(frozen=True)
class OperatorPair:
    """The operators that quantize and dequantize a tensor, and what both take behind it.

    `dtype` is that of the integers, `steps` the largest of them less the smallest; of float8, which wider
    float types hold, how many of its numbers lie between two powers of 2.
    """

    quantize: Callable[..., Any]
    dequantize: Callable[..., Any]
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    steps: int

    def to_float(self, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keywords of `dequantize` behind its tensor, for a result of `dtype`."""
        if self.dequantize is dequantize_per_block:
            return (*self.arguments[:-1], dtype), {}
        if self.dequantize in (dequantize_per_group, dequantize_per_token):
            return (*self.arguments, dtype), {}
        return self.arguments, {} if dtype is torch.float32 else {"out_dtype": dtype}


def static_pair(q: QParams, shape: tuple[int, ...], scale: Any, zero_point: Any) -> OperatorPair:
    """Return the operators for parameters that are known.

    Args:
        shape: that of the tensor.
        scale, zero_point: what stands for those of `q` in the graph.
    """
    bounds = (q.low, q.high, q.dtype)
    steps = 8 if q.dtype in FLOAT8 else q.high - q.low
    if q.per_tensor:
        pair = quantize_per_tensor, dequantize_per_tensor
        return OperatorPair(*pair, (scale, zero_point, *bounds), q.dtype, steps)
    if q.axis is not None:
        pair = quantize_per_channel, dequantize_per_channel
        if q.zero_point.is_floating_point() and bool(q.zero_point.any()):
            pair = quantize_per_channel_float, dequantize_per_channel
        axis = q.axis % len(shape)
        return OperatorPair(*pair, (scale, zero_point, axis, *bounds), q.dtype, steps)
    size = _group_size(q.scale, shape)
    if size is not None and q.dtype not in FLOAT8:
        pair = quantize_per_group, dequantize_per_group
        return OperatorPair(*pair, (scale, zero_point, *bounds, size), q.dtype, steps)
    pair = quantize_per_block, dequantize_per_block
    return OperatorPair(*pair, (scale, zero_point, *bounds), q.dtype, steps)


def per_group(q: QParams, shape: tuple[int, ...]) -> bool:
    """Tell whether parameters are those of groups within the rows of a matrix of this shape."""
    in_blocks = not q.per_tensor and q.axis is None
    return in_blocks and _group_size(q.scale, shape) is not None


def _group_size(scale: Tensor, shape: tuple[int, ...]) -> int | None:
    """Return the size of blocks that are groups within the rows of a matrix, at least 2 as torch wants."""
    if len(shape) != 2 or scale.shape[0] != shape[0] or shape[1] <= scale.shape[1]:
        return None
    return shape[1] // scale.shape[1]


def choosing_operator(
    spec: Any, low: int, high: int, eps: float
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the operator that computes parameters from a tensor, and what it takes behind the tensor."""
    symmetric = spec.qscheme in SYMMETRIC
    if spec.block_size is not None:
        if symmetric:
            return choose_qparams_per_token_symmetric, (spec.dtype,)
        return choose_qparams_per_token, (spec.dtype,)
    choose = choose_qparams_symmetric if symmetric else choose_qparams
    return choose, (low, high, eps, spec.dtype)


def dynamic_pair(spec: Any, low: int, high: int, scale: Any, zero_point: Any) -> OperatorPair:
    """Return the operators for parameters that `choosing_operator` computes."""
    if spec.block_size is not None:
        pair = quantize_per_token, dequantize_per_token
    else:
        pair = quantize_per_tensor_dynamic, dequantize_per_tensor_dynamic
    arguments = (scale, zero_point, low, high, spec.dtype)
    return OperatorPair(*pair, arguments, spec.dtype, high - low)


def axis_of(spec: Any) -> int | None:
    """Return the channel dimension of a specification, None where it is not per channel."""
    blocks = getattr(spec, "block_size", None) is not None
    return spec.ch_axis if spec.qscheme in PER_CHANNEL and not blocks else None


def in_rows(
    constant: Tensor, absorbed: Absorbed = (), multiple: int = 1
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first, last, values) of a parameter's rows, some at a time, with the factors it took up.

    The number of rows is a multiple of `multiple`. A scalar is one row.
    """
    constant = constant.detach()
    if constant.dim() == 0:
        yield 0, 1, constant
        return
    length = constant.shape[0]
    row = max(1, constant[0].numel()) if length else 1
    step = max(1, _CHUNK // (row * multiple)) * multiple
    for first in range(0, length, step):
        last = min(first + step, length)
        rows = constant[first:last]
        for vector, dim in absorbed:
            part = vector[first:last] if dim == 0 else vector
            rows = rows * along(part, dim, rows.dim())
        yield first, last, rows


def integers_of(constant: Tensor, q: QParams, absorbed: Absorbed = ()) -> Tensor:
    """Return the integers of a parameter, as the operators of `static_pair` would give them.

    Float zero points are added before rounding; see `quantize_float_zero_point`.
    """
    block = _rows_of_block(constant, q)
    result = torch.empty(constant.shape, dtype=q.dtype, device=constant.device)
    for first, last, rows in in_rows(constant, absorbed, block):
        target = result[first:last] if constant.dim() else result
        target.copy_(_quantize(rows, _of_rows(q, rows.dim(), first // block, last // block)))
    return result


def for_each_value(q: QParams, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of each value of a parameter, in float32 and its shape."""

    def spread(values: Tensor) -> Tensor:
        values = values.float()
        if q.axis is not None:
            values = along(values, q.axis, len(shape))
        if not q.blocks:
            return values.expand(shape)
        for dim, size in enumerate(shape):
            values = values.repeat_interleave(size // values.shape[dim], dim)
        return values

    return spread(q.scale), spread(q.zero_point)


def values_of_integers(integers: Tensor, q: QParams) -> Tensor:
    """Return the values that the integers of a parameter stand for, in float32.

    Operators hold several copies of what they are given, which is some rows at a time.
    """
    if integers.numel() <= _CHUNK:
        return _dequantize(integers, q)
    block = _rows_of_block(integers, q)
    result = torch.empty(integers.shape, dtype=torch.float32, device=integers.device)
    for first, last, rows in in_rows(integers, multiple=block):
        part = _of_rows(q, rows.dim(), first // block, last // block)
        result[first:last] = _dequantize(rows, part)
    return result


def _rows_of_block(constant: Tensor, q: QParams) -> int:
    """Return how many rows of a parameter have the same scales, 1 where that does not matter."""
    return constant.shape[0] // q.scale.shape[0] if q.blocks and constant.numel() else 1


def _of_rows(q: QParams, rank: int, first: int, last: int) -> QParams:
    """Return what some rows are quantized by: the scales from `first` to `last`, if rows have any."""
    if not q.blocks and (q.per_tensor or q.axis not in (0, -rank)):
        return q
    return replace(q, scale=q.scale[first:last], zero_point=q.zero_point[first:last])


def _dequantize(integers: Tensor, q: QParams) -> Tensor:
    scale, zero_point = q.scale.to(integers.device), q.zero_point.to(integers.device)
    given: tuple[Any, Any] = (
        (float(scale), int(zero_point)) if q.per_tensor else (scale, zero_point)
    )
    pair = static_pair(q, tuple(integers.shape), *given)
    arguments, keywords = pair.to_float(torch.float32)
    values: Tensor = pair.dequantize(integers, *arguments, **keywords)
    return values


def _quantize(x: Tensor, q: QParams) -> Tensor:
    bounds = (q.low, q.high, q.dtype)
    x = x.float()
    if q.per_tensor:
        quantized: Tensor = quantize_per_tensor(x, float(q.scale), int(q.zero_point), *bounds)
        return quantized
    scale, zero_point = q.scale, q.zero_point
    if q.blocks:
        size = _group_size(scale, tuple(x.shape))
        if size is None or q.dtype in FLOAT8:
            return quantize_blocks(x, scale, zero_point, *bounds)
        # Torch's operator rounds the sum with the zero point, which halves show.
        in_groups: Tensor = quantize_per_group(x, scale, zero_point, *bounds, size)
        return in_groups
    assert q.axis is not None
    if zero_point.is_floating_point():
        return quantize_float_zero_point(x, scale, zero_point, q.axis, *bounds)
    by_channel: Tensor = quantize_per_channel(x, scale, zero_point, q.axis, *bounds)
    return by_channel


def evaluated(call: Node) -> Tensor | None:
    """Return what a call makes of nothing but parameters, None where it reads anything else."""
    constants = {source: constant_of(source) for source in call.all_input_nodes}
    if any(constant is None for constant in constants.values()):
        return None
    args, keywords = map_arg((call.args, call.kwargs), constants.__getitem__)
    with torch.no_grad():
        result: Tensor = call.target(*args, **keywords)  # type: ignore[operator]
        return result


def fold_quantized_constants(model: GraphModule) -> None:
    """Evaluate the quantize operators of parameters, in place; `fold_quantize=False` leaves them."""
    for node in list(nodes_in(model)):
        if is_quantize(node) and (integers := evaluated(node)) is not None:
            with node.graph.inserting_before(node):
                read = add_buffer(f"{node.all_input_nodes[0].target}_q", integers, node)
            node.replace_all_uses_with(read)
            node.graph.erase_node(node)


def fold_computed_values(model: GraphModule, claimed: Container[str]) -> None:
    """Evaluate the quantize operators of what is computed from parameters alone, in place.

    Those whose scale an operator chooses stay. Kernels put steps of their own in their place, behind the
    tensor, and what is read from a buffer has no place: an export moves it to the front.

    Args:
        claimed: the names of operators that stay, since they run as integers themselves.
    """
    computed = computed_values(model)
    for node in [n for n in nodes_in(model) if n in computed and is_quantize(n)]:
        static = not node._erased and chooser_of(node.args[1]) is None
        if static and is_the_same_in_every_call(node, claimed):
            (value,) = node.all_input_nodes[:1]
            with node.graph.inserting_before(node):
                read = add_buffer(f"{value.name}_q", value_in_every_call(node), node)
            node.replace_all_uses_with(read)
            drop([node])


def chooser_of(scale: Any) -> Node | None:
    """Return the operator that chooses a scale when the program runs; None if the scale is static."""
    chosen = scale.args[0] if isinstance(scale, Node) and scale.args else None
    return chosen if isinstance(chosen, Node) and chosen.target in CHOOSE else None


def add_buffer(path: str, value: Tensor, like: Node) -> Node:
    """Store `value` under a free name near `path`, and read it for `like`."""
    owner = owner_of(like)
    target = free_attribute(owner, path)
    set_attribute(owner, target, value)
    return read_buffer(target, like)


def read_buffer(target: str, like: Node) -> Node:
    """Read a buffer for `like`, to whose claim it does not belong."""
    read = read_attribute(owner_of(like), target, like)
    read.meta.pop("custom", None)
    return read
