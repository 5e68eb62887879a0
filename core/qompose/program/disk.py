# SPDX-License-Identifier: Apache-2.0
"""Tensors on disk: weights as pages of a checkpoint, files for what is made of them, and fields of bits.

Mapped tensors are read when they are used, and the system takes their pages back when it needs memory. Each
has a storage of its own, as if it had been made alone.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import mmap
import os
import sys
import tempfile
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from qompose.errors import CheckpointError, UserError, warn_user
from qompose.program.graph import get_attribute, set_attribute

if TYPE_CHECKING:
    from rich.progress import Progress

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
Made: TypeAlias = "dict[str, Tensor]"
Job: TypeAlias = "Callable[[], Made]"
"""Makes tensors, the same in every process."""
INDEX = "model.safetensors.index.json"
"""The file that says which file of a sharded checkpoint has which tensor."""
_LISTED = 10
"""How many tensors a message names."""


def mapped(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint's file as pages of it, which must not be written to.

    Raises:
        CheckpointError: it is not a safetensors file, is cut off, or has a type that torch does not know.
        OSError: it cannot be read.
    """
    start, header = _header(path)
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {name: _view(pages, start, facts) for name, facts in header.items()}


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return at which byte the tensors of a safetensors file begin, and what it says of each."""
    with path.open("rb") as file:
        _checked_names(path)
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    if odd := sorted({facts["dtype"] for facts in header.values()} - {*_DTYPES}):
        raise CheckpointError(f"{path} has tensors of the types {', '.join(odd)}")
    return 8 + size, header


def names_in(path: Path) -> list[str]:
    """Return the names of the tensors of a safetensors file, whose header fits its size.

    Raises:
        CheckpointError: it is not a safetensors file, or is cut off.
        OSError: it cannot be read.
    """
    with path.open("rb"):  # says of what cannot be read what it is; safetensors does not
        return _checked_names(path)


def _checked_names(path: Path) -> list[str]:
    """Return the names of the tensors of a file that can be read, having checked its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return [*file.keys()]
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _view(pages: mmap.mmap, start: int, facts: Mapping[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[facts["dtype"]], tuple(facts["shape"])
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    offset = start + facts["data_offsets"][0]
    with warnings.catch_warnings():  # that nobody may write to it, which is so
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        flat = torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=offset)
    return flat.view(shape)


def _read(path: Path) -> Made:
    """Return the tensors of a small file that `_write` wrote, each mapped on its own.

    Unlike `mapped`, it holds no file open: a process may open few, and a model has many weights.
    """
    start, header = _header(path)
    size, made = path.stat().st_size, {}
    for name, facts in header.items():
        dtype, shape = _DTYPES[facts["dtype"]], tuple(facts["shape"])
        storage: Any = torch.UntypedStorage.from_file(str(path), False, size)
        offset = (start + facts["data_offsets"][0]) // dtype.itemsize
        flat = torch.empty(0, dtype=dtype).set_(storage, offset, (math.prod(shape),), (1,))
        made[name] = flat.view(shape)
    return made


def _write(path: Path, made: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors to a file that is there whole or not at all."""
    draft = path.with_name(f"{uuid4().hex}.draft")
    try:
        save_file({name: tensor.detach() for name, tensor in made.items()}, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


def files_of(checkpoint: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint: a file, an index of several, or a folder with either.

    Raises:
        CheckpointError: there is none, or there are several without an index, or the index is not one or
            does not agree with its files.
        OSError: it cannot be read, or a file that the index names cannot.
    """
    if checkpoint.is_dir():
        if (checkpoint / INDEX).exists():
            return files_of(checkpoint / INDEX)
        found = sorted(checkpoint.glob("*.safetensors"))
        if len(found) != 1:
            raise CheckpointError(
                f"{checkpoint} has {len(found)} safetensors files and no {INDEX}; pass one file, an index, "
                "or a folder with either"
            )
        return (found[0],)
    if checkpoint.suffix != ".json":
        return (checkpoint,)
    places = _places(checkpoint)
    files = tuple(map(checkpoint.with_name, sorted(set(places.values()))))
    _check_places(checkpoint, places, {file.name: names_in(file) for file in files})
    return files


def _places(index: Path) -> dict[str, str]:
    """Return by tensor the name of the file in which an index says that it is."""
    try:
        places = dict(json.loads(index.read_text("utf-8"))["weight_map"])
        if odd := [name for name in sorted(places.values()) if not name or Path(name).name != name]:
            raise ValueError(f"{odd[0]!r} is not the name of a file beside it")
        return places
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not an index of safetensors files: {type(error).__name__}: {error}"
        ) from error


def _check_places(
    index: Path, places: Mapping[str, str], held: Mapping[str, Sequence[str]]
) -> None:
    """Raise CheckpointError for tensors that are not where an index says; `held` are those of files.

    A file of an older download, or of another model, may have tensors of the same names and shapes.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for file, names in held.items():
        for name in names:
            found[name].append(file)
    wrong = sorted(n for n in found.keys() | places.keys() if found.get(n) != [places.get(n)])
    if wrong:
        lines = "".join(
            f"\n  - {name} is in {', '.join(found.get(name, ())) or 'no file'}, but by the index in "
            f"{places.get(name, 'no file')}"
            for name in wrong[:_LISTED]
        )
        more = f"\n  - and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise CheckpointError(
            f"{index} does not agree with its files. Download all of them again, or save the "
            f"checkpoint anew:{lines}{more}",
            wrong,
        )


def tensors_of(files: tuple[Path, ...]) -> dict[str, Tensor]:
    """Return the tensors of `files_of` a checkpoint, mapped; raises what `mapped` does."""
    return {name: tensor for file in files for name, tensor in mapped(file).items()}


def with_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a model, as a rule of the meta device, that has the tensors of a checkpoint.

    Of tied parameters the checkpoint may have one or all. Buffers that a state dict leaves out keep their
    values.

    Raises:
        UserError: `model` is no module.
        CheckpointError: tensors are missing, left over, or of another shape or type than the model's; or
            a buffer has no values.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"a checkpoint needs a torch.nn.Module to go with, got {model!r}")
    ties = _ties(model)
    names = {name: tied[0] for tied in ties for name in tied}
    given: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        given.setdefault(names.get(name, name), tensor)
    if wrong := [*_misfits(model, tensors, ties, given)]:
        raise CheckpointError(
            "the checkpoint does not fit the model:"
            + "".join(f"\n  - {name} {reason}" for name, reason in wrong),
            [name for name, _ in wrong],
        )
    own = chain(model.parameters(), model.buffers())
    result = copy.deepcopy(model, {id(tensor): tensor for tensor in own})  # shared, not copied
    for tied in ties:
        old, value = get_attribute(result, tied[0]), given[tied[0]]
        if isinstance(old, nn.Parameter):
            value = nn.Parameter(value, requires_grad=old.requires_grad)
        for name in tied:
            set_attribute(result, name, value)
    return result


def _ties(model: nn.Module) -> list[list[str]]:
    """Return the names of a state dict, those of one tensor together."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        found[id(tensor)].append(name)
    return list(found.values())


def _misfits(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    ties: list[list[str]],
    given: Mapping[str, Tensor],
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a checkpoint, by tensor; `given` has one of each that are tied."""
    for tied in ties:
        if tied[0] not in given:
            yield tied[0], "is not in the checkpoint"
        for name in filter(tensors.__contains__, tied):
            yield from (
                (name, text) for text in _objections(tensors[name], get_attribute(model, name))
            )
            if not _same(tensors[name], given[tied[0]]):
                yield name, f"differs, but is one tensor in the model: {', '.join(tied)}"
    known = {name for tied in ties for name in tied}
    for name in tensors.keys() - known:
        yield name, "is not in the model"
    for name, buffer in model.named_buffers():
        if name not in known and buffer.is_meta:
            yield (
                name,
                (
                    "is a buffer that state dicts leave out, and has no values on the meta device; make "
                    "it on the CPU (accelerate.init_empty_weights does)"
                ),
            )


def _same(one: Tensor, other: Tensor) -> bool:
    """Tell whether tensors are one, or have one shape and the same values."""
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def _objections(tensor: Tensor, wanted: Tensor) -> Iterator[str]:
    if tensor.is_meta:
        yield "is on the meta device and has no values"
    if tensor.shape != wanted.shape:
        yield f"has the shape {tuple(tensor.shape)}, the model's {tuple(wanted.shape)}"
    if tensor.dtype is not wanted.dtype:
        yield f"is {tensor.dtype}, the model's {wanted.dtype}: call model.to({tensor.dtype})"


class Ranks(Protocol):
    """Processes that work together, or one alone: `qompose.calibration.calibrator.Ranks`."""

    @property
    def rank(self) -> int:
        """Return the number of this process."""

    @property
    def count(self) -> int:
        """Return how many there are."""

    def exchange(self, part: Any) -> list[Any]:
        """Return what each process gave."""


_WEIGHTS = "weights.qompose"


def whole_tensors(source: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    """Return the tensors of a state dict; parts that processes hold (DTensor) are put together on disk.

    All processes have to call it with the same names in the same order.

    Raises:
        OSError: `folder`, which is made anew, cannot be written.
    """
    parts = [name for name, tensor in source.items() if hasattr(tensor, "full_tensor")]
    if not parts:
        return dict(source)
    place = folder / _WEIGHTS
    if ranks.rank == 0:
        if place.exists():
            rmtree(place)
        place.mkdir(parents=True)
    files = {name: place / f"{number}.safetensors" for number, name in enumerate(parts)}
    for name, file in files.items():
        whole: Any = source[name]
        made = whole.full_tensor()
        if ranks.rank == 0:
            _write(file, {"whole": made.detach().cpu().contiguous()})
    ranks.exchange(None)
    return {**source, **{name: _read(file)["whole"] for name, file in files.items()}}


@dataclass(frozen=True)
class Spool:
    """A folder with a file per finished job, from which whoever comes next takes what the job made.

    A file is there whole or not at all, so work that was cut off is gone on with; and processes on one file
    system share it.
    """

    folder: Path
    ranks: Ranks
    bar: Progress

    def claim(self, task: str) -> None:
        """Make the folder, or find it as the same task left it.

        Raises:
            UserError: it was left by another task; or processes do not see one folder.
        """
        note = self.folder / "task"
        if self.ranks.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not note.exists() and {file.name for file in self.folder.iterdir()} <= {_WEIGHTS}:
                note.write_text(task)
        self.ranks.exchange(None)
        found = note.read_text() if note.exists() else None
        if any(each != task for each in self.ranks.exchange(found)):
            raise UserError(
                f"{self.folder} is not the unfinished work of this model, checkpoint, configuration and "
                "versions. Delete it, or pass another folder as scratch=. Processes that share work have to "
                "see one folder."
            )

    def fill(self, title: str, jobs: Mapping[str, Job], *, shared: bool = True) -> None:
        """Do the jobs that nobody has done; `shared` ones are divided among processes.

        Raises:
            UserError: another process failed.
            Exception: whatever a job raises.
        """
        rank, count = (self.ranks.rank, self.ranks.count) if shared else (0, 1)
        mine = dict(list(jobs.items())[rank::count])
        done = self.bar.add_task(title, total=len(mine))

        def work() -> None:
            for name, job in mine.items():
                if not self._file(name).exists():
                    _write(self._file(name), job())
                self.bar.advance(done)

        self.together(work) if shared else work()

    def together(self, work: Callable[[], None]) -> None:
        """Work, and go on when every process has; what stops one stops all.

        Raises:
            UserError: another process failed.
            Exception: whatever the work raises.
        """
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        said = self.ranks.exchange(failure and f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if failed := [f"process {number}: {text}" for number, text in enumerate(said) if text]:
            raise UserError(f"another process failed: {'; '.join(failed)}")

    def take(self, name: str, job: Job) -> Made:
        """Return what a job made, from its file, which is made if need be. Small ones stay in memory."""
        if not self._file(name).exists():
            made = job()
            size = sum(tensor.untyped_storage().nbytes() for tensor in made.values())
            if size < _SMALL or not all(tensor.is_contiguous() for tensor in made.values()):
                return made
            _write(self._file(name), made)
        return _read(self._file(name))

    def _file(self, name: str) -> Path:
        return self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"


_SMALL = 2**16
"""Bytes from which on a file is worth the while."""
_current: ContextVar[Spool | None] = ContextVar("qompose_spool", default=None)


@contextmanager
def spooling(spool: Spool) -> Iterator[None]:
    """Let conversion and saving keep on disk what they make of weights, a tensor at a time."""
    token = _current.set(spool)
    try:
        yield
    finally:
        _current.reset(token)


def spools() -> bool:
    """Tell whether tensors are kept on disk now."""
    return _current.get() is not None


def do_ahead(title: str, jobs: Mapping[str, Job], *, shared: bool = True) -> None:
    """Do jobs that `kept` will ask for, if tensors are kept on disk; see `Spool.fill`."""
    if (spool := _current.get()) is not None:
        spool.fill(title, jobs, shared=shared)


def kept(name: str, job: Job) -> Made:
    """Return what a job makes, from disk if tensors are kept there; the same values and shapes.

    Args:
        name: of this job and no other of a task.
    """
    spool = _current.get()
    return job() if spool is None else spool.take(name, job)


class Pages:
    """A nameless temporary file that tensors move to. All share one, since a process may open only so many.

    When memory is short the system drops their pages, which it can read again. Writing to a tensor changes
    memory, not the file. The file is gone once the last of them is.

    Args:
        sizes: in bytes, of each tensor. Nothing is written before one comes.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._size, self._at = sum(_aligned(size) for size in sizes), 0
        self._mapping: mmap.mmap | None = None
        if self._size < _SMALL:
            return
        try:
            self._file = tempfile.TemporaryFile(prefix="qompose-", buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
            self._file.truncate(self._size)
            self._mapping = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            self._stay(error)

    def moved(self, x: Tensor) -> Tensor:
        """Return a tensor of the same values in the file.

        What is small or on another device is returned as it is. So is all from the first on that finds no
        room, with one warning.
        """
        size = x.numel() * x.element_size()
        if self._mapping is None or size < _SMALL or x.device.type != "cpu":
            return x
        left = x.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        try:
            self._file.seek(self._at)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._stay(error)
            return x
        at, self._at = self._at, self._at + _aligned(size)
        flat = torch.frombuffer(self._mapping, dtype=x.dtype, count=x.numel(), offset=at)
        return flat.view(x.shape)

    def _stay(self, error: OSError) -> None:
        self._mapping = None
        warn_user(
            f"{self._size - self._at} bytes of integers stay in memory: no temporary file could be written "
            f"({error}). Set TMPDIR to a directory with room"
        )


def _aligned(size: int) -> int:
    """Return the bytes from one tensor to the next: each begins at a multiple of 8."""
    return -(-size // 8) * 8


# Integers of few values are fields of few bits in a file, which follow one another in bytes without gaps:
# `value = field + low`. How many bits a tensor needs is found from its values, not from a scheme. Zero points
# of groups fit too, which are as many as the scales, eight bytes each, and as a rule all zero.
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
    if isinstance(x, PackedIntegers):
        return x.fields.numel()
    found = fields_of(x)
    return x.numel() * x.element_size() if found is None else field_bytes(x.numel(), found[0])


_AT_A_TIME: Final = 2**20
"""How many values are packed at a time, a multiple of 8: temporaries are then small beside a model."""


def pack_fields(x: Tensor, low: int, bits: int) -> Tensor:
    """Return integers as fields, in bytes, shape `(field_bytes,)`; the first has the lowest bits."""
    flat = x.reshape(-1)
    packed = torch.empty(field_bytes(len(flat), bits), dtype=torch.uint8, device=x.device)
    for first in range(0, len(flat), _AT_A_TIME):
        part = _packed(flat[first : first + _AT_A_TIME], low, bits)
        start = first // 8 * bits
        packed[start : start + len(part)] = part
    return packed


def _packed(flat: Tensor, low: int, bits: int) -> Tensor:
    fields = (flat - low).to(torch.uint8)
    # The usual case is computed in a quarter of the time.
    if bits == 4 and len(fields) % 2 == 0 and sys.byteorder == "little":
        pairs = fields.view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs & 15).to(torch.uint8)
    size = field_bytes(len(fields), bits)
    fields = torch.nn.functional.pad(fields, (0, -len(fields) % 8)).view(-1, 8)
    packed = fields.new_zeros(len(fields), bits)  # eight fields fill so many bytes
    for place in range(8):
        byte, shift = divmod(bits * place, 8)
        packed[:, byte] |= fields[:, place] << shift
        if shift + bits > 8:  # it goes on in the next byte
            packed[:, byte + 1] |= fields[:, place] >> (8 - shift)
    return packed.reshape(-1)[:size]


def unpack_fields(packed: Tensor, count: int, low: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the integers that `pack_fields` was given, shape `(count,)`."""
    integers = torch.empty(count, dtype=dtype, device=packed.device)
    for first in range(0, count, _AT_A_TIME):
        part, start = integers[first : first + _AT_A_TIME], first // 8 * bits
        fields = _fields(packed[start : start + field_bytes(len(part), bits)], bits)
        part.copy_(fields[: len(part)]).add_(low)
    return integers


def _fields(packed: Tensor, bits: int) -> Tensor:
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), 1).reshape(-1)
    stream = torch.nn.functional.pad(packed, (0, -len(packed) % bits)).view(-1, bits)
    fields = packed.new_empty(len(stream), 8)
    for place in range(8):
        byte, shift = divmod(bits * place, 8)
        field = stream[:, byte] >> shift
        if shift + bits > 8:
            field = field | stream[:, byte + 1] << (8 - shift)
        fields[:, place] = field & ((1 << bits) - 1)
    return fields.reshape(-1)


class PackedIntegers(Tensor):
    """Integers as fields, with the shape and type of the integers, for a program on its way to kernels.

    Whatever operator reads it sees the integers, which are unpacked for it alone. Its memory is that of the
    fields. Programs that leave core have none: see `unpack_constants`.
    """

    fields: Tensor
    _range: tuple[int, int]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, fields: Tensor, shape: Sequence[int], low: int, bits: int, dtype: torch.dtype
    ) -> PackedIntegers:
        made: PackedIntegers = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        made.fields, made._range = fields, (low, bits)
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the fields' memory, by which what is shared is known."""
        return self.fields.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        places = zip(func._schema.arguments, args, strict=False)
        written = [v for place, v in places if place.alias_info and place.alias_info.is_write]
        if any(isinstance(v, PackedIntegers) for v in [*written, (kwargs or {}).get("out")]):
            raise TypeError(f"{func} cannot write to integers that are packed as in their file")
        args, named = tree_map(unpacked, (args, kwargs or {}))
        return func(*args, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedIntegers:
        """Return itself: nothing writes to it."""
        return self


def unpacked(value: Any) -> Any:
    """Return the integers of what is packed, new in memory, and anything else as it is."""
    if not isinstance(value, PackedIntegers):
        return value
    return unpack_fields(value.fields, value.numel(), *value._range, value.dtype).view(value.shape)


def unpack_constants(module: nn.Module) -> None:
    """Replace packed buffers by their integers, in place; what is one tensor stays one."""
    named = [*module.named_buffers(remove_duplicate=False)]
    made: dict[Tensor, Tensor] = {v: unpacked(v) for _, v in named if isinstance(v, PackedIntegers)}
    for path, value in named:
        if value in made:
            set_attribute(module, path, made[value])
