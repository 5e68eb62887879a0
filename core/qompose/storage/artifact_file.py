# SPDX-License-Identifier: Apache-2.0
"""The file of a saved model: blocks of memory with one description in JSON.

It is a safetensors file. Its header, checked when it is opened, can name no code; any tool of the field can
list the tensors; and what a model consists of besides them is JSON text in its metadata. A SHA-256 of that
text, and in it one of each block of memory, tell a damaged file from a sound one. They are not a signature:
who may write the file may write them too.

Tensors are views of blocks: what shares memory is stored once, and shares it again. Integers of few values
are packed into bytes (`qompose.program.disk`).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from importlib_metadata import version
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from qompose.errors import ArtefactError
from qompose.files import draft_of
from qompose.json_codec import DTYPE, named, of_type, plain, sequence
from qompose.program.disk import (
    BITS,
    INTEGERS,
    PackedIntegers,
    do_ahead,
    field_bytes,
    fields_of,
    kept,
    mapped,
    pack_fields,
    stored_size,
    unpacked,
)
from qompose.program.graph import address_of
from qompose.storage.json_values import NotStorable

FORMAT_VERSION = 4
_KEY = "qompose"


def write(body: Mapping[str, Any], blocks: Mapping[str, Tensor], path: Path) -> None:
    """Write to a file beside the wanted one, and put it in its place when it is complete.

    Raises:
        OSError: it cannot be written.
    """
    whole = {**body, "blocks": {name: digest(block) for name, block in blocks.items()}}
    description = {
        "format_version": FORMAT_VERSION,
        "written_by": f"qompose {version('qompose')}",
        "sha256": _hash(whole),
        "model": whole,
    }
    # One entry, because safetensors writes several in any order: equal models make equal files.
    metadata = {_KEY: _text(description)}
    try:
        with draft_of(path) as draft:
            draft.touch(exist_ok=False)
            mode = draft.stat().st_mode
            save_file({name: block.cpu() for name, block in blocks.items()}, draft, metadata)
            # safetensors lets nobody else read it; the process's own mask decides
            draft.chmod(mode)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"{path} cannot be written: {error}") from error


def _text(data: Any) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a file's description of a model and its blocks of memory, both as they were written.

    Fields are pages of the file: they are read once more, when they are unpacked.

    Raises:
        ArtefactError: it was not written by `write`, is damaged, or of a newer qompose.
        OSError: it cannot be read.
    """
    with path.open("rb"):  # says of what is no file what it is; safetensors does not
        pass
    try:
        with safe_open(path, framework="pt") as file:
            body = _body(path, file.metadata() or {})
            fields = {name: block for name, block in mapped(path).items() if name in body["packed"]}
            # Copies, because kernels may sum in another order where memory is not aligned to 64 bytes.
            blocks = fields | {
                name: file.get_tensor(name).clone()
                for name in file.keys()  # noqa: SIM118
                if name not in fields
            }
    except (ArtefactError, OSError):
        raise
    except Exception as error:  # forged: unknown types, impossible sizes, no description
        kind = " (it is a zip archive, like those of torch.save and torch.export.save)"
        raise ArtefactError(
            f"{path} is damaged or was not written by "
            f"qompose.save{kind if is_zipfile(path) else ''}: {type(error).__name__}: {error}"
        ) from error
    expected = body.get("blocks")
    if expected != {name: digest(block) for name, block in blocks.items()}:
        raise ArtefactError(f"{path} is damaged: checksum mismatch in its tensors")
    return body, blocks


