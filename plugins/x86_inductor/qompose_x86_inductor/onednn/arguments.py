# SPDX-License-Identifier: Apache-2.0
"""The arguments of the operators ``qompose_x86::*`` as records, in the order of the schemas.

Most fields hold tensors while an operator runs, nodes while a graph is built or rewritten.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qompose_x86_inductor.onednn.post_ops import POST_OPS

NAMESPACE: Final = "qompose_x86"
QUANTIZED: Final = (torch.uint8, torch.int8)
CONVOLUTIONS: Final = ("conv2d", "conv2d_add")
SUMS: Final = ("linear_add", "conv2d_add")


class Geometry(NamedTuple):
    """Of a 2-D convolution: (height, width) each, in pixels, and the number of groups."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def key(self) -> Hashable:
        """Return the same as a hashable value."""
        return (*self.stride, *self.padding, *self.dilation, self.groups)


ONE_PIXEL: Final = Geometry([1, 1], [0, 0], [1, 1], 1)
"""The geometry of a matrix product, seen as a convolution."""


class Product(NamedTuple):
    """The arguments that every product begins with."""

    x: Tensor
    x_scale: float
    x_zp: int
    weight: Tensor
    w_scale: Tensor
    bias: Tensor | None

    def checked(self, operator: str, geometry: Geometry | None = None) -> Product:
        """Return itself, a product of matrices or, with a geometry, of images.

        Raises ValueError on what oneDNN would misread, or refuse without saying why.
        """
        if self.x.dtype not in QUANTIZED or self.weight.dtype != torch.int8:
            dtypes = f"{self.x.dtype} and {self.weight.dtype}"
            raise ValueError(
                f"{NAMESPACE}::{operator}: expected x uint8/int8 and weight int8, got {dtypes}"
            )
        if self.w_scale.dtype != torch.float32 or self.w_scale.shape != self.weight.shape[:1]:
            expected = f"float32 {tuple(self.weight.shape[:1])}"
            given = f"{self.w_scale.dtype} {tuple(self.w_scale.shape)}"
            raise ValueError(
                f"{NAMESPACE}::{operator}: w_scale must be {expected}, got {given}. Quantized models "
                "keep their types: do not call half() or to(dtype) on them"
            )
        if geometry is None:
            check_matrices(operator, self.x, self.weight)
        else:
            _check_images(operator, self.x, self.weight, geometry)
        return self

    def unsigned(self) -> Product:
        """Return the same product with a uint8 ``x``, the only kind oneDNN convolves."""
        if self.x.dtype == torch.uint8:
            return self
        return self._replace(x=flip_sign_bit(self.x), x_zp=self.x_zp + 128)

    def centred(self) -> tuple[Tensor, Tensor]:
        """Return ``x - x_zp`` and the weight, as float64."""
        return self.x.double() - self.x_zp, self.weight.double()

    def real(self, sums: Tensor, trailing: int) -> Tensor:
        """Return integer sums with ``trailing`` axes after the channels in real units: float64."""
        over_channels = (-1, *[1] * trailing)
        scaled = sums * (self.w_scale.double() * self.x_scale).reshape(over_channels)
        return scaled if self.bias is None else scaled + self.bias.double().reshape(over_channels)


class Summand(NamedTuple):
    """What is added to a product: float32, or integers with their scale and zero point."""

    tensor: Tensor
    scale: float = 1.0
    zero_point: int = 0

    def checked(self) -> Summand:
        """Return itself. Raises ValueError on a dtype or qparams that conv2d_add does not accept."""
        is_float = self.tensor.dtype == torch.float32 and self[1:] == (1.0, 0)
        if not is_float and self.tensor.dtype not in QUANTIZED:
            given = f"{self.tensor.dtype} with scale {self.scale} and zero point {self.zero_point}"
            raise ValueError(
                f"{NAMESPACE}::conv2d_add: other must be uint8, int8, or float32 with scale 1 and "
                f"zero point 0, got {given}"
            )
        return self

    def real(self) -> Tensor:
        """Return its float32 values."""
        return (self.tensor.to(torch.float32) - self.zero_point) * self.scale


