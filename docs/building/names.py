# SPDX-License-Identifier: Apache-2.0
"""Reference pages get the documentation of the names that they list, and names in signatures lead to it."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

from docs.building import api, docstrings

# What signatures name from elsewhere: there is no copy of its documentation to link to without a network.
ELSEWHERE = (
    "abc",
    "torch",
    "collections",
    "typing",
    "pathlib",
    "os",
    "executorch",
    "pytest",
    "_pytest",
    "rich",
    "numpy",
    "onnx_ir",
)

TYPES = "docs/reference/types"  # what is not public and named all the same


def documented(text: str, brief: bool = False) -> str:
    """Return a reference page with its blocks of names as directives of autodoc.

    Args:
        brief: leave out methods.
    """
    return api.BLOCK.sub(
        lambda block: "\n".join(
            ["```{eval-rst}", *(_directive(path, brief) for path in api.listed(block[0])), "```"]
        ),
        text,
    )


def _directive(path: str, brief: bool) -> str:
    found = api.entry(path)
    if found.kind == "data":
        told = docstrings.as_rst(api.data_doc(found), api.by_short_name())
        package, _, name = path.rpartition(".")
        return f".. py:data:: {name}\n   :module: {package}\n\n{textwrap.indent(told, '   ')}\n"
    members = "" if brief else "   :members:\n"
    bases = getattr(found.value, "__bases__", ())
    own = any(base.__module__ not in ("builtins", "abc", "typing") for base in bases)
    inheritance = "   :show-inheritance:\n" if own or found.kind == "exception" else ""
    options = "" if found.kind == "function" else f"{members}{inheritance}"
    return f".. auto{found.kind}:: {path}\n{options}"


def _resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Return a link to a public name that a signature names by the place that defines it, or shortly."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target.partition(".")[0] in ELSEWHERE or target in _outsiders():
        return content
    if target.rpartition(".")[2].startswith("_"):
        return content  # a type variable: other private names are in no public signature
    if node["refdoc"] == TYPES and target.startswith("qompose"):
        return content  # what records consist of goes ever deeper
    path = api.by_place().get(target) or api.by_short_name().get(target)
    if path is None:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, content)


@functools.cache
def _outsiders() -> frozenset[str]:
    """Return short names that signatures have from packages of others."""
    import collections.abc
    import types
    import typing

    import torch

    found = {
        name for module in (collections.abc, typing, types, torch, torch.fx) for name in dir(module)
    }
    return frozenset(
        found | {"nn.Module", "torch.dtype", "ExportedProgram", "OpOverload", "PathLike", "Self"}
    )


def _on_source(app: Any, page: str, source: list[str]) -> None:
    if page.startswith("docs/reference/"):
        source[0] = documented(source[0], brief=page == TYPES)


def setup(app: Any) -> dict[str, bool]:
    """Connect this extension of Sphinx."""
    app.connect("source-read", _on_source)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True}
