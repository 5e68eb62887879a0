# SPDX-License-Identifier: Apache-2.0
"""The numbers that rows are tried with: sizes, parameters, calibration data, extremes.

Inputs are asymmetric about zero, so that affine zero points are not zero. The first two channels of a
weight are as large, and as small, as quantization allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from qompose.patterns import Shape

RANGES = ((-1.0, 2.5), (-1.5, 0.5), (-0.5, 4.0), (-3.0, 2.0))
"""By place: the range of a float input, in which calibration data are evenly spread.

No two inputs have one scale or one zero point, so that a kernel which confuses them is seen.
"""

BATCH = 4
_FACTORS = (4, 2, 1)
_MOST_ELEMENTS = 4096


def sizes(shapes: Sequence[Shape], stored: Sequence[bool]) -> Iterator[tuple[Shape, ...]]:
    """Yield the shapes of an example, larger ones first, and those that its author gave last.

    Args:
        stored: which of them are parameters; the first dimension of the others may be a batch.
    """
    seen = set()
    for factor, batch in product(_FACTORS, (BATCH, 1)):
        scaled = tuple(
            shape if callable(shape) else _scaled(shape, factor, 1 if is_stored else batch)
            for shape, is_stored in zip(shapes, stored, strict=True)
        )
        too_large = any(not callable(s) and math.prod(s) > _MOST_ELEMENTS for s in scaled)
        if scaled not in seen and (factor == 1 or not too_large):
            seen.add(scaled)
            yield scaled


def _scaled(shape: tuple[int, ...], factor: int, batch: int) -> tuple[int, ...]:
    """Return a shape with all sizes but 1 multiplied, so that what broadcasts goes on broadcasting."""
    larger = [size if size == 1 else size * factor for size in shape]
    if batch > 1 and len(larger) > 1:
        larger[0] = shape[0] * batch
    return tuple(larger)


def parameter(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a parameter with values in [-1, 1]; its first channels are 1 and -1 throughout."""
    if callable(shape):
        return shape()
    values = torch.rand(shape, generator=generator) * 2 - 1
    if values.dim() > 1 and len(values) > 3:
        values[0], values[1] = 1.0, -1.0
    return values.to(dtype)


def random(shape: Shape, dtype: torch.dtype, generator: torch.Generator, place: int = 0) -> Tensor:
    """Return an input that is evenly spread over the range of its place, whose ends occur."""
    if callable(shape):
        return shape()
    lowest, highest = RANGES[place % len(RANGES)]
    values = torch.rand(shape, generator=generator) * (highest - lowest) + lowest
    flat = values.view(-1)
    flat[0], flat[-1] = highest, lowest
    return values.to(dtype)


def extremes(inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return inputs at both ends of the range of `inputs`, alternating between them, and far beyond.

    Where there are several inputs, they are at one end together, and at opposite ends.
    """
    batches = [tuple(fill(x) for x in inputs) for fill in (_high, _low, _beyond)]
    batches += [tuple(_alternating(x, i) for i, x in enumerate(inputs))]
    batches += [tuple((_low, _high)[i % 2](x) for i, x in enumerate(inputs))]
    return batches


def _high(x: Tensor) -> Tensor:
    return torch.full_like(x, float(x.max())) if x.is_floating_point() else x


def _low(x: Tensor) -> Tensor:
    return torch.full_like(x, float(x.min())) if x.is_floating_point() else x


def _beyond(x: Tensor) -> Tensor:
    return x * 8 if x.is_floating_point() else x


def _alternating(x: Tensor, phase: int) -> Tensor:
    if not x.is_floating_point():
        return x
    odd = (torch.arange(x.numel()) + phase) % 2 == 1
    return torch.where(odd.view(x.shape), x.max(), x.min())


def other_layouts(inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return equal inputs that lie otherwise in memory: last dimension first, and every second element."""
    return [tuple(relay(x) for x in inputs) for relay in (_reversed, _strided)]


def _reversed(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def _strided(x: Tensor) -> Tensor:
    return torch.stack((x, -x) if x.is_floating_point() else (x, x), dim=-1)[..., 0]
