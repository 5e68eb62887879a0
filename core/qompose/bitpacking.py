# SPDX-License-Identifier: Apache-2.0
"""Integers of few values packed into bytes: torch has no tensors of four or two bits, and a file needs none.

What fits is found from the values, not from a scheme, and comes back bit by bit: `value = field + low`.
Zero points of groups fit too, which are as many as the scales, eight bytes each, and as a rule all zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_BITS = (2, 4)
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
}
_WORTH = 1024
"""Bytes below which a block is left as it is, readable by other tools: there is little to save."""


def pack_bits(blocks: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return how blocks were packed, by name, and the blocks: those that fit as bytes, others as they are.

    The first value of a byte is in its lowest bits.
    """
    found: dict[str, Any] = {}
    stored = dict(blocks)
    names = {dtype: name for name, dtype in _TYPES.items()}
    for name, block in blocks.items():
        if block.dtype not in names or block.numel() < _WORTH:
            continue
        low, high = (int(bound) for bound in block.aminmax())
        bits = next((bits for bits in _BITS if high - low < 1 << bits), None)
        if bits is not None:
            found[name] = {
                "bits": bits,
                "low": low,
                "dtype": names[block.dtype],
                "shape": [*block.shape],
            }
            stored[name] = _packed(block, low, bits)
    return found, stored


def _packed(block: Tensor, low: int, bits: int) -> Tensor:
    fields = (block.reshape(-1) - low).to(torch.uint8)
    each = 8 // bits
    fields = torch.nn.functional.pad(fields, (0, -len(fields) % each)).view(-1, each)
    packed = fields[:, 0].clone()
    for place in range(1, each):
        packed |= fields[:, place] << (bits * place)
    return packed


def unpack_bits(packed: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the blocks that `pack_bits` was given.

    Raises:
        ValueError, TypeError, LookupError: this is nothing that it returned.
    """
    return {**stored, **{name: _unpacked(stored[name], facts) for name, facts in packed.items()}}


def _unpacked(block: Tensor, facts: Mapping[str, Any]) -> Tensor:
    bits, low, dtype, shape = facts["bits"], facts["low"], _TYPES[facts["dtype"]], facts["shape"]
    if bits not in _BITS or not all(type(size) is int and size >= 0 for size in (bits, *shape)):
        raise ValueError(f"{str(facts)[:80]} is no way to pack integers")
    range_ = torch.iinfo(dtype)
    if type(low) is not int or not range_.min <= low <= range_.max:
        raise ValueError(f"{str(low)[:20]} is no value of {dtype}")
    count, each = torch.Size(shape).numel(), 8 // bits
    if block.dtype is not torch.uint8 or block.dim() != 1 or len(block) != -(-count // each):
        raise ValueError(f"a packed block has not the bytes of {count} values")
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=block.device)
    fields: Tensor = (block[:, None] >> places) & ((1 << bits) - 1)
    return (fields.reshape(-1)[:count].to(dtype) + low).reshape(shape)
