# SPDX-License-Identifier: Apache-2.0
"""What the operators ``qompose_x86::*`` begin with: integers, their scales, a weight, a geometry."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

import torch
from torch import Tensor

QUANTIZED: Final = (torch.uint8, torch.int8)


class Geometry(NamedTuple):
    """Of a 2-D convolution: (height, width) each, in pixels, and the number of groups."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def key(self) -> Hashable:
        """The same as a hashable value."""
        return (*self.stride, *self.padding, *self.dilation, self.groups)


class Product(NamedTuple):
    """The arguments that every product begins with, in the order of the schemas."""

    x: Tensor
    x_scale: float
    x_zp: int
    weight: Tensor
    w_scale: Tensor
    bias: Tensor | None

    def checked(self, operator: str) -> Product:
        """Itself. Raises ValueError on what oneDNN would misread instead of refusing."""
        if self.x.dtype not in QUANTIZED or self.weight.dtype != torch.int8:
            dtypes = f"{self.x.dtype} and {self.weight.dtype}"
            raise ValueError(f"{operator}: x uint8/int8, weight int8; not {dtypes}")
        if self.w_scale.dtype != torch.float32 or self.w_scale.shape != self.weight.shape[:1]:
            given, wanted = tuple(self.w_scale.shape), tuple(self.weight.shape[:1])
            raise ValueError(f"{operator}: w_scale float32 {wanted}, not {given}")
        return self

    def unsigned(self) -> Product:
        """The same product with a uint8 ``x``, the only kind oneDNN convolves."""
        if self.x.dtype == torch.uint8:
            return self
        return self._replace(x=flip_sign_bit(self.x), x_zp=self.x_zp + 128)

    def centred(self) -> tuple[Tensor, Tensor]:
        """``x - x_zp`` and the weight, as float64."""
        return self.x.double() - self.x_zp, self.weight.double()

    def real(self, sums: Tensor, trailing: int) -> Tensor:
        """Integer sums with ``trailing`` axes behind the channels, in real units: float64."""
        over_channels = (-1, *[1] * trailing)
        scaled = sums * (self.w_scale.double() * self.x_scale).reshape(over_channels)
        return scaled if self.bias is None else scaled + self.bias.double().reshape(over_channels)


def flip_sign_bit(x: Tensor) -> Tensor:
    """8-bit integers as uint8, with the top bit inverted: adds 128 to int8, keeps its order."""
    return torch.bitwise_xor(x.view(torch.uint8), 128)


def dequantize(value: Tensor, scale: float, zero_point: int) -> Tensor:
    """Integers to float32 real values."""
    return (value.to(torch.float32) - zero_point) * scale


def summand(other: Tensor, scale: float, zero_point: int) -> tuple[Tensor, float, int]:
    """Itself. Raises ValueError on a dtype or qparams that conv2d_add does not take."""
    if other.dtype == torch.float32 and (scale, zero_point) == (1.0, 0):
        return other, scale, zero_point
    if other.dtype not in QUANTIZED:
        given = f"{other.dtype} with scale {scale} and zero point {zero_point}"
        raise ValueError(f"conv2d_add: other is {given}; uint8, int8, or float32 with 1, 0")
    return other, scale, zero_point


def image_shape(product: Product, geometry: Geometry) -> list[int]:
    """(N, out, H', W'), symbolic where the image is."""
    x, weight = product.x, product.weight
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry[:3], strict=True)
    spatial = [(i + 2 * p - d * (k - 1) - 1) // s + 1 for i, k, s, p, d in sizes]
    return [x.shape[0], weight.shape[0], *spatial]
