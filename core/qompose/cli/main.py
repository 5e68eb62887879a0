# SPDX-License-Identifier: Apache-2.0
"""The command `qompose`: its arguments, its exit codes, and how it reports problems."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from importlib_metadata import version

from qompose.backend.discovery import describe_error
from qompose.cli import inspection, new_backend, quantize
from qompose.cli.command import Command, Results, own_standard_output, say
from qompose.errors import InternalError, QomposeError, QomposeWarning

COMMANDS: dict[str, Command] = {
    "backends": inspection.BACKENDS,
    "capabilities": inspection.CAPABILITIES,
    "calibrate": quantize.CALIBRATE,
    "quantize": quantize.QUANTIZE,
    "report": inspection.REPORT,
    "env": inspection.ENV,
    "new-backend": new_backend.NEW_BACKEND,
}
DESCRIPTION = """\
Composable int8 quantization for PyTorch 2: list backends, quantize models and inspect the result.

Results are printed to standard output, everything else to standard error. Exit codes: 0 success, 1 failure,
2 usage error, 130 interrupted. QOMPOSE_PLUGINS=a,b enables only these backends; QOMPOSE_TRACE=1 logs every
plugin call."""
PROBLEM, INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a problem, or 130 where it was interrupted.

    Args:
        arguments: of a caller inside a program; None for those of the process.

    Raises:
        SystemExit: with code 2 for wrong usage, with code 0 for --help and --version.
    """
    try:
        options = _parser().parse_args(arguments)
        results = Results(own_standard_output() if arguments is None else sys.stdout)
        with redirect_stdout(sys.stderr), _warnings_as_messages():
            return _run(options, results)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _run(options: Namespace, results: Results) -> int:
    command: Command = options.command
    try:
        return command.run(options, results)
    except (Exception, SystemExit) as error:
        if options.traceback or os.environ.get("QOMPOSE_TRACE", "0") not in ("", "0"):
            traceback.print_exc()
        say(_problem(error))
        return PROBLEM


def _problem(error: BaseException) -> str:
    """Return the message for an error: its own if it is meant for users, else that it is a defect."""
    if isinstance(error, InternalError):
        return f"internal error: {error}. This is a bug in qompose; --traceback shows where."
    if isinstance(error, (QomposeError, QomposeWarning)):
        return str(error)
    if isinstance(error, OSError):
        known = error.filename is not None and error.strerror
        return f"{error.filename}: {error.strerror}" if known else str(error)
    return (
        f"internal error: {describe_error(error)}. This is a bug in qompose or a plugin; "
        "--traceback shows where."
    )


@contextmanager
def _warnings_as_messages() -> Iterator[None]:
    """Print qompose's own warnings as messages, and leave those of others as they are."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def say_warning(
            message: Warning | str, category: type[Warning], *rest: Any, **more: Any
        ) -> None:
            if issubclass(category, QomposeWarning):
                say(f"warning: {message}")
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = say_warning
        yield


# An abbreviation may become ambiguous with a later option.
_FORM: Mapping[str, Any] = {
    "formatter_class": RawDescriptionHelpFormatter,
    "allow_abbrev": False,
}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="qompose", description=DESCRIPTION, **_FORM)
    parser.add_argument("--version", action="version", version=f"qompose {version('qompose')}")
    _add_traceback(parser, False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        examples = "\n".join(f"  {line}" for line in command.examples.splitlines())
        added = commands.add_parser(
            name,
            help=command.summary,
            description=command.description,
            epilog=f"examples:\n{examples}",
            **_FORM,
        )
        command.add_arguments(added)
        _add_traceback(added, SUPPRESS)
        added.set_defaults(command=command)
    return parser


def _add_traceback(parser: ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--traceback", action="store_true", default=default, help="show the traceback of an error"
    )
