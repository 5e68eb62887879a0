# SPDX-License-Identifier: Apache-2.0
"""Calibration takes as much memory for many batches as for ten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec, activation_spec, weight_spec
from qompose.observers import PerChannelHistogramObserver
from qompose.observers.channel_ranges import PerChannelRangeObserver
from qompose.observers.config import ACTIVATION_RANGES
from qompose.observers.row_sample import MOST
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.calibration.test_collecting import BALANCED_LINEAR
from tests.core.live_bytes import LiveBytes
from tests.core.toy import LINEAR, SIGMOID, Model, export, prepare, randn, seeded, toy
from tests.sampling import at_once

FEW, MANY, ROWS_OF_BATCH = 20, 60, 256
LAYERS = {"first": nn.Linear(6, 8), "second": nn.Linear(8, 8)}
NET = seeded(Model(lambda m, x: m.second(torch.sigmoid(m.first(x))), **LAYERS))
PROGRAM = export(NET, randn(4, 6), dynamic_shapes=({0: torch.export.Dim("batch")},))


def with_range(word: str = "histogram") -> QuantizationConfig:
    one = activation_spec(torch.int8, -128, 127, range=word)
    return QuantizationConfig(one, one, weight_spec(-127, 127), name=word)


def of_channels() -> QuantizationConfig:
    one = QuantizationSpec(
        torch.int8, PerChannelHistogramObserver, -128, 127, torch.per_channel_affine, ch_axis=-1
    )
    return replace(with_range(), input_activation=one, output_activation=one, name="channels")


QUANTIZERS = {
    **{word: toy(LINEAR, SIGMOID, config=with_range(word)) for word in ACTIVATION_RANGES},
    "balanced": toy(BALANCED_LINEAR, config=replace(with_range(), balance=True)),
    "channels": toy(LINEAR, SIGMOID, config=of_channels()),
}
AT_ONCE = [(name, FEW, MANY) for name in ("auto", "balanced")]


def batches(count: int) -> Iterator[Tensor]:
    """Made one by one; after the second none reaches further, so that histograms are widened then."""
    for number in range(count):
        x = torch.randn(ROWS_OF_BATCH, 6).clamp(-3, 3)
        x[:, 0] = 4.0  # all rows are of one size, of which there are as many as are kept soon
        yield x * 8 if number == 1 else x


def peak(model: GraphModule, count: int) -> int:
    with torch.random.fork_rng(devices=[]), LiveBytes() as live:
        torch.manual_seed(0)
        qompose.calibrate(model, batches(count))
    return live.peak


@pytest.mark.parametrize(
    ("name", "fewer", "more"),
    [
        *at_once([(name, FEW, MANY) for name in QUANTIZERS], *AT_ONCE),
        *(pytest.param(n, 300, 1000, marks=pytest.mark.full) for n in ("histogram", "balanced")),
    ],
)
def test_the_most_memory_does_not_depend_on_the_number_of_batches(
    name: str, fewer: int, more: int
) -> None:
    assert FEW * ROWS_OF_BATCH >= 8 * MOST, "the sample of rows is full after few batches"
    few, many = (peak(prepare(PROGRAM, QUANTIZERS[name]), number) for number in (fewer, more))
    assert many <= 1.1 * few  # up to four times MOST rows wait to be sorted, or have just been
    observers = prepare(PROGRAM, QUANTIZERS[name]).modules()
    balanced = any(isinstance(module, PerChannelRangeObserver) for module in observers)
    assert balanced == (name == "balanced")
