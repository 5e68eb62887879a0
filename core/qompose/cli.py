# SPDX-License-Identifier: Apache-2.0
"""The command `qompose`: what is installed, and what it can do."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from qompose.errors import PluginError, QomposeError
from qompose.plugins import BackendInfo, backends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 1 for a problem, or 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except QomposeError as error:
        print(f"qompose: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qompose", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("backends", help="list the installed backends")
    listing.add_argument("--check", action="store_true", help="load each in a process of its own")
    listing.set_defaults(run=_backends)
    rows = commands.add_parser("capabilities", help="list what backends can do")
    rows.add_argument("backend", nargs="*", help="names; all installed backends if none is given")
    rows.set_defaults(run=_capabilities)
    for command in (listing, rows):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _backends(options: argparse.Namespace) -> int:
    found = backends()
    rows: list[dict[str, Any]] = [
        {**info.to_dict(), **({"problem": _check(info)} if options.check else {})} for info in found
    ]
    columns = ["name", "distribution", "version", "module"]
    if options.check or any(row["problem"] for row in rows):
        columns.append("problem")
    _print(rows, columns, options.json)
    return int(any(row["problem"] for row in rows))


_CHECK = (
    "import sys, qompose.plugins as p;"
    "info = [i for i in p.backends() if (i.name, i.distribution) == tuple(sys.argv[1:3])][0];"
    "problem = p.check_backend(info);"
    "print('\\0' + (problem or ''))"
)


def _check(info: BackendInfo) -> str | None:
    """Load a backend in a process of its own and return what is wrong with it."""
    command = [sys.executable, "-c", _CHECK, info.name, info.distribution]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or "\0" not in done.stdout:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"loading it ended the process with code {done.returncode}: {last}"
    return done.stdout.rpartition("\0")[2].strip() or None


def _capabilities(options: argparse.Namespace) -> int:
    from qompose.capabilities import capability_rows
    from qompose.plugins import load_backend

    rows, problems = [], []
    for name in options.backend or [info.name for info in backends()]:
        try:
            rows += [row.to_dict() for row in capability_rows(load_backend(name))]
        except PluginError as error:
            problems.append(error)
    for row in rows:
        row["targets"] = ", ".join(
            f"{target}: {kernel}" for target, kernel in row["kernels"].items()
        )
    _print(rows, ["backend", "drawing", "config", "targets"], options.json)
    for problem in problems:
        print(f"qompose: {problem}", file=sys.stderr)
    return int(bool(problems))


def _print(rows: list[dict[str, Any]], columns: list[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row[column] or "") for column in columns))
    Console().print(table)
