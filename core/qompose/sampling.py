# SPDX-License-Identifier: Apache-2.0
"""Which values of a tensor a histogram counts: all of a small one, and of a large one a fixed part.

Counting every value of an activation costs several times what computing it does. Of each example, which
is a row along the first dimension, the same positions are taken: one out of each run of equally many, in
the order of the dimensions, however the tensor lies in memory. So what is counted does not depend on how
examples are put into batches. The place inside each run is scattered, because a fixed one would fall
on the same column of each image.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

EXAMPLE = 4096
"""The most values of an example that are counted."""
_SCATTER = 2654435761  # 2**32 over the golden ratio: multiples of it are spread evenly modulo 2**32


def sample_of(x: Tensor) -> tuple[Tensor, int]:
    """Return values of a tensor of any shape, and for how many of its values each of them stands.

    A tensor of no or one dimension has one value in each example, and is taken whole.
    """
    example = x.shape[1:]
    if math.prod(example) <= EXAMPLE:
        return x, 1
    places, run = places_in(tuple(example), EXAMPLE, x.device)
    return taken(x, places), run


def taken(x: Tensor, places: tuple[Tensor, ...]) -> Tensor:
    """Return the values at some places of each example, `(N, P)` or `(N, P, ...)` for fewer dimensions."""
    index: tuple[Any, ...] = (slice(None), *places)
    return x[index]


@lru_cache(maxsize=1024)
def places_in(
    shape: tuple[int, ...], most: int, device: torch.device
) -> tuple[tuple[Tensor, ...], int]:
    """Return at most so many positions in an example, an index for each dimension, and a run's length."""
    size = math.prod(shape)
    run = -(-size // most)
    starts = torch.arange(0, size, run)
    number = torch.arange(len(starts))
    lengths = torch.clamp(size - starts, max=run)
    chosen = starts + (((number * _SCATTER) % 2**32) * lengths >> 32)
    return tuple(index.to(device) for index in torch.unravel_index(chosen, shape)), run
