# SPDX-License-Identifier: Apache-2.0
"""What torch's exporter is to put for quantize and dequantize operators, linears, and plain attention.

Zero points are always written out: ONNX Runtime fuses QGemm with them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from onnxscript import opset20 as op, opset21
from onnxscript.function_libs.torch_lib.ops.core import aten_mean_dim
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention
from qompose.backend.kit import INT4

aten = torch.ops.aten
quantized = torch.ops.quantized_decomposed

FLOAT: Final = ir.DataType.FLOAT


def _constant(value: Any, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(value, dtype.numpy())))


def _of_type(value: Any, dtype: ir.DataType) -> Any:
    """Return a number as a constant, or a value that is cast."""
    return op.Cast(value, to=dtype) if isinstance(value, ir.Value) else _constant(value, dtype)


def _onnx_type(dtype: Any) -> ir.DataType:
    """Return ONNX's name of a type, which the exporter gives as its number or as torch's."""
    return ir.DataType(dtype) if isinstance(dtype, int) else from_torch_dtype(dtype)


def quantize(
    x: Any, scale: Any, zero_point: Any, low: int, high: int, dtype: Any, **axis: int
) -> Any:
    """Put QuantizeLinear, and Clip where the integers have less than the range of their type."""
    kind = _onnx_type(dtype)
    integers = op.QuantizeLinear(x, _of_type(scale, FLOAT), _of_type(zero_point, kind), **axis)
    if (low, high) == (kind.min, kind.max):
        return integers
    return op.Clip(integers, _constant(low, kind), _constant(high, kind))


def dequantize(
    x: Any, scale: Any, zero_point: Any, low: int, high: int, dtype: Any, out_dtype: Any = None,
    **axis: int,
) -> Any:  # fmt: skip
    """Put DequantizeLinear, of version 21 where scales are those of blocks."""
    kind = _onnx_type(dtype)
    if zero_point is None:
        zero_point = np.zeros([int(size) for size in scale.shape])
    if "block_size" in axis and INT4[0] <= low and high <= INT4[1]:
        kind = ir.DataType.INT4
        x = op.Cast(x, to=kind)
    versions = opset21 if "block_size" in axis else op
    floats = versions.DequantizeLinear(
        x, _of_type(scale, FLOAT), _of_type(zero_point, kind), **axis
    )
    return _as(floats, out_dtype)


def _as(floats: Any, dtype: Any) -> Any:
    kind = FLOAT if dtype is None else _onnx_type(dtype)
    return floats if kind is FLOAT else op.Cast(floats, to=kind)


def quantize_per_channel(
    x: Any, scales: Any, zero_points: Any, axis: int, low: int, high: int, dtype: Any
) -> Any:
    """Put QuantizeLinear along an axis."""
    return quantize(x, scales, zero_points, low, high, dtype, axis=axis)


def dequantize_per_channel(
    x: Any, scales: Any, zero_points: Any, axis: int, low: int, high: int, dtype: Any,
    out_dtype: Any = None,
) -> Any:  # fmt: skip
    """Put DequantizeLinear along an axis; where zero points are floats, the arithmetic that it stands for."""
    if zero_points is None or not zero_points.dtype.is_floating_point():
        return dequantize(x, scales, zero_points, low, high, dtype, out_dtype, axis=axis)
    shape = [1] * len(x.shape)
    shape[axis] = -1
    along = _constant(shape, ir.DataType.INT64)
    zeros, factors = (op.Reshape(op.Cast(v, to=FLOAT), along) for v in (zero_points, scales))
    return _as(op.Mul(op.Sub(op.Cast(x, to=FLOAT), zeros), factors), out_dtype)


def dequantize_per_group(
    x: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: Any, group_size: int = 0,
    output_dtype: Any = None,
) -> Any:  # fmt: skip
    """Put DequantizeLinear in blocks along the rows of a matrix, of integers of four bits where these fit."""
    blocks = {"axis": 1, "block_size": group_size}
    return dequantize(x, scales, zero_points, low, high, dtype, output_dtype, **blocks)


def choose_qparams(x: Any, low: int, high: int, eps: float, dtype: Any) -> Any:
    """Put DynamicQuantizeLinear, and its scale and zero point in the types that torch has for them."""
    _, scale, zero_point = op.DynamicQuantizeLinear(x)
    return op.Cast(scale, to=ir.DataType.DOUBLE), op.Cast(zero_point, to=ir.DataType.INT64)


def quantize_at_run_time(
    x: Any, scale: Any, zero_point: Any, low: int, high: int, dtype: Any
) -> Any:
    """Take the integers of the DynamicQuantizeLinear that chose the scale."""
    chosen = _chosen_by(scale)
    if chosen is not None and chosen.inputs[0] is x:
        return op.Identity(chosen.outputs[0])
    return quantize(x, scale, zero_point, low, high, dtype)


def dequantize_at_run_time(
    x: Any, scale: Any, zero_point: Any, low: int, high: int, dtype: Any, out_dtype: Any = None
) -> Any:
    """Put DequantizeLinear with the scale that was chosen."""
    chosen = _chosen_by(scale)
    if chosen is None:
        return dequantize(x, scale, zero_point, low, high, dtype, out_dtype)
    return _as(op.DequantizeLinear(x, *chosen.outputs[1:]), out_dtype)


def _chosen_by(scale: Any) -> ir.Node | None:
    """Return the DynamicQuantizeLinear that chose a scale."""
    cast = scale.producer()
    node = None if cast is None or cast.inputs[0] is None else cast.inputs[0].producer()
    return node if _is(node, "DynamicQuantizeLinear") else None


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Put what runtimes fuse: Gemm with an int32 bias, MatMulInteger behind a chosen scale, else MatMul."""
    if bias is not None and len(x.shape) == 2 and _is(bias.producer(), "DequantizeLinear"):
        return op.Gemm(x, weight, bias, alpha=1.0, beta=1.0, transB=1)
    integers, table = x.producer(), weight.producer()
    if not _is(table, "DequantizeLinear"):
        product = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
    elif _is(integers, "DequantizeLinear") and _is(
        integers.inputs[1].producer(), "DynamicQuantizeLinear"
    ):
        product = _integer_product(integers, table)
    else:
        product = op.MatMul(x, _transposed(table))
    return product if bias is None else op.Add(product, bias)


