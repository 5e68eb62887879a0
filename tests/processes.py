# SPDX-License-Identifier: Apache-2.0
"""Python in processes and environments of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

END_AT_ONCE = """
import os, sys
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""
"""Behind a script: Python takes up to two seconds to take apart what torch has imported."""


def python(
    *arguments: object, cwd: Path | None = None, to_the_end: bool = False, **variables: str
) -> str:
    """What a new process prints, which must not fail; it has the variables besides those that are set.

    Args:
        to_the_end: whether code that is given with -c ends as programs do, with all that was loaded unloaded.
    """
    words = [sys.executable, *arguments]
    if "-c" in words and not to_the_end:
        code = words.index("-c") + 1
        words[code] = f"{words[code]}\n{END_AT_ONCE}"
    return _printed(_run(words, cwd, {**os.environ, **variables}))


def run(
    command: Sequence[object], cwd: Path = Path(sys.prefix), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command away from the checkout, without what the caller's environment says of Python."""
    ours = ("PYTHON", "QOMPOSE", "PYTEST", "COLUMNS")  # the last of which xdist sets
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return _run(command, cwd, kept | variables)


def checked(command: Sequence[object], cwd: Path = Path(sys.prefix)) -> str:
    """What a command prints that is run like this, which must not fail."""
    return _printed(run(command, cwd))


def _run(
    command: Sequence[object], cwd: Path | None, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=cwd, env=variables
    )


def _printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A new virtual environment in a folder."""

    path: Path

    def __post_init__(self) -> None:
        venv.create(self.path, with_pip=False, symlinks=True)

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def packages(self) -> Path:
        return next((self.path / "lib").glob("python*/site-packages"))

    def pip(self, *arguments: object) -> str:
        return checked([sys.executable, "-m", "pip", "--python", self.python, *arguments])
