# SPDX-License-Identifier: Apache-2.0
"""Scale and zero point: one set of formulas for them, and the bounds that a kernel puts on them.

The formulas are those of torch's `UniformQuantizationObserverBase`, so a scale computed here from a
given minimum and maximum is the scale that torch computes from them, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from qompose.errors import ConfigError

SYMMETRIC = frozenset({torch.per_tensor_symmetric, torch.per_channel_symmetric})
FLOAT_ZERO_POINT = frozenset({torch.per_channel_affine_float_qparams})
PER_CHANNEL = frozenset(
    {torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams}
)
CASTS = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Types that a tensor is cast to: they have no scale."""
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""Types that hold integers, as the quantize operators make them, the large ones rounded to float8.

Their zero point is 0 in every scheme: around another number the integers would be rounded away.
"""
UNIT_SCALE: Literal["unit_scale"] = "unit_scale"
AllowUncalibrated: TypeAlias = bool | Literal["unit_scale"]
"""Whether tensors that saw no data stay in float, or get a scale of 1 (`"unit_scale"`); False: an error."""
DEFAULT_EPS = torch.finfo(torch.float32).eps
"""Least scale, in units of the float tensor: torch's own.

Recipes of this field take 2**-12, under which a row of 8-bit weights has few steps where its largest is
below 0.03, as after a wide layer's initialization.
"""


def quantized_range(
    dtype: torch.dtype, quant_min: int | None, quant_max: int | None
) -> tuple[int, int]:
    """Return the bounds of the quantized integers, filling in the whole range of `dtype`.

    Raises:
        ConfigError: a bound is not an integer or lies outside `dtype`; the range is empty or lacks zero.
    """
    if dtype not in FLOAT8 and (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        raise ConfigError(f"{dtype} is not an integer type, so it has no quantized range")
    info = torch.finfo(dtype) if dtype in FLOAT8 else torch.iinfo(dtype)
    low = int(info.min) if quant_min is None else quant_min
    high = int(info.max) if quant_max is None else quant_max
    whole = all(isinstance(bound, Integral) for bound in (low, high))
    if not whole or not info.min <= low <= 0 <= high <= info.max or low == high:
        raise ConfigError(
            f"quant_min={low!r} and quant_max={high!r} must be distinct integers in {dtype} "
            f"[{int(info.min)}, {int(info.max)}], with quant_min <= 0 <= quant_max"
        )
    return low, high


def choose_qparams(
    minimum: Tensor,
    maximum: Tensor,
    *,
    dtype: torch.dtype,
    quant_min: int | None,
    quant_max: int | None,
    qscheme: torch.qscheme,
    eps: float = DEFAULT_EPS,
) -> tuple[Tensor, Tensor]:
    """Compute scale and zero point for tensors whose values lie in [minimum, maximum].

    With `n = quant_max - quant_min` and the range widened to contain zero::

        symmetric      scale = max(|minimum|, |maximum|) / (n / 2)    zero point = 0 (signed)
        affine         scale = (maximum - minimum) / n    zero point = quant_min - round(minimum / scale)
        float qparams  scale = (maximum - minimum) / n, unwidened     zero point = quant_min - minimum / scale

    torch's float qparams suppose `quant_min == 0`. Below `eps`, torch gives them the scale 1, which collapses
    a channel to one value; here its scale is `eps`, as in the other schemes. A constant channel has the
    scale 1 and is exact. float8 is symmetric whatever the scheme.

    Args:
        minimum, maximum: shape `()` or `(C,)`, same shape.
        eps: least scale, in units of the tensor.

    Returns:
        scale (float32) and zero point (int64, float32 for float qparams), shaped like `minimum`.
    """
    low, high = quantized_range(dtype, quant_min, quant_max)
    if qscheme in FLOAT_ZERO_POINT:
        scale = (maximum - minimum) / float(high - low)
        scale = torch.where(scale > 0, scale.clamp(min=eps), torch.ones_like(scale))
        return scale, low - minimum / scale
    least = torch.full_like(minimum, eps)
    below = torch.clamp(minimum, max=0.0)
    above = torch.clamp(maximum, min=0.0)
    if qscheme in SYMMETRIC or dtype in FLOAT8:
        scale = torch.maximum(torch.maximum(-below, above) / (float(high - low) / 2), least)
        middle = symmetric_zero_point(dtype, quant_min, quant_max)
        return scale, torch.full_like(scale, middle, dtype=torch.int64)
    scale = torch.maximum((above - below) / float(high - low), least)
    zero_point = low - torch.round(below / scale).to(torch.int64)
    return scale, torch.clamp(zero_point, low, high)


def stored_in(dtype: torch.dtype, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest parameters that a kernel can store in a smaller float type.

    Scales become numbers of `dtype`, the least of which stands for 0. So do the offsets
    `-zero_point * scale` where zero points are not integers; those stay float32 themselves.
    """
    info = torch.finfo(dtype)
    narrow = scale.to(dtype).to(scale.dtype)
    narrow = torch.where(narrow > 0, narrow, info.smallest_normal * info.eps)
    if not zero_point.is_floating_point():
        return narrow, zero_point
    offset = (-zero_point * scale).to(dtype).to(scale.dtype)
    return narrow, -offset / narrow


