# SPDX-License-Identifier: Apache-2.0
"""The command `qompose env`: versions, processor and backends, as a bug report needs them."""

from __future__ import annotations

import os
import platform
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from importlib_metadata import PackageNotFoundError, distribution, version

from qompose.backend.discovery import algorithms, backends
from qompose.cli.command import Command, Results
from qompose.console import counted

_SETTINGS = re.compile(r"(QOMPOSE_|TORCH|ATEN_|OMP_|MKL_|KMP_)\w+|CXX|\w+_MAX_CPU_ISA")
"""Environment variables that change what runs, or how fast."""
SCHEMA = 1
"""The version of the form of what `qompose env --json` prints."""
_REQUIREMENT = re.compile(r"[\w.-]+")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(options: Namespace, results: Results) -> int:
    found = facts()
    if options.json:
        results.json({"schema": SCHEMA, **found})
        return 0
    for name, value in found.items():
        if isinstance(value, Mapping):
            results.text(f"{name}:")
            results.text("".join(f"  {key}: {entry}\n" for key, entry in value.items()).rstrip())
        else:
            results.text(f"{name}: {value}")
    return 0


def facts() -> dict[str, Any]:
    """Return what the behaviour of quantized models depends on, as JSON data.

    `packages` are the installed distributions of qompose and of plugins, and what they require, optional
    requirements included; None is one that is not installed.
    """
    import torch

    plugins = {info.name: info for info in (*backends(), *algorithms())}
    threads = counted(torch.get_num_threads(), "thread")
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "torch_uses": f"{torch.backends.cpu.get_cpu_capability()}, {threads}",
        "cores": os.cpu_count(),
        "plugins": {
            name: info.problem or f"{info.kind} of {info.distribution} {info.version}"
            for name, info in plugins.items()
        },
        "packages": _packages({"qompose", *(info.distribution for info in plugins.values())}),
        "settings": {k: v for k, v in sorted(os.environ.items()) if _SETTINGS.fullmatch(k)},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _packages(ours: set[str]) -> dict[str, str | None]:
    """Return the versions of distributions and of what they require."""
    required = {
        match.group().lower().replace("_", "-")
        for name in ours
        if _version(name) is not None
        for text in distribution(name).requires or ()
        if (match := _REQUIREMENT.match(text)) is not None
    }
    return {name: _version(name) for name in (*sorted(ours), *sorted(required - ours))}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


ENV = Command(
    "print versions, processor and backends for a bug report",
    "Print what quantized models depend on: the versions of Python, torch, qompose, its plugins "
    "and their requirements, the processor, the installed backends, and environment variables.",
    "qompose env\nqompose env --json",
    _add_arguments,
    _run,
)
