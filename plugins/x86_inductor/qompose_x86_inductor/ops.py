# SPDX-License-Identifier: Apache-2.0
"""The operators ``qompose_x86::*``: int8 arithmetic on plain tensors, computed by oneDNN.

Weights stay as they are stored, so a graph that calls these operators can be deep-copied, saved,
exported and compiled; `packing` makes oneDNN's form of them on first use. In every operator

* ``x``, ``other`` and an integer result mean ``(value - zero_point) * scale``, per tensor;
* ``weight`` is int8 and means ``value * w_scale`` with ``w_scale`` float32 (out channels,);
* ``bias`` is float32 (out channels,) in real units; arithmetic is done on exact integer sums;
* ``out_dtype`` is uint8, int8 or float32 (the default). float32 results are real values and need
  ``out_scale == 1`` and ``out_zp == 0``. Integer results round half to even and saturate;
* images are (N, C, H, W), in any memory format; resulting images are channels_last;
* no argument is written to, and no result shares memory with an argument.

Where `isa` finds that oneDNN would not be exact for a weight, float64 carries the integer sums
instead (exact below 2 ** 53): slow, but right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qompose_x86_inductor import packing
from qompose_x86_inductor.packing import QUANTIZED as QUANTIZED
from qompose_x86_inductor.packing import (
    Geometry,
    Packed,
    Product,
    dequantize,
    flip_sign_bit,
    image_shape,
    summand,
)

NAMESPACE: Final = "qompose_x86"

_X: Final = "Tensor x, float x_scale, int x_zp"
_WEIGHT: Final = "Tensor weight, Tensor w_scale, Tensor? bias"
_GEOMETRY: Final = "int[2] stride, int[2] padding, int[2] dilation, int groups"
_OUT: Final = "float out_scale=1.0, int out_zp=0, ScalarType? out_dtype=None"
_POST: Final = 'str post_op="none", float[] post_op_args=[]'

SCHEMAS: Final[dict[str, str]] = {
    "linear": f'({_X}, {_WEIGHT}, {_OUT}, {_POST}, str algorithm="none") -> Tensor',
    "conv2d": f"({_X}, {_WEIGHT}, {_GEOMETRY}, {_OUT}, {_POST}) -> Tensor",
    "conv2d_add": (
        f"({_X}, {_WEIGHT}, {_GEOMETRY}, Tensor other, float other_scale, int other_zp, {_OUT},"
        ' str post_op="none") -> Tensor'
    ),
    "max_pool2d": (
        "(Tensor x, int[2] kernel_size, int[2] stride, int[2] padding=0, int[2] dilation=1,"
        " bool ceil_mode=False) -> Tensor"
    ),
}


class PostOp(NamedTuple):
    """A function fused behind a product, under oneDNN's name for it.

    ``arity``: the length of ``post_op_args``; ``compute``: its meaning in float, given the real
    values, ``post_op_args`` and ``algorithm``; ``operators``: which operators take it.
    """

    arity: int
    compute: Callable[[Tensor, Sequence[float], str], Tensor]
    operators: tuple[str, ...]


_EVERYWHERE: Final = ("linear", "conv2d", "conv2d_add")
_UNARY: Final = ("linear", "conv2d")

POST_OPS: Final[dict[str, PostOp]] = {
    "none": PostOp(0, lambda real, args, algorithm: real, _EVERYWHERE),
    "relu": PostOp(0, lambda real, args, algorithm: F.relu(real), _EVERYWHERE),
    "hardtanh": PostOp(2, lambda real, args, algorithm: real.clamp(args[0], args[1]), _UNARY),
    "hardswish": PostOp(0, lambda real, args, algorithm: F.hardswish(real), _UNARY),
    "swish": PostOp(0, lambda real, args, algorithm: F.silu(real), _UNARY),
    "gelu": PostOp(
        0, lambda real, args, algorithm: F.gelu(real, approximate=algorithm), ("linear",)
    ),
    "tanh": PostOp(0, lambda real, args, algorithm: real.tanh(), ("linear",)),
    "leaky_relu": PostOp(1, lambda real, args, algorithm: F.leaky_relu(real, args[0]), ("linear",)),
}


class Output(NamedTuple):
    """The arguments that every product ends with, in the order of the schemas."""

    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype | None = None
    post_op: str = "none"
    args: Sequence[float] = ()
    algorithm: str = "none"

    def checked(self, operator: str) -> Output:
        """The same with a dtype. Raises ValueError on what the operator does not take."""
        dtype = self.dtype or torch.float32
        row = POST_OPS.get(self.post_op)
        if row is None or operator not in row.operators or len(self.args) != row.arity:
            known = [f"{k}/{v.arity}" for k, v in POST_OPS.items() if operator in v.operators]
            given = f"{self.post_op!r} with {len(self.args)} argument(s)"
            raise ValueError(f"{NAMESPACE}::{operator}: post_op {given} is not one of {known}")
        if dtype == torch.float32 and (self.scale, self.zero_point) != (1.0, 0):
            raise ValueError(f"{NAMESPACE}::{operator}: float32 results need out_scale=1, out_zp=0")
        if dtype != torch.float32 and dtype not in QUANTIZED:
            raise ValueError(
                f"{NAMESPACE}::{operator}: out_dtype {dtype} is not uint8/int8/float32"
            )
        return self._replace(dtype=dtype)

    def fused(self) -> tuple[Any, ...]:
        """The same for oneDNN, whose list of post-op arguments cannot be exported when empty."""
        args: list[float | None] = [*self.args]
        return (*self[:4], args or [None], self.algorithm)

    def finish(self, real: Tensor) -> Tensor:
        """What oneDNN does behind the sums: the post-op, then `quantize`."""
        return self.quantize(POST_OPS[self.post_op].compute(real, self.args, self.algorithm))

    def quantize(self, real: Tensor) -> Tensor:
        """Real values to this scale and dtype, rounding half to even and saturating."""
        if self.dtype not in QUANTIZED:
            return real.to(torch.float32)
        bounds = torch.iinfo(self.dtype)
        steps = torch.round(real / self.scale) + self.zero_point
        return steps.clamp(bounds.min, bounds.max).to(self.dtype)


def linear_kernel(product: Product, packed: Packed, out: Output) -> Tensor:
    """Call oneDNN's linear."""
    result: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        *product[:3], packed.weight, product.w_scale, packed.zero_points, product.bias, *out.fused()
    )
    return result


