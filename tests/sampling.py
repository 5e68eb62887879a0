# SPDX-License-Identifier: Apache-2.0
"""Long lists of cases: a few of them in every run, the others in the full or the long one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def one_of(number: int, cases: Sequence[Any]) -> list[Any]:
    """The cases: the first of every ``number`` for each run, every fourth of the others for the full run, and
    the rest for the long one."""
    later = [[pytest.mark.full if i % 4 == 0 else pytest.mark.long] for i, _ in enumerate(cases)]
    marks = [[] if i % number == 0 else mark for i, mark in enumerate(later)]
    return [pytest.param(case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


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
