# SPDX-License-Identifier: Apache-2.0
"""A command of the command line: its help, its arguments, and where what it prints goes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

_UNLIMITED = 100_000
"""Columns where standard output is no terminal: a row of a table is then one line, for `grep` and `cut`."""


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        examples: command lines, one in each line.
        run: does what the options say, prints the results, and returns the exit code.
    """

    summary: str
    description: str
    examples: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Results], int]


class Results:
    """Prints the results of a command on standard output, or nothing where that is closed."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    @property
    def width(self) -> int:
        """Return the columns of the terminal, or as good as no limit where there is none."""
        return shutil.get_terminal_size((_UNLIMITED, 0)).columns

    def text(self, text: str) -> None:
        """Print text and a line break. A reader that goes away, as `head` does, is no error."""
        if self._file is None:
            return
        try:
            print(printable(text), file=self._file, flush=True)
        except (
            OSError
        ) as error:  # the rest goes nowhere, so that closing the file does not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())
            if not isinstance(error, BrokenPipeError):
                raise OSError(f"cannot write to standard output: {error.strerror}") from error

    def json(self, data: Any) -> None:
        """Print data as JSON."""
        self.text(json.dumps(data, indent=2, allow_nan=False))


def own_standard_output() -> TextIO | None:
    """Return standard output for results alone; what others print goes to standard error from now on.

    Plugins and runtimes print as they like, some of them from C, or when the process ends.
    """
    if sys.stdout is None:
        return None
    other = sys.stderr.fileno() if sys.stderr else os.open(os.devnull, os.O_WRONLY)
    kept = os.fdopen(
        os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors="replace"
    )
    os.dup2(other, sys.stdout.fileno())
    return kept


def say(text: str) -> None:
    """Print a message to the user, which is not a result, on standard error."""
    print(f"qompose: {printable(text)}", file=sys.stderr)


def printable(text: str) -> str:
    """Return text with control characters written out; rich lets escape sequences of plugins pass."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
