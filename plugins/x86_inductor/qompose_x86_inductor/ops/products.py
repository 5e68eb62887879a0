# SPDX-License-Identifier: Apache-2.0
"""Matrix products and convolutions, with what oneDNN fuses behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qompose_x86_inductor import packing
from qompose_x86_inductor.arguments import (
    NAMESPACE,
    Geometry,
    Product,
    dequantize,
    image_shape,
    summand,
)
from qompose_x86_inductor.ops.outputs import FLOAT32, Output
from qompose_x86_inductor.packing import Packed
from qompose_x86_inductor.placing import placed


def linear_kernel(product: Product, packed: Packed, out: Output) -> Tensor:
    """Call oneDNN's linear."""
    result: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        *product[:3], packed.weight, product.w_scale, packed.zero_points, product.bias, *out.fused()
    )
    return result


def linear_add_kernel(product: Product, packed: Packed, other: Tensor, out: Output) -> Tensor:
    """Call oneDNN's linear with a float32 summand, which it only reads.

    Its form for integer summands scales them wrongly (torch 2.13), and the one called "sum" writes
    to them. What it reads of a summand with gaps or another order is not the summand.
    """
    result: Tensor = torch.ops.onednn.qlinear_pointwise.binary(
        *product[:3], packed.weight, product.w_scale, packed.zero_points, other.contiguous(), product.bias,
        *out[:3], 1.0, 0, "add", 1.0, *out.fused()[3:],
    )  # fmt: skip
    return result


def conv2d_kernel(product: Product, geometry: Geometry, packed: Packed, out: Output) -> Tensor:
    """Call oneDNN's convolution; ``product`` must be `Product.unsigned`."""
    form, placing = placed(product, geometry)
    inner = out if out.is_fused("conv2d") else FLOAT32
    result: Tensor = torch.ops.onednn.qconv_pointwise.default(
        *form[:3], packed.weight, form.w_scale, packed.zero_points, form.bias,
        *placing, *inner.fused(),
    )  # fmt: skip
    if form.x is not product.x:
        wanted = image_shape(product, geometry)[3]
        result = result if result.shape[3] is wanted else laid_out(result[..., :wanted])
    return result if inner is out else out.finish(result)


def linear(*arguments: Any) -> Tensor:
    """Compute ``qompose_x86::linear``."""
    product = Product(*arguments[:6]).checked("linear")
    out = Output(*arguments[6:]).checked("linear")
    packed = packing.linear(product.weight)
    # oneDNN gives an empty x of rank 3 or more a result of rank 2.
    if packed.weight is not None and product.x.numel() > 0:
        return linear_kernel(product, packed, out)
    return out.finish(_exact_matrix(product))


def linear_fake(*arguments: Any) -> Tensor:
    """Its result without values."""
    product = Product(*arguments[:6]).checked("linear")
    out = Output(*arguments[6:]).checked("linear")
    return product.x.new_empty(_matrix_shape(product), dtype=out.dtype)


def linear_add(*arguments: Any) -> Tensor:
    """Compute ``qompose_x86::linear_add``."""
    product, other, out = _linear_add_arguments(arguments)
    packed = packing.linear(product.weight)
    if packed.weight is not None and product.x.numel() > 0:
        return linear_add_kernel(product, packed, other, out)
    return out.finish(_exact_matrix(product) + other)


def linear_add_fake(*arguments: Any) -> Tensor:
    """Its result without values."""
    product, _, out = _linear_add_arguments(arguments)
    return product.x.new_empty(_matrix_shape(product), dtype=out.dtype)


def linear_add_in_graph(*arguments: Any, zero_points: Tensor) -> Tensor:
    """The same in oneDNN's operators, packing included; ``zero_points`` is int32 zeros (out,).

    The summand is added in float32, which Inductor fuses with what follows.
    """
    product, other, out = _linear_add_arguments(arguments)
    packed = Packed(packing.prepack_linear(product.weight), zero_points)
    return out.finish(linear_kernel(product, packed, FLOAT32) + other)


