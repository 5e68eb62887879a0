# SPDX-License-Identifier: Apache-2.0
"""A view of what was seen last is known; another tensor, part or version is not taken for it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import qompose
import torch
from qompose.observers.min_max import LastSeen
from torch import Tensor, nn

from tests.core.toy import LINEAR, VIEW, export, prepare, randn, seeded, toy

X = randn(4, 6, 2)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.view(24, 2),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.flatten().unsqueeze(0),
        lambda x: x.permute(1, 2, 0).flatten(0, 1),
    ],
)
def test_views(view: Callable[[Tensor], Tensor]) -> None:
    last = LastSeen()
    assert not last.again(X)
    assert last.again(view(X))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.clone(),
        lambda x: x[:2],
        lambda x: x[2:],
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(4, 6, 2),
        lambda x: torch.cat([x, x]),
    ],
)
def test_what_is_no_view_of_the_same_values(other: Callable[[Tensor], Tensor]) -> None:
    last = LastSeen()
    last.again(X)
    assert not last.again(other(X))
    halves = LastSeen()
    halves.again(X[:2])
    assert not halves.again(X[2:])


def test_values_that_were_written_are_new() -> None:
    last, x = LastSeen(), X.clone()
    last.again(x)
    x.add_(1)
    assert not last.again(x)


def test_a_tensor_in_the_place_of_another_is_new() -> None:
    """The allocator gives the same address again and again."""
    last, addresses = LastSeen(), set()
    for number in range(50):
        x = torch.full((1000,), float(number))
        addresses.add(x.data_ptr())
        assert not last.again(x)
        del x
    assert len(addresses) < 50


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_remember_nothing(copied: Callable[[LastSeen], LastSeen]) -> None:
    last = LastSeen()
    last.again(X)
    assert not copied(last).again(X)
    assert last.again(X)


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(-1, 2)


def test_an_observer_of_several_values_looks_at_views_once() -> None:
    prepared = prepare(export(seeded(Viewed()), randn(6, 3)), toy(LINEAR, VIEW))
    prepared(randn(6, 3))
    prepared(randn(6, 3))
    found = {e.sites[0].operator: e.facts.values for e in qompose.statistics(prepared)}
    assert found == {"aten.linear.default": 2 * 24, "input": 2 * 18}
