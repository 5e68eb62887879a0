# SPDX-License-Identifier: Apache-2.0
"""The public names of core and plugins, where they are defined, and on which reference page each is.

A reference page lists names in blocks of its own, which a code host shows as they are:

    ```{api} qompose
    quantize
    QuantizedModel
    ```
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qompose

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
BLOCK = re.compile(
    r"^```\{api\} (?P<package>[\w.]+)\n(?P<names>.*?)^```$", re.MULTILINE | re.DOTALL
)


def packages() -> tuple[str, ...]:
    """Return the packages of this repository with public names: core's, and that of each plugin."""
    plugins = sorted(path.parent.name for path in ROOT.glob("plugins/*/*/__init__.py"))
    submodules = sorted(f"qompose.{name}" for name in qompose._submodules)
    return ("qompose", *submodules, "qompose.backend.kit", "qompose.testing", *plugins)


def public_names() -> set[str]:
    """Return every public name behind the name of its package; of two packages, the first that has it."""
    found: dict[int, str] = {}
    for package in packages():
        module = importlib.import_module(package)
        for name in module.__all__:
            if inspect.ismodule(getattr(module, name)):  # with names of its own
                continue
            found.setdefault(id(getattr(module, name)), f"{package}.{name}")
    return set(found.values())


def listed(text: str) -> list[str]:
    """Return the names of the blocks of a page, behind those of their packages."""
    return [
        f"{block['package']}.{name}"
        for block in BLOCK.finditer(text)
        for name in block["names"].split()
    ]


@dataclass(frozen=True)
class Entry:
    """A public name.

    Attributes:
        path: the name behind that of its package, `qompose.quantize`.
        module: the module that defines it.
        value: what it stands for.
        kind: "function", "class", "exception", or "data" for constants and names of types.
    """

    path: str
    module: str
    value: Any
    kind: str

    @property
    def name(self) -> str:
        """Return the name alone."""
        return self.path.rpartition(".")[2]


def entry(path: str) -> Entry:
    """Return what a name is.

    Raises:
        AttributeError: the package has no such name.
    """
    package, _, name = path.rpartition(".")
    home = importlib.import_module(package)
    value = getattr(home, name)
    if inspect.isclass(value) and value.__name__ == name:
        kind = "exception" if issubclass(value, BaseException) else "class"
        return Entry(path, value.__module__, value, kind)
    if inspect.isroutine(value) and getattr(value, "__name__", "") == name:
        return Entry(path, value.__module__, value, "function")
    return Entry(path, _defining(package, name), value, "data")


def _defining(module: str, name: str) -> str:
    """Return the module whose code assigns a name, behind those that import it from there."""
    file = Path(str(importlib.import_module(module).__file__))
    stub = file.with_suffix(".pyi")
    for node in ast.parse((stub if stub.exists() else file).read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            source = f"{module}.{node.module}" if node.level else str(node.module)
            return _defining(source, name)
    return module


def data_doc(found: Entry) -> str:
    """Return the text behind the definition of a constant in its module, "" where there is none."""
    module = importlib.import_module(found.module)
    body = ast.parse(inspect.getsource(module)).body
    for statement, following in itertools.pairwise(body):
        targets = [*getattr(statement, "targets", ()), getattr(statement, "target", None)]
        named = any(isinstance(each, ast.Name) and each.id == found.name for each in targets)
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return str(following.value.value)
    return ""


@functools.cache
def documented() -> tuple[str, ...]:
    """Return every name that a reference page lists, also those that are not public."""
    return tuple(
        name for page in sorted(PAGES.glob("*.md")) for name in listed(page.read_text("utf-8"))
    )


@functools.cache
def by_place() -> dict[str, str]:
    """Return the documented name of each place that defines one, `qompose.spec.claim.Claim`."""
    entries = [entry(path) for path in documented()]
    return {f"{found.module}.{found.name}": found.path for found in entries}


@functools.cache
def by_short_name() -> dict[str, str]:
    """Return the documented names by their last parts, but for those that several packages have."""
    parts: dict[str, list[str]] = {}
    for path in documented():
        parts.setdefault(path.rpartition(".")[2], []).append(path)
    return {name: paths[0] for name, paths in parts.items() if len(paths) == 1}
