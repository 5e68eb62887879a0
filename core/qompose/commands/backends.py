# SPDX-License-Identifier: Apache-2.0
"""`qompose backends`: what is installed, and with --check what is wrong with it."""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from qompose.commands.output import Output, printable, say
from qompose.offers import unreadable_packages
from qompose.plugins import backends, names_nobody_offers, why_none

SUMMARY = "list the installed backends"
DESCRIPTION = """\
List the installed backends from package metadata alone, without importing one.

With --check, load each in a process of its own and say what is wrong: "broken" means that the package is
at fault, "unavailable here" that this machine lacks something. Either makes the exit code 1."""
EXAMPLES = """\
qompose backends
qompose backends --check
QOMPOSE_PLUGINS=my_chip,my_cpu qompose backends --json"""


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--check", action="store_true", help="load each in a process of its own")
    parser.add_argument(
        "--timeout", type=_seconds, default=120.0, metavar="SECONDS",
        help="with --check: how long loading one may take (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace, out: Output) -> int:
    """Print the table; return 1 where something is wrong with a backend."""
    rows = _rows(options)
    for name in names_nobody_offers():
        say(f"QOMPOSE_PLUGINS names {name!r}, which no installed package offers")
    for package in unreadable_packages():
        say(f"{package}: its entry_points.txt is damaged, so that what it offers is not known")
    if options.json:
        out.json(rows)
    else:
        _print(rows, out)
    return int(any(row["problem"] for row in rows))


def _rows(options: Namespace) -> list[dict[str, Any]]:
    found = backends()
    if not options.check:
        return [info.to_dict() for info in found]
    from qompose.commands.checking import check_all

    checked = check_all(found, options.timeout)
    return [
        {**info.to_dict(), **health.to_dict()} for info, health in zip(found, checked, strict=True)
    ]


def _print(rows: list[dict[str, Any]], out: Output) -> None:
    from qompose.rendering import Table, as_text

    if not rows:
        out.text(why_none())
        return
    columns = ["name", "distribution", "version", "module"]
    columns += [c for c in ("status", "problem") if any(row.get(c) for row in rows)]
    cells = tuple(tuple(printable(row.get(column) or "") for column in columns) for row in rows)
    out.text(as_text([Table(tuple(columns), cells)], out.width).strip("\n"))
    for row in rows:
        for target, problem in row.get("targets", {}).items():
            if problem:
                out.text(f"{row['name']}: target {target} cannot be used here: {problem}")