def _integer_product(x: ir.Node, weight: ir.Node) -> Any:
    """Return the product of integers as floats: `integers * (scale of x * scales of the weight)`."""
    q, scale, zero_point = x.inputs
    total = op.MatMulInteger(q, op.Transpose(weight.inputs[0], perm=[1, 0]), zero_point)
    return op.Mul(op.Cast(total, to=FLOAT), op.Mul(scale, weight.inputs[1]))


def _transposed(weight: ir.Node) -> Any:
    """Transpose the constants that are dequantized, once and for all, rather than the floats."""
    facts = {name: attribute.as_int() for name, attribute in weight.attributes.items()}
    if "axis" in facts:
        facts["axis"] = 1 - facts["axis"]
    versions, of_blocks = (opset21, 3) if "block_size" in facts else (op, 1)
    constants = [
        op.Transpose(value, perm=[1, 0]) if place < of_blocks else value
        for place, value in enumerate(weight.inputs)
    ]
    return versions.DequantizeLinear(*constants, **facts)


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type


def mean(x: Any, dim: Any, keepdim: bool = False, dtype: int = -1) -> Any:
    """Put GlobalAveragePool, which runtimes fuse, for means over images; torch's exporter puts ReduceMean."""
    rank = len(x.shape)
    dim = [*(dim or range(rank))]
    is_image = rank > 2 and sorted(axis % rank for axis in dim) == [*range(2, rank)]
    if is_image and keepdim and dtype in (-1, None):
        return op.GlobalAveragePool(x)
    return aten_mean_dim(x, dim, keepdim, dtype)


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Put attention without a mask as the two products and the softmax that OpenVINO makes one kernel of.

    torch's exporter scales both inputs. Where a boolean mask leaves nothing of a row, its attention is the
    mean of all values, and torch's is zero: onnxscript 0.7 expects NaN there, which the finite number of its
    masks never gives. All else is left to it.
    """
    is_chosen = attn_mask is not None and attn_mask.dtype is ir.DataType.BOOL
    is_plain = not (is_causal or enable_gqa or dropout_p) and (attn_mask is None or is_chosen)
    if not is_plain or query.shape is None:
        return aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    last = len(query.shape) - 1
    order = [*range(last - 1), last, last - 1]
    width = query.shape[last]
    factor = scale if scale is not None else 1 / math.sqrt(int(width))
    logits = op.MatMul(query, op.Transpose(key, perm=order))
    scaled = op.Mul(logits, _constant(factor, query.dtype))
    if not is_chosen:
        return op.MatMul(op.Softmax(scaled, axis=-1), value)
    masked = op.Where(attn_mask, scaled, _constant(query.dtype.min, query.dtype))
    weights = op.Softmax(masked, axis=-1)
    return op.MatMul(op.Where(attn_mask, weights, _constant(0, query.dtype)), value)


def _extremum(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return what puts ReduceMax or ReduceMin: torch's exporter has none over all dimensions."""

    def put(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        axes = [_constant([*dim], ir.DataType.INT64)] if dim else []
        return reduce(x, *axes, keepdims=int(keepdim))

    return put


TRANSLATIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    quantized.quantize_per_tensor.default: quantize,
    quantized.dequantize_per_tensor.default: dequantize,
    quantized.quantize_per_channel.default: quantize_per_channel,
    quantized.dequantize_per_channel.default: dequantize_per_channel,
    quantized.dequantize_per_channel_group.default: dequantize_per_group,
    quantized.choose_qparams.tensor: choose_qparams,
    quantized.quantize_per_tensor.tensor: quantize_at_run_time,
    quantized.dequantize_per_tensor.tensor: dequantize_at_run_time,
    aten.amax.default: _extremum(op.ReduceMax),
    aten.amin.default: _extremum(op.ReduceMin),
    aten.linear.default: linear,
    aten.mean.dim: mean,
    aten.scaled_dot_product_attention.default: attention,
}
"""By operator, for the table of translations of `torch.onnx.export`."""
