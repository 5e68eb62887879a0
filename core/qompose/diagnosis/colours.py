# SPDX-License-Identifier: Apache-2.0
"""Which class of the page's style sheet an operator has, by owner, by state and by error.

Colours never stand alone: whatever has one says the same in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from qompose.diagnosis.entries import NOBODY, Entry
from qompose.rendering import as_decibels

_HUES = 7
"""How many colours the style sheet has for owners; more owners have them in turn."""

_STEPS = (40.0, 30.0, 20.0, 10.0)
"""From which SQNR on a value is in a step, in dB: from exact to 16 bits or so, to one with no bit right."""

MODES = ("owner", "state", "sqnr", "own")

FULL, DASHED, DOTTED = "full", "dashed", "dotted"
"""Borders of boxes: of operators that run on kernels for integers, that are about to, and of floats."""


def owner_classes(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the class of each owner, the one of most operators first; that of nobody is grey."""
    counted = Counter(entry.owner for entry in entries if entry.owner)
    owners = sorted(counted, key=lambda owner: (-counted[owner], owner))
    classes = {owner: f"hue{i % _HUES}" for i, owner in enumerate(owners)}
    return {**classes, **({NOBODY: "none"} if any(not e.owner for e in entries) else {})}


def state_class(state: str, states: Mapping[str, str]) -> str:
    """Return the class of a state; one with a dotted border, float, is grey."""
    return "none" if states[state] == DOTTED else f"hue{[*states].index(state) % _HUES}"


def step_class(sqnr: float | None) -> str:
    """Return the class of an SQNR: a darker one for each ten decibels less."""
    if sqnr is None:
        return "none"
    return f"step{sum(sqnr < limit for limit in _STEPS)}"


def step_legend() -> list[tuple[str, str]]:
    """Return (class, words) of each step, and of what has no number."""
    words = [f"{_STEPS[0]:.0f} dB and more"]
    words += [f"{low:.0f} to {high:.0f} dB" for high, low in pairwise(_STEPS)]
    words += [f"less than {_STEPS[-1]:.0f} dB"]
    return [*((f"step{i}", text) for i, text in enumerate(words)), ("none", "not compared")]


def worst(entries: Sequence[Entry], own: bool) -> float | None:
    """Return the least SQNR of operators, None where none of them has one."""
    values = [entry.own_sqnr if own else entry.sqnr for entry in entries]
    return min((value for value in values if value is not None), default=None)


def looks(
    entries: Sequence[Entry], owners: Mapping[str, str], states: Mapping[str, str]
) -> tuple[dict[str, list[str]], str]:
    """Return, of operators that are drawn as one, the class and the words for each of `MODES`; the border."""
    work = Counter[tuple[str, str]]()
    for entry in entries:
        work[entry.who, entry.state] += entry.macs + 1  # those without products count as well
    (owner, state), _ = max(work.items(), key=lambda item: item[1])
    several = len({entry.who for entry in entries}), len({entry.state for entry in entries})
    sqnr, own = (worst(entries, own) for own in (False, True))
    found = {
        "owner": [owners[owner], owner if several[0] == 1 else f"{several[0]} owners"],
        "state": [
            state_class(state, states),
            state if several[1] == 1 else f"{several[1]} states",
        ],
        "sqnr": [step_class(sqnr), as_decibels(sqnr) or "not compared"],
        "own": [step_class(own), as_decibels(own) or "not compared"],
    }
    return found, states[state]
