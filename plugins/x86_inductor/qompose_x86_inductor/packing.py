# SPDX-License-Identifier: Apache-2.0
"""Weights in oneDNN's own layout, kept beside the plain weights and never inside a module.

A module that holds a packed tensor cannot be deep-copied, saved or exported, so the packed form
lives in a table keyed weakly on the plain weight: it is made on first use, made again when the
weight was written to, and goes when the weight goes. Writes through the weight or its views are
seen; one through ``weight.data`` leaves no trace in torch's version counter and is not.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qompose_x86_inductor import isa

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


def summand(other: Tensor, scale: float, zero_point: int) -> tuple[Tensor, float, int]:
    """Itself. Raises ValueError on a dtype or qparams that conv2d_add does not take."""
    if other.dtype == torch.float32 and (scale, zero_point) == (1.0, 0):
        return other, scale, zero_point
    if other.dtype not in QUANTIZED:
        given = f"{other.dtype} with scale {scale} and zero point {zero_point}"
        raise ValueError(f"conv2d_add: other is {given}; uint8, int8, or float32 with 1, 0")
    return other, scale, zero_point


def dequantize(value: Tensor, scale: float, zero_point: int) -> Tensor:
    """Integers to float32 real values."""
    return (value.to(torch.float32) - zero_point) * scale


def image_shape(product: Product, geometry: Geometry) -> list[int]:
    """(N, out, H', W'), symbolic where the image is."""
    x, weight = product.x, product.weight
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry[:3], strict=True)
    spatial = [(i + 2 * p - d * (k - 1) - 1) // s + 1 for i, k, s, p, d in sizes]
    return [x.shape[0], weight.shape[0], *spatial]


class Packed(NamedTuple):
    """A weight for oneDNN, or None where it would not be exact, and int32 zeros (channels,)."""

    weight: Tensor | None
    zero_points: Tensor


@dataclass(slots=True)
class _Entry:
    owner: weakref.ref[Tensor]
    state: int | Tensor
    address: int
    packed: dict[Hashable, Packed] = field(default_factory=dict)

    def holds_for(self, weight: Tensor) -> bool:
        """Whether the entry belongs to this very tensor and nobody wrote to it since."""
        if self.owner() is not weight or self.address != weight.data_ptr():
            return False
        if isinstance(self.state, int):
            return self.state == weight._version
        return torch.equal(self.state, weight)


_table: dict[int, _Entry] = {}
_lock = threading.Lock()


def linear(weight: Tensor) -> Packed:
    """The packed form of an int8 linear weight (out, in), from the table or made now."""
    return _lookup(weight, "linear", lambda: prepack_linear(weight))


def convolution(product: Product, geometry: Geometry) -> Packed:
    """The packed form of an int8 weight (out, in / groups, kh, kw) for a `Product.unsigned`.

    The image's height and width decide which kernel oneDNN packs for (on 1 x 1 kernels that is a
    third of the time), not what the result may be used with; those of the first image count.
    """

    def build() -> Tensor:
        return prepack_convolution(product, geometry, [1, *product.x.shape[1:]])

    return _lookup(product.weight, (product.x_zp, geometry.key()), build)


def prepack_linear(weight: Tensor) -> Tensor:
    """Call oneDNN's packing, which takes any weight (out, in) for a contiguous one."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack.default(weight.contiguous(), None)
    return packed


def prepack_convolution(product: Product, geometry: Geometry, shape: list[int] | None) -> Tensor:
    """Call oneDNN's packing for images like ``shape`` (N, C, H, W), where known."""
    _, x_scale, x_zp, weight, w_scale, _ = product
    packed: Tensor = torch.ops.onednn.qconv_prepack.default(
        weight.contiguous(), w_scale, x_scale, x_zp, *geometry, shape
    )
    return packed


def table_size() -> int:
    """The number of weights that have a packed form now."""
    return len(_table)


def _lookup(weight: Tensor, key: Hashable, build: Callable[[], Tensor]) -> Packed:
    entry = _table.get(id(weight))
    if entry is not None and entry.holds_for(weight):
        found = entry.packed.get(key)
        if found is not None:
            return found
    with _lock:
        return _build(weight, key, build)


def _build(weight: Tensor, key: Hashable, build: Callable[[], Tensor]) -> Packed:
    entry = _table.get(id(weight))
    if entry is None or not entry.holds_for(weight):
        entry = _new_entry(weight)
        _table[id(weight)] = entry
    if key not in entry.packed:
        zeros = torch.zeros(weight.shape[0], dtype=torch.int32, device="cpu")
        entry.packed[key] = Packed(build() if isa.admits(weight) else None, zeros)
    return entry.packed[key]


def _new_entry(weight: Tensor) -> _Entry:
    number = id(weight)

    def forget(reference: weakref.ref[Tensor]) -> None:
        # The number may already belong to a younger tensor with an entry of its own.
        entry = _table.get(number)
        if entry is not None and entry.owner is reference:
            del _table[number]

    # Inference tensors have no version counter: only comparing the values shows a write.
    state = weight.clone() if weight.is_inference() else weight._version
    return _Entry(weakref.ref(weight, forget), state, weight.data_ptr())
