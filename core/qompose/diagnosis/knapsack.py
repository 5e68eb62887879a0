# SPDX-License-Identifier: Apache-2.0
"""The knapsack of mixed precision: which option each site gets so that few bytes cost little.

Costs of sites are taken to add up. The assignments of which none is both smaller and cheaper are found site
by site: of all ways to assign those before, only such ones can be part of another (Kellerer, Pferschy and
Pisinger, "Knapsack Problems", 2004, sections 3.4 and 11.5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

_MOST = 500
"""How many assignments are kept from site to site: for 200 sites it is a second."""


@dataclass(frozen=True)
class Option:
    """One way to quantize a site: its name, its bytes, and what it costs the outputs."""

    name: str
    bytes: int
    cost: float


Assigned = dict[str, Option]
"""The option of each site, by name."""


_State: TypeAlias = tuple[float, int, Any]
"""An assignment of some sites: cost, bytes, and the last site with its option and the state before."""


def efficient(options: Mapping[str, Sequence[Option]], most: float = math.inf) -> list[Assigned]:
    """Return assignments from the one of least cost to the one of fewest bytes; none beats another in both.

    Args:
        options: by site, at least one each.
        most: bytes that none may have more than; where even the fewest are more, none is returned.
    """
    rest = sum(min(option.bytes for option in some) for some in options.values())
    states: list[_State] = [(0.0, 0, None)]
    for site, some in options.items():
        rest -= min(option.bytes for option in some)
        grown: list[_State] = [
            (state[0] + option.cost, state[1] + option.bytes, (site, option, state))
            for option in some
            for state in states
            if state[1] + option.bytes + rest <= most
        ]
        states = _thinned(_unbeaten(grown))
    return [_assigned(state) for state in states]


def _unbeaten(states: list[_State]) -> list[_State]:
    """Return those that none of the others is both as small as and as cheap as, from the cheapest on."""
    found: list[_State] = []
    for state in sorted(states, key=itemgetter(0, 1)):
        if not found or state[1] < found[-1][1]:
            found.append(state)
    return found


def _thinned(states: list[_State]) -> list[_State]:
    """Return some of too many, the cheapest and the smallest among them."""
    apart = math.ceil(len(states) / _MOST)
    return states if apart < 2 else [*states[:-1:apart], states[-1]]


def _assigned(state: _State) -> Assigned:
    found: list[tuple[str, Option]] = []
    while state[2] is not None:
        site, option, state = state[2]
        found.append((site, option))
    return dict(reversed(found))
