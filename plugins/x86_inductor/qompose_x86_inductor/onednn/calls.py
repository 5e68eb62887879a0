# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's operators ``onednn::*``, from the records of `arguments`."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qompose_x86_inductor.onednn.arguments import (
    FLOAT32,
    Geometry,
    Output,
    Product,
    Summand,
    channels_last,
    image_shape,
)
from qompose_x86_inductor.onednn.convolution_workarounds import safe_form

CONVOLUTION_SUM: Final = torch.ops.onednn.qconv2d_pointwise.binary
"""A convolution that adds its result to a tensor, which it overwrites."""


class Packed(NamedTuple):
    """A weight for oneDNN, or None where it would not be exact, and int32 zeros (channels,)."""

    weight: Tensor | None
    zero_points: Tensor


class ConvolutionSum(NamedTuple):
    """The arguments of ``qompose_x86::conv2d_sum``, which are those of `CONVOLUTION_SUM` but for its end."""

    x: Tensor
    x_scale: float
    x_zp: int
    packed: Tensor | None
    w_scale: Tensor
    w_zp: Tensor
    other: Tensor
    bias: Tensor | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    out_scale: float
    out_zp: int
    out_dtype: torch.dtype | None
    other_scale: float
    other_zp: int
    post_op: str

    @classmethod
    def of(
        cls, product: Product, geometry: Geometry, packed: Packed, summand: Summand, out: Output
    ) -> ConvolutionSum:
        """Return the arguments of a `Product.unsigned` and its geometry, both in `safe_form`."""
        fields: list[Any] = [
            *product[:3], packed.weight, product.w_scale, packed.zero_points, summand.tensor, product.bias,
            *geometry, *out[:3], *summand[1:], out.post_op,
        ]  # fmt: skip
        return cls(*fields)

    def for_onednn(self) -> tuple[Any, ...]:
        """Return the arguments of `CONVOLUTION_SUM`."""
        return (*self[:-1], "sum", 1.0, self.post_op, [None], "none")


def prepack_linear(weight: Tensor) -> Tensor:
    """Call oneDNN's packing, which takes any weight (out, in) for a contiguous one."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack.default(weight.contiguous(), None)
    return packed


def prepack_convolution(product: Product, geometry: Geometry, shape: list[int] | None) -> Tensor:
    """Call oneDNN's packing for images like ``shape`` (N, C, H, W), where known, in `safe_form`."""
    form, placement = safe_form(product, geometry)
    _, x_scale, x_zp, weight, w_scale, _ = form
    packed: Tensor = torch.ops.onednn.qconv_prepack.default(
        weight.contiguous(),
        w_scale,
        x_scale,
        x_zp,
        *placement,
        shape if form.x is product.x else None,
    )
    return packed


def linear(product: Product, packed: Packed, out: Output) -> Tensor:
    """Call oneDNN's linear."""
    result: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        *product[:3], packed.weight, product.w_scale, packed.zero_points, product.bias, *out.fused()
    )
    return result


def linear_sum(product: Product, packed: Packed, other: Tensor, out: Output) -> Tensor:
    """Call oneDNN's linear with a float32 summand, which it only reads.

    Its form for integer summands scales them wrongly (torch 2.13), and the one called "sum" writes
    to them. It misreads a summand with gaps or in another order.
    """
    result: Tensor = torch.ops.onednn.qlinear_pointwise.binary(
        *product[:3], packed.weight, product.w_scale, packed.zero_points, other.contiguous(), product.bias,
        *out[:3], 1.0, 0, "add", 1.0, *out.fused()[3:],
    )  # fmt: skip
    return result


def convolution(product: Product, geometry: Geometry, packed: Packed, out: Output) -> Tensor:
    """Call oneDNN's convolution of a `Product.unsigned`, in `safe_form`."""
    form, placement = safe_form(product, geometry)
    inner = out if out.is_fused("conv2d") else FLOAT32
    result: Tensor = torch.ops.onednn.qconv_pointwise.default(
        *form[:3], packed.weight, form.w_scale, packed.zero_points, form.bias,
        *placement, *inner.fused(),
    )  # fmt: skip
    if form.x is not product.x:
        width = image_shape(product, geometry)[3]
        result = result if result.shape[3] is width else channels_last(result[..., :width])
    return result if inner is out else out.finish(result)
