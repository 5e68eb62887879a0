# SPDX-License-Identifier: Apache-2.0
"""The file of a saved model: blocks of memory and one description in JSON, written whole and read strictly.

It is a safetensors file. Its header, checked when it is opened, can name no code; any tool of the field can
list the tensors; and what a model consists of besides them is JSON text in its metadata. A SHA-256 of that
text, and in it one of each block of memory, tell a damaged file from a sound one. They are no signature: who
may write the file may write them too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from importlib_metadata import version
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qompose.drafts import draft_of
from qompose.errors import ArtefactError
from qompose.storages import digest

FORMAT_VERSION = 3
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

    Raises:
        ArtefactError: it was not written by `write`, is damaged, or of a newer qompose.
        OSError: it cannot be read.
    """
    with path.open("rb"):  # says of what is no file what it is; safetensors does not
        pass
    try:
        with safe_open(path, framework="pt") as file:
            body = _body(path, file.metadata() or {})
            # Copies, because kernels may sum in another order where memory is not aligned to 64 bytes.
            blocks = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (ArtefactError, OSError):
        raise
    except (
        Exception
    ) as error:  # of a forged header: types that torch has not, sizes that it cannot have
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
        found = _parsed(metadata[_KEY])
        number, digests, body = found["format_version"], found["sha256"], found.get("model")
        author = str(found["written_by"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ArtefactError(f"{path} is damaged: its description cannot be read") from error
    if type(number) is not int or number < 1:
        raise ArtefactError(f"{path} is damaged: {str(number)[:20]!r} is no version of the format")
    if number != FORMAT_VERSION:
        remedy = (
            "Upgrade qompose"
            if number > FORMAT_VERSION
            else "Save the model again, or install the qompose that wrote it"
        )
        raise ArtefactError(
            f"{path} has version {number} of the format, written by {author[:80]}; qompose "
            f"{version('qompose')} reads version {FORMAT_VERSION}. {remedy}."
        )
    if not isinstance(body, dict) or _hash(body) != digests:
        raise ArtefactError(f"{path} is damaged: its description is not the one that was saved")
    return body


def _parsed(text: str) -> Any:
    """Return JSON data that means one thing: no name occurs twice, and every number is one.

    Raises:
        ValueError, RecursionError: the text is no such JSON.
    """
    data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    _text(data)  # 1e999 is read as infinity
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