def conv2d_kernel(product: Product, geometry: Geometry, packed: Packed, out: Output) -> Tensor:
    """Call oneDNN's convolution; ``product`` must be `Product.unsigned`."""
    result: Tensor = torch.ops.onednn.qconv_pointwise.default(
        *product[:3], packed.weight, product.w_scale, packed.zero_points, product.bias,
        *geometry, *out.fused(),
    )  # fmt: skip
    return result


def _linear(*arguments: Any) -> Tensor:
    product = Product(*arguments[:6]).checked("linear")
    out = Output(*arguments[6:]).checked("linear")
    packed = packing.linear(product.weight)
    # oneDNN gives an empty x of rank 3 or more a result of rank 2.
    if packed.weight is not None and product.x.numel() > 0:
        return linear_kernel(product, packed, out)
    return out.finish(product.real(F.linear(*product.centred()), 0))


def _linear_fake(*arguments: Any) -> Tensor:
    product = Product(*arguments[:6]).checked("linear")
    out = Output(*arguments[6:]).checked("linear")
    shape = (*product.x.shape[:-1], product.weight.shape[0])
    return product.x.new_empty(shape, dtype=out.dtype)


def _conv2d(*arguments: Any) -> Tensor:
    product, geometry = convolution(arguments, "conv2d")
    out = Output(*arguments[10:]).checked("conv2d")
    unsigned = product.unsigned()
    packed = packing.convolution(unsigned, geometry)
    if packed.weight is not None:
        return conv2d_kernel(unsigned, geometry, packed, out)
    return _laid_out(out.finish(_exact_image(product, geometry)))


def _conv2d_fake(*arguments: Any) -> Tensor:
    product, geometry = convolution(arguments, "conv2d")
    out = Output(*arguments[10:]).checked("conv2d")
    return _new_image(product, geometry, out.dtype)


