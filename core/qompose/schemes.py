# SPDX-License-Identifier: Apache-2.0
"""From a scheme to the pair of operators that stands for it in a graph, and to a parameter's integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qompose import decomposed
from qompose.numerics import (
    PER_CHANNEL,
    SYMMETRIC,
    along,
    quantize_blocks,
    quantize_float_zero_point,
)

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


@dataclass(frozen=True)
class OperatorPair:
    """The operators that quantize and dequantize a tensor, and what both take behind it.

    `dtype` is that of the integers, `steps` the largest of them less the smallest.
    """

    quantize: Callable[..., Any]
    dequantize: Callable[..., Any]
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    steps: int

    def to_float(self, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keywords of `dequantize` behind its tensor, for a result of `dtype`."""
        if self.dequantize is decomposed.dequantize_per_block:
            return (*self.arguments[:-1], dtype), {}
        if self.dequantize in (decomposed.dequantize_per_group, decomposed.dequantize_per_token):
            return (*self.arguments, dtype), {}
        return self.arguments, {} if dtype is torch.float32 else {"out_dtype": dtype}


def static_pair(q: QParams, shape: tuple[int, ...], scale: Any, zero_point: Any) -> OperatorPair:
    """Return the operators for parameters that are known.

    Args:
        shape: that of the tensor.
        scale, zero_point: what stands for those of `q` in the graph.
    """
    bounds, steps = (q.low, q.high, q.dtype), q.high - q.low
    if q.per_tensor:
        pair = decomposed.quantize_per_tensor, decomposed.dequantize_per_tensor
        return OperatorPair(*pair, (scale, zero_point, *bounds), q.dtype, steps)
    if q.axis is not None:
        pair = decomposed.quantize_per_channel, decomposed.dequantize_per_channel
        if q.zero_point.is_floating_point() and bool(q.zero_point.any()):
            pair = decomposed.quantize_per_channel_float, decomposed.dequantize_per_channel
        axis = q.axis % len(shape)
        return OperatorPair(*pair, (scale, zero_point, axis, *bounds), q.dtype, steps)
    size = _group_size(q.scale, shape)
    if size is not None:
        pair = decomposed.quantize_per_group, decomposed.dequantize_per_group
        return OperatorPair(*pair, (scale, zero_point, *bounds, size), q.dtype, steps)
    pair = decomposed.quantize_per_block, decomposed.dequantize_per_block
    return OperatorPair(*pair, (scale, zero_point, *bounds), q.dtype, steps)


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
            return decomposed.choose_qparams_per_token_symmetric, (spec.dtype,)
        return decomposed.choose_qparams_per_token, (spec.dtype,)
    choose = decomposed.choose_qparams_symmetric if symmetric else decomposed.choose_qparams
    return choose, (low, high, eps, spec.dtype)


def dynamic_pair(spec: Any, low: int, high: int, scale: Any, zero_point: Any) -> OperatorPair:
    """Return the operators for parameters that `choosing_operator` computes."""
    if spec.block_size is not None:
        pair = decomposed.quantize_per_token, decomposed.dequantize_per_token
    else:
        pair = decomposed.quantize_per_tensor_dynamic, decomposed.dequantize_per_tensor_dynamic
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
    block = constant.shape[0] // q.scale.shape[0] if q.blocks and constant.numel() else 1
    result = torch.empty(constant.shape, dtype=q.dtype, device=constant.device)
    for first, last, rows in in_rows(constant, absorbed, block):
        target = result[first:last] if constant.dim() else result
        target.copy_(_quantize(rows, q, first // block, last // block))
    return result


def _quantize(x: Tensor, q: QParams, first: int, last: int) -> Tensor:
    """Quantize some rows, whose scales along dimension 0 are those from `first` to `last`."""
    bounds = (q.low, q.high, q.dtype)
    x = x.float()
    if q.per_tensor:
        quantized: Tensor = decomposed.quantize_per_tensor(
            x, float(q.scale), int(q.zero_point), *bounds
        )
        return quantized
    scale, zero_point = q.scale, q.zero_point
    if q.blocks or q.axis in (0, -x.dim()):
        scale, zero_point = scale[first:last], zero_point[first:last]
    if q.blocks:
        size = _group_size(scale, tuple(x.shape))
        if size is None:
            return quantize_blocks(x, scale, zero_point, *bounds)
        # Torch's operator rounds the sum with the zero point, which halves show.
        in_groups: Tensor = decomposed.quantize_per_group(x, scale, zero_point, *bounds, size)
        return in_groups
    assert q.axis is not None
    if zero_point.is_floating_point():
        return quantize_float_zero_point(x, scale, zero_point, q.axis, *bounds)
    by_channel: Tensor = decomposed.quantize_per_channel(x, scale, zero_point, q.axis, *bounds)
    return by_channel
