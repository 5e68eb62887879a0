# SPDX-License-Identifier: Apache-2.0
"""Links of pages to files and folders of the repository lead to pages that show those.

`[the demo](../examples/digits.py)` works on a code host as it is. On the site, the file becomes a page of its
own, highlighted, and a folder a list of such pages.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "source"
SHOWN = {".py", ".toml", ".ini", ".txt", ".yml", ".yaml", ".json", ".sh", ".cfg", ""}

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#:]+)\)")


def rewritten(text: str, page: str, root: Path, found: set[str]) -> str:
    """Return the text of a page with links to what is no page turned to the pages that show it.

    Args:
        page: the page's name, a path from `root` without a suffix.
        found: gets the paths of what is linked.
    """
    here = posixpath.dirname(page)

    def turned(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[1]))
        file = root / path
        if path.startswith("..") or file.suffix in (".md", ".svg", ".png") or not file.exists():
            return link[0]  # a page or a picture; what is not there, the builder complains about
        found.add(path)
        return f"](source:{posixpath.relpath(f'{FOLDER}/{path}.html', here or '.')})"

    pieces = []
    end = 0
    for fence in _FENCE.finditer(text):
        pieces += [_LINK.sub(turned, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, _LINK.sub(turned, text[end:])])


def shown(root: Path, linked: set[str]) -> list[str]:
    """Return what gets a page: what is linked, and all within linked folders."""
    found = set(linked)
    for path in linked:
        if (root / path).is_dir():
            found |= {file.relative_to(root).as_posix() for file in _within(root / path)}
    return sorted(found)


def _within(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")) or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield path
            yield from _within(path)
        elif path.suffix in SHOWN:
            yield path


def _on_source(app: Any, page: str, source: list[str]) -> None:
    found: set[str] = set()
    source[0] = rewritten(source[0], page, Path(app.srcdir), found)
    app.env.linked_sources.setdefault(page, set())
    app.env.linked_sources[page] = found


def _on_start(app: Any) -> None:
    if not hasattr(app.env, "linked_sources"):
        app.env.linked_sources = {}


def _pages(app: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    root = Path(app.srcdir)
    linked = set().union(*app.env.linked_sources.values())
    for path in shown(root, linked):
        body = _listing(root / path) if (root / path).is_dir() else _highlighted(app, root / path)
        title = html.escape(path)
        yield f"{FOLDER}/{path}", {"title": title, "body": f"<h1>{title}</h1>\n{body}"}, "page.html"


def _listing(folder: Path) -> str:
    entries = [path for path in _within(folder) if path.parent == folder]
    lines = [
        f'<li><a href="{html.escape(f"{folder.name}/{path.name}")}.html">{html.escape(path.name)}</a></li>'
        for path in entries
    ]
    return "<ul>\n" + "\n".join(lines) + "\n</ul>"


def _highlighted(app: Any, file: Path) -> str:
    language = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "sh"}.get(
        file.suffix, "text"
    )
    text = file.read_text("utf-8")
    return str(app.builder.highlighter.highlight_block(text, language, linenos=False))


def setup(app: Any) -> dict[str, bool]:
    """Connect this extension of Sphinx."""
    app.connect("builder-inited", _on_start)
    app.connect("source-read", _on_source)
    app.connect("html-collect-pages", _pages)
    return {"parallel_read_safe": False}
