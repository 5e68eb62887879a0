# SPDX-License-Identifier: Apache-2.0
"""What a constant or a name of a type is: the text after its definition, which Python does not keep."""

from __future__ import annotations

import ast
import importlib
import itertools
from pathlib import Path


def text_after(module: str, name: str) -> str:
    """Return the text that follows the definition of a name that a module has, "" if there is none."""
    file = Path(str(importlib.import_module(module).__file__))
    stub = file.with_suffix(".pyi")
    body = ast.parse((stub if stub.exists() else file).read_text("utf-8")).body
    for node, following in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return text_after(f"{module}.{node.module}" if node.level else str(node.module), name)
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        named = any(isinstance(each, ast.Name) and each.id == name for each in targets)
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return str(following.value.value)
    return ""