def _linear_add_arguments(arguments: Sequence[Any]) -> tuple[Product, Tensor, Output]:
    product, other = Product(*arguments[:6]).checked("linear_add"), arguments[6]
    shape = _matrix_shape(product)
    if other.dtype != torch.float32 or list(other.shape) != shape:
        given = f"{other.dtype} {tuple(other.shape)}"
        raise ValueError(f"{NAMESPACE}::linear_add: other must be float32 {shape}, not {given}")
    return product, other, Output(*arguments[7:]).checked("linear_add")


def conv2d(*arguments: Any) -> Tensor:
    """Compute ``qompose_x86::conv2d``."""
    product, geometry = convolution(arguments, "conv2d")
    out = Output(*arguments[10:]).checked("conv2d")
    unsigned = product.unsigned()
    packed = packing.convolution(unsigned, geometry)
    if packed.weight is not None:
        return laid_out(conv2d_kernel(unsigned, geometry, packed, out))
    return laid_out(out.finish(_exact_image(product, geometry)))


def conv2d_fake(*arguments: Any) -> Tensor:
    """Its result without values."""
    product, geometry = convolution(arguments, "conv2d")
    out = Output(*arguments[10:]).checked("conv2d")
    return _new_image(product, geometry, out.dtype)


def conv2d_add(*arguments: Any) -> Tensor:
    """Compute ``qompose_x86::conv2d_add``."""
    product, geometry = convolution(arguments, "conv2d_add")
    other, other_scale, other_zp = summand(*arguments[10:13])
    out = Output(*arguments[13:]).checked("conv2d_add")
    unsigned, placing = placed(product.unsigned(), geometry)
    packed = packing.convolution(unsigned, placing)
    if packed.weight is None:
        real = _exact_image(product, geometry) + dequantize(other, other_scale, other_zp)
        return laid_out(out.finish(real))
    # oneDNN adds in place and in the dtype of its result: it gets a copy, float32 if they differ.
    if other.dtype != out.dtype:
        other, other_scale, other_zp = dequantize(other, other_scale, other_zp), 1.0, 0
    into = _new_image(product, geometry, other.dtype).copy_(other)
    inner = out if other.dtype == out.dtype else Output(dtype=other.dtype, post_op=out.post_op)
    sums: Tensor = torch.ops.onednn.qconv2d_pointwise.binary(
        *unsigned[:3], packed.weight, unsigned.w_scale, packed.zero_points, into, unsigned.bias,
        *placing, *inner[:3], other_scale, other_zp, "sum", 1.0, *inner.fused()[3:],
    )  # fmt: skip
    return sums if inner is out else laid_out(out.quantize(sums))


def conv2d_add_fake(*arguments: Any) -> Tensor:
    """Its result without values."""
    product, geometry = convolution(arguments, "conv2d_add")
    summand(*arguments[10:13])
    out = Output(*arguments[13:]).checked("conv2d_add")
    return _new_image(product, geometry, out.dtype)


def convolution(arguments: Sequence[Any], operator: str) -> tuple[Product, Geometry]:
    """The first ten arguments. Raises ValueError as `Product.checked` does."""
    geometry = Geometry(*arguments[6:10])
    return Product(*arguments[:6]).checked(operator, geometry), geometry


def laid_out(image: Tensor) -> Tensor:
    """The image as channels_last; pointwise code forgets the layout of empty ones."""
    return image.contiguous(memory_format=torch.channels_last)


def _matrix_shape(product: Product) -> list[int]:
    return [*product.x.shape[:-1], product.weight.shape[0]]


def _exact_matrix(product: Product) -> Tensor:
    return product.real(F.linear(*product.centred()), 0)


def _exact_image(product: Product, geometry: Geometry) -> Tensor:
    x, weight = product.centred()
    stride, padding, dilation, groups = geometry
    sums = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    return product.real(sums, 2)


def _new_image(product: Product, geometry: Geometry, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(
        image_shape(product, geometry),
        dtype=dtype,
        device=product.x.device,
        memory_format=torch.channels_last,
    )
