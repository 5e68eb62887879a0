# SPDX-License-Identifier: Apache-2.0
"""Archives of torch.export that can run no code: what is in them is checked before torch reads it.

`torch.export.load` unpickles weights, constants and objects where an archive says so, loads compiled code,
evaluates sizes as Python, and takes any attribute of torch for an operator. Here an archive may hold what
`torch.export.save` writes of a plain program, and nothing else; of the pickle of the example inputs, which
is always there, tensors and numbers are read and no other class.
"""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch

from qompose.programs import UnknownOperator, decode_target
from qompose.symbols import FUNCTION_NAMES

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
