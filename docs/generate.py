# SPDX-License-Identifier: Apache-2.0
"""Write docs/support: what each backend supports, from the capabilities that it lists.

python docs/generate.py                     the pages of this repository's backends
python docs/generate.py mybackend           docs/support/mybackend.md, for any that is installed
python docs/generate.py --print mybackend   to standard output
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import qompose
from qompose.backend import Capability
from qompose.console import Block, Table, as_markdown

OWN = ("embedding", "onnx", "x86_inductor", "xnnpack")
FOLDER = Path(__file__).parent / "support"


def page(name: str) -> str:
    """Return the page of an installed backend as Markdown."""
    rows = qompose.backend.load_backend(name).quantization_capabilities()
    blocks: list[Block] = [
        f"# What `{name}` supports",
        "",
        f"Written by `docs/generate.py` from the backend's rule table. `qompose capabilities {name}` also "
        "shows kernels, specifications and conditions; [capabilities](../capabilities.md) explains how to "
        "ask about an operator.",
        Table(("mode", "configurations"), tuple(_configurations(rows))),
        Table(("mode", "runs on", "patterns"), tuple(_patterns(rows))),
    ]
    return as_markdown(blocks).rstrip("\n") + "\n"


def _configurations(rows: Iterable[Capability]) -> Iterable[tuple[str, str]]:
    """Yield each mode with its configurations, the default one first."""
    modes: dict[str, dict[str, None]] = {}
    for row in rows:
        modes.setdefault(row.mode, {})[row.config] = None
    return [(mode, "; ".join(names)) for mode, names in modes.items()]


def _patterns(rows: Iterable[Capability]) -> Iterable[tuple[str, str, str]]:
    """Yield the patterns of each mode and set of targets; those with one beginning share an entry."""
    places: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for row in rows:
        begins, _, ends = row.drawing.rpartition(" -> ")
        found = places.setdefault((row.mode, ", ".join(row.targets)), {})
        if begins:
            found.setdefault(begins, {})[ends] = None
        else:
            found.setdefault(ends, {})
    for place, patterns in places.items():
        drawn = (
            f"{begins} (-> {', '.join(ends)})" if ends else begins
            for begins, ends in patterns.items()
        )
        yield (*place, ", ".join(drawn))


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
