# SPDX-License-Identifier: Apache-2.0
"""Weights in oneDNN's own layout, kept beside the plain weights (`derived`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from qompose_x86_inductor import isa
from qompose_x86_inductor.arguments import (
    QUANTIZED as QUANTIZED,
    Geometry as Geometry,
    Product as Product,
    dequantize as dequantize,
    flip_sign_bit as flip_sign_bit,
    image_shape as image_shape,
    summand as summand,
)
from qompose_x86_inductor.derived import derived
from qompose_x86_inductor.placing import placed


class Packed(NamedTuple):
    """A weight for oneDNN, or None where it would not be exact, and int32 zeros (channels,)."""

    weight: Tensor | None
    zero_points: Tensor


def linear(weight: Tensor) -> Packed:
    """The packed form of an int8 linear weight (out, in), from the table or made now."""
    return _lookup(weight, "linear", lambda: prepack_linear(weight))


def convolution(product: Product, geometry: Geometry) -> Packed:
    """The packed form of an int8 weight (out, in / groups, kh, kw) for a `Product.unsigned`.

    The image's height and width decide which kernel oneDNN packs for (on 1 x 1 kernels that is a
    third of the time), not what the result may be used with; those of the first image count.
    """
    form, placing = placed(product, geometry)

    def build() -> Tensor:
        return prepack_convolution(form, placing, [1, *form.x.shape[1:]])

    return _lookup(product.weight, (form.x_zp, placing.key()), build)


def prepack_linear(weight: Tensor) -> Tensor:
    """Call oneDNN's packing, which takes any weight (out, in) for a contiguous one."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack.default(weight.contiguous(), None)
    return packed


def prepack_convolution(product: Product, geometry: Geometry, shape: list[int] | None) -> Tensor:
    """Call oneDNN's packing for images like ``shape`` (N, C, H, W), where known, as `placed`."""
    form, placing = placed(product, geometry)
    _, x_scale, x_zp, weight, w_scale, _ = form
    packed: Tensor = torch.ops.onednn.qconv_prepack.default(
        weight.contiguous(),
        w_scale,
        x_scale,
        x_zp,
        *placing,
        shape if form.x is product.x else None,
    )
    return packed


def _lookup(weight: Tensor, key: Hashable, build: Callable[[], Tensor]) -> Packed:
    return derived(weight, key, lambda: _packed(weight, build))


def _packed(weight: Tensor, build: Callable[[], Tensor]) -> Packed:
    zeros = torch.zeros(weight.shape[0], dtype=torch.int32, device="cpu")
    return Packed(build() if isa.admits(weight) else None, zeros)
