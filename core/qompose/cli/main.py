# SPDX-License-Identifier: Apache-2.0
"""The command `qompose`.

The command `qompose`: its arguments, its exit codes, and how problems are told.

The commands of `qompose`: a module each, with `add_arguments` and `run`. Importing them needs no torch.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import ModuleType
from typing import Any, NoReturn

from qompose.backend.discovery import told
from qompose.cli import backends, calibrate, capabilities, new_backend, quantize, report
from qompose.cli.output import Output, results_apart, say
from qompose.errors import InternalError, QomposeError, QomposeWarning, near_names

COMMANDS: dict[str, ModuleType] = {
    "backends": backends,
    "capabilities": capabilities,
    "calibrate": calibrate,
    "quantize": quantize,
    "report": report,
    "new-backend": new_backend,
}
DESCRIPTION = """\
Composable int8 quantization for PyTorch 2: see what is installed, quantize, and see what happened.

Results go to standard output, all else to standard error. Exit codes: 0 fine, 1 a problem, 2 wrong usage, 130
interrupted. QOMPOSE_PLUGINS=a,b hides all other backends; QOMPOSE_TRACE=1 tells of every call of a plugin."""
PROBLEM, INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a problem, or 130 where it was interrupted.

    Args:
        arguments: of a caller inside a program; None for those of the process, which then ends.

    Raises:
        SystemExit: with code 2 for wrong usage; with code 0 for --help and --version, or 1 where they
            cannot be printed.
    """
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        with results_apart(for_good=arguments is None) as out, _warnings_told():
            return _run(options, out)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _run(options: Namespace, out: Output) -> int:
    try:
        code: int = options.command.run(options, out)
    except (Exception, SystemExit) as error:
        if options.traceback or os.environ.get("QOMPOSE_TRACE", "0") not in ("", "0"):
            traceback.print_exc()
        say(_problem(error))
        return PROBLEM
    return code


def _problem(error: BaseException) -> str:
    """Return what to tell of an error: a message for users, or that it is a defect."""
    if isinstance(error, InternalError):
        return f"internal error: {error}. This is a defect of qompose; --traceback shows where."
    if isinstance(error, (QomposeError, QomposeWarning)):
        return str(error)
    if isinstance(error, OSError):
        known = error.filename is not None and error.strerror
        return f"{error.filename}: {error.strerror}" if known else str(error)
    return (
        f"internal error: {told(error)}. This is a defect, of qompose or of a plugin; --traceback shows "
        "where."
    )


@contextmanager
def _warnings_told() -> Iterator[None]:
    """Print qompose's own warnings as messages, and leave those of others as they are."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def tell(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, QomposeWarning):
                say(f"warning: {message}")
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = tell
        yield


class _Parser(ArgumentParser):
    """A parser that takes no abbreviations, which a later option may make ambiguous."""

    def __init__(self, **facts: Any) -> None:
        facts.setdefault("formatter_class", RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **facts)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or usage. argparse itself takes a full disk for success."""
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
            return
        try:
            Output(file).text(message.rstrip("\n"))
        except OSError as error:
            say(str(error))
            self.exit(PROBLEM)


class _Version(Action):
    """Print the version; it is looked up only then."""

    def __call__(self, parser: ArgumentParser, *_: object) -> NoReturn:
        from importlib_metadata import version

        parser._print_message(f"qompose {version('qompose')}", sys.stdout)
        parser.exit()


def _parser() -> _Parser:
    parser = _Parser(prog="qompose", description=DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    _add_traceback(parser, False)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for name, module in COMMANDS.items():
        examples = "\n".join(f"  {line}" for line in module.EXAMPLES.splitlines())
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=f"examples:\n{examples}",
        )
        module.add_arguments(command)
        _add_traceback(command, SUPPRESS)
        command.set_defaults(command=module, parser=command)
    return parser


def _add_traceback(parser: ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--traceback", action="store_true", default=default, help="show where an error was raised"
    )


def _parse(arguments: Sequence[str]) -> Namespace:
    """Return the arguments, or print usage or help and raise SystemExit."""
    parser = _parser()
    command = next((word for word in arguments if not word.startswith("-")), None)
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if command is not None and command not in COMMANDS:
        near = near_names(command, COMMANDS)
        parser.error(f"there is no command {command!r}{near}; there are {', '.join(COMMANDS)}")
    options, rest = parser.parse_known_args(arguments)
    asked: ArgumentParser = getattr(options, "parser", parser)
    if rest:
        known = re.findall(r"--[a-z-]+", asked.format_help())
        close = get_close_matches(rest[0], known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        asked.error(f"there is no argument {rest[0]!r}{hint}")
    if command is None:
        parser.error("a command is missing")
    return options
