# SPDX-License-Identifier: Apache-2.0
"""Pages of Markdown: their blocks, and what of their sentences can be checked against the repository."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import qompose

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml"))

_FENCED = re.compile(r"^```(\w+)[ \t]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: the language, what stands behind it, its text, and where that starts."""

    language: str
    info: str
    text: str
    start: int
    line: int


def by_branch(pages: Sequence[str]) -> Iterator[object]:
    """The pages as parameters: what this branch changes against main for every run, the rest for `full`."""
    changed = _changed()
    for page in pages:
        later = changed is not None and page not in changed
        yield pytest.param(page, marks=[pytest.mark.full] if later else [])


def _changed() -> set[str] | None:
    """The files that differ from main, committed or not; `None` where git knows no main."""
    for main in ("origin/main", "main"):
        base = _git("merge-base", "HEAD", main)
        if base:
            new = _git("ls-files", "--others", "--exclude-standard")
            return {*_git("diff", "--name-only", base).splitlines(), *new.splitlines()}
    return None


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    whole = text(page)
    return [
        Block(m[1], m[2], m[3], m.start(3), whole.count("\n", 0, m.start()) + 1)
        for m in _FENCED.finditer(whole)
    ]


def fenced(page: str, language: str) -> list[str]:
    """The texts of the blocks of a language that are no files."""
    return [b.text for b in blocks(page) if b.language == language and not b.info]


def missing_files(page: str) -> list[str]:
    """The files named in a page's sentences that are neither here nor in one of its own blocks."""
    prose = _FENCED.sub("", text(page))
    named = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|ini|txt|toml|md|yaml))`", prose)
    own = " ".join(f"{block.info} {block.text}" for block in blocks(page))
    places = (ROOT, (ROOT / page).parent)
    return [
        name
        for name in named
        if name != "utils.py"  # the house has none, and says so
        and name not in own
        and not any((place / name).exists() for place in places)
    ]


def unknown_names(page: str) -> list[str]:
    """What a page calls `qompose.something` and is neither a public name nor a module."""
    named = set(re.findall(r"(?<![\w./\"'-])qompose((?:\.\w+)+)", text(page)))
    return sorted(f"qompose{path}" for path in named if not _exists(path.split(".")[1:]))


def _exists(path: list[str]) -> bool:
    if path[0] in qompose.__all__ or path[0] in ("__version__", "__all__"):
        found, rest = getattr(qompose, path[0]), path[1:]
    else:
        found, rest = qompose, path
        while rest and (module := _module(f"{found.__name__}.{rest[0]}")):
            found, rest = module, rest[1:]
        if found is qompose:
            return False
    return all(hasattr(found, name) for name in rest[:1])


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def unknown_commands(page: str) -> list[str]:
    """The lines of a page's shell blocks with a subcommand or option that the help of `qompose` lacks."""
    lines = "\n".join(fenced(page, "sh")).replace("\\\n", " ").splitlines()
    unknown = []
    for line in lines:
        command = line.partition("#")[0].split()
        while command and ("=" in command[0] or command[0] in ("$", "python", "-m")):
            command = command[1:]  # a variable that is set for the command, or its longer name
        if command[:1] == ["qompose"]:
            shown = help_of(command[1]) if len(command) > 1 else ""
            options = [part.partition("=")[0] for part in command[2:] if part.startswith("--")]
            if not shown or any(option not in shown for option in options):
                unknown.append(line)
    return unknown


@functools.cache
def help_of(subcommand: str) -> str:
    """The help of a subcommand, "" where there is none of that name."""
    from qompose.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            main([subcommand, "--help"])
        except SystemExit as done:
            if done.code:
                return ""
    return printed.getvalue()
