# SPDX-License-Identifier: Apache-2.0
"""Every ordered pair of other packages' quantizers on every model: a correct graph, or an error naming both.

`tests/ecosystem/pairs.py` has what "correct" means.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest

from tests.ecosystem.models import KINDS
from tests.ecosystem.pairs import MEMBERS, Result, alone, problems_of_orders

pytestmark = pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning",  # torch's strict export, of torch's own
    # ours: several quantizers want nothing of some models, and the tests compare what came of it
    "ignore:Nothing was quantized:qompose.QomposeWarning",
)

SLOW = "CoreML"
"""What exports patterns for half a minute, once in a process: its pairs are for the full run."""

LEAST = 30.0
"""dB of 8 bit weights and activations on these models; the worst has 34."""


def _case(kind: str, *names: str, tier: str = "") -> object:
    tier = tier or ("full" if SLOW in names else "")
    marks = [getattr(pytest.mark, tier)] if tier else []
    return pytest.param(kind, *names, marks=marks, id=f"{kind}: {' and '.join(names)}")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        _case(kind, name, tier="full" if (i + j) % len(KINDS) else "")
        for i, name in enumerate(MEMBERS)
        for j, kind in enumerate(KINDS)
    ],
)
def test_alone(kind: str, name: str) -> None:
    """None is refused; so the only errors of pairs are those of two that cannot be together."""
    result = alone(kind, name)
    assert isinstance(result, Result), result
    assert result.sqnr > LEAST


def _pairs() -> Iterator[object]:
    """Each pair with one of the models, in turn; every run has each member once, the long one all models."""
    for number, (pair, kind) in enumerate(product(combinations(MEMBERS, 2), KINDS)):
        if (number + number // len(KINDS)) % len(KINDS):
            tier = "long"
        else:
            first, second = map([*MEMBERS].index, pair)
            tier = "" if second == first + 1 and first % 2 == 0 else "full"
        yield _case(kind, *pair, tier=tier)


@pytest.mark.parametrize(("kind", "first", "second"), [*_pairs()])
def test_both_orders(kind: str, first: str, second: str) -> None:
    assert problems_of_orders(kind, first, second) == []
