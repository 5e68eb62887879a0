# SPDX-License-Identifier: Apache-2.0
"""The knapsack of mixed precision: which option each site gets so that few bytes cost little.

Costs of sites are taken to add up. Then every assignment of the frontier is the cheapest of all that have at
most its bytes (the greedy solution of the linear relaxation, which is exact at the corners that it goes
through; Kellerer, Pferschy and Pisinger, "Knapsack Problems", 2004, chapter 11).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One way to quantize a site: its name, its bytes, and what it costs the outputs."""

    name: str
    bytes: int
    cost: float


Assigned = dict[str, Option]
"""The option of each site, by name."""


def frontier(options: Mapping[str, Sequence[Option]]) -> Iterator[Assigned]:
    """Yield assignments from the one of least cost to the one of fewest bytes, each smaller than the last.

    From each to the next, one site takes the step that saves its bytes at the least cost for each.

    Args:
        options: by site, at least one each.
    """
    corners = {site: _corners(some) for site, some in options.items()}
    now = {site: some[0] for site, some in corners.items()}
    yield dict(now)
    steps = [
        (_slope(before, after), site, after)
        for site, some in corners.items()
        for before, after in itertools.pairwise(some)
    ]
    for _, site, after in sorted(steps, key=lambda step: (*step[:2], -step[2].bytes)):
        now[site] = after
        yield dict(now)


def within(options: Mapping[str, Sequence[Option]], most: int) -> Assigned | None:
    """Return the first assignment of the frontier that has at most so many bytes, with what is left spent.

    Sites go back to cheaper options where these fit, those first that save the most cost. None where even the
    fewest bytes are more.
    """
    found = next((a for a in frontier(options) if _bytes(a) <= most), None)
    if found is None:
        return None
    better = sorted(
        (
            (option.cost - found[site].cost, site, option)
            for site, some in options.items()
            for option in some
        ),
        key=lambda step: (step[0], step[1], step[2].bytes),
    )
    for _, site, option in better:
        fits = _bytes(found) - found[site].bytes + option.bytes <= most
        if fits and option.cost < found[site].cost:
            found[site] = option
    return found


def _bytes(assigned: Assigned) -> int:
    return sum(option.bytes for option in assigned.values())


def _corners(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of cost over bytes, from the cheapest to the smallest."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.cost, o.bytes)):
        if hull and option.bytes >= hull[-1].bytes:
            continue  # another has fewer bytes and costs no more
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(before: Option, after: Option) -> float:
    """Return the cost of each byte that is saved."""
    return (after.cost - before.cost) / (before.bytes - after.bytes)
