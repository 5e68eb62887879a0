# SPDX-License-Identifier: Apache-2.0
"""The machine that measures: what it is, what is installed, and whether anything else is at work on it."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
IDLE = 0.1
"""The part of the cores that other processes may use."""
_WATCHED = 2.0
"""Seconds."""
_EXTENSIONS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")


def release(package: str) -> str | None:
    """The installed version of a package, None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def facts(packages: Iterable[str]) -> dict[str, Any]:
    """What figures depend on: processor, its instructions, threads, versions, and the commit."""
    return {
        "processor": _from("/proc/cpuinfo", "model name")
        or platform.processor()
        or platform.machine(),
        "instructions": [name for name in _EXTENSIONS if name in _flags()],
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "commit": _commit(),
        "versions": {name: release(name) or "not installed" for name in packages},
    }


def anonymous_bytes() -> int:
    """The memory of this process that is no file's."""
    held = _from("/proc/self/status", "RssAnon")
    return int(held.split()[0]) * 1024


def lines(found: dict[str, Any]) -> list[str]:
    """The facts in Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    instructions = " ".join(found["instructions"]) or "no extensions known"
    return [
        f"- {found['processor']}, {found['cores']} cores; {instructions}",
        f"- torch uses {found['torch_uses']} and {found['threads']} threads, unless a script says otherwise",
        f"- {found['system']}; {versions}",
        f"- commit {found['commit']}",
    ]


def busy() -> float | None:
    """The part of all cores that is at work while this process waits, None where that cannot be known."""
    before = _jiffies()
    time.sleep(_WATCHED)
    after = _jiffies()
    if before is None or after is None:
        return None
    total, idle = (late - early for late, early in zip(after, before, strict=True))
    return 1 - idle / total if total else None


def _jiffies() -> tuple[int, int] | None:
    """All time of the processors so far, and what of it they waited (Linux)."""
    try:
        times = [
            int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ]
    except (OSError, ValueError):
        return None
    return sum(times), times[3] + times[4]


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="qompose-benchmark-") as folder:
        yield Path(folder)


def _flags() -> set[str]:
    return set((_from("/proc/cpuinfo", "flags") or _from("/proc/cpuinfo", "Features")).split())


def _from(file: str, key: str) -> str:
    try:
        text = Path(file).read_text("utf-8")
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(key))
    return next(found, "")


def _commit() -> str:
    """The commit of these sources, and whether they differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown: these sources are no checkout"
    return done.stdout.strip()
