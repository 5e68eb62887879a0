# SPDX-License-Identifier: Apache-2.0
"""Check a built site: every link within it leads somewhere, and no page loads anything from elsewhere.

python -m docs.building.check build/site
"""

from __future__ import annotations

import argparse
import posixpath
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "srcset"),
}


class Page(HTMLParser):
    """What a page names: its anchors, where its links lead, and what a browser loads for it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take what an element names."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (tag, name) in LOADS and value:
                self.loads.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)


def problems(site: Path) -> Iterator[str]:
    """Yield what is wrong, a line each."""
    pages = {file.relative_to(site).as_posix(): Page(file) for file in site.rglob("*.html")}
    if not pages:
        yield f"{site} has no page"
    for name, page in pages.items():
        for target in page.loads:
            if urlsplit(target).netloc:
                yield f"{name} loads {target} from elsewhere"
        for target in [*page.links, *page.loads]:
            if not urlsplit(target).scheme and not _leads(site, pages, name, target):
                yield f"{name}: {target} leads nowhere"


def _leads(site: Path, pages: dict[str, Page], name: str, target: str) -> bool:
    parts = urlsplit(target)
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
    path = path if parts.path else name
    anchor = unquote(parts.fragment)
    if path in pages:
        return not anchor or anchor in pages[path].anchors
    return (site / path).is_file()


def main() -> None:
    """Print the problems of a site; end with status 1 where there are any."""
    parser = argparse.ArgumentParser(description="Check the links of a built site.")
    parser.add_argument("site", type=Path, help="the folder of the site")
    found = list(problems(parser.parse_args().site))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
