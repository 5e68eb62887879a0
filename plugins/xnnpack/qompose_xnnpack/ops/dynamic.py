# SPDX-License-Identifier: Apache-2.0
"""Linear and convolutions of a float input that is quantized at run time, with float output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qompose_xnnpack import convolution, integer
from qompose_xnnpack.ops.weighted import convolved_shape, lengthen, misfit, spread_shape

LOW, HIGH = -128, 127
# A narrower span than this has no finite number of steps per unit: its values count as zero.
_NARROWEST = 7.5e-37


def linear(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    clamp_min: float,
    clamp_max: float,
) -> Tensor:
    """``x: (..., K)``, quantized per row; ``weight: (O, K)``, ``bias: (O,)`` -> ``(..., O)``.

    ``w_scale``: ``(1,)``, ``(O,)``, or ``(O, G)`` for ``G`` groups of ``K / G`` neighbours in a row.
    Formula: ``x_scale * sum over groups of (w_scale * exact integer sum) + bias``.
    """
    linear_shape(x, weight, w_scale)
    rows = quantize_rows(x.reshape(-1, weight.shape[1]))
    return _linear(x, rows, weight, w_scale, bias, clamp_min, clamp_max)


def linear_per_tensor(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    clamp_min: float,
    clamp_max: float,
) -> Tensor:
    """The same with one scale and zero point for all of ``x``. XNNPACK has no such operator."""
    linear_shape(x, weight, w_scale)
    whole, x_scale, x_zp = quantize_rows(x.reshape(1, -1) if x.numel() else x.new_zeros(1, 1))
    count = x.numel() // weight.shape[1]
    rows = whole[:, : x.numel()].reshape(count, weight.shape[1])
    quantized = rows, x_scale.expand(count, 1), x_zp.expand(count, 1)
    return _linear(x, quantized, weight, w_scale, bias, clamp_min, clamp_max)


def _linear(
    x: Tensor,
    quantized: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *clamp: float,
) -> Tensor:
    """Multiply the rows of ``x``, as ``quantize_rows`` gives them."""
    rows, x_scale, x_zp = quantized
    scales = w_scale.to(torch.float32).unsqueeze(-1).flatten(1).t().contiguous()
    total = torch.zeros((rows.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    sums = integer.shifted_groups(rows, x_zp, weight, weight.shape[1] // scales.shape[0])
    for part, scale in zip(sums, scales, strict=True):
        total.addcmul_(part, scale)
    total.mul_(x_scale)
    if bias is not None:
        total.add_(bias)
    return total.clamp_(*clamp).view(*x.shape[:-1], weight.shape[0])


def linear_shape(x: Tensor, weight: Tensor, w_scale: Tensor, *_: Any) -> list[int]:
    """Return the shape of the output. Raises ``ValueError`` where the sizes do not fit."""
    outputs, depth = weight.shape
    if x.shape[-1] != depth:
        raise misfit("their last sizes differ", input=x, weight=weight)
    groups = w_scale.shape[1] if w_scale.dim() == 2 else 1
    allowed = (outputs,) if w_scale.dim() == 2 else (outputs, 1)
    if w_scale.dim() not in (1, 2) or w_scale.shape[0] not in allowed or depth % groups:
        groups_of = f"({outputs}, groups) with a number of groups that divides {depth}"
        why = f"the scales are (1,), ({outputs},) or {groups_of}"
        raise misfit(why, weight=weight, w_scale=w_scale)
    return [*x.shape[:-1], outputs]


def conv2d(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *clamp: float,
) -> Tensor:
    """``x: (N, C, H, W)``, quantized per image; ``weight: (O, C / groups, kh, kw)``.

    ``w_scale``: ``(O,)`` or ``(1,)``; ``bias: (O,)``. Returns ``(N, O, H', W')``.
    """
    conv_shape(x, weight, w_scale, bias, stride, padding, dilation, groups)
    geometry = (*lengthen(2, stride, padding, dilation), groups)
    return _by_image(convolution.conv2d, x, weight, w_scale, bias, geometry, clamp)


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    *clamp: float,
) -> Tensor:
    """``x: (N, C, H, W)``, quantized per image; ``weight: (C, O / groups, kh, kw)``.

    ``w_scale``: ``(1,)``, or ``(O,)`` where ``groups`` is 1; ``bias: (O,)``. Returns
    ``(N, O, H', W')``.
    """
    spatial = (stride, padding, output_padding)
    transposed_shape(x, weight, w_scale, bias, *spatial, groups, dilation)
    geometry = (*lengthen(2, *spatial), groups, *lengthen(2, dilation))
    return _by_image(convolution.conv_transpose2d, x, weight, w_scale, bias, geometry, clamp)


def conv_shape(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Any, *rest: Any) -> Sequence[int]:
    """Return the shape of the output. Raises ``ValueError`` where the sizes do not fit."""
    _check_image(x, weight, w_scale, weight.shape[0])
    return convolved_shape(x, weight, *rest[:4])


def transposed_shape(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Any, *rest: Any
) -> Sequence[int]:
    """Return the shape of the output. Raises ``ValueError`` where sizes or padding do not fit."""
    _check_image(x, weight, w_scale, weight.shape[1] * rest[3])
    return spread_shape(x, weight, w_scale, *rest[:5])


def _check_image(x: Tensor, weight: Tensor, w_scale: Tensor, channels: int) -> None:
    if x.dim() != 4:
        raise misfit("the input is no batch of images", input=x, weight=weight)
    if tuple(w_scale.shape) not in ((1,), (channels,)):
        raise misfit(f"the scales are (1,) or ({channels},)", weight=weight, w_scale=w_scale)


def _by_image(
    convolve: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    geometry: Sequence[Any],
    clamp: Sequence[float],
) -> Tensor:
    """Quantize each image, ``convolve(integers, zero points, weight, *geometry)``, and return floats."""
    images, x_scale, x_zp = quantize_rows(x.flatten(1))
    whole = convolve(images.view(x.shape), x_zp.view(-1, 1, 1, 1), weight, *geometry)
    total = whole.to(torch.float32).mul_(x_scale.view(-1, 1, 1, 1)).mul_(w_scale.view(-1, 1, 1))
    if bias is not None:
        total.add_(bias.view(-1, 1, 1))
    return total.clamp_(*clamp).contiguous()


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each row of float32 ``x: (M, K)`` to int8 over its own range, zero included.

    Returns int8 ``(M, K)``, float32 scales ``(M, 1)`` and int32 zero points ``(M, 1)``. Formula: that
    of ``quantized_decomposed.choose_qparams_per_token_asymmetric``, computed as XNNPACK does, that
    is by products with steps per unit and without a least scale: where all of a row is below 3e-5,
    torch's operator rounds most of it away and XNNPACK does not.
    """
    low = x.amin(1, keepdim=True).clamp_(max=0)
    high = x.amax(1, keepdim=True).clamp_(min=0)
    span = high - low
    narrow = span < _NARROWEST
    steps = torch.where(narrow, 1.0, (HIGH - LOW) / span)
    low, high = low * steps, high * steps
    # Of both ends of the range, the one that keeps the rounding of the zero point smaller decides.
    at_low = (LOW + low) + (HIGH + high) > 0
    zero_point = torch.where(at_low, LOW - low, HIGH - high).clamp_(LOW, HIGH).round_()
    quantized = x.mul(steps).round_().add_(zero_point).clamp_(LOW, HIGH).to(torch.int8)
    scale = torch.where(narrow, 1.0, span / (HIGH - LOW))
    return quantized, scale, zero_point.to(torch.int32)
