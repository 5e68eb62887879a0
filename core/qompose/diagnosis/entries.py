# SPDX-License-Identifier: Apache-2.0
"""What a page says of one operator: its row of a report, and what a comparison found of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A row of a report with the numbers of a comparison; None where that has none."""

    name: str
    operator: str
    module: str
    macs: int
    state: str
    owner: str
    rule: str
    config: str
    mode: str
    selector: str
    kernel: str
    reason: str
    inputs: tuple[str, ...]
    sqnr: float | None
    own_sqnr: float | None
    cause: str

    @property
    def who(self) -> str:
        """Return the owner, or a word for that there is none."""
        return self.owner or NOBODY


NOBODY = "nobody"


def entries_of(
    report: Mapping[str, Any], comparison: Mapping[str, Any] | None
) -> tuple[Entry, ...]:
    """Return an entry for each row of a report, of both as data.

    Where a comparison has several values of one operator, its first is the one that says most.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for row in (comparison or {}).get("rows", ()):
        found.setdefault(row["name"], row)
    return tuple(
        Entry(
            **{**row, "inputs": tuple(row["inputs"])},
            sqnr=number(found.get(row["name"], {}).get("sqnr")),
            own_sqnr=number(found.get(row["name"], {}).get("own_sqnr")),
            cause=found.get(row["name"], {}).get("cause", ""),
        )
        for row in report["rows"]
    )


def number(value: Any) -> float | None:
    """Return a number of a comparison's data, where an infinite one is a text; None for none."""
    found = None if value is None else float(value)
    return None if found is None or math.isnan(found) else found
