# SPDX-License-Identifier: Apache-2.0
"""Calibration batches of files, matched to the inputs of a program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from qompose.errors import CalibrationError, QomposeWarning, near_names


@dataclass(frozen=True)
class Input:
    """A tensor that a program takes. `sizes` has the least and the greatest size of each dimension."""

    name: str
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[tuple[int, int | None], ...]
    example_batch: int

    def objection(self, value: object) -> str | None:
        """Return why a value cannot be this input, or None."""
        if not isinstance(value, Tensor):
            return f"must be a tensor, got {type(value).__name__}"
        if objection := without_values(value):
            return objection
        fits = len(self.sizes) == value.dim() and all(map(_within, value.shape, self.sizes))
        if fits and value.dtype == self.dtype:
            return None
        return f"is {_dtype(value.dtype)}{list(value.shape)}, but the program expects {self.shape}"

    @property
    def shape(self) -> str:
        """Return element type and sizes as text, `float32[2.., 8]` where 8 is fixed and 2 the least."""
        return f"{_dtype(self.dtype)}[{', '.join(map(_size, self.sizes))}]"

    def takes_batch(self, size: int) -> bool:
        """Whether the first dimension may have this size."""
        return bool(self.sizes) and _within(size, self.sizes[0])

    def __str__(self) -> str:
        return f"{self.name}: {self.shape}"


def without_values(value: Tensor) -> str | None:
    """Return why a tensor has no values that a program can be run with, or None."""
    if value.is_meta:
        return "is on the 'meta' device, so it has no values"
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        return f"has layout {layout}, but programs expect dense tensors; save its .to_dense()"
    return None


def shown(value: Any) -> str:
    """Return a value, or what is wanted for one, with its containers and without its numbers."""
    if isinstance(value, Input):
        return value.shape
    if isinstance(value, Tensor):
        return f"{_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {shown(item)}" for key, item in value.items()) + "}"
    if type(value) in (list, tuple):
        left, right = "[]" if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
        return left + ", ".join(map(shown, value)) + right
    simple = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if simple else f"{type(value).__name__}(...)"


def _within(size: int, bounds: tuple[int, int | None]) -> bool:
    low, high = bounds
    return low <= size and (high is None or size <= high)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(bounds: tuple[int, int | None]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}..{'' if high is None else high}"


@dataclass(frozen=True)
class Inputs:
    """What a program is called with: a leaf for each tensor or number in its arguments, and their structure.

    `leaves` has an Input for a tensor, and for anything else the value with which the program was exported.
    `names` are those of the arguments, the positional ones first.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    names: tuple[str, ...]

    @property
    def tensors(self) -> tuple[Input, ...]:
        """Return the tensors, in the order in which the program takes them."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Input))

    def __str__(self) -> str:
        flat = ", ".join(map(str, self.tensors)) or "no tensors"
        nested = any(
            not child.is_leaf() for part in self.spec.children() for child in part.children()
        )
        return f"{flat} (in {self.structure})" if nested else flat

    @property
    def structure(self) -> str:
        """Return the arguments by name, each with its containers."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return ", ".join(f"{name}: {shown(value)}" for name, value in named.items()) or "none"

    def filled(self, values: Mapping[str, Tensor]) -> list[Any]:
        """Return leaves with the values of the named tensors."""
        return [values[leaf.name] if isinstance(leaf, Input) else leaf for leaf in self.leaves]

    def call(self, leaves: list[Any]) -> dict[str, Any]:
        """Return the arguments by name."""
        placed = [
            value.to(leaf.device) if isinstance(leaf, Input) else value
            for leaf, value in zip(self.leaves, leaves, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(placed, self.spec)
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def by_name(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Sort arguments by name into positional and keyword ones, in the order of the program's own."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        positional = self.names[: len(args)]
        ordered = {name: values[name] for name in kwargs if name in values} | dict(values)
        return (
            tuple(values[name] for name in positional if name in values),
            {name: value for name, value in ordered.items() if name not in positional},
        )


def program_inputs(program: ExportedProgram) -> Inputs:
    """Return what a program is called with."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    leaves = [
        _leaf(spec.arg, values.get(spec.arg.name), program)
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    signature = program.module_call_graph[0].signature
    names = signature.forward_arg_names if signature else None
    return Inputs(tuple(leaves), program.call_spec.in_spec, tuple(names or ()))


def _leaf(argument: Any, value: Any, program: ExportedProgram) -> Any:
    if not isinstance(value, Tensor):
        return value.node.hint if isinstance(value, torch.SymInt) else argument.value
    sizes = tuple(_bounds(size, program) for size in value.shape)
    first: Any = value.shape[0] if value.dim() else 1
    hint = first.node.hint if isinstance(first, torch.SymInt) else first
    return Input(argument.name, value.dtype, value.device, sizes, int(hint or 1))


def _bounds(size: Any, program: ExportedProgram) -> tuple[int, int | None]:
    if not isinstance(size, torch.SymInt):
        return int(size), int(size)
    found = program.range_constraints.get(size.node.expr)
    if found is None:
        return 0, None
    low, high = found.lower, found.upper
    return int(low) if low.is_Integer else 0, int(high) if high.is_Integer else None


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
            f"{path} holds a list of batches, which --batch-size cannot split; remove --batch-size"
        )
    if not data:
        raise CalibrationError(f"{path} holds an empty list; expected at least one batch")
    for number, batch in enumerate(data, start=1):
        yield _checked(f"{path}, batch {number}", _leaves(path, number, batch, inputs), inputs)


def _read(path: Path) -> Any:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise CalibrationError(f"{path} must end in one of {', '.join(_READERS)}")
    with path.open("rb"):
        pass
    try:
        return reader(path)
    except SafetensorError as error:
        raise CalibrationError(f"{path} is not a valid safetensors file: {error}") from error
    except Exception as error:  # a damaged pickle fails in any way
        raise CalibrationError(
            f"{path} cannot be loaded by torch.load with weights_only=True "
            f"({type(error).__name__}). The file may only contain tensors and lists, tuples "
            "or dicts of tensors"
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
            f"{path}: the program has no tensor inputs; quantize it without --calibration"
        )
    if isinstance(data, Tensor):
        if len(known) != 1:
            raise CalibrationError(
                f"{path} holds one tensor, but the program expects {inputs}; save a dict "
                "that maps input names to tensors"
            )
        data = dict.fromkeys(known, data)
    if not isinstance(data, Mapping):
        raise CalibrationError(
            f"{path} must contain a tensor, a list of batches or a dict of tensors, got {type(data).__name__}"
        )
    named = _named(path, data, inputs)
    for name, value in named.items():
        _check_sample(path, name, value, inputs)
    missing = sorted(known - set(named))
    if missing:
        raise CalibrationError(
            f"{path} has no samples for {' and '.join(missing)}. The program expects {inputs}"
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
                f"{path} has the input {name} twice, by name and as arg{names.index(name)}"
            )
        named[name] = value
    return named


def _check_sample(path: Path, name: str, value: Any, inputs: Inputs) -> None:
    known = [tensor.name for tensor in inputs.tensors]
    if name not in known:
        raise CalibrationError(
            f"{path}: the program has no input {name!r}{near_names(name, known)}. It expects "
            f"{inputs}"
        )
    objection = (
        without_values(value)
        if isinstance(value, Tensor)
        else f"must be a tensor of samples, got {type(value).__name__}"
    )
    if objection:
        raise CalibrationError(f"{path}: input {name} {objection}")


def _cut(
    path: Path, samples: Mapping[str, Tensor], inputs: Inputs, batch_size: int | None
) -> Iterator[list[Any]]:
    """Cut samples into batches. What remains is a smaller batch, or is left out where none may be."""
    lengths = {name: len(value) if value.dim() else None for name, value in samples.items()}
    count = next(iter(lengths.values()), None)
    if count is None or set(lengths.values()) != {count}:
        listed = ", ".join(f"{name} {'none' if n is None else n}" for name, n in lengths.items())
        raise CalibrationError(
            f"{path}: inputs must have the same number of samples in dimension 0, got {listed}. "
            "Use a list of batches for inputs without that dimension"
        )
    size = batch_size or inputs.tensors[0].example_batch
    if count == 0 or not _is_taken(min(count, size), inputs):
        raise CalibrationError(
            f"{path}: {count} samples in batches of {size} do not fit the program, which expects "
            f"{inputs}. Provide more samples or a different --batch-size"
        )
    for start in range(0, count, size):
        stop = min(start + size, count)
        if not _is_taken(stop - start, inputs):
            warnings.warn(
                f"{path}: the last {stop - start} of {count} samples are skipped because they do "
                f"not fill a batch that the program accepts ({inputs})",
                QomposeWarning,
                stacklevel=2,
            )
            return
        leaves = inputs.filled({name: value[start:stop] for name, value in samples.items()})
        yield _checked(f"{path}, batch {start // size + 1}", leaves, inputs)


def _is_taken(size: int, inputs: Inputs) -> bool:
    return all(tensor.takes_batch(size) for tensor in inputs.tensors)


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
            f"{path}, batch {number}: expected {inputs.structure}, got {shown(batch)} "
            f"({len(flat)} value{'s' * (len(flat) != 1)})"
        )
    return flat


def _checked(where: str, leaves: list[Any], inputs: Inputs) -> list[Any]:
    for wanted, value in zip(inputs.leaves, leaves, strict=True):
        objection = wanted.objection(value) if isinstance(wanted, Input) else None
        if objection:
            raise CalibrationError(f"{where}: input {wanted.name} {objection}")
    return leaves
