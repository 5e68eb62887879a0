# SPDX-License-Identifier: Apache-2.0
"""Batches for calibration, read from files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils import _pytree as pytree

from qompose.cli.command import say
from qompose.errors import CalibrationError, near_names
from qompose.storage.export_archive import Input, Inputs, shown, without_values


@dataclass(frozen=True)
class Batch:
    """A batch: the file it comes from, its number there, and a value for each leaf of the inputs."""

    file: Path
    number: int
    leaves: list[Any]


def read_batches(
    paths: Sequence[Path], inputs: Inputs, batch_size: int | None, limit: int | None
) -> list[Batch]:
    """Return the batches in files, at most `limit`, each checked to be what the program takes.

    Samples, that is a tensor, or tensors by name, with a sample in each step of the first dimension, are
    cut into batches of `batch_size`, or of the size with which the program was exported. A list in a
    `.pt` file has batches in it.

    Raises:
        CalibrationError: a file or a batch in it does not fit; the message names file, batch and input.
        OSError: a file cannot be read.
    """
    batches: list[Batch] = []
    for path in paths:
        for number, leaves in enumerate(_batches(path, inputs, batch_size), start=1):
            if limit is not None and len(batches) == limit:
                return batches
            batches.append(Batch(path, number, leaves))
    return batches


def _batches(path: Path, inputs: Inputs, batch_size: int | None) -> Iterator[list[Any]]:
    data = _read(path)
    if not isinstance(data, (list, tuple)):
        yield from _cut(path, _samples(path, data, inputs), inputs, batch_size)
        return
    if batch_size is not None:
        raise CalibrationError(
            f"{path} holds a list of batches, and --batch-size cuts samples into batches: leave it out"
        )
    if not data:
        raise CalibrationError(f"{path} holds an empty list, and no batch")
    for number, batch in enumerate(data, start=1):
        yield _checked(f"{path}, batch {number}", _leaves(path, number, batch, inputs), inputs)


def _read(path: Path) -> Any:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise CalibrationError(f"{path} must be one of {', '.join(_READERS)}")
    with path.open("rb"):
        pass
    try:
        return reader(path)
    except SafetensorError as error:
        raise CalibrationError(f"{path} is not a valid safetensors file: {error}") from error
    except Exception as error:  # a damaged pickle fails in any way
        raise CalibrationError(
            f"{path} cannot be read as a file of torch.save with weights_only=True ({type(error).__name__}); "
            "tensors, and lists, tuples and dicts of them can"
        ) from error


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


_READERS: Mapping[str, Callable[[Path], Any]] = {
    ".pt": _load,
    ".pth": _load,
    ".safetensors": load_file,
}


def _samples(path: Path, data: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Return samples by the name of the input they are for."""
    known = {tensor.name for tensor in inputs.tensors}
    if not known:
        raise CalibrationError(
            f"{path}: the program takes no tensors, and needs no data: leave out --calibration"
        )
    if isinstance(data, Tensor):
        if len(known) != 1:
            raise CalibrationError(
                f"{path} holds one tensor, and the program takes {inputs}: name the tensors in a dict"
            )
        data = dict.fromkeys(known, data)
    if not isinstance(data, Mapping):
        raise CalibrationError(
            f"{path} must hold a tensor, a list of batches or a dict of tensors, got {type(data).__name__}"
        )
    named = _named(path, data, inputs)
    for name, value in named.items():
        _check_sample(path, name, value, inputs)
    missing = sorted(known - set(named))
    if missing:
        raise CalibrationError(
            f"{path} has nothing for {' and '.join(missing)}; the program takes {inputs}"
        )
    return named


def _named(path: Path, data: Mapping[Any, Any], inputs: Inputs) -> dict[str, Any]:
    """Return what a file holds by the names of inputs, for which it may have arg0, arg1, ..."""
    names = [tensor.name for tensor in inputs.tensors]
    numbered = {f"arg{i}": name for i, name in enumerate(names)}
    named: dict[str, Any] = {}
    for given, value in data.items():
        name = str(given if given in names else numbered.get(given, given))
        if name in named:
            raise CalibrationError(
                f"{path} has the input {name} twice: by its name, and as arg{names.index(name)}"
            )
        named[name] = value
    return named


def _check_sample(path: Path, name: str, value: Any, inputs: Inputs) -> None:
    known = [tensor.name for tensor in inputs.tensors]
    if name not in known:
        raise CalibrationError(
            f"{path}: the program has no input {name!r}{near_names(name, known)}; it takes {inputs}"
        )
    objection = (
        without_values(value)
        if isinstance(value, Tensor)
        else f"is a {type(value).__name__}; expected a tensor of samples"
    )
    if objection:
        raise CalibrationError(f"{path}, input {name}: it {objection}")


def _cut(
    path: Path, samples: Mapping[str, Tensor], inputs: Inputs, batch_size: int | None
) -> Iterator[list[Any]]:
    """Cut samples into batches. What remains is a smaller batch, or is left out where none may be."""
    lengths = {name: len(value) if value.dim() else None for name, value in samples.items()}
    count = next(iter(lengths.values()), None)
    if count is None or set(lengths.values()) != {count}:
        listed = ", ".join(f"{name} {length or 'none'}" for name, length in lengths.items())
        raise CalibrationError(
            f"{path}: the inputs have different numbers of samples ({listed}); what does not go by samples "
            "needs a list of batches"
        )
    size = batch_size or inputs.tensors[0].example_batch
    if count == 0 or not _is_taken(min(count, size), inputs):
        _refuse(path, count, size, inputs)
    for start in range(0, count, size):
        stop = min(start + size, count)
        if not _is_taken(stop - start, inputs):
            say(
                f"{path}: the last {stop - start} of {count} samples are left out, because they make no "
                f"batch that the program takes ({inputs})"
            )
            return
        leaves = inputs.filled({name: value[start:stop] for name, value in samples.items()})
        yield _checked(f"{path}, batch {start // size + 1}", leaves, inputs)


def _is_taken(size: int, inputs: Inputs) -> bool:
    return all(tensor.takes_batch(size) for tensor in inputs.tensors)


def _refuse(path: Path, count: int, size: int, inputs: Inputs) -> None:
    raise CalibrationError(
        f"{path}: {count} samples in batches of {size} are nothing that the program takes ({inputs}); "
        "--batch-size sets the size of a batch"
    )


def _leaves(path: Path, number: int, batch: Any, inputs: Inputs) -> list[Any]:
    """Return the leaves of a batch: a tensor, a tuple of positional arguments, or a dict of keyword ones."""
    if isinstance(batch, Tensor):
        given: tuple[Any, Any] = ((batch,), {})
    elif isinstance(batch, Mapping):
        given = inputs.by_name(batch)
    else:
        given = (tuple(batch) if isinstance(batch, (list, tuple)) else (batch,), {})
    flat, spec = pytree.tree_flatten(given)
    if spec != inputs.spec:
        raise CalibrationError(
            f"{path}, batch {number}: it has {_count(flat)} in another structure than the program's inputs, "
            f"which are {inputs.structure}; it is {shown(batch)}"
        )
    return flat


def _count(flat: Sequence[Any]) -> str:
    return f"{len(flat)} value{'s' * (len(flat) != 1)}"


def _checked(where: str, leaves: list[Any], inputs: Inputs) -> list[Any]:
    for wanted, value in zip(inputs.leaves, leaves, strict=True):
        objection = wanted.objection(value) if isinstance(wanted, Input) else None
        if objection:
            raise CalibrationError(f"{where}, input {wanted.name}: it {objection}")
    return leaves
