# SPDX-License-Identifier: Apache-2.0
"""Save and load: a converted model as one file of tensors and JSON, which runs no code when it is read.

The file is a safetensors file. Its header, checked when it is opened, can name no code; any tool of the
field can list the tensors; and what a model consists of besides them is JSON text in its metadata. A SHA-256
of that text, and in it one of each block of memory, tell a damaged file from a sound one. They are no
signature: who may write the file may write them too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from importlib_metadata import version
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.fx import GraphModule

from qompose.backend import Backend
from qompose.drafts import destination, draft_of
from qompose.errors import (
    ArtefactError,
    BackendNotFoundError,
    ExcludedBackendError,
    MissingBackendError,
    PluginError,
    RequirementError,
    UserError,
)
from qompose.graph import copies_of
from qompose.plan import META_KEY, Record, attach, record_of
from qompose.plugins import backends as installed_backends
from qompose.plugins import load_backend
from qompose.programs import ProgramReader, ProgramWriter, UnknownOperator
from qompose.records import decode_record, encode_record
from qompose.requirements import objections, warn
from qompose.storages import digest, pack, unpack
from qompose.trees import UnknownType
from qompose.values import NotStorable

FORMAT_VERSION = 1
_KEY = "qompose"


def save(converted: GraphModule, path: str | os.PathLike[str]) -> None:
    """Write a converted model to a file, from which `load` makes it again in another process.

    Buffers that the program writes to are saved as they were exported. A file that exists is replaced at
    once, or left as it is where saving fails; a symbolic link stays, and its file is replaced.

    Raises:
        StageError: the model was not converted.
        UserError: `path` is no path, or is a directory, a pipe or a device.
        ArtefactError: it holds something that cannot be stored; the message names it.
        OSError: the file cannot be written.
    """
    record = record_of(
        converted,
        stages=("converted", "reference"),
        function="save",
        remedy="Call convert_pt2e first.",
    )
    path = _as_path(path, "save")
    destination(path)  # refused before any work is done
    try:
        writer = ProgramWriter()
        program = writer.program(converted)
        views, blocks = pack({**writer.tensors, **record.state})
        body = {
            "manifest": _manifest(record),
            "program": program,
            "record": encode_record(record),
            "state": sorted(record.state),
            "tensors": views,
            "blocks": {name: digest(block) for name, block in blocks.items()},
        }
    except NotStorable as reason:
        raise ArtefactError(f"The model cannot be saved, because it has {reason}.") from reason
    description = {
        "format_version": FORMAT_VERSION,
        "written_by": f"qompose {version('qompose')}",
        "sha256": hashlib.sha256(_text(body).encode()).hexdigest(),
        "model": body,
    }
    # One entry, because safetensors writes several in any order: equal models make equal files.
    metadata = {_KEY: _text(description)}
    _write({name: block.cpu() for name, block in blocks.items()}, metadata, path)


def _as_path(path: object, function: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"{function} takes the path of a file, and got {path!r}")
    return Path(path)


def _text(data: Any) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _write(blocks: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    """Write to a file beside the wanted one, and put it in its place when it is complete."""
    try:
        with draft_of(path) as draft:
            draft.touch(exist_ok=False)
            mode = draft.stat().st_mode
            save_file(blocks, draft, metadata)
            draft.chmod(
                mode
            )  # safetensors lets nobody else read it; the process's own mask decides
            with draft.open("rb") as file:
                os.fsync(file.fileno())
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"{path} cannot be written: {error}") from error


def _manifest(record: Record) -> dict[str, Any]:
    """Return with what the model was made: versions, and the package of each owner of claims."""
    known = {info.name: info for info in installed_backends()}
    owners = {}
    for label, backend in record.backends.items():
        info = known.get(backend.name)
        owners[label] = {
            "backend": backend.name,
            "distribution": info.distribution if info else "",
            "version": info.version if info else "",
            "api_version": backend.api_version,
        }
    return {"qompose": version("qompose"), "torch": torch.__version__, "owners": owners}


class _Backends(Mapping[str, Backend]):
    """The backends of a stored model, by owner, each loaded when it is asked for.

    One that owns no claims and is not installed is left out: nothing is missing without it.
    """

    def __init__(self, owners: Mapping[str, Any], claiming: set[str]) -> None:
        self._owners = {
            label: dict(facts)
            for label, facts in owners.items()
            if label in claiming or _is_installed(facts["backend"])
        }

    def __getitem__(self, owner: str) -> Backend:
        facts = self._owners[owner]
        try:
            return load_backend(facts["backend"])
        except ExcludedBackendError:
            raise
        except BackendNotFoundError:
            installed = [info.name for info in installed_backends()]
            raise MissingBackendError(facts, installed) from None

    def __contains__(self, owner: object) -> bool:
        return owner in self._owners

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


def _is_installed(name: str) -> bool:
    return any(info.name == name for info in installed_backends())


def load(path: str | os.PathLike[str], *, allow_mismatch: bool = False) -> GraphModule:
    """Return the converted model that `save` wrote, as it was: it runs, and can be reported and lowered.

    No pickle is read and no code of the file is run. Backends are imported when `lower` asks for them, or
    here, where they recorded what the model asks of the machine.

    Args:
        allow_mismatch: load a model that was made for another machine, with a warning. What it
            computes is the same, and not with the kernels that it was made for.

    Raises:
        RequirementError: a backend's requirements are not met here; the message has the remedies.
        UserError: `path` is no path.
        ArtefactError: the file is damaged, of another kind or of a newer qompose, or needs operators or
            types that nobody registered in this process.
        OSError: it cannot be read.
    """
    model = read(path)
    found = tuple(objections(model.meta[META_KEY]))
    if found and not allow_mismatch:
        lines = "".join(f"\n  - {line}" for line in found)
        raise RequirementError(
            f"{path} was made for another machine:{lines}\n"
            "Or load it with allow_mismatch=True: it runs without the kernels that it was made for."
        )
    warn(found, stacklevel=2)
    return model


def read(path: str | os.PathLike[str]) -> GraphModule:
    """Return what `load` returns, whatever the model asks of the machine; its backends are not asked."""
    path = _as_path(path, "load")
    body, blocks = _read(path)
    try:
        return _model(body, blocks)
    except (UnknownOperator, UnknownType) as missing:
        made = body["manifest"]
        raise ArtefactError(
            f"{path} cannot be loaded: {missing.args[0]}. Import the package that brings it first. The "
            f"file was written with torch {made['torch']}; this is torch {torch.__version__}."
        ) from missing
    except Exception as error:  # whatever a forged file makes the readers stumble on
        reason = f"{type(error).__name__}: {error}"
        raise ArtefactError(f"{path} is no sound artefact: {reason}") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a file's JSON and its blocks of memory, both as they were written."""
    with path.open("rb"):  # says of what is no file what it is; safetensors does not
        pass
    try:
        with safe_open(path, framework="pt") as file:
            body = _body(path, file.metadata() or {})
            # Copies, because kernels may sum in another order where memory is not aligned to 64 bytes.
            blocks = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        kind = " (it is a zip archive, as torch.save and torch.export.save write)"
        raise ArtefactError(
            f"{path} was not written by qompose.save{kind if is_zipfile(path) else ''}, or is incomplete: "
            f"{error}"
        ) from error
    expected = body.get("blocks")
    if expected != {name: digest(block) for name, block in blocks.items()}:
        raise ArtefactError(f"{path} is damaged: its tensors are not those that were saved")
    return body, blocks


