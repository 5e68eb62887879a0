# SPDX-License-Identifier: Apache-2.0
"""Regions that hold what they promise: hypotheses that running them refutes are given up.

Where two values that were thought to stand for each other differ, the border of a region is in the wrong
place, or else the transform does not compute the same there. A region that is wrong grows by what reads it;
if nothing that it can grow to computes the same, it is the transform, and the region is left as it was.
"""

from __future__ import annotations

from qompose.quantizer.interop.correspondence import Correspondence
from qompose.quantizer.interop.equivalence import unequal
from qompose.quantizer.interop.execution import NotRunnable
from qompose.quantizer.interop.regions import Pair, Region, regions_of

GROWTH = 4
"""How often a region grows by its readers before it grows to the outputs."""


def settle(found: Correspondence) -> tuple[list[Region], list[Region]]:
    """Give up pairs of values, in place, until every region computes what stood in its place.

    Returns:
        the regions, and those of them for which that is not so, or which could not be run.
    """
    proven: set[Region] = set()
    unproven: set[Region] = set()
    while True:
        regions = regions_of(found)
        wrong = {
            region: _differing(region, found, proven)
            for region in regions
            if region not in unproven
        }
        first = next(
            (region for region, pairs in wrong.items() if pairs), None
        )  # others follow from it
        if first is None:
            return regions, [region for region in regions if region in unproven]
        if not _grow(first, wrong[first], found, proven):
            unproven.add(first)


def _differing(region: Region, found: Correspondence, proven: set[Region]) -> list[Pair]:
    """Return the pairs that are wrong: all, where a region cannot be run."""
    if region in proven:
        return []
    try:
        wrong = unequal(region, found)
    except NotRunnable:
        wrong = list(region.pairs)
    if not wrong:
        proven.add(region)
    return wrong


def _grow(region: Region, wrong: list[Pair], found: Correspondence, proven: set[Region]) -> bool:
    """Give up wrong pairs, and those that are wrong then; take all back if none of it helps."""
    pairs = found.pairs()
    core = {*region.before, *region.after}
    for rounds in range(GROWTH + 1):
        ones = [one for one, other in wrong if other not in found.given]
        if not ones:
            break  # what the program returns stands for what it returned
        if rounds < GROWTH:
            for one in ones:
                found.shift(one)
        else:
            found.drop_behind(ones)
        grown = [r for r in regions_of(found) if not core.isdisjoint((*r.before, *r.after))]
        wrong = [pair for part in grown for pair in _differing(part, found, proven)]
        if not wrong:
            return True
    found.restore(pairs)
    return False
