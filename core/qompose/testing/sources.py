# SPDX-License-Identifier: Apache-2.0
"""What a backend's source may import of qompose: its public names."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import qompose
from qompose.testing.failures import ContractError
from qompose.testing.suite import Suite

PUBLIC_MODULES = ("qompose", "qompose.testing")


def imports_public_names(suite: Suite) -> None:
    """The backend's modules use nothing of qompose but its public names."""
    for path in _files(suite):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for line, name in sorted(_private(tree)):
            raise ContractError(
                f"backend {suite.backend.name!r}, {path.name}, line {line}",
                expected="imports of public names only, `from qompose import ...`",
                found=name,
                remedy="use what `qompose.__all__` lists, or ask for the name to be made public",
            )


def _files(suite: Suite) -> list[Path]:
    """Return the modules of the backend's package; of a backend that is not installed, its own one."""
    module = type(suite.backend).__module__
    if not isinstance(suite.source, str):
        file = inspect.getsourcefile(sys.modules[module])
        return [Path(file)] if file else []
    spec = find_spec(module.partition(".")[0])
    if spec is None or not spec.submodule_search_locations:
        return [Path(spec.origin)] if spec is not None and spec.origin else []
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def _private(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for each use of a name of qompose that is not public."""
    public = {*qompose.__all__, "__version__", "testing"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("qompose.") and alias.name not in PUBLIC_MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.startswith("qompose.") and module not in PUBLIC_MODULES:
                yield node.lineno, f"from {module} import ..."
            if module == "qompose":
                names = [a.name for a in node.names if a.name not in public and a.name != "*"]
                yield from ((node.lineno, f"from qompose import {name}") for name in names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "qompose"
            and node.attr not in public
        ):
            yield node.lineno, f"qompose.{node.attr}"
