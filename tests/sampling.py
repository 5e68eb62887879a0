# SPDX-License-Identifier: Apache-2.0
"""Long lists of cases: a few of them in every run, the others in the full or the long one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def one_of(number: int, cases: Sequence[Any]) -> list[Any]:
    """The cases: the first of every ``number`` for each run, every fourth of the others for the full run, and
    the rest for the long one."""
    later = [pytest.mark.full, *[pytest.mark.long] * 3]
    return [
        pytest.param(case, marks=[later[i % 4]] if i % number else [])
        for i, case in enumerate(cases)
    ]


def at_once(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """The cases, all but the ``chosen`` ones for the full run; a tuple has the test's arguments."""
    cases = list(cases)
    assert all(case in cases for case in chosen), "what is chosen is among them"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in chosen else [pytest.mark.full],
        )
        for case in cases
    ]
