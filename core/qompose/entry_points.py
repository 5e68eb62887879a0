# SPDX-License-Identifier: Apache-2.0
"""What installed packages offer by entry point, from their metadata alone."""

from __future__ import annotations

from collections.abc import Iterator

from importlib_metadata import Distribution, EntryPoint, EntryPoints

ALGORITHM_GROUP = "qompose.algorithms"
"""The group of other packages' algorithms, whose names are the words that configurations ask by."""


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group; of two copies of a package, those of the one Python imports.

    Packages are read one at a time: `importlib_metadata.entry_points` parses all of them at once, so that
    one malformed line would hide the entry points of every package.
    """
    found: list[EntryPoint] = []
    for distribution, points in offers(group):
        if points:
            found += _imported_copy(distribution).entry_points.select(group=group)
    return found


def offers(group: str) -> Iterator[tuple[Distribution, EntryPoints | None]]:
    """Yield each distribution with its entry points of a group, None where they cannot be read."""
    for distribution in Distribution.discover():
        try:
            points = distribution.entry_points.select(group=group)
        except Exception:  # a malformed line, or bytes that are not text
            points = None
        yield distribution, points


def _imported_copy(distribution: Distribution) -> Distribution:
    """Return the copy of a package that comes first on `sys.path`."""
    try:
        found: Distribution = Distribution.from_name(distribution.name)
        found.entry_points  # noqa: B018 - raises if it cannot be read
    except Exception:  # no metadata, or a folder of another name, from an interrupted removal
        return distribution
    return found
