# SPDX-License-Identifier: Apache-2.0
"""What `zoo.py` has measured so far, in a file that a kill leaves usable."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import qompose

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "torchao", "executorch", "transformers")
MEASURED = ("core", "plugins", "tests/zoo", "benchmarks")
"""The folders whose Python decides what is measured; of benchmarks, the files of the zoo."""

Row = dict[str, Any]


class ChangedError(Exception):
    """The rows of a state were measured on something else."""


def measured_on() -> dict[str, str]:
    """What the results depend on: a digest of the sources, the commit for people, and versions."""
    digest = hashlib.sha256()
    for folder in MEASURED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder != "benchmarks" or path.name.startswith("zoo"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    found = {"sources": digest.hexdigest()[:16], "commit": _commit()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    backends = qompose.backends()
    return {**found, **{f"backend {b.name}": f"{b.distribution} {b.version}" for b in backends}}


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


class State:
    """Rows by model and flow, in a file of a line each; what was cut off by a kill is measured again.

    Args:
        path: of the file, which this process alone may write to meanwhile.
        mixed: keep rows that were measured on other sources or versions; they say so.
        restart: begin with nothing.

    Raises:
        ChangedError: there are such rows, and neither was asked for.
        BlockingIOError: another process writes to the file.
    """

    def __init__(self, path: Path, *, mixed: bool = False, restart: bool = False) -> None:
        self.on = measured_on()
        self.rows: dict[tuple[str, str], Row] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if restart:
                self._file.truncate(0)
            self._read(path, mixed)
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path, mixed: bool) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind("\n") + 1]
        rows = [json.loads(line) for line in whole.splitlines()]
        if not mixed and (others := [row for row in rows if row["on"] != self.on]):
            raise ChangedError(
                f"{path} has {len(others)} of {len(rows)} rows that were measured on something else "
                f"({_difference(others[-1]['on'], self.on)}): --restart throws all rows away, --mixed "
                "keeps them and marks those"
            )
        if len(whole) < len(text):  # the process was killed as it wrote
            self._file.truncate(len(whole.encode()))
        self.rows = {(row["model"], row["flow"]): row for row in rows}

    def add(self, model: str, flow: str, row: Row) -> Row:
        """Write a row, so that it outlasts this process."""
        row = {**row, "model": model, "flow": flow, "on": self.on}
        self.rows[model, flow] = row
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return row

    def has(self, model: str, flow: str, again: str) -> bool:
        """Whether a row need not be measured; `again` says which are: `failed`, `changed`, or `` for none."""
        row = self.rows.get((model, flow))
        if row is None:
            return False
        if again == "changed":
            return bool(row["on"] == self.on)
        return again != "failed" or bool(row["works"])

    def chosen(self, models: Iterable[str], flows: Iterable[str]) -> list[Row]:
        """The rows of models and flows, in their order."""
        wanted = list(flows)
        pairs = ((model, flow) for model in models for flow in wanted)
        return [self.rows[pair] for pair in pairs if pair in self.rows]

    def close(self) -> None:
        self._file.close()


def _difference(one: dict[str, str], other: dict[str, str]) -> str:
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name}: {one.get(name)} then, {other.get(name)} now" for name in names)
