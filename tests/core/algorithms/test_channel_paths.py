# SPDX-License-Identifier: Apache-2.0
"""What may take up the factors of a tensor's channels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from qompose.algorithms import find_absorbers
from qompose.program.graph import address_of
from qompose.spec.claim import Point
from torch import nn

from tests.core.toy import export, randn


@pytest.mark.parametrize(
    ("integers", "free", "with_range"),
    [
        (None, True, True),
        (Point("linear"), False, False),
        (Point("linear", "relu"), False, False),
        (Point("relu"), False, True),
        (Point("relu", "linear_1"), False, True),
    ],
)
def test_ranges_on_the_way_were_seen_without_factors(
    integers: Point | None, free: bool, with_range: bool
) -> None:
    """Only that of the tensor itself may be integers, for who chooses its range anew."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
    program = export(layers, randn(2, 3)).module()
    source = next(node for node in program.graph.nodes if node.name == "relu")
    groups = {} if integers is None else {integers: 0}
    readers = {address_of(value): 1 for value in program.parameters()}
    found: Any = SimpleNamespace(readers=readers, plan=SimpleNamespace(group_of=groups))
    for option, wanted in ((False, free), (True, with_range)):
        absorbers = find_absorbers(found, source, {"linear_1"}, 1, with_range=option)
        assert (absorbers is not None) is wanted