def _body(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of a model, checked to be one that this release can read."""
    if _KEY not in metadata:
        raise ArtefactError(f"{path} is a safetensors file that was not written by qompose.save")
    found = json.loads(metadata[_KEY])
    number, author, body = found["format_version"], str(found["written_by"]), found.get("model")
    sound = isinstance(body, dict) and _hash(body) == found["sha256"]
    if type(number) is not int or number < 1:
        raise ArtefactError(f"{path} is damaged: invalid format version {str(number)[:20]!r}")
    if number != FORMAT_VERSION:
        remedy = (
            "Upgrade qompose"
            if number > FORMAT_VERSION
            else "Save the model again, or install the qompose version that wrote it"
        )
        raise ArtefactError(
            f"{path} has format version {number}, written by {author[:80]}, but qompose "
            f"{version('qompose')} reads version {FORMAT_VERSION}. {remedy}."
        )
    if not sound:
        raise ArtefactError(f"{path} is damaged: checksum mismatch in its description")
    described: dict[str, Any] = body
    return described


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
class _View:
    """Which part of a block a tensor is; of no block, one that has no values."""

    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: bool
    requires_grad: bool
    block: str | None = None
    offset: int = 0

    @property
    def reach(self) -> int:
        """How many items of memory the tensor needs from its first one to its last."""
        if 0 in self.shape:
            return 0
        sizes = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in sizes)

    def is_whole(self, block: Tensor) -> bool:
        """Tell whether the tensor is a block of packed integers as it stands."""
        return (
            isinstance(block, PackedIntegers)
            and not self.parameter
            and self.device == "cpu"
            and (self.dtype, self.offset) == (block.dtype, 0)
            and (self.shape, self.stride) == (tuple(block.shape), block.stride())
        )


_SIZE = plain("a size", lambda value: type(value) is int and 0 <= value < 2**63)
_VIEW = of_type(_View, {torch.dtype: DTYPE, int: _SIZE})


@dataclass(frozen=True)
class _Extent:
    """The bytes of its storage that a tensor reaches."""

    path: str
    tensor: Tensor
    view: _View

    @property
    def start(self) -> int:
        """Return the first byte."""
        return int(self.tensor.storage_offset()) * self.tensor.element_size()

    @property
    def end(self) -> int:
        """Return the byte behind the last."""
        return self.start + self.view.reach * self.tensor.element_size()


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return how each tensor is a view of a block, and the blocks, by the path of one of their tensors.

    Of a storage the bytes from the first to the last that any tensor reaches are kept. A tensor of two paths
    has at the second one the first path.

    Raises:
        NotStorable: a tensor that is not plain memory.
    """
    groups: dict[Any, list[_Extent]] = defaultdict(list)
    views: dict[str, Any] = {}
    first: dict[int, str] = {}
    for path, tensor in tensors.items():
        _check(path, tensor)
        if first.setdefault(id(tensor), path) != path:
            views[path] = first[id(tensor)]
            continue
        view = _View(
            tensor.dtype,
            str(tensor.device),
            tuple(tensor.shape),
            tensor.stride(),
            isinstance(tensor, nn.Parameter),
            tensor.requires_grad,
        )
        views[path] = _VIEW.write(view, path)
        if tensor.numel():
            groups[tensor.device, address_of(tensor)].append(_Extent(path, tensor, view))
    blocks = {}
    for extents in groups.values():
        name, block, low = _block(extents)
        blocks[name] = block
        for extent in extents:
            offset = (extent.start - low) // extent.tensor.element_size()
            placed = replace(extent.view, block=name, offset=offset)
            views[extent.path] = _VIEW.write(placed, extent.path)
    return views, blocks


def _check(path: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise NotStorable(f"{path}, a {type(tensor).__module__}.{type(tensor).__qualname__}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
        raise NotStorable(f"{path}, a {kind} tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise NotStorable(
            f"{path}, a lazy conjugate or negative (call resolve_conj and resolve_neg)"
        )


def _block(extents: list[_Extent]) -> tuple[str, Tensor, int]:
    """Return a name, the block, and the byte of the storage where it begins."""
    low, high = min(e.start for e in extents), max(e.end for e in extents)
    for extent in extents:
        tensor = extent.tensor
        whole = (extent.start, extent.end) == (low, high) and tensor.is_contiguous()
        # Offsets are whole numbers of items where the items of all tensors have one size.
        alike = len({extent.tensor.element_size() for extent in extents}) == 1
        if whole and tensor.dtype in _NATURAL and alike:
            return extent.path, tensor.detach(), low
    low -= low % _ALIGNMENT
    storage = extents[0].tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return extents[0].path, empty.set_(storage, low, (high - low,), (1,)), low


def unpack(views: Mapping[str, Any], blocks: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for each stored view, on the device it was on.

    Raises:
        ArtefactError: a device is not there in this process.
        ValueError, TypeError, LookupError, RuntimeError: the data is not what `pack` made.
    """
    read = {p: v if isinstance(v, str) else _VIEW.read(v, p) for p, v in views.items()}
    _check_devices({view.device for view in read.values() if isinstance(view, _View)})
    made: dict[str, Tensor] = {}
    placed: dict[tuple[str, str], Tensor] = {}
    for path, view in read.items():
        if isinstance(view, str):
            made[path] = made[view]
            yield path, made[path]
            continue
        if view.block is not None and view.is_whole(blocks[view.block]):
            made[path] = blocks[view.block]
            yield path, made[path]
            continue
        if view.block is None:
            if view.reach:
                raise ValueError(f"{path} has no memory")
            tensor = torch.empty_strided(
                view.shape, view.stride, dtype=view.dtype, device=view.device
            )
        else:
            place = (view.block, view.device)
            if place not in placed:
                placed[place] = blocks[view.block].reshape(-1).to(view.device)
            tensor = _part(placed[place], view)
        wanted = view.requires_grad
        made[path] = (
            nn.Parameter(tensor, wanted) if view.parameter else tensor.requires_grad_(wanted)
        )
        yield path, made[path]


def _check_devices(devices: Collection[str]) -> None:
    for device in sorted(devices):
        try:
            if torch.empty(0, device=device).is_meta:
                raise ValueError("the device has no memory")
        except Exception as error:  # each kind of device says in its own way that it is not there
            raise ArtefactError(
                f"its tensors were on the device {device!r}, which this process cannot use "
                f"({error}). For machines without the device, export and quantize the model on the "
                "CPU."
            ) from error


def _part(block: Tensor, view: _View) -> Tensor:
    """Return a view of a block, which it does not reach beyond."""
    if block.dtype is not view.dtype:
        size = torch.empty(0, dtype=view.dtype).element_size()
        flat = block.view(torch.uint8)
        block = flat[: len(flat) - len(flat) % size].view(view.dtype)
    if view.offset + view.reach > block.numel():
        raise ValueError("a tensor extends beyond its block")
    return block.as_strided(view.shape, view.stride, block.storage_offset() + view.offset)


def digest(block: Tensor) -> str:
    """Return the SHA-256 of a block's bytes, in hexadecimal."""
    block = block.detach().cpu().contiguous()
    size = block.numel() * block.element_size()
    memory = (ctypes.c_char * size).from_address(block.data_ptr()) if size else b""
    return hashlib.sha256(memory).hexdigest()


@dataclass(frozen=True)
class _Packing:
    """How integers from `low` on became fields of `bits` in bytes."""

    bits: int
    low: int
    dtype: torch.dtype
    shape: tuple[int, ...]


_PACKING = of_type(
    _Packing, {torch.dtype: named(INTEGERS, "an integer type"), tuple[int, ...]: sequence(_SIZE)}
)


def pack_bits(blocks: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return how blocks were packed, by name, and the blocks: those that fit as bytes, others as they are."""
    fields = {name: found for name, block in blocks.items() if (found := fields_of(block))}
    jobs = {f"packed {n}": partial(_packed, blocks[n], *found) for n, found in fields.items()}
    do_ahead("packing", jobs, shared=False)
    facts: dict[str, Any] = {}
    stored = dict(blocks)
    for name, (bits, low) in fields.items():
        packing = _Packing(bits, low, blocks[name].dtype, tuple(blocks[name].shape))
        facts[name] = _PACKING.write(packing, name)
        stored[name] = kept(f"packed {name}", jobs[f"packed {name}"])["fields"]
    return facts, stored


def _packed(block: Tensor, bits: int, low: int) -> dict[str, Tensor]:
    return {"fields": pack_fields(block, low, bits)}


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes that tensors take in a file; what several names share counts once.

    Raises:
        NotStorable: a tensor that is not plain memory.
    """
    _, blocks = pack(tensors)
    return sum(map(stored_size, blocks.values()))


def unpack_bits(
    packed: Mapping[str, Any], stored: Mapping[str, Tensor], *, later: bool = False
) -> dict[str, Tensor]:
    """Return the blocks that `pack_bits` was given, or those that are unpacked `later`, at each use.

    Raises:
        ValueError, TypeError, LookupError: this is nothing that it returned.
    """
    blocks = {name: _integers(stored[name], facts) for name, facts in packed.items()}
    return {**stored, **(blocks if later else {name: unpacked(b) for name, b in blocks.items()})}


def _integers(block: Tensor, data: Any) -> PackedIntegers:
    packing: _Packing = _PACKING.read(data, "packed")
    bits, low, dtype = packing.bits, packing.low, packing.dtype
    bounds = torch.iinfo(dtype)
    if bits not in BITS or not bounds.min <= low <= bounds.max:
        raise ValueError(f"unknown packing {packing}")
    count = torch.Size(packing.shape).numel()
    if (block.dtype, tuple(block.shape)) != (torch.uint8, (field_bytes(count, bits),)):
        raise ValueError(f"{block.dtype} {[*block.shape]} does not fit {count} {bits}-bit values")
    return PackedIntegers(block, packing.shape, low, bits, dtype)
