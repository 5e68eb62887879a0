# SPDX-License-Identifier: Apache-2.0
"""Every ordered pair of other packages' quantizers on every model: a correct graph, or an error naming both.

`tests/ecosystem/pairs.py` has what "correct" means; `python -m tests.ecosystem.pairs` prints the matrix.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.ecosystem.models import KINDS
from tests.ecosystem.pairs import MEMBERS, problems_of_orders
from tests.ecosystem.warned import THEIR_WARNINGS

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)

SLOW = "CoreML"
"""What exports patterns for half a minute, once in a process: its pairs are for one worker."""


def _case(kind: str, pair: tuple[str, str]) -> object:
    marks = [pytest.mark.xdist_group(SLOW)] if SLOW in pair else []
    return pytest.param(kind, *pair, marks=marks, id=f"{kind}: {' and '.join(pair)}")


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [_case(kind, pair) for pair in combinations(MEMBERS, 2) for kind in KINDS],
)
def test_both_orders(kind: str, first: str, second: str) -> None:
    assert problems_of_orders(kind, first, second) == []
