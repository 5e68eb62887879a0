# SPDX-License-Identifier: Apache-2.0
"""Archives of torch.export (`.pt2`), read without running code in them.

`torch.export.load` unpickles weights, constants and objects where an archive says so, loads compiled code,
evaluates sizes as Python, and takes any attribute of torch for an operator. Here an archive may hold what
`torch.export.save` writes of a plain program, and nothing else; of the pickle of the example inputs,
tensors and numbers are read and no other class. `export_pt2` writes a converted model as such an archive.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import load_pt2
from torch.fx import GraphModule

from qompose.backend.discovery import describe_error
from qompose.errors import ArtefactError, UserError
from qompose.files import destination, draft_of
from qompose.plan.plan import Record, record_of
from qompose.program.call_signature import call_signature
from qompose.program.control_flow import nodes_in
from qompose.program.graph import one_thread_at_a_time
from qompose.spec.qdq import IN_ATEN
from qompose.storage.json_values import check_tree, expression, unwritable
from qompose.storage.program_json import decode_target

_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_EXAMPLES, _MODEL = "data/sample_inputs/model.pt", "models/model.json"
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")
_PLAIN = re.compile(
    r"\.data/.*|archive_format|archive_version|byteorder|extra/.*|data/(weights|constants)/"
    rf"{_PAYLOAD.pattern}|{'|'.join(map(re.escape, (*_CONFIGS, _EXAMPLES, _MODEL)))}"
)
"""Entries of a plain program: no pickled object, no legacy payload, no compiled code, no second program."""
_HIGH_NUMBER = re.compile(r"[a-z]+\d{7,}")


class RefusedArchive(Exception):  # noqa: N818 - it says why
    """An archive holds what could run code, or is not one that torch.export.save writes."""


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
                for name, entry in entries.items():
                    place = written.open(f"archive/{name}", "w", force_zip64=True)
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
        if name in entries or len(roots) > 1 or info.compress_type != ZIP_STORED:
            raise RefusedArchive(
                f"it has several top-level folders, or its entry {info.filename!r} is "
                "compressed or duplicated"
            )
        if not _PLAIN.fullmatch(name):
            raise RefusedArchive(
                f"its entry {name!r} is not part of a plain program and may contain code"
            )
        entries[name] = info.filename
    missing = {_MODEL, _EXAMPLES, *_CONFIGS} - set(entries)
    if missing:
        raise RefusedArchive(f"it lacks {min(missing)}")
    return entries


def _check(archive: ZipFile, entries: Mapping[str, str]) -> None:
    """Check all that torch unpickles, looks up or evaluates."""
    try:
        for name in _CONFIGS:
            folder = name.rpartition("/")[0]
            for payload in json.loads(archive.read(entries[name]))["config"].values():
                place = str(payload["path_name"])
                if payload["use_pickle"] or not _PAYLOAD.fullmatch(place):
                    raise RefusedArchive(f"its tensor {place} is pickled")
                sizes = [size.get("as_int", 0) for size in payload["tensor_meta"]["sizes"]]
                if not archive.getinfo(entries[f"{folder}/{place}"]).file_size and 0 not in sizes:
                    raise RefusedArchive(f"its tensor {place} is empty")
        _check_examples(archive.read(entries[_EXAMPLES]))
        _check_program(json.loads(archive.read(entries[_MODEL])))
    except (RefusedArchive, OSError):
        raise
    except Exception as error:  # of damaged and of hostile files
        raise RefusedArchive(f"{type(error).__name__}: {error}") from error


def _check_examples(pickled: bytes) -> None:
    try:
        if pickled:
            torch.load(io.BytesIO(pickled), weights_only=True)
    except Exception as error:
        raise RefusedArchive("its example inputs do not load with weights_only=True") from error


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
            expression(str(part["expr_str"]), {}, {})
        for key in ("in_spec", "out_spec"):
            if isinstance(part.get(key), str):
                check_tree(part[key])
        for symbol in part.get("range_constraints") or ():
            if _HIGH_NUMBER.match(symbol):  # torch counts up to it
                raise RefusedArchive(f"invalid symbol name {symbol[:40]!r}")


def _check_target(target: str) -> None:
    name = target.removeprefix("torch.ops.")
    if name != target:
        namespace, _, rest = name.partition(".")
        name = f"{namespace}::{rest}"
    decode_target(re.sub(r"^_operator\.", "operator.", name))


def load_program(path: Path) -> ExportedProgram:
    """Return the program in a file that torch.export.save wrote, if reading it runs no code.

    Raises:
        UserError: it is of another kind, or refused; the message says which, where that can be seen.
        OSError: it cannot be read.
    """
    with path.open("rb"):
        pass
    remedy = (
        "Create an archive with torch.export.save(torch.export.export(model, inputs), 'model.pt2')."
    )
    other = _other_kind(path)
    if other is not None:
        raise UserError(f"{path} is not a torch.export archive: {other}. {remedy}")
    try:
        with checked(path) as file:
            # torch.export.load, without its logging of errors, whose causes it does not raise
            program = load_pt2(file).exported_programs["model"]
    except RefusedArchive as refusal:
        raise UserError(
            f"{path} is rejected: {refusal}. If you trust it, load it with torch.export.load "
            "in Python and pass the program to qompose.quantize."
        ) from refusal
    except Exception as error:
        raise UserError(
            f"{path} cannot be read by torch.export: {describe_error(error)}. {remedy}"
        ) from error
    program._guards_code = []  # source, which nothing here is to run
    return program


def _other_kind(path: Path) -> str | None:
    """Return what a file is that is not an archive of torch.export, and None for one that seems to be."""
    if is_zipfile(path):
        with ZipFile(path) as archive:
            names = {name.rpartition("/")[2] for name in archive.namelist()}
        if "archive_format" in names:
            return None
        return (
            "it was written by torch.save"
            if "data.pkl" in names
            else "it is another kind of zip archive"
        )
    try:
        with safe_open(path, framework="pt") as file:
            if "qompose" in (file.metadata() or {}):
                return f"it contains an already quantized model (see `qompose report {path}`)"
            return "it is a safetensors file"
    except SafetensorError:
        return "it is not a zip archive"


def export_pt2(model: GraphModule, path: str | os.PathLike[str]) -> None:
    """Write a converted model as an archive that `torch.export.load` opens in a process without qompose.

    That process imports `torch.ao.quantization.fx._decomposed`, which registers torch's quantize and
    dequantize operators, and what registers operators of other packages if the model calls any. The report
    and what `lower` reads are not in the archive: `save` writes them.

    Buffers that the program writes to are written as they were exported. A file that exists is replaced at
    once, or left as it is where exporting fails.

    Args:
        model: what `convert_pt2e` returned.
        path: a file whose name ends in `.pt2`.

    Raises:
        StageError: the model was not converted, or is lowered.
        UserError: `path` is not the path of a `.pt2` file, or is a directory, a pipe or a device.
        ArtefactError: torch cannot export the model, or cannot write what it takes or returns.
        OSError: the file cannot be written.
    """
    record = record_of(
        model,
        stages=("converted", "reference"),
        function="export_pt2",
        remedy=(
            "Pass the model that convert_pt2e returned; a lowered model has kernels from outside "
            "torch."
        ),
    )
    if not isinstance(path, (str, os.PathLike)) or Path(path).suffix != ".pt2":
        raise UserError(f"export_pt2 expects the path of a .pt2 file, got {path!r}")
    destination(Path(path))
    program = _exported(model, record)
    with draft_of(Path(path)) as draft, draft.open("w+b") as file:
        try:
            torch.export.save(program, file)
        except OSError:
            raise
        except Exception as error:  # a type without a name for files, among others
            raise ArtefactError(
                f"torch.export cannot write the model: {unwritable(error)}"
            ) from error


@one_thread_at_a_time
def _exported(model: GraphModule, record: Record) -> ExportedProgram:
    signature = call_signature(model)
    try:
        with torch.no_grad():
            program = torch.export.export(
                model,
                signature.args,
                dict(signature.kwargs),
                dynamic_shapes=signature.dynamic_shapes,
            )
            ours = {op: form for op, form in IN_ATEN.items() if op.namespace == "qompose"}
            if any(node.target in ours for node in nodes_in(program.graph_module)):
                program = program.run_decompositions(ours)
    except Exception as error:  # whatever torch makes of it
        raise ArtefactError(
            f"torch.export cannot export the model: {describe_error(error)}"
        ) from error
    for held in (program.state_dict, program.constants):
        held.update({name: value for name, value in record.state.items() if name in held})
    return program
