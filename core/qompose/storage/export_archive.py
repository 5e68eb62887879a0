# SPDX-License-Identifier: Apache-2.0
"""torch.export .pt2 archives, read without running code.

Archives of torch.export that can run no code: what is in them is checked before torch reads it.

`torch.export.load` unpickles weights, constants and objects where an archive says so, loads compiled code,
evaluates sizes as Python, and takes any attribute of torch for an operator. Here an archive may hold what
`torch.export.save` writes of a plain program, and nothing else; of the pickle of the example inputs, which
is always there, tensors and numbers are read and no other class.

Programs as files: what torch.export.save wrote, and what its inputs are.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from qompose.backend.discovery import describe_error
from qompose.errors import UserError
from qompose.storage.json_values import FUNCTION_NAMES
from qompose.storage.program_json import UnknownOperator, decode_target

_KINDS = (
    (r"(\.data/.*|archive_format|archive_version|byteorder|extra/.*|models/model\.json)", ""),
    (r"data/(weights/weight_\d+|constants/tensor_\d+)", ""),
    (r"data/(weights/model_weights_config|constants/model_constants_config)\.json", ""),
    (r"data/sample_inputs/model\.pt", ""),
    (r"data/constants/(custom|opaque)_obj_.*", "an object that is pickled"),
    (
        r"data/(weights|constants)/.*\.pt|serialized_.*|version",
        "a legacy payload, which is pickled",
    ),
    (r"data/aotinductor/.*", "compiled code"),
    (r"models/.*", "a second program"),
    (r".*", "something that torch.export.save does not write"),
)
_CONFIGS = {"data/weights/model_weights_config.json", "data/constants/model_constants_config.json"}
_EXAMPLES, _MODEL = "data/sample_inputs/model.pt", "models/model.json"
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")
_HIGH_NUMBER = re.compile(r"[a-z]+\d{7,}")
_TEXT = re.compile(r"[A-Za-z_]\w*|-?[\d.]+(e[+-]?\d+)?")
_CALLABLE = FUNCTION_NAMES | {
    *("Symbol", "Integer", "Float", "IsNonOverlappingAndDenseIndicator"),
    *("Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan"),
}
_PLAIN = (
    *(
        ast.Expression,
        ast.Call,
        ast.keyword,
        ast.Name,
        ast.Load,
        ast.Constant,
        ast.BinOp,
        ast.UnaryOp,
    ),
    *(ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_LONGEST_POWER = 64


class RefusedArchive(Exception):  # noqa: N818 - it says why
    """An archive holds what could run code, or is none that torch.export.save writes."""


@contextmanager
def checked(path: Path) -> Iterator[IO[bytes]]:
    """Yield a copy of an archive that holds what was checked and nothing else, for torch.export.load.

    Raises:
        RefusedArchive: it holds something that could run code, or is damaged; the message says what.
        OSError: it cannot be read.
    """
    with tempfile.TemporaryFile() as copy:
        try:
            with ZipFile(path) as archive, ZipFile(copy, "w", ZIP_STORED) as written:
                entries = _entries(archive)
                root = next(iter(archive.namelist())).partition("/")[0]
                for name, entry in entries.items():
                    place = written.open(f"{root}/{name}", "w", force_zip64=True)
                    with archive.open(entry) as source, place:
                        shutil.copyfileobj(source, place, 1 << 20)
                _check(archive, entries)
        except (BadZipFile, NotImplementedError, EOFError, RecursionError) as error:
            raise RefusedArchive(f"it is damaged: {error}") from error
        copy.seek(0)
        yield copy


def _entries(archive: ZipFile) -> dict[str, str]:
    """Return the names of an archive's entries by their names below its one folder."""
    entries: dict[str, str] = {}
    roots = {info.filename.partition("/")[0] for info in archive.infolist()}
    for info in archive.infolist():
        name = info.filename.partition("/")[2]
        if name in entries or len(roots) > 1 or not name:
            raise RefusedArchive(
                f"its entry {info.filename!r} is not in its one folder, or twice there"
            )
        if info.compress_type != ZIP_STORED:
            raise RefusedArchive(
                f"its entry {name} is compressed, and torch.export.save compresses none"
            )
        what = next(what for pattern, what in _KINDS if re.fullmatch(pattern, name, re.DOTALL))
        if what:
            raise RefusedArchive(f"its entry {name} is {what}")
        entries[name] = info.filename
    missing = {_MODEL, _EXAMPLES, *_CONFIGS} - set(entries)
    if missing:
        raise RefusedArchive(f"it has no {min(missing)}")
    return entries


