# SPDX-License-Identifier: Apache-2.0
"""Docstrings are read as they are written here: Google's sections, and `name` for code.

Code is a link where it is a documented name. Sphinx's own extension for Google's style is not loaded: it
takes "Return the rows: ..." of a property for a type, and "low, high: ..." under "Attributes:" for one name.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

from docs.building import api

STYLE = Config(
    napoleon_use_rtype=False,
    napoleon_custom_sections=[("Attributes", "params_style")],
)
_CODE = re.compile(r"(?<![`:\w])`([^`\n]+)`(?!`)")


def as_rst(line: str, linked: dict[str, str]) -> str:
    """Return a line of a docstring with its code in the syntax of reStructuredText.

    Args:
        linked: the full names of what is linked, by the names that docstrings use.
    """

    def marked(code: re.Match[str]) -> str:
        path = linked.get(code[1].removeprefix("qompose."))
        return f":py:obj:`{code[1]} <{path}>`" if path else f"``{code[1]}``"

    return _CODE.sub(marked, line)


def _on_docstring(
    app: Any, what: str, name: str, value: object, options: Any, lines: list[str]
) -> None:
    linked = {path: full for path, full in api.by_short_name().items() if full != name}
    marked = [as_rst(line, linked) for line in lines]
    kind = what if what in ("class", "exception", "function") else "method"
    lines[:] = GoogleDocstring(marked, STYLE, app, kind, name, value, options).lines()


def _on_signature(
    app: Any,
    what: str,
    name: str,
    value: object,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Leave out defaults that print as no Python: `<factory>` of dataclasses, `<function f>`."""
    return (signature and re.sub(r"= ?<[^<>]*>", "= ...", signature)), returned


def _on_bases(app: Any, name: str, value: object, options: Any, bases: list[type]) -> None:
    """Show what a private base is made of in its place."""
    while any(base.__name__.startswith("_") for base in bases):
        bases[:] = [
            each
            for base in bases
            for each in (base.__bases__ if base.__name__.startswith("_") else (base,))
        ]


def setup(app: Any) -> dict[str, bool]:
    """Connect this extension of Sphinx."""
    app.connect("autodoc-process-docstring", _on_docstring)
    app.connect("autodoc-process-signature", _on_signature)
    app.connect("autodoc-process-bases", _on_bases)
    return {"parallel_read_safe": True}
