# SPDX-License-Identifier: Apache-2.0
"""The `quantized_decomposed` operators, taken from torch here and nowhere else, and three of our own.

ExecuTorch and Inductor know a quantized model by these operators, so they are torch's own; importing
the private module registers them. Torch's only operators for blocks are for groups within the rows of a
matrix; `qompose::quantize_per_block` takes blocks of any shape and rank. Behind a zero point that is no
integer, torch's operator rounds before it adds it and then truncates: `qompose::quantize_per_channel_float`
rounds the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization.fx import _decomposed as _registers
from torch.fx import Node

from qompose.numerics import dequantize_blocks, quantize_blocks, quantize_float_zero_point

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


@torch.library.custom_op("qompose::quantize_per_block", mutates_args=())
def _quantize_per_block(
    input: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    return quantize_blocks(input, scale, zero_point, low, high, dtype)


@torch.library.custom_op("qompose::dequantize_per_block", mutates_args=())
def _dequantize_per_block(
    input: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    return dequantize_blocks(input, scale, zero_point, dtype)


@_quantize_per_block.register_fake
@_dequantize_per_block.register_fake
def _like_input(
    input: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(input, dtype=dtype)


@torch.library.custom_op("qompose::quantize_per_channel_float", mutates_args=())
def _quantize_per_channel_float(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    return quantize_float_zero_point(input, scale, zero_point, axis, low, high, dtype)


@_quantize_per_channel_float.register_fake
def _like_its_input(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_like(input, dtype=dtype)


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
    dequantize_per_block: lambda x, scale, zero, low, high, dtype: dequantize_blocks(
        x, scale, zero, dtype
    ),
    quantize_per_channel_float: quantize_float_zero_point,
}
"""What to trace for the operators that torch's compiler does not know: the same in aten's."""


def is_quantize(node: object) -> bool:
    """Tell whether an argument is a node that calls a quantize operator."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in QUANTIZE


def is_dequantize(node: object) -> bool:
    """Tell whether an argument is a node that calls a dequantize operator."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in DEQUANTIZE