def _check(archive: ZipFile, entries: Mapping[str, str]) -> None:
    for name in sorted(_CONFIGS):
        folder = name.rpartition("/")[0]
        sizes = {
            e: archive.getinfo(full).file_size
            for e, full in entries.items()
            if e.startswith(folder)
        }
        _check_payloads(_json(archive, entries[name]), folder, sizes)
    _check_examples(archive.read(entries[_EXAMPLES]))
    _check_program(_json(archive, entries[_MODEL]))


def _json(archive: ZipFile, name: str) -> Any:
    try:
        return json.loads(archive.read(name))
    except ValueError as error:
        raise RefusedArchive(f"its {name} is no JSON: {error}") from error


def _check_payloads(config: Any, folder: str, sizes: Mapping[str, int]) -> None:
    """Check that tensors are plain memory, and as large as they claim."""
    try:
        payloads = dict(config["config"])
        for name, payload in payloads.items():
            place = str(payload["path_name"])
            if payload["use_pickle"] or not _PAYLOAD.fullmatch(place):
                raise RefusedArchive(f"its tensor {name} is pickled")
            lengths = [size.get("as_int", 0) for size in payload["tensor_meta"]["sizes"]]
            if not sizes[f"{folder}/{place}"] and 0 not in lengths:
                raise RefusedArchive(f"its tensor {name} has no memory")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RefusedArchive(f"its tensors in {folder} are not described as torch does") from error


def _check_examples(pickled: bytes) -> None:
    if not pickled:
        return
    try:
        torch.load(io.BytesIO(pickled), weights_only=True)
    except Exception as error:  # of damaged and of hostile files
        raise RefusedArchive(
            "its example inputs are more than tensors and numbers in containers: torch would unpickle them"
        ) from error


def _check_program(data: Any) -> None:
    """Check all that torch looks up or evaluates in the description of a program."""
    waiting = [data]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        targets = [part.get("as_operator"), part.get("target") if "inputs" in part else None]
        for target in filter(None, targets):
            _check_target(str(target))
        if "expr_str" in part:
            _check_expression(str(part["expr_str"]))
        for key in ("in_spec", "out_spec"):
            if isinstance(part.get(key), str):
                _check_tree(part[key])
        for symbol in part.get("range_constraints") or ():
            if _HIGH_NUMBER.match(symbol):  # torch counts up to it
                raise RefusedArchive(f"{symbol[:40]!r} is no name of a size")


def _check_target(target: str) -> None:
    name = target.removeprefix("torch.ops.")
    if name != target:
        namespace, _, rest = name.partition(".")
        name = f"{namespace}::{rest}"
    name = re.sub(r"^_operator\.", "operator.", name)
    try:
        decode_target(name)
    except UnknownOperator as error:
        raise RefusedArchive(str(error.args[0])) from error
    except LookupError as error:
        raise RefusedArchive(f"it calls {target[:80]!r}, which is no operator") from error


def _check_expression(text: str) -> None:
    """Check that the text of a size, which is evaluated, computes with numbers and symbols alone."""
    try:
        tree = ast.parse(text, mode="eval")
        plain = all(map(_is_plain, ast.walk(tree)))
    except (SyntaxError, ValueError, MemoryError) as error:
        raise RefusedArchive(f"the size {text[:80]!r} cannot be read") from error
    if not plain or _power(tree) > 2:
        raise RefusedArchive(f"the size {text[:80]!r} is more than a computation with sizes")


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _CALLABLE
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _TEXT.fullmatch(node.value) is not None
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return abs(node.value).bit_length() <= 2 * _LONGEST_POWER
    return isinstance(node, _PLAIN)


def _power(node: ast.AST) -> int:
    """Return how deep powers and shifts are nested; those by large numbers count as infinitely deep."""
    deepest = max(map(_power, ast.iter_child_nodes(node)), default=0)
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
    raised = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift))
    if not raised and not (called and ("Pow" in called or called == "LShift")):
        return deepest
    numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    large = any(isinstance(n, int) and abs(n) > _LONGEST_POWER for n in numbers)
    return 99 if large else deepest + 1


def _check_tree(text: str) -> None:
    """Check that arguments are of containers and registered types: factories and enumerations are code."""
    try:
        waiting = [json.loads(text)]
        while waiting:
            part = waiting.pop()
            if isinstance(part, list):
                waiting += part
            elif isinstance(part, dict):
                if "__enum__" in part or "default_factory_module" in part:
                    raise RefusedArchive(
                        "its arguments have a type that torch would import code for"
                    )
                waiting += part.values()
                if isinstance(part.get("context"), str):
                    waiting.append(json.loads(part["context"]))
    except ValueError as error:
        raise RefusedArchive("its arguments are not described as torch does") from error


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
            reason = describe_error(problems[-1] if problems else error)
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
