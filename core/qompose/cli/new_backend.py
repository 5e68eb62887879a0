# SPDX-License-Identifier: Apache-2.0
"""`qompose new-backend`: write the project of a small backend that works, for its author to change."""

from __future__ import annotations

import keyword
import re
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from string import Template

from importlib_metadata import version

from qompose.backend.discovery import API_VERSION, GROUP, metadata_field
from qompose.cli.command import Command, Results
from qompose.entry_points import entry_points
from qompose.errors import ProjectError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the backend")
    parser.add_argument(
        "--directory", type=Path, default=Path(), metavar="DIR",
        help="parent directory of the new project (default: current directory)",
    )  # fmt: skip


def _run(options: Namespace, results: Results) -> int:
    """Write the project and print where it is."""
    results.text(str(new_backend(options.name, options.directory)))
    return 0


NEW_BACKEND = Command(
    summary="create a project for a new backend",
    description="""\
Create a pip package with a small working backend and its tests: an entry point, a rule table and
kernels. It can be installed and passes its tests unchanged; replace its rules step by step.""",
    examples="""\
qompose new-backend my_chip
qompose new-backend my_chip --directory ~/projects""",
    add_arguments=_add_arguments,
    run=_run,
)


PREFIX = "qompose"
"""What the names of a backend's distribution and package begin with."""
_TEMPLATES = Path(__file__).with_name("templates") / "backend"
_SUFFIX = ".template"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def new_backend(name: str, parent: Path) -> Path:
    """Write the project of a backend into a new folder of `parent`, and return the folder.

    The project is complete: it installs, quantizes linear layers, and passes the contract suite. For the
    name `my-npu` the backend is called `my_npu`, the distribution and the folder `qompose-my-npu`, and
    the package `qompose_my_npu`.

    Raises:
        ProjectError: the name is not valid for a backend, or an installed one has it; `parent` is not a
            directory that can be written to; the folder exists and is not empty. Nothing is written then.
    """
    facts = _facts(name)
    target = Path(parent) / facts["distribution"]
    if not Path(parent).is_dir():
        raise ProjectError(f"{parent} is not a directory")
    try:
        if target.is_symlink() or (
            target.exists() and not (target.is_dir() and not any(target.iterdir()))
        ):
            raise ProjectError(f"{target} already exists; move it or choose another name")
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=parent) as scratch:
            draft = Path(scratch) / target.name
            for path, text in _rendered(facts).items():
                file = draft / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            if target.exists():
                target.rmdir()
            draft.rename(target)
    except OSError as error:
        raise ProjectError(f"{target} cannot be written: {error}") from error
    return target


def _facts(name: str) -> dict[str, str]:
    """Return what the templates need to know of a backend of this name."""
    _check(name)
    words = re.split("[-_]", name)
    major, minor = map(int, version(PREFIX).split(".")[:2])
    camel = "".join(word.capitalize() for word in words)
    return {
        "name": "_".join(words),
        "distribution": "-".join((PREFIX, *words)),
        "package": "_".join((PREFIX, *words)),
        "class_name": camel if words[-1] == "backend" else f"{camel}Backend",
        "requirement": f"{PREFIX}>={major}.{minor},<{major}.{minor + 1}",
        "api_version": str(API_VERSION),
    }


def _check(name: str) -> None:
    """Refuse a name that cannot be one, or is taken."""
    if not _NAME.fullmatch(name):
        raise ProjectError(
            f"{name!r} is not a valid backend name: use lowercase letters and digits, in words "
            "separated by single hyphens or underscores, starting with a letter"
        )
    if keyword.iskeyword(name):
        raise ProjectError(f"{name!r} is a Python keyword; choose another name")
    if re.split("[-_]", name)[0] == PREFIX:
        raise ProjectError(
            f"{name!r} is not a valid backend name: omit the prefix {PREFIX!r}; it is added "
            "to the distribution name"
        )
    for point in entry_points(group=GROUP):
        if point.name.replace("-", "_") == name.replace("-", "_"):
            raise ProjectError(
                f"the backend name {point.name!r} is taken by the installed package "
                f"{metadata_field(point.dist, 'name')}; use another name or uninstall that package"
            )


def _rendered(facts: dict[str, str]) -> dict[str, str]:
    """Return the text of each file by its path in the project."""
    return {
        _path(file, facts): Template(file.read_text(encoding="utf-8")).substitute(facts)
        for file in sorted(_TEMPLATES.rglob(f"*{_SUFFIX}"))
    }


def _path(file: Path, facts: dict[str, str]) -> str:
    """Return where a template's text goes; `gitignore` is stored without its dot, to be a plain file."""
    first, *rest = file.relative_to(_TEMPLATES).as_posix().removesuffix(_SUFFIX).split("/")
    names = {"package": facts["package"], "gitignore": ".gitignore"}
    return "/".join((names.get(first, first), *rest))
