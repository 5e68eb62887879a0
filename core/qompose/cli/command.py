# SPDX-License-Identifier: Apache-2.0
"""A command of the command line: its help, its options, and where what it prints goes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from qompose.console import printable
from qompose.errors import BatchError, CalibrationError, ConfigError, UserError
from qompose.files import place_for

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from qompose.cli.calibration_data import Batch, Inputs
    from qompose.console import Printable
    from qompose.quantizer.base import Quantizer
    from qompose.reporting.report_data import Report


_UNLIMITED = 100_000
"""Columns where standard output is not a terminal: a row of a table is one line, for `grep` and `cut`."""


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

    def show(self, found: Printable) -> None:
        """Print what has tables, in colours on a terminal."""
        colors = self._file is not None and self._file.isatty()
        self._write(found.to_text(self.width, colors=colors).strip("\n"))

    def text(self, text: str) -> None:
        """Print text and a line break."""
        self._write(printable(text))

    def _write(self, text: str) -> None:
        """Print text that is printable. A reader that goes away, as `head` does, is not an error."""
        if self._file is None:
            return
        try:
            print(text, file=self._file, flush=True)
        except OSError as error:
            # The rest goes nowhere, so that closing the file does not fail again.
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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def add_quantizer(parser: ArgumentParser, required: bool = True) -> None:
    """Add the options that `chosen_quantizer` reads."""
    how = parser.add_mutually_exclusive_group(required=required)
    how.add_argument(
        "--backend", action="append", metavar="NAME[:CONFIG]",
        help=("an installed backend and optionally one of its configurations (default: its first); "
            "repeat in order of priority; `qompose capabilities` lists both"),
    )  # fmt: skip
    how.add_argument(
        "--config", type=Path, metavar="FILE.json", help="a quantizer saved as JSON by Quantizer.to_dict"
    )  # fmt: skip
    parser.add_argument(
        "--on-conflict", choices=("priority", "error", "first"),
        help=("with --backend: how to resolve operators claimed by several backends (default: "
            "priority, the first backend that supports them; error: fail; first: like priority, but "
            "also keep earlier annotations)"),
    )  # fmt: skip


def add_data(parser: ArgumentParser) -> None:
    """Add the options that `read_data` and `run_data` read."""
    add = parser.add_argument
    add(
        "--calibration", type=Path, nargs="+", action="extend", default=[], metavar="FILE",
        help="calibration samples (.safetensors or .pt)",
    )  # fmt: skip
    add(
        "--batch-size",
        type=_positive,
        metavar="N",
        help="samples per batch (default: as exported)",
    )
    add("--batches", type=_positive, metavar="N", help="use only the first N batches")
    add(
        "--no-progress",
        action="store_true",
        help="hide the progress bar (it is only shown on a terminal)",
    )


def chosen_quantizer(options: Namespace) -> Quantizer:
    """Return the quantizer of the options.

    Raises:
        UserError: it does not exist, or is not what they say.
    """
    if options.config is None:
        from qompose.quantizer.composition import compose

        return compose(*options.backend, on_conflict=options.on_conflict or "priority")
    from qompose.quantizer.composition import quantizer_from_json

    if options.on_conflict:
        raise UserError(
            "--on-conflict requires --backend; a --config file sets its own on_conflict"
        )
    try:
        return quantizer_from_json(options.config.read_text(encoding="utf-8-sig"))
    except (UserError, UnicodeDecodeError) as error:
        raise ConfigError(f"{options.config}: {error}") from error


def read_data(options: Namespace, inputs: Inputs) -> list[Batch]:
    """Return the batches of the options; one of no tensors where the program takes none."""
    from qompose.cli.calibration_data import Batch, read_batches

    if not options.calibration:
        # What takes no tensors computes the same each time.
        return [] if inputs.tensors else [Batch(options.model, 1, list(inputs.leaves))]
    return read_batches(options.calibration, inputs, options.batch_size, options.batches)


def run_data(
    prepared: GraphModule, batches: Sequence[Batch], inputs: Inputs, options: Namespace
) -> None:
    """Calibrate with batches, if there are any.

    Raises:
        CalibrationError: one does not fit the model; the message names its file.
    """
    if not batches:
        return
    from qompose.calibration.calibrator import calibrate

    running: list[Batch] = []

    def arguments(batch: Batch) -> dict[str, Any]:
        running[:] = [batch]
        return inputs.call(batch.leaves)

    try:
        calibrate(
            prepared, batches, transform=arguments, progress=False if options.no_progress else None
        )
    except BatchError as error:
        (batch,) = running
        raise CalibrationError(f"{batch.file}, batch {batch.number} {error.reason}") from error


def add_report_form(parser: ArgumentParser) -> None:
    """Add the choice of how a report is printed."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html",
        help="also write the report as a self-contained HTML page",
    )  # fmt: skip


def check_page(page: Path | None, read: Collection[Path]) -> None:
    """Refuse a page that cannot be written, or would destroy a file that is read, before any work is done."""
    if page is None:
        return
    if page.suffix.lower() != ".html":
        raise UserError(f"--html must name a .html file, got {page}")
    check_place(page, read)


def check_place(path: Path, read: Collection[Path]) -> None:
    """Refuse a file that cannot be written where it is to be, or that is read."""
    if place_for(path) in read:
        raise UserError(f"{path} is an input and would be overwritten; choose another file")


def print_report(found: Report, options: Namespace, results: Results) -> None:
    """Print a report in the form that was asked for."""
    if options.json:
        results.json(found.to_dict())
    elif options.markdown:
        results.text(found.to_markdown())
    else:
        results.show(found)
