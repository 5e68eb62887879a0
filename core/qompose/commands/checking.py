# SPDX-License-Identifier: Apache-2.0
"""Check backends, each in a process of its own: it may end, crash or never return, and only its row tells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from qompose.commands.output import results_apart
from qompose.plugins import BROKEN, BackendInfo, Health, backends, check_backend

if TYPE_CHECKING:
    Process: TypeAlias = subprocess.Popen[str]

_AT_ONCE = 4
"""Most backends import torch, and that takes some hundred MB."""

# The process finds modules where this one does; -c alone would put the working directory first.
_CHILD = (
    "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); "
    "from qompose.commands.checking import answer; answer(sys.argv[2:])"
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
