# SPDX-License-Identifier: Apache-2.0
"""Results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

_UNLIMITED = 100_000
"""Columns where nobody looks on: a row of a table is then one line, for `grep` and `cut`."""


class Output:
    """Takes the results of a command. Nothing is printed where standard output is closed."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    @property
    def width(self) -> int:
        """Return the columns of the terminal; where standard output is none, as good as no limit."""
        columns = os.environ.get("COLUMNS", "")
        if columns.isdecimal() and int(columns) > 0:
            return int(columns)
        with suppress(AttributeError, OSError, ValueError):
            return os.get_terminal_size(self._file.fileno()).columns  # type: ignore[union-attr]
        return _UNLIMITED

    def text(self, text: str) -> None:
        """Print text and a line break. A reader that goes away, as `head` does, is no error."""
        if self._file is None:
            return
        try:
            self._file.write(f"{printable(text)}\n")
            self._file.flush()
        except OSError as error:
            _discard_the_rest(self._file)
            if not isinstance(error, BrokenPipeError):
                raise OSError(f"standard output cannot be written: {error.strerror}") from error

    def json(self, data: Any) -> None:
        """Print data as JSON."""
        self.text(json.dumps(data, indent=2, allow_nan=False))


def _discard_the_rest(file: TextIO) -> None:
    """Let what is still in a file's buffer go nowhere, so that closing it does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


@contextmanager
def results_apart(for_good: bool = False) -> Iterator[Output]:
    """Send all that the process prints to standard error, save what goes through the Output.

    Plugins and runtimes print as they like, some of them from C.

    Args:
        for_good: until the process ends, rather than until the block does: some print when it ends.
    """
    stdout = sys.stdout
    other = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    with redirect_stdout(other):
        try:
            descriptor = stdout.fileno()
        except (AttributeError, OSError, ValueError):  # closed, or replaced by an object
            yield Output(stdout)
            return
        stdout.flush()
        kept = os.dup(descriptor)
        _point(descriptor, at=other)
        try:
            with open(kept, "w", encoding=stdout.encoding, errors="replace", closefd=False) as file:
                yield Output(file)
        finally:
            if not for_good:
                os.dup2(kept, descriptor)
            os.close(kept)


def _point(descriptor: int, at: TextIO) -> None:
    with suppress(OSError, ValueError):  # standard error is an object without a descriptor
        os.dup2(at.fileno(), descriptor)


def say(text: str) -> None:
    """Tell the user something that is no result, on standard error."""
    print(f"qompose: {printable(text)}", file=sys.stderr)


def printable(text: str) -> str:
    """Return text with control characters written out, which a terminal would obey: plugins may say them."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs")
        else ascii(char)[1:-1]
        for char in text
    )
