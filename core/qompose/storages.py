# SPDX-License-Identifier: Apache-2.0
"""Tensors as blocks of memory and views of them: what shares memory is stored once, and shares it again."""

from __future__ import annotations

import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qompose.errors import ArtefactError
from qompose.graph import address_of
from qompose.values import NotStorable, decode, encode

# A block is stored in the shape and type of a tensor that fills it, so that other tools can read it; these
# are the types that safetensors has had from the start. Others are stored as bytes.
_NATURAL = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
)
_ALIGNMENT = 16  # a multiple of every item size


@dataclass(frozen=True)
class _Extent:
    """The bytes of its storage that a tensor reaches."""

    path: str
    tensor: Tensor
    start: int
    end: int


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return how each tensor is a view of a block, and the blocks, by the path of one of their tensors.

    Of a storage the bytes from the first to the last that any tensor reaches are kept.

    Raises:
        NotStorable: a tensor that is not plain memory.
    """
    groups: dict[Any, list[_Extent]] = defaultdict(list)
    views: dict[str, Any] = {}
    first: dict[int, str] = {}
    for path, tensor in tensors.items():
        _check(path, tensor)
        if id(tensor) in first:
            views[path] = {"same": first[id(tensor)]}
            continue
        first[id(tensor)] = path
        views[path] = _describe(tensor)
        if tensor.numel():
            groups[tensor.device, address_of(tensor)].append(_extent(path, tensor))
    blocks = {}
    for extents in groups.values():
        name, block, low = _block(extents)
        blocks[name] = block
        for extent in extents:
            offset = (extent.start - low) // extent.tensor.element_size()
            views[extent.path] |= {"block": name, "offset": offset}
    return views, blocks


def _check(path: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise NotStorable(f"{path} is a {type(tensor).__module__}.{type(tensor).__qualname__}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
        raise NotStorable(f"{path} is a tensor without plain memory ({kind})")
    if tensor.is_conj() or tensor.is_neg():
        raise NotStorable(f"{path} is a lazy conjugate or negative: call resolve_conj, resolve_neg")


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": encode(tensor.dtype),
        "device": str(tensor.device),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "parameter": isinstance(tensor, nn.Parameter),
        "requires_grad": tensor.requires_grad,
    }


def _extent(path: str, tensor: Tensor) -> _Extent:
    reach = _reach(list(tensor.shape), list(tensor.stride()))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return _Extent(path, tensor, start, start + reach * tensor.element_size())


def _block(extents: list[_Extent]) -> tuple[str, Tensor, int]:
    """Return a name, the block, and the byte of the storage where it begins."""
    low, high = min(e.start for e in extents), max(e.end for e in extents)
    for extent in extents:
        tensor = extent.tensor
        whole = (extent.start, extent.end) == (low, high) and tensor.is_contiguous()
        if whole and tensor.dtype in _NATURAL and _same_size(extents):
            return extent.path, tensor.detach(), low
    low -= low % _ALIGNMENT
    storage = extents[0].tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return extents[0].path, empty.set_(storage, low, (high - low,), (1,)), low


def _same_size(extents: list[_Extent]) -> bool:
    """Tell whether all tensors have items of one size, so that offsets are whole numbers of them."""
    return len({extent.tensor.element_size() for extent in extents}) == 1


def unpack(views: Mapping[str, Any], blocks: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for each stored view, on the device it was on.

    Raises:
        ArtefactError: a device is not there in this process.
        ValueError, TypeError, LookupError, RuntimeError: the data is not what `pack` made.
    """
    _check_devices(views)
    made: dict[str, Tensor] = {}
    placed: dict[tuple[str, str], Tensor] = {}
    for path, view in views.items():
        if "same" in view:
            made[path] = made[view["same"]]
            yield path, made[path]
            continue
        dtype, device = decode(view["dtype"]), str(view["device"])
        if "block" in view:
            place = (view["block"], device)
            if place not in placed:
                placed[place] = blocks[view["block"]].reshape(-1).to(device)
            tensor = _view(placed[place], dtype, view)
        else:
            if _reach(view["shape"], view["stride"]):
                raise ValueError(f"{path} has no memory")
            tensor = torch.empty_strided(view["shape"], view["stride"], dtype=dtype, device=device)
        made[path] = tensor = _as_it_was(tensor, view)
        yield path, tensor


def _check_devices(views: Mapping[str, Any]) -> None:
    for device in sorted({str(view["device"]) for view in views.values() if "device" in view}):
        try:
            if torch.empty(0, device=device).is_meta:
                raise ValueError("no tensor of it has memory")
        except (
            Exception
        ) as error:  # each kind of device has its own way to say that it is not there
            raise ArtefactError(
                f"its tensors were on the device {device!r}, which this process cannot use ({error}). Export "
                "and quantize the model on the CPU for a machine without it."
            ) from error


def _view(block: Tensor, dtype: torch.dtype, view: Mapping[str, Any]) -> Tensor:
    """Return a view of a block, which it does not reach beyond."""
    if block.dtype is not dtype:
        size = torch.empty(0, dtype=dtype).element_size()
        flat = block.view(torch.uint8)
        block = flat[: len(flat) - len(flat) % size].view(dtype)
    offset = view["offset"]
    if not _is_size(offset) or offset + _reach(view["shape"], view["stride"]) > block.numel():
        raise ValueError("a tensor reaches beyond its block")
    return block.as_strided(view["shape"], view["stride"], block.storage_offset() + offset)


def _reach(shape: Any, stride: Any) -> int:
    """Return how many items of memory a tensor needs from its first one to its last.

    Raises:
        ValueError, TypeError: these are no sizes and strides.
    """
    if not all(map(_is_size, [*shape, *stride])) or len(shape) != len(stride):
        raise ValueError(f"{str([shape, stride])[:80]} are no sizes and strides")
    if 0 in shape:
        return 0
    return 1 + int(sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _as_it_was(tensor: Tensor, view: Mapping[str, Any]) -> Tensor:
    if view["parameter"]:
        return nn.Parameter(tensor, requires_grad=bool(view["requires_grad"]))
    return tensor.requires_grad_(bool(view["requires_grad"]))


def digest(block: Tensor) -> str:
    """Return the SHA-256 of a block's bytes, in hexadecimal."""
    block = block.detach().cpu().contiguous()
    size = block.numel() * block.element_size()
    memory = (ctypes.c_char * size).from_address(block.data_ptr()) if size else b""
    return hashlib.sha256(memory).hexdigest()
