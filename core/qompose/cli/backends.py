# SPDX-License-Identifier: Apache-2.0
"""`qompose backends`, and its `--check`.

`qompose backends`: what is installed, and with --check what is wrong with it.

Check backends, each in a process of its own: it may end, crash or never return, and only its row tells.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

from qompose.backend.discovery import (
    BROKEN,
    BackendInfo,
    Health,
    backends,
    check_backend,
    names_nobody_offers,
    unreadable_packages,
    why_none,
)
from qompose.cli.output import Output, printable, results_apart, say

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

    checked = check_all(found, options.timeout)
    return [
        {**info.to_dict(), **health.to_dict()} for info, health in zip(found, checked, strict=True)
    ]


def _print(rows: list[dict[str, Any]], out: Output) -> None:
    from qompose.console import Table, as_text

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


if TYPE_CHECKING:
    Process: TypeAlias = subprocess.Popen[str]
_AT_ONCE = 4
"""Most backends import torch, and that takes some hundred MB."""
# The process finds modules where this one does; -c alone would put the working directory first.
_CHILD = (
    "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); "
    "from qompose.cli.backends import answer; answer(sys.argv[2:])"
)


def check_all(found: Sequence[BackendInfo], timeout: float) -> list[Health]:
    """Return the health of each backend; one that gives no answer for `timeout` seconds is broken."""
    running: set[Process] = set()
    pool = ThreadPoolExecutor(max_workers=min(_AT_ONCE, os.cpu_count() or 1))
    try:
        return list(pool.map(lambda info: _check(info, timeout, running), found))
    except BaseException:  # an interrupt above all: the processes are out of the terminal's reach
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            _end(process)
        raise
    finally:
        pool.shutdown()


def _check(info: BackendInfo, timeout: float, running: set[Process]) -> Health:
    """Load a backend in a process of its own, kept in `running` meanwhile, and return its health."""
    if info.problem is not None:
        return Health(BROKEN, info.problem)
    key = (info.name, info.distribution, info.module)
    process: Process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, os.pathsep.join(sys.path), *key],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    running.add(process)
    try:
        printed, noise = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Health(BROKEN, f"loading it did not end within {timeout:g} s")
    finally:
        _end(process)
        running.discard(process)
    try:
        return Health(**json.loads(printed))
    except (ValueError, TypeError):
        return Health(BROKEN, _last_words(process.returncode, noise))


def _end(process: Process) -> None:
    """End a process and those that it started, if it has not ended."""
    if process.poll() is None:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()


def _last_words(code: int, noise: str) -> str:
    last = (noise.strip().splitlines() or ["no message"])[-1]
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = str(-code)
        return f"loading it ended the process by signal {name}: {last}"
    return f"loading it ended the process with code {code}: {last}"


def answer(key: Sequence[str]) -> None:
    """Print the health of the one backend of a name, distribution and module, as JSON."""
    with results_apart(for_good=True) as out:
        wanted = (i for i in backends() if [i.name, i.distribution, i.module] == list(key))
        out.json(check_backend(next(wanted)).to_dict())
