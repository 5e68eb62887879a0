# SPDX-License-Identifier: Apache-2.0
"""Programs as files: what torch.export.save wrote, and what its inputs are."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from qompose.commands.program_archives import RefusedArchive, checked
from qompose.errors import UserError
from qompose.faults import told


def load_program(path: Path) -> ExportedProgram:
    """Return the program in a file that torch.export.save wrote, if reading it runs no code.

    Raises:
        UserError: it is of another kind, or refused; the message says which, where that can be seen.
        OSError: it cannot be read.
    """
    with path.open("rb"):
        pass
    remedy = "Write one with torch.export.save(torch.export.export(model, inputs), 'model.pt2')."
    other = _other_kind(path)
    if other is not None:
        raise UserError(f"{path} is no archive of torch.export: {other}. {remedy}")
    with _logged_by("torch.export") as problems:
        try:
            with checked(path) as file:
                program = torch.export.load(file)
            program._guards_code = []  # source, which nothing here is to run
            return program
        except RefusedArchive as refusal:
            raise UserError(
                f"{path} is refused: {refusal}. Where you trust it, read it with torch.export.load in "
                "Python, and pass the program to qompose.quantize."
            ) from refusal
        except Exception as error:
            reason = told(problems[-1] if problems else error)
            raise UserError(f"{path} cannot be read by torch.export: {reason}. {remedy}") from error


def _other_kind(path: Path) -> str | None:
    """Return what a file is that is no archive of torch.export, and None for one that seems to be."""
    if is_zipfile(path):
        with ZipFile(path) as archive:
            names = {name.rpartition("/")[2] for name in archive.namelist()}
        if "archive_format" in names:
            return None
        return "torch.save wrote it" if "data.pkl" in names else "it is some other zip archive"
    try:
        with safe_open(path, framework="pt") as file:
            if "qompose" in (file.metadata() or {}):
                return (
                    f"it holds a model that is quantized already (`qompose report {path}` shows it)"
                )
            return "it is a safetensors file"
    except SafetensorError:
        return "it is no zip archive"


class _Collector(logging.Handler):
    """Keeps the exceptions that are logged, and prints nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.errors += [error] if error is not None else []


@contextmanager
def _logged_by(name: str) -> Iterator[list[BaseException]]:
    """Collect what a logger and those below it say: torch logs the cause of an error, and raises another."""
    logger, collector = logging.getLogger(name), _Collector()
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [collector], False
    try:
        yield collector.errors
    finally:
        logger.handlers, logger.propagate = before


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
            return f"is {type(value).__name__}, and not a tensor"
        if objection := without_values(value):
            return objection
        fits = len(self.sizes) == value.dim() and all(map(_within, value.shape, self.sizes))
        if fits and value.dtype == self.dtype:
            return None
        return f"is {_dtype(value.dtype)}{list(value.shape)}, and the program takes {self.shape}"

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
        return "is a tensor of the device 'meta', which has no values"
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        return f"has the layout {layout}, and programs take dense tensors: store its .to_dense()"
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
