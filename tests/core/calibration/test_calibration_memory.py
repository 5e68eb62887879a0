# SPDX-License-Identifier: Apache-2.0
"""Calibration takes as much memory for a thousand batches as for ten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, RuleQuantizer, activation_spec, weight_spec
from qompose.observers import HistogramObserver, PerChannelHistogramObserver
from qompose.observers.channel_ranges import PerChannelRangeObserver
from qompose.observers.histogram_observers import ACTIVATION_RANGES
from qompose.observers.tensor_statistics import ROWS
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.calibration.test_collecting import BALANCED_LINEAR
from tests.core.live_bytes import LiveBytes
from tests.core.toy import LINEAR, SIGMOID, export, prepare, randn, seeded, toy

FEW, MANY, ROWS_OF_BATCH = 10, 200, 256
MOST = {"histogram": 1000, "balanced": 1000}
"""How many batches where that is not `MANY`: the default, and the one that keeps most."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x)))


def with_range(word: str = "histogram") -> QuantizationConfig:
    one = activation_spec(torch.int8, -128, 127, range=word)
    return QuantizationConfig(one, one, weight_spec(-127, 127), name=word)


def of_channels() -> QuantizationConfig:
    one = replace(
        activation_spec(torch.int8, -128, 127),
        qscheme=torch.per_channel_affine,
        ch_axis=-1,
        observer_or_fake_quant_ctr=PerChannelHistogramObserver,
    )
    return replace(with_range(), input_activation=one, output_activation=one, name="channels")


QUANTIZERS = {
    **{word: toy(LINEAR, SIGMOID, config=with_range(word)) for word in ACTIVATION_RANGES},
    "balanced": toy(BALANCED_LINEAR, config=replace(with_range(), balance=True)),
    "channels": toy(LINEAR, SIGMOID, config=of_channels()),
}


def prepared(quantizer: RuleQuantizer) -> GraphModule:
    batch = {0: torch.export.Dim("batch")}
    return prepare(export(seeded(Net()), randn(4, 6), dynamic_shapes=(batch,)), quantizer)


def batches(count: int) -> Iterator[Tensor]:
    """Made one by one; after the second none reaches further, so that histograms are widened then."""
    for number in range(count):
        x = torch.randn(ROWS_OF_BATCH, 6).clamp(-4, 4)
        yield x * 8 if number == 1 else x


def peak(model: GraphModule, count: int) -> int:
    with torch.random.fork_rng(devices=[]), LiveBytes() as live:
        torch.manual_seed(0)
        qompose.calibrate(model, batches(count))
    return live.peak


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_most_memory_does_not_depend_on_the_number_of_batches(name: str) -> None:
    assert FEW * ROWS_OF_BATCH >= 2 * ROWS, (
        "the sample of rows is as full as it gets after few batches"
    )
    counts = FEW, MOST.get(name, MANY)
    few, many = (peak(prepared(QUANTIZERS[name]), count) for count in counts)
    assert many <= 1.01 * few
    balanced = [
        m for m in prepared(QUANTIZERS[name]).modules() if isinstance(m, PerChannelRangeObserver)
    ]
    assert bool(balanced) == (name == "balanced")


def test_what_keeps_batches_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this test itself: an observer with a list of what it saw has a peak that grows."""
    observe, kept = HistogramObserver.observe, list[Tensor]()

    def greedy(self: Any, x: Tensor) -> None:
        kept.append(x)
        observe(self, x)

    monkeypatch.setattr(HistogramObserver, "observe", greedy)
    few, many = (peak(prepared(QUANTIZERS["histogram"]), count) for count in (FEW, 2 * FEW))
    assert many > 1.05 * few


def test_live_bytes() -> None:
    """Views share a storage; what was there before, or is freed, does not count."""
    before = torch.ones(7)
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a.view(10, 100)[2]
        assert live.now == 4000
        del a
        before.view(7).add_(1)
        assert live.now == 4000, "the view keeps it"
        del b
        assert live.now == 0
        kept = [before + 1 for _ in range(3)]
        assert live.now == 3 * 28
    del kept
    assert (live.now, live.peak) == (0, 4000)
