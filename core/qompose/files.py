# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from qompose.errors import UserError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_LONGEST = 32
"""Characters of the place's name that a draft's name has of it, before and behind its last dot each."""


def destination(path: Path) -> Path:
    """Return the file to write for `path`: the path itself, or what it leads to as a symbolic link.

    Raises:
        UserError: there is something else than a file, which a file would replace.
        OSError: it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "no file")
        raise UserError(f"{path} cannot be written: it is {kind}, and a file would replace it")
    return Path(os.path.realpath(path))


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield the name of a file beside `path`, which takes its place if all goes well, and is gone if not.

    A symbolic link stays one, and the file to which it leads is replaced.

    Raises:
        UserError: in that place is something else than a file.
        OSError: nothing can be written there; it names `path`, not the draft.
    """
    place = destination(path)
    # Names of files have a limit, which this one must not be the first to meet.
    stem = place.stem[:_LONGEST]
    draft = place.with_name(f".{stem}.{uuid4().hex}{place.suffix[-_LONGEST:]}")
    try:
        yield draft
        draft.replace(place)
    except OSError as error:
        if error.filename in (str(draft), draft):
            raise OSError(error.errno, error.strerror, str(path)) from error  # of the same class
        raise
    finally:
        draft.unlink(missing_ok=True)