def symmetric_zero_point(dtype: torch.dtype, quant_min: int | None, quant_max: int | None) -> int:
    """Return the zero point of symmetric schemes: 0 for signed types, else (about) the middle."""
    if dtype is torch.uint8:
        both = quant_min is not None and quant_max is not None
        return (quant_min + quant_max) // 2 if both else 128  # type: ignore[operator]
    return 2**15 if dtype is torch.uint16 else 0


def quantize_float_zero_point(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """Return `round(x / scale + zero_point)` within [low, high], for zero points that are not integers.

    This is the arithmetic of `torch.quantize_per_channel`. The decomposed operator rounds `x / scale`
    alone and truncates the sum, which costs up to a whole step.

    Args:
        scale, zero_point: shape `(C,)`, along dimension `axis` of `x`.
    """
    scale, zero_point = along(scale, axis, x.dim()), along(zero_point, axis, x.dim())
    steps = x.float() * (1.0 / scale) + zero_point
    return torch.clamp(torch.round(steps), low, high).to(dtype)


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
    """Return the values that the nearest integers within [low, high] stand for.

    `scale` and `zero_point` broadcast against `x`. The product with `1 / scale`, and not the quotient, is
    what torch's kernels round.
    """
    steps = torch.clamp(torch.round(x * (1.0 / scale)) + zero_point, low, high)
    return (steps - zero_point) * scale


def full_blocks(shape: tuple[int, ...], block_size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the block's size along every dimension of a tensor.

    `block_size` speaks of the last dimensions, and -1 is a whole one; blocks are one wide along the others.

    Raises:
        ConfigError: the tensor has fewer dimensions, or a block does not divide one.
    """
    if len(block_size) > len(shape):
        raise ConfigError(
            f"block_size={block_size} has more dimensions than the tensor of shape {shape}"
        )
    sizes = (1,) * (len(shape) - len(block_size)) + tuple(block_size)
    full = tuple(dim if size == -1 else size for dim, size in zip(shape, sizes, strict=True))
    if any(dim % size for dim, size in zip(shape, full, strict=True)):
        raise ConfigError(f"block_size={block_size} does not divide the tensor of shape {shape}")
    return full


def in_blocks(x: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Return `x` with each dimension split in two: number of blocks, and place within the block."""
    sizes = [n for dim, size in zip(x.shape, blocks, strict=True) for n in (dim // size, size)]
    return x.reshape(sizes)


def quantize_blocks(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """Return `round(x / scale) + zero_point` within [low, high], one scale for each block.

    A zero point that is not an integer is added before rounding, as in `quantize_float_zero_point`.

    Args:
        scale, zero_point: as many dimensions as `x`; their sizes are the numbers of blocks.
    """
    steps = in_blocks(x, _block_sizes(x, scale)) * (1.0 / _for_blocks(scale))
    zero_point = _for_blocks(zero_point)
    late = zero_point.is_floating_point()
    steps = torch.round(steps + zero_point) if late else torch.round(steps) + zero_point
    return torch.clamp(steps, low, high).to(dtype).reshape(x.shape)


def dequantize_blocks(q: Tensor, scale: Tensor, zero_point: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `(q - zero_point) * scale`, one scale for each block; see `quantize_blocks`."""
    blocks = in_blocks(q, _block_sizes(q, scale))
    values = (blocks.float() - _for_blocks(zero_point)) * _for_blocks(scale)
    return values.reshape(q.shape).to(dtype)


def _block_sizes(x: Tensor, scale: Tensor) -> tuple[int, ...]:
    return tuple(dim // count for dim, count in zip(x.shape, scale.shape, strict=True))


def _for_blocks(values: Tensor) -> Tensor:
    return values.reshape([n for count in values.shape for n in (count, 1)])


def along(vector: Tensor, dim: int, rank: int) -> Tensor:
    """Return `vector`, shape `(C,)`, shaped so that it broadcasts along one dimension of a tensor."""
    shape = [1] * rank
    shape[dim] = -1
    return vector.reshape(shape)


def decibels(signal: float, noise: float) -> float:
    """Return a signal to noise ratio in dB, of powers.

    Infinite where there is no noise. Minus infinity where there is noise and no signal, and where the noise
    has no bound or is no number: nothing is left of the signal then, and no bound on the ratio is met.
    """
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a kernel takes of one tensor's parameters, by the names of PyTorch's BackendConfig.

    Scales are compared as the float32 numbers that kernels get. None allows anything.
    """

    scale_min_lower_bound: float | None = None
    scale_max_upper_bound: float | None = None
    scale_exact_match: float | None = None
    zero_point_exact_match: int | None = None

    @property
    def lowest(self) -> Bounds:
        """Return the bound on the least scale alone: what can be checked where data decides on the rest."""
        return Bounds(scale_min_lower_bound=self.scale_min_lower_bound)

    def objections(self, scale: Any, zero_point: Any) -> list[str]:
        """Return what is wrong with parameters, with the value and the bound that it breaks.

        Args:
            scale, zero_point: numbers, or tensors of any shape.
        """
        scales = torch.as_tensor(scale).detach().to(torch.float32)
        zero_points = torch.as_tensor(zero_point)
        asked = (self.scale_min_lower_bound, self.scale_max_upper_bound, self.scale_exact_match)
        least, most, exact = (
            None if bound is None else torch.tensor(bound, dtype=torch.float32) for bound in asked
        )
        found = []
        if least is not None and bool((scales < least).any()):
            found.append(
                self._broken("scale_min_lower_bound", f"the scale {float(scales.min()):g}")
            )
        if most is not None and bool((scales > most).any()):
            found.append(
                self._broken("scale_max_upper_bound", f"the scale {float(scales.max()):g}")
            )
        if exact is not None and bool((scales != exact).any()):
            found.append(self._broken("scale_exact_match", f"the scale {_listed(scales)}"))
        wanted = self.zero_point_exact_match
        if wanted is not None and bool((zero_points != wanted).any()):
            value = f"the zero point {_listed(zero_points)}"
            found.append(self._broken("zero_point_exact_match", value))
        return found

    def _broken(self, name: str, value: str) -> str:
        words = {
            "scale_min_lower_bound": "below the bound",
            "scale_max_upper_bound": "above the bound",
        }
        how = words.get(name, "but the kernel requires exactly")
        return f"{value}, {how} {getattr(self, name):g} ({name})"


def _listed(values: Tensor) -> str:
    distinct = sorted({float(value) for value in values.flatten()})
    shown = ", ".join(f"{value:g}" for value in distinct[:3])
    return f"{shown}, ..." if distinct[3:] else shown
