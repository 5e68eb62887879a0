# SPDX-License-Identifier: Apache-2.0
"""The site: Sphinx reads the Markdown pages of the repository and the docstrings of public names.

`python -m tox run -e docs` builds it. The root of the sources is the repository, so that links to README.md
or to results of benchmarks are the same on a code host and on the site.
"""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docstrings import prepare_docstring

from docs.constants import text_after

project = "qompose"
copyright = "the qompose authors, Apache-2.0"
version = release = version_of("qompose")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
root_doc = "docs/contents"
include_patterns = [
    "docs/**.md",
    "docs/**.rst",
    "plugins/*/README.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
]

myst_heading_anchors = 4  # the anchors that code hosts make, for links to a heading
default_role = "py:obj"  # `name` in a docstring is code, and a link where the name is documented
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "furo"
html_title = "qompose"
html_copy_source = False
html_show_sphinx = False
html_favicon = "figures/icon.svg"
html_extra_path = ["site"]
pygments_style = "tango"
pygments_dark_style = "monokai"


TYPES = "docs/reference/types"  # what records consist of goes ever deeper


def _resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link what is documented under another path; leave other packages' names and plain code unlinked."""
    target = node.get("reftarget", "").removeprefix("~")
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    found = [path for path in domain.objects if path.rpartition(".")[2] == name]
    if len(found) > 1:  # in `qompose` and in a submodule, or a method of several classes
        found = [path for path in found if target in (path, path.removeprefix("qompose."))] or [
            path for path in found if path.count(".") == 1
        ]
    if len(found) == 1:
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, content)
    inside = (
        target.startswith("qompose") and node.get("reftype") != "obj" and node["refdoc"] != TYPES
    )
    return None if inside and not found and not name.startswith("_") else content


def _document(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Give a constant the text that follows its definition, and a property its docstring.

    napoleon takes what precedes a colon in a property's first line for a type.
    """
    if what == "data":
        package, _, constant = name.rpartition(".")
        lines[:] = text_after(package, constant).splitlines() or lines
    elif what == "property" and value.__doc__:
        text = prepare_docstring(value.__doc__)
        lines[:] = GoogleDocstring(text, app.config, app, "method", name, value, options).lines()


def _shorten(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str | None, returned: Any
) -> tuple[str | None, Any]:
    """Replace defaults that print as no Python, such as `<factory>`, in a signature."""
    return (signature and re.sub(r"= ?<[^<>]*>", "= ...", signature)), returned


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("missing-reference", _resolve)
    app.connect("autodoc-process-docstring", _document, priority=600)  # after napoleon
    app.connect("autodoc-process-signature", _shorten)