class Output(NamedTuple):
    """The arguments that every operator ends with."""

    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype | None = None
    post_op: str = "none"
    args: Sequence[float] = ()
    algorithm: str = "none"

    def checked(self, operator: str) -> Output:
        """Return the same with a dtype. Raises ValueError on what the operator does not accept."""
        dtype = self.dtype or torch.float32
        row = POST_OPS.get(self.post_op)
        accepted = self.post_op == "none" or (row is not None and operator in row.operators)
        if row is None or not accepted or len(self.args) != row.arity:
            known = [f"{k}/{v.arity}" for k, v in POST_OPS.items() if operator in v.operators]
            given = f"{self.post_op!r} with {len(self.args)} argument(s)"
            raise ValueError(
                f"{NAMESPACE}::{operator}: post_op/arity must be one of {known}, got {given}"
            )
        if dtype == torch.float32 and (self.scale, self.zero_point) != (1.0, 0):
            raise ValueError(
                f"{NAMESPACE}::{operator}: float32 results require out_scale=1 and out_zp=0"
            )
        if dtype != torch.float32 and dtype not in QUANTIZED:
            raise ValueError(
                f"{NAMESPACE}::{operator}: expected out_dtype uint8, int8 or float32, got {dtype}"
            )
        return self._replace(dtype=dtype)

    def is_fused(self, operator: str) -> bool:
        """Return whether oneDNN computes the post-op of this operator."""
        return operator in POST_OPS[self.post_op].fused

    def fused(self) -> tuple[Any, ...]:
        """Return the same for oneDNN, whose list of post-op arguments cannot be exported when empty."""
        args: list[float | None] = [*self.args]
        return (*self[:4], args or [None], self.algorithm)

    def finish(self, real: Tensor) -> Tensor:
        """Compute what oneDNN does with the sums: the post-op, then `quantize`."""
        return self.quantize(POST_OPS[self.post_op].compute(real, self.args, self.algorithm))

    def quantize(self, real: Tensor) -> Tensor:
        """Convert real values to this scale and dtype, rounding half to even and saturating."""
        if self.dtype not in QUANTIZED:
            return real.to(torch.float32)
        bounds = torch.iinfo(self.dtype)
        steps = torch.round(real / self.scale) + self.zero_point
        return steps.clamp(bounds.min, bounds.max).to(self.dtype)


FLOAT32: Final = Output(dtype=torch.float32)
"""Real values, without a post-op."""


class ProductCall(NamedTuple):
    """All arguments of ``linear``, ``linear_add``, ``conv2d`` or ``conv2d_add``.

    The ``other`` of linear_add is float32, so it has no scale or zero point among the arguments.
    """

    operator: str
    product: Product
    out: Output
    geometry: Geometry = ONE_PIXEL
    summand: Summand | None = None

    @classmethod
    def read(cls, operator: str, arguments: Sequence[Any]) -> ProductCall:
        """Return the record of an operator's arguments, in the order of its schema."""
        product, rest = Product(*arguments[:6]), arguments[6:]
        geometry, summand = ONE_PIXEL, None
        if operator in CONVOLUTIONS:
            geometry, rest = Geometry(*rest[:4]), rest[4:]
        if operator in SUMS:
            count = 3 if operator in CONVOLUTIONS else 1
            summand, rest = Summand(*rest[:count]), rest[count:]
        return cls(operator, product, Output(*rest), geometry, summand)

    def write(self) -> list[Any]:
        """Return the arguments that `read` reads, without a post-op where there is none."""
        convolves = self.operator in CONVOLUTIONS
        geometry = self.geometry if convolves else ()
        summand = () if self.summand is None else self.summand[: 3 if convolves else 1]
        end = list(self.out[: 6 if self.summand is None else 4])
        while end[-1] in ("none", (), []):  # the dtype is none of them
            end.pop()
        return [*self.product, *geometry, *summand, *end]

    def checked(self) -> ProductCall:
        """Return the same with a dtype. Raises ValueError on what the operator does not accept."""
        if self.operator in CONVOLUTIONS:
            self.product.checked(self.operator, self.geometry)
            if self.summand is not None:
                self.summand.checked()
        else:
            self.product.checked(self.operator)
            if self.summand is not None:
                _check_summand(self.operator, self.summand.tensor, matrix_shape(self.product))
        out = self.out.checked(self.operator)
        return ProductCall(self.operator, self.product, out, self.geometry, self.summand)


