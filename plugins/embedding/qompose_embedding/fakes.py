# SPDX-License-Identifier: Apache-2.0
"""Shapes for torch's operators on packed rows that torch cannot trace for want of them (2.13: those below
8 bits).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def _unpacked(bits: int, weight: Tensor) -> Tensor:
    width = (weight.shape[1] - 4) * (8 // bits)
    return weight.new_empty((weight.shape[0], width), dtype=torch.float32)


def _summed(
    bits: int,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None = None,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    pruned_weights: bool = False,
    per_sample_weights: Tensor | None = None,
    compressed_indices_mapping: Tensor | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    bags = indices.shape[0] if offsets is None else offsets.shape[0] - int(include_last_offset)
    width = (weight.shape[1] - 4) * (8 // bits)
    return weight.new_empty((bags, width), dtype=torch.float32)


def register() -> torch.library.Library:
    """Register the shapes that nobody has registered yet; they are known as long as what is returned.

    Torch wants the fakes of these operators from a module of its own, which it has not; as kernels without
    data it takes them from anyone.
    """
    library = torch.library.Library("quantized", "IMPL")  # type: ignore[no-untyped-call]
    for bits in (4, 2):
        for ending, fake in (("unpack", _unpacked), ("rowwise_offsets", _summed)):
            name = f"embedding_bag_{bits}bit_{ending}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"quantized::{name}", "Meta"):
                library.impl(name, functools.partial(fake, bits), "Meta")  # type: ignore[no-untyped-call]
    return library
