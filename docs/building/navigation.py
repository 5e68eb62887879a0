# SPDX-License-Identifier: Apache-2.0
"""Which pages the site has, and in which order; the index gets them as its tables of contents.

The index stays plain Markdown: a code host shows directives of Sphinx as they are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT_PAGE = "docs/index"

# (caption, pages or patterns). A pattern takes the pages, by name, that no line above it or below it names.
MENU: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Start", ("README", "docs/concepts")),
    (
        "Tutorials",
        (
            "docs/tutorials/index",
            "docs/tutorials/static",
            "docs/tutorials/dynamic",
            "docs/tutorials/weight-only",
            "docs/tutorials/qat",
            "docs/tutorials/composing",
            "docs/tutorials/write-a-quantizer",
            "docs/tutorials/capabilities",
            "docs/tutorials/debugging",
            "docs/tutorials/distributed",
            "docs/tutorials/first-backend",
            "docs/tutorials/deploying",
            "docs/tutorials/*",
        ),
    ),
    ("Moving to qompose", ("docs/migrating/index", "docs/migrating/*")),
    (
        "Guides",
        (
            "docs/selectors",
            "docs/composition",
            "docs/capabilities",
            "docs/calibration",
            "docs/qat",
            "docs/report",
            "docs/comparing",
            "docs/algorithms",
            "docs/tuning",
            "docs/compiling",
            "docs/methods",
            "docs/artefacts",
            "docs/interop",
            "docs/command-line",
            "docs/write-a-backend",
            "docs/kit",
            "docs/*",
        ),
    ),
    ("Backends", ("docs/xnnpack", "docs/x86", "docs/embedding", "docs/onnx", "plugins/*/README")),
    ("What each supports", ("docs/support/*",)),
    (
        "Reference",
        (
            "docs/reference/index",
            "docs/reference/quantize",
            "docs/reference/stages",
            "docs/reference/specifications",
            "docs/reference/quantizers",
            "docs/reference/composition",
            "docs/reference/capabilities",
            "docs/reference/observers",
            "docs/reference/algorithms",
            "docs/reference/training",
            "docs/reference/report",
            "docs/reference/diagnosis",
            "docs/reference/artefacts",
            "docs/reference/backends",
            "docs/reference/kit",
            "docs/reference/testing",
            "docs/reference/*",
        ),
    ),
    (
        "Comparison",
        ("docs/compares", "docs/ecosystem", "benchmarks/README", "benchmarks/results/*"),
    ),
    ("Project", ("CONTRIBUTING", "CHANGELOG")),
)


def sections(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield captions with the pages below them; those that have none are left out."""
    named = {entry for _, entries in MENU for entry in entries if "*" not in entry} | {ROOT_PAGE}
    for caption, entries in MENU:
        found = []
        for entry in entries:
            files = sorted(root.glob(f"{entry}.md"))
            names = [file.relative_to(root).with_suffix("").as_posix() for file in files]
            found += [name for name in names if name == entry or name not in named]
        if found:
            yield caption, found


def pages(root: Path) -> list[str]:
    """Return every page of the site, the index first."""
    return [ROOT_PAGE, *(page for _, found in sections(root) for page in found)]


def tables(root: Path) -> str:
    """Return the tables of contents in the syntax of MyST."""
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
        + "".join(f"/{page}\n" for page in found)
        + "```\n"
        for caption, found in sections(root)
    )


def _add_tables(app: Any, page: str, source: list[str]) -> None:
    if page == ROOT_PAGE:
        source[0] += tables(Path(app.srcdir))


def setup(app: Any) -> dict[str, bool]:
    """Connect this extension of Sphinx."""
    app.connect("source-read", _add_tables)
    return {"parallel_read_safe": True}
