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
from onnxscript import opset20 as op, opset21
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

aten = torch.ops.aten
quantized = torch.ops.quantized_decomposed

FLOAT: Final = ir.DataType.FLOAT


def _constant(value: Any, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(value, dtype.numpy())))


def _onnx_type(dtype: Any) -> ir.DataType:
    """Return ONNX's name of a type, which the exporter gives as its number or as torch's."""
    return ir.DataType(dtype) if isinstance(dtype, int) else _TYPES[dtype]


_TYPES: Final = {
    torch.uint8: ir.DataType.UINT8, torch.int8: ir.DataType.INT8, torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16, torch.uint16: ir.DataType.UINT16, torch.float32: FLOAT,
    torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16,
}  # fmt: skip


def _clipped(integers: Any, low: int, high: int, dtype: ir.DataType) -> Any:
    """Return integers within bounds, where these are narrower than the type's, to which ONNX saturates."""
    info = np.iinfo(dtype.numpy())
    if (low, high) == (info.min, info.max):
        return integers
    return op.Clip(integers, _constant(low, dtype), _constant(high, dtype))


def quantize_per_tensor(
    x: Any, scale: float, zero_point: int, low: int, high: int, dtype: Any
) -> Any:
    """Put QuantizeLinear, and Clip where the integers have less than the range of their type."""
    kind = _onnx_type(dtype)
    integers = op.QuantizeLinear(x, _constant(scale, FLOAT), _constant(zero_point, kind))
    return _clipped(integers, low, high, kind)


def dequantize_per_tensor(
    x: Any, scale: float, zero_point: int, low: int, high: int, dtype: Any, out_dtype: Any = None
) -> Any:
    """Put DequantizeLinear."""
    zero = _constant(zero_point, _onnx_type(dtype))
    return _as(op.DequantizeLinear(x, _constant(scale, FLOAT), zero), out_dtype)


def _as(floats: Any, dtype: Any) -> Any:
    kind = FLOAT if dtype is None else _onnx_type(dtype)
    return floats if kind is FLOAT else op.Cast(floats, to=kind)


def quantize_per_channel(
    x: Any, scales: Any, zero_points: Any, axis: int, low: int, high: int, dtype: Any
) -> Any:
    """Put QuantizeLinear along an axis."""
    kind = _onnx_type(dtype)
    zeros = op.Cast(zero_points, to=kind)
    return _clipped(
        op.QuantizeLinear(x, op.Cast(scales, to=FLOAT), zeros, axis=axis), low, high, kind
    )


def dequantize_per_channel(
    x: Any, scales: Any, zero_points: Any, axis: int, low: int, high: int, dtype: Any,
    out_dtype: Any = None,
) -> Any:  # fmt: skip
    """Put DequantizeLinear along an axis; where zero points are floats, the arithmetic that it stands for."""
    floats = op.Cast(scales, to=FLOAT)
    if zero_points is not None and zero_points.dtype in (FLOAT, ir.DataType.DOUBLE):
        shape = [1] * len(x.shape)
        shape[axis] = -1
        along = _constant(shape, ir.DataType.INT64)
        zeros = op.Reshape(op.Cast(zero_points, to=FLOAT), along)
        values = op.Mul(op.Sub(op.Cast(x, to=FLOAT), zeros), op.Reshape(floats, along))
        return _as(values, out_dtype)
    return _as(
        op.DequantizeLinear(x, floats, _zeros(x, zero_points, scales, dtype), axis=axis), out_dtype
    )


def _zeros(x: Any, zero_points: Any, scales: Any, dtype: Any) -> Any:
    kind = _onnx_type(dtype)
    if zero_points is None:
        return _constant(np.zeros([int(n) for n in scales.shape]), kind)
    return op.Cast(zero_points, to=kind)


def dequantize_per_group(
    x: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: Any, group_size: int = 0,
    output_dtype: Any = None,
) -> Any:  # fmt: skip
    """Put DequantizeLinear in blocks along the rows of a matrix."""
    zeros = _zeros(x, zero_points, scales, dtype)
    floats = opset21.DequantizeLinear(
        x, op.Cast(scales, to=FLOAT), zeros, axis=1, block_size=group_size
    )
    return _as(floats, output_dtype)


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
    zero = op.Cast(zero_point, to=_onnx_type(dtype))
    return _clipped(
        op.QuantizeLinear(x, op.Cast(scale, to=FLOAT), zero), low, high, _onnx_type(dtype)
    )


def dequantize_at_run_time(
    x: Any, scale: Any, zero_point: Any, low: int, high: int, dtype: Any, out_dtype: Any = None
) -> Any:
    """Put DequantizeLinear with the scale that was chosen."""
    chosen = _chosen_by(scale)
    if chosen is not None:
        floats = op.DequantizeLinear(x, *chosen.outputs[1:])
    else:
        zero = op.Cast(zero_point, to=_onnx_type(dtype))
        floats = op.DequantizeLinear(x, op.Cast(scale, to=FLOAT), zero)
    return _as(floats, out_dtype)


def _chosen_by(scale: Any) -> ir.Node | None:
    """Return the DynamicQuantizeLinear that chose a scale."""
    cast = scale.producer()
    node = None if cast is None or cast.inputs[0] is None else cast.inputs[0].producer()
    return node if _reads(node, "DynamicQuantizeLinear") else None


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Put what runtimes fuse: Gemm with an int32 bias, MatMulInteger behind a chosen scale, else MatMul."""
    integers, table = x.producer(), weight.producer()
    if bias is not None and len(x.shape) == 2 and _reads(bias.producer(), "DequantizeLinear"):
        return op.Gemm(x, weight, bias, alpha=1.0, beta=1.0, transB=1)
    if _chosen(integers) and _reads(table, "DequantizeLinear"):
        product = _integer_product(integers, table)
    else:
        product = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
    return product if bias is None else op.Add(product, bias)


def _integer_product(x: ir.Node, weight: ir.Node) -> Any:
    """Return the product of integers as floats: `integers * (scale of x * scales of the weight)`."""
    q, scale, zero_point = x.inputs
    total = op.MatMulInteger(q, op.Transpose(weight.inputs[0], perm=[1, 0]), zero_point)
    return op.Mul(op.Cast(total, to=FLOAT), op.Mul(scale, weight.inputs[1]))


def _reads(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type


def _chosen(node: ir.Node | None) -> bool:
    """Tell whether a node dequantizes with a scale that DynamicQuantizeLinear chose."""
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[1] is None:
        return False
    return _reads(node.inputs[1].producer(), "DynamicQuantizeLinear")


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
    quantized.quantize_per_tensor.default: quantize_per_tensor,
    quantized.dequantize_per_tensor.default: dequantize_per_tensor,
    quantized.quantize_per_channel.default: quantize_per_channel,
    quantized.dequantize_per_channel.default: dequantize_per_channel,
    quantized.dequantize_per_channel_group.default: dequantize_per_group,
    quantized.choose_qparams.tensor: choose_qparams,
    quantized.quantize_per_tensor.tensor: quantize_at_run_time,
    quantized.dequantize_per_tensor.tensor: dequantize_at_run_time,
    aten.amax.default: _extremum(op.ReduceMax),
    aten.amin.default: _extremum(op.ReduceMin),
    aten.linear.default: linear,
    aten.scaled_dot_product_attention.default: attention,
}
"""By operator, for the table of translations of `torch.onnx.export`."""
