# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from uuid import uuid4

from qompose.errors import UserError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""What a disk or quota that is full says, without the file's name where it was open already."""
_LONGEST = 32
"""Characters of a file's name that the folder of its draft is named after: names have a limit."""


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
        kind = next((name for test, name in _KINDS if test(mode)), "a special file")
        raise UserError(f"{path} cannot be written: it is {kind}, not a regular file")
    return Path(os.path.realpath(path))


def place_for(path: Path) -> Path:
    """Return the `destination` of a file that is to be made by long work, before which it is called.

    Raises:
        UserError: there is something else than a file, or no directory to write it in.
        OSError: it cannot be looked at.
    """
    place = destination(path)
    if not place.parent.is_dir():
        raise UserError(f"{path} cannot be written: {place.parent} is not a directory")
    return place


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield a file to write, which takes the place of `path` if all goes well, and is gone if not.

    It has the name that `path` leads to, in a folder of its own: files that name one another, such as a
    program and its weights, take their places beside `path` together, `path` itself last. A symbolic link
    stays one, and the file to which it leads is replaced.

    Raises:
        UserError: in one of these places is something else than a file.
        OSError: nothing can be written there; it names `path`, not the draft.
    """
    place = destination(path)
    folder = place.with_name(f".{place.name[:_LONGEST]}.{uuid4().hex}")
    draft = folder / place.name
    try:
        folder.mkdir()
        yield draft
        _take_places(draft, place)
    except OSError as error:
        is_full = error.filename is None and error.errno in _FULL
        if is_full or Path(error.filename or "") in (folder, draft):
            raise OSError(error.errno, error.strerror, str(path)) from error  # of the same class
        raise
    finally:
        rmtree(folder, ignore_errors=True)


def _take_places(draft: Path, place: Path) -> None:
    """Move a draft and what was written beside it; look at all places before the first is changed."""
    others = sorted(set(draft.parent.iterdir()) - {draft})
    places = [destination(place.with_name(other.name)) for other in others]
    for file, target in zip([*others, draft], [*places, place], strict=True):
        file.replace(target)