def _conv2d_add(*arguments: Any) -> Tensor:
    product, geometry = convolution(arguments, "conv2d_add")
    other, other_scale, other_zp = summand(*arguments[10:13])
    out = Output(*arguments[13:]).checked("conv2d_add")
    unsigned = product.unsigned()
    packed = packing.convolution(unsigned, geometry)
    if packed.weight is None:
        real = _exact_image(product, geometry) + dequantize(other, other_scale, other_zp)
        return _laid_out(out.finish(real))
    # oneDNN adds in place and in the dtype of its result: it gets a copy, float32 if they differ.
    if other.dtype != out.dtype:
        other, other_scale, other_zp = dequantize(other, other_scale, other_zp), 1.0, 0
    into = _new_image(product, geometry, other.dtype).copy_(other)
    inner = out if other.dtype == out.dtype else Output(dtype=other.dtype, post_op=out.post_op)
    sums: Tensor = torch.ops.onednn.qconv2d_pointwise.binary(
        *unsigned[:3], packed.weight, product.w_scale, packed.zero_points, into, product.bias,
        *geometry, *inner[:3], other_scale, other_zp, "sum", 1.0, *inner.fused()[3:],
    )  # fmt: skip
    return sums if inner is out else _laid_out(out.quantize(sums))


def _conv2d_add_fake(*arguments: Any) -> Tensor:
    product, geometry = convolution(arguments, "conv2d_add")
    summand(*arguments[10:13])
    out = Output(*arguments[13:]).checked("conv2d_add")
    return _new_image(product, geometry, out.dtype)


def convolution(arguments: Sequence[Any], operator: str) -> tuple[Product, Geometry]:
    """The first ten arguments. Raises ValueError on ranks that oneDNN would misread."""
    product = Product(*arguments[:6]).checked(operator)
    if product.x.dim() != 4 or product.weight.dim() != 4:
        raise ValueError(f"{NAMESPACE}::{operator}: images and weights must be of rank 4")
    return product, Geometry(*arguments[6:10])


def _new_image(product: Product, geometry: Geometry, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(
        image_shape(product, geometry),
        dtype=dtype,
        device=product.x.device,
        memory_format=torch.channels_last,
    )


def _exact_image(product: Product, geometry: Geometry) -> Tensor:
    x, weight = product.centred()
    stride, padding, dilation, groups = geometry
    sums = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    return product.real(sums, 2)


def _laid_out(image: Tensor) -> Tensor:
    # Pointwise code forgets the layout of empty images.
    return image.contiguous(memory_format=torch.channels_last)


def _max_pool2d(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Tensor:
    _check_pooled(x)
    # aten's max_pool2d refuses 8-bit images beyond 127 or 255 pixels; this one takes uint8 alone.
    pixels = x if x.dtype == torch.uint8 else flip_sign_bit(x)
    pooled = torch.ops.quantized.max_pool2d.default(
        pixels, kernel_size, stride, padding, dilation, ceil_mode
    )
    return _laid_out(pooled if x.dtype == torch.uint8 else flip_sign_bit(pooled).view(torch.int8))


def max_pool2d_in_float(x: Tensor, *window: Any) -> Tensor:
    """The same through float32, which holds every 8-bit integer: for tracing.

    The metadata that quantized::max_pool2d gives of its result is laid out otherwise than the
    result (torch 2.13).
    """
    _check_pooled(x)
    # A dilated window may lie in the padding altogether, which float calls -inf.
    pooled = F.max_pool2d(x.to(torch.float32), *window).clamp(min=torch.iinfo(x.dtype).min)
    return _laid_out(pooled.to(x.dtype))


def _check_pooled(x: Tensor) -> None:
    if x.dim() != 4 or x.dtype not in QUANTIZED:
        given = f"{x.dtype} of rank {x.dim()}"
        raise ValueError(f"{NAMESPACE}::max_pool2d: x must be uint8 or int8 of rank 4, not {given}")


def _register() -> torch.library.Library:
    implementations = {
        "linear": (_linear, _linear_fake),
        "conv2d": (_conv2d, _conv2d_fake),
        "conv2d_add": (_conv2d_add, _conv2d_add_fake),
        "max_pool2d": (_max_pool2d, max_pool2d_in_float),
    }
    library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
    for name, (real, fake) in implementations.items():
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
        library.define(name + SCHEMAS[name], tags=tags)  # type: ignore[no-untyped-call]
        library.impl(name, real, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library


_LIBRARY: Final = _register()
