# SPDX-License-Identifier: Apache-2.0
"""The operators ``conv2d``, ``conv2d_add`` and ``conv2d_sum``: int8 convolutions by oneDNN.

oneDNN adds another tensor to a convolution by overwriting it ("sum"), which saves a tensor and a pass over
it. A functional graph cannot express that, so compiled graphs hold ``qompose_x86::conv2d_sum``, which is
functional too, until Inductor's own passes are through (`late_operators`).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qompose_x86_inductor.onednn import calls, packed_weights
from qompose_x86_inductor.onednn.arguments import (
    FLOAT32,
    NAMESPACE,
    Geometry,
    Output,
    Product,
    ProductCall,
    Summand,
    channels_last,
    image_shape,
)
from qompose_x86_inductor.onednn.calls import CONVOLUTION_SUM, ConvolutionSum, Packed
from qompose_x86_inductor.onednn.convolution_workarounds import safe_form
from qompose_x86_inductor.operators.linear import retyped, typed_like
from qompose_x86_inductor.operators.registration import register


def conv2d(*arguments: Any) -> Tensor:
    """Compute ``qompose_x86::conv2d``."""
    _, product, out, geometry, _ = ProductCall.read("conv2d", arguments).checked()
    unsigned = product.unsigned()
    packed = packed_weights.convolution(unsigned, geometry)
    if packed.weight is not None:
        return channels_last(calls.convolution(unsigned, geometry, packed, out))
    return channels_last(out.finish(_exact(product, geometry)))


def conv2d_fake(*arguments: Any) -> Tensor:
    """Return its result without values."""
    _, product, out, geometry, _ = ProductCall.read("conv2d", arguments).checked()
    return _empty(product, geometry, out.dtype)


def conv2d_in_graph(*arguments: Any, zero_points: Tensor, pack_shape: list[int] | None) -> Tensor:
    """Compute it in oneDNN's operators, packing included.

    Args:
        zero_points: int32 zeros (out,).
        pack_shape: the shape of the image, where it is known: a hint for packing.
    """
    _, product, out, geometry, _ = ProductCall.read("conv2d", arguments).checked()
    unsigned = product.unsigned()
    packed = Packed(calls.prepack_convolution(unsigned, geometry, pack_shape), zero_points)
    return retyped(calls.convolution(unsigned, geometry, packed, typed_like(unsigned.x, out)), out)


def conv2d_add(*arguments: Any) -> Tensor:
    """Compute ``qompose_x86::conv2d_add``."""
    _, product, out, geometry, summand = ProductCall.read("conv2d_add", arguments).checked()
    assert summand is not None
    unsigned, placement = safe_form(product.unsigned(), geometry)
    packed = packed_weights.convolution(unsigned, placement)
    if packed.weight is None:
        return channels_last(out.finish(_exact(product, geometry) + summand.real()))
    # oneDNN adds in place and in the dtype of its result: it gets a copy, float32 if they differ.
    if summand.tensor.dtype != out.dtype:
        summand = Summand(summand.real())
    dtype = summand.tensor.dtype
    into = summand._replace(tensor=_empty(product, geometry, dtype).copy_(summand.tensor))
    inner = out if dtype == out.dtype else Output(dtype=dtype, post_op=out.post_op)
    call = ConvolutionSum.of(unsigned, placement, packed, into, inner)
    sums: Tensor = CONVOLUTION_SUM(*call.for_onednn())
    return sums if inner is out else channels_last(out.quantize(sums))


def conv2d_add_fake(*arguments: Any) -> Tensor:
    """Return its result without values."""
    _, product, out, geometry, _ = ProductCall.read("conv2d_add", arguments).checked()
    return _empty(product, geometry, out.dtype)


def conv2d_add_in_graph(
    *arguments: Any, zero_points: Tensor, pack_shape: list[int] | None
) -> Tensor:
    """Compute it in oneDNN's operators, packing included; see `conv2d_in_graph`."""
    _, product, out, geometry, summand = ProductCall.read("conv2d_add", arguments).checked()
    assert summand is not None
    unsigned = product.unsigned()
    packed = Packed(calls.prepack_convolution(unsigned, geometry, pack_shape), zero_points)
    form, placement = safe_form(unsigned, geometry)
    if summand.tensor.dtype == out.dtype == torch.uint8 and form.x is unsigned.x:
        call = ConvolutionSum.of(form, placement, packed, summand, out)
        result: Tensor = torch.ops.qompose_x86.conv2d_sum.default(*call)
        return result
    return out.finish(calls.convolution(unsigned, geometry, packed, FLOAT32) + summand.real())


def _exact(product: Product, geometry: Geometry) -> Tensor:
    x, weight = product.centred()
    stride, padding, dilation, groups = geometry
    sums = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    return product.real(sums, 2)


def _empty(product: Product, geometry: Geometry, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(
        image_shape(product, geometry),
        dtype=dtype,
        device=product.x.device,
        memory_format=torch.channels_last,
    )


def _conv2d_sum(*arguments: Any) -> Tensor:
    """Compute a uint8 convolution plus a uint8 tensor of its shape, with a uint8 result."""
    call = ConvolutionSum(*arguments)
    into = call.other.clone(memory_format=torch.channels_last)
    result: Tensor = CONVOLUTION_SUM(*call._replace(other=into).for_onednn())
    return result


def _conv2d_sum_fake(*arguments: Any) -> Tensor:
    return torch.empty_like(ConvolutionSum(*arguments).other, memory_format=torch.channels_last)


_SCHEMAS: Final = {
    "conv2d_sum": (
        "(Tensor x, float x_scale, int x_zp, Tensor packed, Tensor w_scale, Tensor w_zp, Tensor other,"
        " Tensor? bias, int[2] stride, int[2] padding, int[2] dilation, int groups, float out_scale,"
        " int out_zp, ScalarType out_dtype, float other_scale, int other_zp, str post_op) -> Tensor"
    )
}
register(
    NAMESPACE,
    _SCHEMAS,
    {"conv2d_sum": (_conv2d_sum, _conv2d_sum_fake)},
    # With a packed weight, which is what freezing makes of it, torch looks for the second one.
    devices=("CPU", "MkldnnCPU"),
)