def _body(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of a model, checked to be one that this release can read."""
    if _KEY not in metadata:
        raise ArtefactError(f"{path} is a safetensors file that qompose.save did not write")
    try:
        found = json.loads(metadata[_KEY])
        number, digests, body = int(found["format_version"]), found["sha256"], found.get("model")
        author = str(found["written_by"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ArtefactError(f"{path} is damaged: its description cannot be read") from error
    if number > FORMAT_VERSION:
        raise ArtefactError(
            f"{path} has version {number} of the format, written by {author}; qompose "
            f"{version('qompose')} reads up to version {FORMAT_VERSION}. Upgrade qompose."
        )
    if not isinstance(body, dict) or hashlib.sha256(_text(body).encode()).hexdigest() != digests:
        raise ArtefactError(f"{path} is damaged: its description is not the one that was saved")
    return body


def _model(body: Mapping[str, Any], blocks: Mapping[str, Tensor]) -> GraphModule:
    tensors = dict(unpack(body["tensors"], blocks))
    record = decode_record(body["record"])
    owners = body["manifest"]["owners"]
    try:
        module = ProgramReader(body["program"], tensors).program()
    except UnknownOperator:
        _import_backends(owners)  # they may register it
        module = ProgramReader(body["program"], tensors).program()
    backends = _Backends(owners, {claim.owner for claim in record.plan.claims})
    state = copies_of({path: tensors[path] for path in body["state"]})
    loaded: GraphModule = attach(module, replace(record, backends=backends, state=state))
    return loaded


def _import_backends(owners: Mapping[str, Any]) -> None:
    for facts in owners.values():
        with contextlib.suppress(BackendNotFoundError, PluginError):
            load_backend(facts["backend"])