def flip_sign_bit(x: Tensor) -> Tensor:
    """Return 8-bit integers as uint8, with the top bit inverted: adds 128 to int8, keeps its order."""
    return torch.bitwise_xor(x.view(torch.uint8), 128)


def channels_last(image: Tensor) -> Tensor:
    """Return the image as channels_last; pointwise code forgets the layout of empty ones."""
    return image.contiguous(memory_format=torch.channels_last)


def matrix_shape(product: Product) -> list[int]:
    """Return the shape of a matrix product: (..., out)."""
    return [*product.x.shape[:-1], product.weight.shape[0]]


def image_shape(product: Product, geometry: Geometry) -> list[int]:
    """Return the shape of a convolution's result: (N, out, H', W'), symbolic where the image is."""
    x, weight = product.x, product.weight
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry[:3], strict=True)
    spatial = [(i + 2 * p - d * (k - 1) - 1) // s + 1 for i, k, s, p, d in sizes]
    return [x.shape[0], weight.shape[0], *spatial]


def check_matrices(operator: str, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless ``x`` (..., in) can be multiplied by ``weight`` (out, in)."""
    fits = x.dim() > 0 and weight.dim() == 2
    if not fits or statically_known_true(x.shape[-1] != weight.shape[1]):
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ValueError(
            f"{NAMESPACE}::{operator}: expected x (..., in) and weight (out, in), got {shapes}"
        )


def check_quantized(operator: str, x: Tensor, rank: int | None) -> None:
    """Raise ValueError unless ``x`` is of 8-bit integers and, where that matters, of a rank."""
    if x.dtype not in QUANTIZED or rank not in (None, x.dim()):
        expected = "uint8 or int8" if rank is None else f"uint8 or int8 of rank {rank}"
        raise ValueError(
            f"{NAMESPACE}::{operator}: expected {expected}, got {x.dtype} of rank {x.dim()}"
        )


def _check_summand(operator: str, other: Tensor, shape: list[int]) -> None:
    if other.dtype != torch.float32 or list(other.shape) != shape:
        given = f"{other.dtype} {list(other.shape)}"
        raise ValueError(f"{NAMESPACE}::{operator}: other must be float32 {shape}, got {given}")


def _check_images(operator: str, x: Tensor, weight: Tensor, geometry: Geometry) -> None:
    """Refuse other channels, and an image smaller than the window: its result would be zeros.

    A size that is a symbol is not checked: asking would make the answer a condition of the graph.
    """
    given = f"{NAMESPACE}::{operator}: image {tuple(x.shape)} and weight {tuple(weight.shape)}"
    if x.dim() != 4 or weight.dim() != 4:
        raise ValueError(f"{given}: images and weights must have rank 4")
    groups, channels = geometry.groups, weight.shape[1] * geometry.groups
    if groups < 1 or weight.shape[0] % groups or statically_known_true(x.shape[1] != channels):
        expected = "(N, in, H, W) and (out, in / groups, h, w), where groups divides out"
        raise ValueError(f"{given} in {groups} group(s): expected {expected}")
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry[1:3], strict=True)
    if any(statically_known_true(size + 2 * p < d * (k - 1) + 1) for size, k, p, d in sizes):
        window = f"padding {geometry.padding}, dilation {geometry.dilation}"
        raise ValueError(f"{given} ({window}): the padded image is smaller than the dilated kernel")
