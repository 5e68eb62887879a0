# SPDX-License-Identifier: Apache-2.0
"""Integers of few values as fields of few bits, which follow one another in bytes without gaps.

torch has no tensors of three bits. How many bits a tensor needs is found from its values, not from a scheme,
and what comes back is the same: `value = field + low`. Zero points of groups fit too, which are as many as
the scales, eight bytes each, and as a rule all zero.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

INTEGERS: Final = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
BITS: Final = range(1, 8)
_WORTH: Final = 1024
"""How many values a tensor has at least: with fewer there is little to save."""


def fields_of(x: Tensor) -> tuple[int, int] | None:
    """Return the bits of a field and the least value; None where fields save nothing."""
    if x.dtype not in INTEGERS or x.numel() < _WORTH:
        return None
    low, high = (int(bound) for bound in x.aminmax())
    bits = next((bits for bits in BITS if high - low < 1 << bits), None)
    return None if bits is None else (bits, low)


def field_bytes(count: int, bits: int) -> int:
    """Return how many bytes so many fields take."""
    return -(-count * bits // 8)


def stored_size(x: Tensor) -> int:
    """Return the bytes that a tensor takes in a file."""
    found = fields_of(x)
    return x.numel() * x.element_size() if found is None else field_bytes(x.numel(), found[0])


def pack_fields(x: Tensor, low: int, bits: int) -> Tensor:
    """Return integers as fields, in bytes, shape `(field_bytes,)`; the first has the lowest bits."""
    fields = (x.reshape(-1) - low).to(torch.uint8)
    size = field_bytes(len(fields), bits)
    fields = torch.nn.functional.pad(fields, (0, -len(fields) % 8)).view(-1, 8)
    packed = fields.new_zeros(len(fields), bits)  # eight fields fill so many bytes
    for place in range(8):
        byte, shift = divmod(bits * place, 8)
        packed[:, byte] |= fields[:, place] << shift
        if shift + bits > 8:  # it goes on in the next byte
            packed[:, byte + 1] |= fields[:, place] >> (8 - shift)
    return packed.reshape(-1)[:size].clone()


def unpack_fields(packed: Tensor, count: int, low: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the integers that `pack_fields` was given, shape `(count,)`."""
    stream = torch.nn.functional.pad(packed, (0, -len(packed) % bits)).view(-1, bits)
    fields = packed.new_empty(len(stream), 8)
    for place in range(8):
        byte, shift = divmod(bits * place, 8)
        field = stream[:, byte] >> shift
        if shift + bits > 8:
            field = field | stream[:, byte + 1] << (8 - shift)
        fields[:, place] = field & ((1 << bits) - 1)
    return fields.reshape(-1)[:count].to(dtype) + low
