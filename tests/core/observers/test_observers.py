# SPDX-License-Identifier: Apache-2.0
"""Observers: they change nothing, see everything once, and leave masks alone."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import ConfigError
from qompose.observers import (
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelHistogramObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    observer_for_range,
    weight_observer_for_range,
)
from qompose.observers.config import WEIGHT_RANGES
from qompose.observers.min_max import LastSeen, gathered, several_processes
from torch import Tensor, nn

from tests.core.toy import LINEAR, VIEW, Model, export, prepare, randn, seeded, toy

PER_TENSOR = [MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver]
CHANNELS = [
    PerChannelMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelHistogramObserver,
]
estimating = pytest.mark.parametrize(
    "kind", [*PER_TENSOR, *CHANNELS], ids=lambda kind: kind.__name__
)
INFINITY = math.inf
LARGEST = torch.finfo(torch.float32).max


def seen(kind: Any, *batches: Tensor, **arguments: Any) -> Any:
    observer = kind(dtype=torch.int8, **arguments)
    for batch in batches:
        assert observer(batch) is batch
    return observer


@pytest.mark.parametrize("mask", [-INFINITY, INFINITY, -LARGEST, LARGEST, -LARGEST / 2], ids=str)
@estimating
def test_mask_values_are_counted_and_widen_nothing(kind: Any, mask: float) -> None:
    x = randn(3, 8)
    x[:, 0] = 0.0  # zero is in every range, so replacing it by a mask value changes no range
    masked = x.clone()
    masked[0, 0] = masked[2, 0] = mask
    plain, other = seen(kind, x), seen(kind, masked)
    assert (plain.screen.masked, other.screen.masked) == (0, 2)
    for one, two in zip(plain.calculate_qparams(), other.calculate_qparams(), strict=True):
        assert torch.equal(one, two)


@estimating
def test_empty_tensors_are_nothing_seen(kind: Any) -> None:
    observer = seen(kind, torch.empty(0, 3))
    assert not observer.calibrated
    observer(randn(2, 3))
    assert observer.calibrated


@estimating
def test_a_constant_is_looked_at_once_until_it_changes(kind: Any) -> None:
    weight = torch.ones(2, 2)
    observer = kind(dtype=torch.int8)
    observer.constant = True
    looks = []
    observer.observe = lambda x: looks.append(x.clone())
    for _ in range(3):
        observer(weight)
    assert len(looks) == 1
    weight.mul_(2)
    observer(weight)
    assert [float(look[0, 0]) for look in looks] == [1.0, 2.0]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels_are_those_of_the_axis(axis: int) -> None:
    x = randn(3, 4, 5)
    others = tuple(dim for dim in range(3) if dim != axis % 3)
    for kind in CHANNELS:
        channels = seen(kind, x, ch_axis=axis).facts().channels
        assert torch.equal(channels.low, x.amin(others))
        assert torch.equal(channels.high, x.amax(others))


def test_gradients_are_not_kept() -> None:
    assert not seen(MinMaxObserver, torch.ones(2, requires_grad=True)).minimum.requires_grad


def test_fixed_parameters_come_out_as_they_went_in() -> None:
    observer = FixedQParamsObserver(1 / 256, 7, dtype=torch.uint8)
    observer(randn(3))
    scale, zero_point = observer.calculate_qparams()
    assert (float(scale), int(zero_point)) == (1 / 256, 7)
    assert observer.calibrated


def test_a_placeholder_has_no_parameters() -> None:
    observer = seen(PlaceholderObserver, randn(3))
    assert observer.calibrated
    with pytest.raises(ConfigError):
        observer.calculate_qparams()


@pytest.mark.parametrize("kind", PER_TENSOR, ids=lambda kind: kind.__name__)
def test_schemes_that_are_not_estimated_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} .*per_channel"):
        kind(qscheme=torch.per_channel_symmetric)


def test_later_arguments_of_a_factory_win() -> None:
    first = MinMaxObserver.with_args(eps=2**-12, quant_min=-127)
    assert first == MinMaxObserver.with_args(quant_min=-127).with_args(eps=2**-12)
    assert first.with_args(eps=0.5)(dtype=torch.int8).eps == 0.5
    assert first(dtype=torch.int8, eps=0.25).eps == 0.25


@pytest.mark.parametrize("unknown", [observer_for_range, weight_observer_for_range])
def test_an_unknown_word_is_refused_with_the_known_ones(unknown: Any) -> None:
    with pytest.raises(ConfigError, match=r"minmax.*mse.*'median'"):
        unknown("median")


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("word", sorted(WEIGHT_RANGES))
def test_every_word_of_weights_stands_for_an_observer(word: str, per_channel: bool) -> None:
    observer: Any = weight_observer_for_range(word, per_channel=per_channel)(dtype=torch.int8)
    assert isinstance(observer, qompose.observers.min_max.Observer)
    assert observer.per_channel == per_channel
    assert observer.mergeable


VIEWED = randn(4, 6, 2)


def seen_again(one: Tensor, other: Tensor) -> bool:
    last = LastSeen()
    assert not last.again(one)
    return last.again(other)


def test_views() -> None:
    x = VIEWED
    moved = x.permute(2, 0, 1), x.permute(1, 2, 0).flatten(0, 1)
    row = x.flatten()
    for view in (x, x.view(24, 2), row.unsqueeze(0), row.as_strided((1, 48), (0, 1)), *moved):
        assert seen_again(x, view)
    other = x.clone(), x[:2], x[2:], x[:, ::2], x[:1].expand(4, 6, 2), torch.cat([x, x])
    for values in other:
        assert not seen_again(x, values)
    assert not seen_again(x[:2], x[2:]) and not seen_again(x[:, ::2], x[:, ::2])
    assert not seen_again(torch.empty(0), torch.empty(0))


def test_one_process_is_not_several_unless_it_says_so() -> None:
    x = randn(3)
    assert not several_processes()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        assert several_processes()
        (own,) = gathered(x)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(own, x) and own.device.type == "cpu"


def test_values_that_were_written_are_new() -> None:
    x = VIEWED.clone()
    last = LastSeen()
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
    last.again(VIEWED)
    assert not copied(last).again(VIEWED)
    assert last.again(VIEWED)


def test_an_observer_of_several_values_looks_at_views_once() -> None:
    model = Model(lambda self, x: self.linear(x).view(-1, 2), linear=nn.Linear(3, 4))
    prepared = prepare(export(seeded(model), randn(6, 3)), toy(LINEAR, VIEW))
    prepared(randn(6, 3))
    prepared(randn(6, 3))
    found = {e.sites[0].operator: e.facts.values for e in qompose.statistics(prepared)}
    assert found == {"aten.linear.default": 2 * 24, "input": 2 * 18}
