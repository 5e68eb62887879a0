# SPDX-License-Identifier: Apache-2.0
"""Write the support tables of docs/support from what backends list of themselves.

python docs/generate.py                     the pages of this repository's backends
python docs/generate.py mybackend           docs/support/mybackend.md, for any that is installed
python docs/generate.py --print mybackend   to standard output
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import qompose
from qompose.console import Block, Table, as_markdown

OWN = ("embedding", "onnx", "x86_inductor", "xnnpack")
FOLDER = Path(__file__).parent / "support"


def page(name: str) -> str:
    """Return the page of an installed backend as Markdown."""
    backend = qompose.backend.load_backend(name)
    rows = backend.quantization_capabilities()
    configurations, patterns = (block for block in rows._blocks() if isinstance(block, Table))
    blocks: list[Block] = [
        f"# What `{name}` supports",
        "",
        "Written by `docs/generate.py` from the backend's rule table. "
        "[Capabilities](../capabilities.md) explains the words.",
        "",
        "## Configurations",
        configurations,
        "## Patterns",
        patterns,
        *notes(rows),
    ]
    return as_markdown(blocks).rstrip("\n") + "\n"


def notes(rows: qompose.Capabilities) -> Iterator[Block]:
    """Yield what patterns ask for beyond their operators; patterns that ask for the same share a line."""
    asked: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        patterns = asked.setdefault(row.notes, [])
        if row.notes and row.drawing not in patterns:
            patterns.append(row.drawing)
    listed = [(patterns, words) for words, patterns in asked.items() if patterns]
    if listed:
        cells = tuple((", ".join(patterns), "\n".join(words)) for patterns, words in listed)
        yield "## Conditions"
        yield Table(("pattern", "what it takes"), cells)


def main() -> None:
    """Write, or print, the pages."""
    parser = argparse.ArgumentParser(description="Write the support tables of docs/support.")
    parser.add_argument(
        "backend", nargs="*", help="installed backends (default: this repository's)"
    )
    parser.add_argument("--print", action="store_true", help="write to standard output")
    options = parser.parse_args()
    for name in options.backend or OWN:
        if options.print:
            print(page(name), end="")
        else:
            (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
