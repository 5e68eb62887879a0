# SPDX-License-Identifier: Apache-2.0
"""The int8 kernels of the ``torch`` target, as custom operators ``qompose_xnnpack::*``.

Every operator takes and returns plain int8 tensors, so a lowered graph copies, saves, exports and
compiles like any other. They compute what XNNPACK's signed 8-bit kernels compute: int32
accumulation, a float32 rescale rounded half to even (``add`` alone rescales in fixed point), then
``clamp(q, out_min, out_max)``. A fused relu is ``out_min = out_zp``.

Names: ``x = x_scale * (q - x_zp)``. ``w_scale``: float32 ``(O,)`` or ``(1,)``, zero point 0.
Importing this module registers the operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import integer

NAMESPACE = "qompose_xnnpack"

_Kernel = Callable[..., Tensor]
_Shape = Callable[..., Sequence[int]]

_OUT = "float out_scale, int out_zp, int out_min, int out_max"
_WEIGHTED = "Tensor x, float x_scale, int x_zp, Tensor weight, Tensor w_scale, Tensor? bias"
_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups"
_PAIR = "Tensor a, float a_scale, int a_zp, Tensor b, float b_scale, int b_zp"
_UNARY = "Tensor x, float x_scale, int x_zp"

SCHEMAS: dict[str, str] = {
    "linear": f"({_WEIGHTED}, {_OUT}) -> Tensor",
    "conv1d": f"({_WEIGHTED}, {_GEOMETRY}, {_OUT}) -> Tensor",
    "conv2d": f"({_WEIGHTED}, {_GEOMETRY}, {_OUT}) -> Tensor",
    "add": f"({_PAIR}, {_OUT}) -> Tensor",
    "mul": f"({_PAIR}, {_OUT}) -> Tensor",
    "avg_pool2d": (
        f"({_UNARY}, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, "
        f"bool count_include_pad, int? divisor_override, {_OUT}) -> Tensor"
    ),
    "adaptive_avg_pool2d": f"({_UNARY}, int[] output_size, {_OUT}) -> Tensor",
    "mean": f"({_UNARY}, int[]? dim, bool keepdim, {_OUT}) -> Tensor",
    "max_pool2d": (
        "(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
        "bool ceil_mode, int out_min, int out_max) -> Tensor"
    ),
}


def _requantize(
    total: Tensor, scale: float | Tensor, out_zp: int, out_min: int, out_max: int
) -> Tensor:
    """``clamp(round(total * scale) + out_zp, out_min, out_max)``, contiguous int8.

    ``scale`` is steps of the output per unit of ``total``; a tensor must broadcast against it.
    """
    steps = total.to(torch.float32).mul(scale).round_().add_(out_zp)
    return steps.clamp_(out_min, out_max).to(torch.int8).contiguous()


def _int_bias(bias: Tensor, unit: Tensor, depth: int) -> Tensor:
    """Float32 ``bias: (O,)`` as int32 counts of ``unit = x_scale * w_scale``, like ExecuTorch's.

    Saturates early enough that adding ``depth`` products cannot wrap around int32.
    """
    limit = 2**31 - 1 - depth * 255 * 128
    steps = (bias.to(torch.float32) * (1.0 / unit)).round_().to(torch.float64)
    return steps.clamp_(-limit, limit).to(torch.int32)


def _finish_weighted(
    total: Tensor,
    x_scale: float,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out: tuple[float, int, int, int],
) -> Tensor:
    """Bias and rescale ``total: int32 (N, O, ...)``, whose channels are on axis 1."""
    along_channels = (-1,) + (1,) * (total.dim() - 2)
    unit = w_scale.to(torch.float32) * x_scale
    if bias is not None:
        steps = _int_bias(bias, unit, weight[0].numel())
        total = total.add_(steps.view(along_channels))
    out_scale, *limits = out
    return _requantize(total, (unit / out_scale).view(along_channels), *limits)


def _linear(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *out: Any,
) -> Tensor:
    """``x: (..., K)``, ``weight: (O, K)``, ``bias: (O,)`` -> ``(..., O)``."""
    shape = _linear_shape(x, x_scale, x_zp, weight)
    rows = x.reshape(-1, weight.shape[1])
    total = integer.shifted_matmul(rows, x_zp, weight)
    return _finish_weighted(total, x_scale, weight, w_scale, bias, out).view(shape)


def _linear_shape(x: Tensor, x_scale: float, x_zp: int, weight: Tensor, *_: Any) -> list[int]:
    if x.shape[-1] != weight.shape[1]:
        raise _mismatch("linear", x, weight)
    return [*x.shape[:-1], weight.shape[0]]


def _mismatch(name: str, x: Tensor, weight: Tensor) -> ValueError:
    shapes = f"input {tuple(x.shape)} and weight {tuple(weight.shape)}"
    return ValueError(f"{NAMESPACE}::{name}: {shapes} do not fit")


def _conv2d(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *out: Any,
) -> Tensor:
    """``x: (N, C, H, W)``, ``weight: (O, C / groups, kh, kw)`` -> ``(N, O, H', W')``."""
    if x.dim() != 4 or x.shape[1] != weight.shape[1] * groups:
        raise _mismatch("conv2d", x, weight)
    stride, padding, dilation = _lengthen(2, stride, padding, dilation)
    total = integer.conv2d(x, x_zp, weight, stride, padding, dilation, groups)
    return _finish_weighted(total, x_scale, weight, w_scale, bias, out)


def _conv1d(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> Tensor:
    """``x: (N, C, L)``, ``weight: (O, C / groups, k)`` -> ``(N, O, L')``, as one-row images."""
    stride, padding, dilation, *out = rest
    flat = ((1, *stride), (0, *padding), (1, *dilation))
    # What is cached per weight is keyed by tensor object, for which a fresh view would not do.
    kernel = _as_image(weight)
    image = _conv2d(x.unsqueeze(2), x_scale, x_zp, kernel, w_scale, bias, *flat, *out)
    return image.squeeze(2)


_as_image = integer.WeightTable(lambda weight: weight.unsqueeze(2).clone())


def _conv_shape(
    x: Tensor, x_scale: float, x_zp: int, weight: Tensor, w_scale: Tensor, bias: Any, *rest: Any
) -> Sequence[int]:
    stride, padding, dilation, groups, *_ = rest
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * groups:
        raise _mismatch("conv", x, weight)
    stride, padding, dilation = _lengthen(x.dim() - 2, stride, padding, dilation)
    lengths = [
        integer.out_length(size + 2 * pad, kernel, step, gap)
        for size, kernel, step, pad, gap in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return (x.shape[0], weight.shape[0], *lengths)


def _lengthen(rank: int, *values: Sequence[int]) -> list[list[int]]:
    """Each of ``values`` with ``rank`` entries, a single one standing for all axes."""
    return [list(value) * rank if len(value) == 1 else list(value) for value in values]


# Bits kept of the larger of the two multipliers, and the largest shift that int32 has room for.
_ADD_BITS = 20
_MAX_SHIFT = 30


def _add(
    a: Tensor, a_scale: float, a_zp: int, b: Tensor, b_scale: float, b_zp: int, *out: Any
) -> Tensor:
    """Broadcasting sum in XNNPACK's fixed point: multipliers below 2**21, one rounding shift.

    Formula: ``(a - a_zp) * round(a_scale / out_scale * 2**s) + (same for b) + 2**(s - 1) >> s``.
    """
    out_scale, out_zp, out_min, out_max = out
    ratios = [min(scale / out_scale, 2.0**_ADD_BITS) for scale in (a_scale, b_scale)]
    exponent = math.frexp(max(ratios))[1] - 1
    shift = max(1, min(_MAX_SHIFT, _ADD_BITS - exponent))
    factors = [round(ratio * 2.0**shift) for ratio in ratios]
    offset = (1 << (shift - 1)) - factors[0] * a_zp - factors[1] * b_zp
    total = a.to(torch.int32) * factors[0] + (b.to(torch.int32) * factors[1] + offset)
    steps: Tensor = total.bitwise_right_shift_(shift).add_(out_zp)
    return steps.clamp_(out_min, out_max).to(torch.int8).contiguous()


def _mul(
    a: Tensor, a_scale: float, a_zp: int, b: Tensor, b_scale: float, b_zp: int, *out: Any
) -> Tensor:
    """Broadcasting product."""
    out_scale, *limits = out
    total = (a.to(torch.int32) - a_zp) * (b.to(torch.int32) - b_zp)
    return _requantize(total, a_scale * b_scale / out_scale, *limits)


def _pair_shape(a: Tensor, a_scale: float, a_zp: int, b: Tensor, *_: Any) -> Sequence[int]:
    return (a + b).shape


def _shifted_float(x: Tensor, x_zp: int, area: int) -> Tensor:
    """``x - x_zp`` in a float type that sums ``area`` of its values exactly."""
    return x.to(torch.float32 if area * 255 < 2**24 else torch.float64) - x_zp


def _avg_pool2d(
    x: Tensor, x_scale: float, x_zp: int, kernel_size: Sequence[int], *rest: Any
) -> Tensor:
    """``x: (..., C, H, W)``, averaged as ``aten.avg_pool2d`` does; padding counts as real zero."""
    *geometry, out_scale, out_zp, out_min, out_max = rest
    (kernel,) = _lengthen(2, kernel_size)
    shifted = _shifted_float(x, x_zp, math.prod(kernel))
    total: Tensor = functional.avg_pool2d(shifted, kernel, *geometry)
    return _requantize(total, x_scale / out_scale, out_zp, out_min, out_max)


def _adaptive_avg_pool2d(
    x: Tensor, x_scale: float, x_zp: int, output_size: Sequence[int], *out: Any
) -> Tensor:
    """``x: (..., C, H, W)`` -> ``(..., C, *output_size)``."""
    out_scale, *limits = out
    shifted = _shifted_float(x, x_zp, x.shape[-1] * x.shape[-2])
    height, width = output_size
    total = functional.adaptive_avg_pool2d(shifted, (height, width))
    return _requantize(total, x_scale / out_scale, *limits)


def _adaptive_shape(
    x: Tensor, x_scale: float, x_zp: int, output_size: Sequence[int], *_: Any
) -> Sequence[int]:
    return (*x.shape[:-2], *output_size)


def _mean(
    x: Tensor, x_scale: float, x_zp: int, dim: Sequence[int] | None, keepdim: bool, *out: Any
) -> Tensor:
    """Mean over ``dim``, or over every axis where it is None or empty."""
    out_scale, *limits = out
    total = x.sum(dim=list(dim) if dim else None, keepdim=keepdim)
    count = x.numel() // max(1, total.numel())
    return _requantize(total - count * x_zp, x_scale / (out_scale * count), *limits)


def _max_pool2d(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    out_min: int,
    out_max: int,
) -> Tensor:
    """``x: (..., C, H, W)``; the output shares the input's scale and zero point."""
    pooled = functional.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    return pooled.clamp_(out_min, out_max).contiguous()


def _shape_by(kernel: _Kernel) -> _Shape:
    """Output shape of ``kernel``, found by running it on the fake tensors themselves."""
    return lambda *args: kernel(*args).shape


def _check_int8(name: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.int8:
            raise TypeError(f"{NAMESPACE}::{name} takes int8 tensors, not {tensor.dtype}")


# name: kernel, shape of its output, positions of the int8 arguments
_OPERATORS: dict[str, tuple[_Kernel, _Shape, tuple[int, ...]]] = {
    "linear": (_linear, _linear_shape, (0, 3)),
    "conv1d": (_conv1d, _conv_shape, (0, 3)),
    "conv2d": (_conv2d, _conv_shape, (0, 3)),
    "add": (_add, _pair_shape, (0, 3)),
    "mul": (_mul, _pair_shape, (0, 3)),
    "avg_pool2d": (_avg_pool2d, _shape_by(_avg_pool2d), (0,)),
    "adaptive_avg_pool2d": (_adaptive_avg_pool2d, _adaptive_shape, (0,)),
    "mean": (_mean, _shape_by(_mean), (0,)),
    "max_pool2d": (_max_pool2d, _shape_by(_max_pool2d), (0,)),
}


def _register(name: str) -> None:
    kernel, shape, int8_at = _OPERATORS[name]

    def real(*args: Any) -> Tensor:
        _check_int8(name, [args[at] for at in int8_at])
        return kernel(*args)

    def fake(*args: Any) -> Tensor:
        _check_int8(name, [args[at] for at in int8_at])
        return torch.empty(shape(*args), dtype=torch.int8, device=args[0].device)

    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "CompositeExplicitAutograd")(real)
    torch.library.register_fake(qualified)(fake)


for _name in SCHEMAS:
    _register(_name)
