# SPDX-License-Identifier: Apache-2.0
"""What the operators ``qompose_x86::*`` begin with: integers, their scales, a weight, a geometry."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

NAMESPACE: Final = "qompose_x86"
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

    def checked(self, operator: str, geometry: Geometry | None = None) -> Product:
        """Itself, of matrices or, with a geometry, of images.

        Raises ValueError on what oneDNN would misread, or refuse without saying why.
        """
        if self.x.dtype not in QUANTIZED or self.weight.dtype != torch.int8:
            dtypes = f"{self.x.dtype} and {self.weight.dtype}"
            raise ValueError(f"{NAMESPACE}::{operator}: x uint8/int8, weight int8; not {dtypes}")
        if self.w_scale.dtype != torch.float32 or self.w_scale.shape != self.weight.shape[:1]:
            given, wanted = tuple(self.w_scale.shape), tuple(self.weight.shape[:1])
            raise ValueError(f"{NAMESPACE}::{operator}: w_scale float32 {wanted}, not {given}")
        if geometry is None:
            check_matrices(operator, self.x, self.weight)
        else:
            _check_images(operator, self.x, self.weight, geometry)
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
        raise ValueError(
            f"{NAMESPACE}::conv2d_add: other is {given}; uint8, int8, or float32 with 1, 0"
        )
    return other, scale, zero_point


def image_shape(product: Product, geometry: Geometry) -> list[int]:
    """(N, out, H', W'), symbolic where the image is."""
    x, weight = product.x, product.weight
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry[:3], strict=True)
    spatial = [(i + 2 * p - d * (k - 1) - 1) // s + 1 for i, k, s, p, d in sizes]
    return [x.shape[0], weight.shape[0], *spatial]


def check_matrices(operator: str, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless ``x`` (..., in) can be multiplied by ``weight`` (out, in)."""
    fits = x.dim() > 0 and weight.dim() == 2
    if not fits or statically_known_true(x.shape[-1] != weight.shape[1]):
        shapes = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        raise ValueError(f"{NAMESPACE}::{operator}: {shapes} are not (..., in) and (out, in)")


def _check_images(operator: str, x: Tensor, weight: Tensor, geometry: Geometry) -> None:
    """Refuse other channels, and an image smaller than the window: its result would be zeros.

    A size that is a symbol says nothing yet, and a question would make it a condition of the graph.
    """
    given = f"{NAMESPACE}::{operator}: image {tuple(x.shape)} and weight {tuple(weight.shape)}"
    if x.dim() != 4 or weight.dim() != 4:
        raise ValueError(f"{given}: images and weights must be of rank 4")
    groups, taken = geometry.groups, weight.shape[1] * geometry.groups
    if groups < 1 or weight.shape[0] % groups or statically_known_true(x.shape[1] != taken):
        wanted = "(N, in, H, W) and (out, in / groups, h, w)"
        raise ValueError(f"{given} in {groups} group(s) are not {wanted}")
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry[1:3], strict=True)
    if any(statically_known_true(size + 2 * p < d * (k - 1) + 1) for size, k, p, d in sizes):
        placing = f"padding {geometry.padding}, dilation {geometry.dilation}"
        raise ValueError(f"{given} ({placing}): the image is smaller than the kernel")
