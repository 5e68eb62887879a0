# SPDX-License-Identifier: Apache-2.0
"""Linear and convolutions, plain and transposed: int8 input, int8 weight, int8 output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qompose_xnnpack import convolution, integer
from qompose_xnnpack.ops.requantization import requantize_channels


def linear(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *out: Any,
) -> Tensor:
    """``x: (..., K)``, ``weight: (O, K)``, ``bias: (O,)`` -> ``(..., O)``."""
    shape = linear_shape(x, x_scale, x_zp, weight)
    total = integer.shifted_matmul(x.reshape(-1, weight.shape[1]), x_zp, weight)
    return requantize_channels(total, _unit(x_scale, w_scale), bias, weight.shape[1], out).view(
        shape
    )


def linear_shape(x: Tensor, x_scale: float, x_zp: int, weight: Tensor, *_: Any) -> list[int]:
    """Return the shape of the output. Raises ``ValueError`` if input and weight do not fit."""
    if x.shape[-1] != weight.shape[1]:
        raise misfit("their last sizes differ", input=x, weight=weight)
    return [*x.shape[:-1], weight.shape[0]]


def _unit(x_scale: float, w_scale: Tensor) -> Tensor:
    """Return the real value of one count of the accumulator, float32 ``(O,)`` or ``(1,)``."""
    return w_scale.to(torch.float32) * x_scale


def conv2d(
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
    if x.dim() != 4:
        raise misfit("the input is no batch of images", input=x, weight=weight)
    convolved_shape(x, weight, stride, padding, dilation, groups)
    stride, padding, dilation = lengthen(2, stride, padding, dilation)
    total = convolution.conv2d(x, x_zp, weight, stride, padding, dilation, groups)
    return requantize_channels(total, _unit(x_scale, w_scale), bias, weight[0].numel(), out)


def conv1d(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> Tensor:
    """``x: (N, C, L)``, ``weight: (O, C / groups, k)`` -> ``(N, O, L')``, as one-row images."""
    conv_shape(x, x_scale, x_zp, weight, w_scale, bias, *rest)
    stride, padding, dilation, *out = rest
    flat = ((1, *stride), (0, *padding), (1, *dilation))
    image = conv2d(x.unsqueeze(2), x_scale, x_zp, _as_image(weight), w_scale, bias, *flat, *out)
    return image.squeeze(2)


# What is cached per weight is keyed by tensor object, for which a fresh view would not do.
_as_image = integer.WeightTable(lambda weight: weight.unsqueeze(2).clone())


def conv_shape(
    x: Tensor, x_scale: float, x_zp: int, weight: Tensor, w_scale: Tensor, bias: Any, *rest: Any
) -> Sequence[int]:
    """Return the shape of the output of a static convolution of any rank."""
    return convolved_shape(x, weight, *rest[:4])


def convolved_shape(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Sequence[int]:
    """Return ``(N, O, ...)``. Raises ``ValueError`` if input and weight do not fit."""
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * groups:
        why = f"the weight is for {weight.shape[1] * groups} channels in {groups} groups"
        raise misfit(why, input=x, weight=weight)
    stride, padding, dilation = lengthen(x.dim() - 2, stride, padding, dilation)
    lengths = [
        convolution.out_length(size + 2 * pad, kernel, step, gap)
        for size, kernel, step, pad, gap in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return (x.shape[0], weight.shape[0], *lengths)


def conv_transpose2d(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    *out: Any,
) -> Tensor:
    """``x: (N, C, H, W)``, ``weight: (C, O / groups, kh, kw)`` -> ``(N, O, H', W')``.

    ``w_scale``: ``(1,)``, or ``(O,)`` where ``groups`` is 1.
    """
    if x.dim() != 4:
        raise misfit("the input is no batch of images", input=x, weight=weight)
    transposed_shape(
        x, x_scale, x_zp, weight, w_scale, bias, stride, padding, output_padding, groups, dilation
    )
    stride, padding, output_padding, dilation = lengthen(
        2, stride, padding, output_padding, dilation
    )
    total = convolution.conv_transpose2d(
        x, x_zp, weight, stride, padding, output_padding, groups, dilation
    )
    depth = convolution.transposed_depth(weight, groups)
    return requantize_channels(total, _unit(x_scale, w_scale), bias, depth, out)


def conv_transpose1d(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> Tensor:
    """``x: (N, C, L)``, ``weight: (C, O / groups, k)`` -> ``(N, O, L')``, as one-row images."""
    transposed_shape(x, x_scale, x_zp, weight, w_scale, bias, *rest)
    stride, padding, output_padding, groups, dilation, *out = rest
    flat = ((1, *stride), (0, *padding), (0, *output_padding), groups, (1, *dilation))
    args: tuple[Any, ...] = (_as_image(weight), w_scale, bias, *flat, *out)
    return conv_transpose2d(x.unsqueeze(2), x_scale, x_zp, *args).squeeze(2)


def transposed_shape(
    x: Tensor, x_scale: float, x_zp: int, weight: Tensor, w_scale: Tensor, bias: Any, *rest: Any
) -> Sequence[int]:
    """Return the shape of the output of a static transposed convolution of any rank."""
    return spread_shape(x, weight, w_scale, *rest[:5])


def spread_shape(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Sequence[int]:
    """Return ``(N, O, ...)`` of a transposed convolution.

    Raises ``ValueError`` if input, weight and its scales do not fit, if a padding of the output is
    not below the stride or dilation of its axis, or if nothing is left of the output.
    """
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[0]:
        why = f"the weight is for {weight.shape[0]} channels"
        raise misfit(why, input=x, weight=weight)
    if groups > 1 and w_scale.numel() > 1:
        why = "with groups, all channels share one scale"
        raise misfit(why, weight=weight, w_scale=w_scale)
    geometry = (stride, padding, output_padding, dilation)
    stride, padding, extra, gaps = lengthen(x.dim() - 2, *geometry)
    if any(more >= max(step, gap) for more, step, gap in zip(extra, stride, gaps, strict=True)):
        why = f"output_padding {extra} is not below stride {stride} or dilation {gaps}"
        raise misfit(why, input=x, weight=weight)
    axes = zip(x.shape[2:], weight.shape[2:], stride, padding, extra, gaps, strict=True)
    lengths = [convolution.transposed_length(*axis) for axis in axes]
    if any(length < 1 for length in lengths):
        raise misfit(f"nothing is left after a padding of {padding}", input=x, weight=weight)
    return (x.shape[0], weight.shape[1] * groups, *lengths)


def lengthen(rank: int, *values: Sequence[int]) -> list[list[int]]:
    """Return each of ``values`` with ``rank`` entries, a single one standing for all axes."""
    return [list(value) * rank if len(value) == 1 else list(value) for value in values]


def misfit(why: str, **tensors: Tensor) -> ValueError:
    """Return the error of an operator whose tensors do not fit each other."""
    shapes = " and ".join(f"{role} {tuple(tensor.shape)}" for role, tensor in tensors.items())
    return ValueError(f"{shapes} do not fit: {why}")
