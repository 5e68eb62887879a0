# SPDX-License-Identifier: Apache-2.0
"""What the metadata of installed packages offers under an entry-point group, read one package at a time.

importlib.metadata's own `entry_points` parses every package's file at once, so that one malformed line in
one package hides the entry points of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from importlib_metadata import Distribution, PackageNotFoundError

UNKNOWN = "unknown"


class Offer(NamedTuple):
    """A line of a package's `entry_points.txt`. `value` is empty where the line is no `name = value`."""

    name: str
    value: str
    dist: Distribution


def entry_points(group: str) -> Iterator[Offer]:
    """Yield what installed packages offer under `group`; of two copies of a package, the one Python finds."""
    seen = set()
    for distribution in Distribution.discover():
        if not _lines(distribution, group):
            continue
        found = _found_by_name(distribution)
        key = str(found.locate_file("")), fact(found, "name")
        if key not in seen:
            seen.add(key)
            yield from (_offer(line, found) for line in _lines(found, group))


def unreadable_packages() -> list[str]:
    """Return the folders of packages whose `entry_points.txt` has something else in it than groups."""
    found = set()
    for distribution in Distribution.discover():
        lines = _content(distribution)
        if lines and not _is_heading(lines[0]):
            # Its metadata may be gone too, and then only the folder tells which package it is.
            found.add(str(getattr(distribution, "_path", distribution.locate_file(""))))
    return sorted(found)


def fact(distribution: Distribution, name: str) -> str:
    """Return the `name` or `version` of a package, "unknown" where its metadata lack it."""
    found = _attempt(lambda: getattr(distribution, name))
    return str(found) if found else UNKNOWN


def _attempt(read: Callable[[], object]) -> object:
    try:
        return read()
    except Exception:  # metadata may be missing, undecodable or half removed, each in its own way
        return None


def _lines(distribution: Distribution, group: str) -> list[str]:
    """Return the lines of a group, without comments."""
    lines, inside = [], False
    for line in _content(distribution):
        if _is_heading(line):
            inside = line == f"[{group}]"
        elif inside:
            lines.append(line)
    return lines


def _content(distribution: Distribution) -> list[str]:
    """Return the lines of a package's file without blank ones and comments."""
    text = _attempt(lambda: _text(distribution))
    lines = map(str.strip, text.splitlines()) if isinstance(text, str) else ()
    return [line for line in lines if line and not line.startswith(("#", ";"))]


def _is_heading(line: str) -> bool:
    return line.startswith("[") and line.endswith("]")


def _text(distribution: Distribution) -> str | None:
    try:
        return distribution.read_text("entry_points.txt")
    except UnicodeDecodeError as error:  # what can be read of it says whom to blame
        return error.object.decode(error.encoding, errors="replace")


def _found_by_name(distribution: Distribution) -> Distribution:
    """Return the copy of a package that comes first on `sys.path`: the one whose modules are imported."""
    name = fact(distribution, "name")
    if name == UNKNOWN:
        return distribution
    try:
        found: Distribution = Distribution.from_name(name)
    except PackageNotFoundError:  # its folder has another name: what an interrupted removal leaves
        return distribution
    return found


def _offer(line: str, distribution: Distribution) -> Offer:
    name, _, value = line.partition("=")
    return Offer(name.strip(), value.strip(), distribution)
