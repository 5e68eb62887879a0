# SPDX-License-Identifier: Apache-2.0
"""Exact int8 products accumulated in int32: the arithmetic under every kernel of this package.

Nothing here knows scales. ``matmul`` and ``conv2d`` return the accumulator that an ideal integer
machine would hold, whatever instructions the processor has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

# |x| <= 128 and |w| <= 128 give 128 * 128 * 1024 = 2**24: up to there float32 counts in ones.
_FLOAT_BLOCK = 1024
# The same bound for an operand that is already shifted by its zero point: |x - zp| <= 255.
_FLOAT_SHIFTED = 2**24 // (255 * 128)
# Largest depth whose shifted products cannot leave int32.
MAX_DEPTH = (2**31 - 1) // (255 * 128)
# Bytes of gathered convolution windows held at once.
_WINDOW_BYTES = 64 * 2**20

_Value = TypeVar("_Value")


class WeightTable(Generic[_Value]):
    """Something computed once per weight tensor and dropped with it.

    Entries are keyed by the tensor object, held weakly, and rebuilt when the tensor was written in
    place. ``build`` must not return anything that refers to the weight, or it would never be freed.
    """

    def __init__(self, build: Callable[[Tensor], _Value]) -> None:
        self._build = build
        self._entries: MutableMapping[Tensor, tuple[Any, _Value]] = WeakIdKeyDictionary()

    def __call__(self, weight: Tensor) -> _Value:
        version = 0 if weight.is_inference() else weight._version
        stamp = (version, weight.data_ptr(), weight.device)
        found = self._entries.get(weight)
        if found is None or found[0] != stamp:
            found = (stamp, self._build(weight))
            self._entries[weight] = found
        return found[1]

    def __len__(self) -> int:
        return len(self._entries)


row_sums = WeightTable(lambda weight: weight.flatten(1).sum(1, dtype=torch.int32))
_window_order = WeightTable(lambda weight: weight.permute(0, 2, 3, 1).flatten(1).clone())


@functools.cache
def int_mm_is_exact() -> bool:
    """Whether ``torch._int_mm`` accumulates without saturation on this processor.

    Without VNNI oneDNN adds pairs of products in int16: 64 products 127 * 127 then give 8160, not
    1,032,256. Probed once per process, with one row and with many, which take different code.
    """
    weight = torch.full((16, 64), 127, dtype=torch.int8)
    return all(
        bool((torch._int_mm(weight[:rows], weight.t()) == 64 * 127 * 127).all()) for rows in (1, 16)
    )


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for int8 ``x: (M, K)`` and ``weight: (N, K)``, exact, as int32 ``(M, N)``.

    Raises ``ValueError`` where ``K`` exceeds ``MAX_DEPTH``, as int32 could then wrap around.
    """
    check_depth(weight.shape[1])
    # At depth 1 the weight is row-major and column-major at once, and torch picks the stride that
    # oneDNN rejects; the result is then uninitialized memory (pytorch issue 195066, in 2.13).
    if x.device.type == "cpu" and weight.shape[1] > 1 and int_mm_is_exact():
        return torch._int_mm(_restride(x), _restride(weight).t())
    return _matmul_float(x, weight)


def _restride(x: Tensor) -> Tensor:
    """``x`` with the strides of a fresh tensor.

    Those of axes of length 1 mean nothing and are 0 in compiled graphs, but ``_int_mm`` reads them
    (pytorch issue 195066).
    """
    return x.contiguous().view(-1).view(x.shape)


def _matmul_float(x: Tensor, weight: Tensor) -> Tensor:
    """``matmul`` by float32 products over blocks of the depth short enough to be exact.

    Exact under every ``fp32_precision`` setting too: int8 values fit the 8 significant bits of
    bfloat16, and those settings still accumulate in float32. Autocast would round the result.
    """
    total = x.new_zeros((x.shape[0], weight.shape[0]), dtype=torch.int32)
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, weight.shape[1], _FLOAT_BLOCK):
            left, right = (t[:, start : start + _FLOAT_BLOCK].float() for t in (x, weight))
            total += (left @ right.t()).to(torch.int32)
    return total


def check_depth(depth: int) -> None:
    """Raise ``ValueError`` if ``depth`` products of a sum could leave the int32 range."""
    if depth > MAX_DEPTH:
        raise ValueError(
            f"a sum of {depth} int8 products can leave the int32 range; at most {MAX_DEPTH} are "
            "supported, so keep this operator in float"
        )


def shifted_matmul(x: Tensor, x_zp: int, weight: Tensor) -> Tensor:
    """``(x - x_zp) @ weight.T`` for int8 ``x: (M, K)``, ``weight: (N, K)``, as int32 ``(M, N)``."""
    total = matmul(x, weight)
    return total if x_zp == 0 else total.sub_(row_sums(weight), alpha=x_zp)


def conv2d(
    x: Tensor,
    x_zp: int,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve ``x - x_zp`` with ``weight`` exactly; padding counts as zero.

    ``x``: int8 ``(N, C, H, W)``; ``weight``: int8 ``(O, C / groups, kh, kw)``; the rest in pixels.
    Returns int32 ``(N, O, H', W')``, usually in channels-last memory.
    """
    if groups == 1:
        return _conv_by_matmul(x, x_zp, weight, stride, padding, dilation)
    if weight[0].numel() <= _FLOAT_SHIFTED:
        with torch.autocast(x.device.type, enabled=False):
            total = functional.conv2d(
                x.float() - x_zp, weight.float(), None, stride, padding, dilation, groups
            )
        return total.to(torch.int32)
    parts = [
        _conv_by_matmul(part, x_zp, kernel, stride, padding, dilation)
        for part, kernel in zip(x.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
    ]
    return torch.cat(parts, 1)


def _conv_by_matmul(
    x: Tensor,
    x_zp: int,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Ungrouped convolution as a product of gathered windows with the flattened weight."""
    kernel = weight.shape[2:]
    # A one-pixel kernel needs no reordering, and must not be cached: it is a view of the weight.
    one_pixel = kernel.numel() == 1
    matrix = weight.flatten(1) if one_pixel else _window_order(weight)
    windows = _windows(_pad_channels_last(x, x_zp, padding), kernel, stride, dilation)
    images = max(1, _WINDOW_BYTES // max(1, windows[:1].numel()))
    totals = [
        matmul(windows[start : start + images].reshape(-1, matrix.shape[1]), matrix)
        for start in range(0, max(1, x.shape[0]), images)
    ]
    total = totals[0] if len(totals) == 1 else torch.cat(totals)
    if x_zp != 0:
        total.sub_(row_sums(weight), alpha=x_zp)
    return total.view(*windows.shape[:3], weight.shape[0]).permute(0, 3, 1, 2)


def _pad_channels_last(x: Tensor, value: int, padding: Sequence[int]) -> Tensor:
    """Int8 ``(N, C, H, W)`` to contiguous ``(N, H + 2 ph, W + 2 pw, C)`` with ``value`` around."""
    moved = x.permute(0, 2, 3, 1)
    high, wide = padding
    if not high and not wide:
        return moved.contiguous()
    batch, height, width, channels = moved.shape
    padded = moved.new_full((batch, height + 2 * high, width + 2 * wide, channels), value)
    padded[:, high : high + height, wide : wide + width].copy_(moved)
    return padded


def _windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """View of ``x: (N, H, W, C)`` as ``(N, H', W', kh, kw, C)``: the pixels under each kernel."""
    batch, height, width, channels = x.shape
    out = [
        out_length(size, *geometry)
        for size, *geometry in zip((height, width), kernel, stride, dilation, strict=True)
    ]
    per_image, per_row, per_pixel, per_channel = x.stride()
    return x.as_strided(
        (batch, *out, *kernel, channels),
        (
            per_image,
            per_row * stride[0],
            per_pixel * stride[1],
            per_row * dilation[0],
            per_pixel * dilation[1],
            per_channel,
        ),
    )


def out_length(padded: int, kernel: int, stride: int, dilation: int) -> int:
    """Output pixels of a convolution along one axis whose padded input has ``padded`` pixels."""
    return (padded - dilation * (kernel - 1) - 1) // stride + 1
