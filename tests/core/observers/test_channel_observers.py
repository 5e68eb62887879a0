# SPDX-License-Identifier: Apache-2.0
"""The observer of channels by histograms: its ranges, and its statistics where it sees activations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationConfig, Statistics
from qompose.errors import ConfigError, StatisticsError
from qompose.observers import (
    HistogramObserver,
    PerChannelHistogramObserver,
    PerChannelMinMaxObserver,
)
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.calibration.test_collecting import (
    BALANCED_LINEAR,
    DATA,
    KINDS,
    eighths,
    exact,
    prepared as prepared_with,
    saved,
    spec,
)
from tests.core.toy import LINEAR, RELU, WEIGHT, randn, toy

AFFINE, SYMMETRIC = torch.per_channel_affine, torch.per_channel_symmetric


def seen(x: Tensor, **arguments: Any) -> PerChannelHistogramObserver:
    observer = PerChannelHistogramObserver(torch.int8, **arguments)
    observer(x)
    return observer


class TestRanges:
    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_channels_are_those_of_the_axis_with_exact_extremes(self, axis: int) -> None:
        x = randn(3, 4, 5)
        channels = seen(x, ch_axis=axis).facts().channels
        others = tuple(dim for dim in range(3) if dim != axis % 3)
        assert channels is not None
        assert torch.equal(channels.low, x.amin(others))
        assert torch.equal(channels.high, x.amax(others))

    @pytest.mark.parametrize("bounds", [(-127, 127), (-128, 127), (-8, 7)], ids=str)
    @pytest.mark.parametrize(
        ("scheme", "other"),
        [(SYMMETRIC, torch.per_tensor_symmetric), (AFFINE, torch.per_tensor_affine)],
        ids=["symmetric", "affine"],
    )
    def test_each_is_about_what_an_observer_of_that_channel_finds(
        self, scheme: Any, other: Any, bounds: tuple[int, int]
    ) -> None:
        """Not the same ends, of which many are as good, but no more than 5 % more of the error."""
        x = randn(6, 700) ** 3
        facts: dict[str, Any] = {"quant_min": bounds[0], "quant_max": bounds[1], "power": 2.0}
        found = seen(x, qscheme=scheme, **facts).calculate_qparams()
        for row, scale, zero_point in zip(x, *found, strict=True):
            alone = HistogramObserver(torch.int8, qscheme=other, **facts)
            alone(row)
            ours, theirs = (
                squared_error(row, *parameters, bounds)
                for parameters in ((scale, zero_point), alone.calculate_qparams())
            )
            assert ours <= 1.05 * theirs

    def test_four_bits_clip_more_than_eight(self) -> None:
        x = randn(5, 900)
        ends = [
            seen(x, qscheme=SYMMETRIC, quant_min=low, quant_max=high).calculate_qparams()[0] * high
            for low, high in ((-7, 7), (-127, 127))
        ]
        assert bool((ends[0] < 0.95 * ends[1]).all())
        assert bool((ends[1] <= x.abs().amax(1) * (1 + 1e-6)).all())

    def test_less_power_clips_more(self) -> None:
        x, facts = randn(5, 900), {"qscheme": SYMMETRIC, "quant_min": -7, "quant_max": 7}
        square, fourth = (seen(x, power=power, **facts) for power in (2.0, 4.0))
        assert bool((square.calculate_qparams()[0] < fourth.calculate_qparams()[0]).all())

    def test_a_weight_of_many_channels_takes_little_memory(self) -> None:
        """Four kilobytes for each: no more than a convolution's weights."""
        observer = seen(randn(512, 1024), qscheme=SYMMETRIC)
        assert observer.histograms.counts.nbytes == 512 * 4096

    def test_float_zero_points_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"does not estimate .*float_qparams"):
            PerChannelHistogramObserver(torch.uint8, qscheme=torch.per_channel_affine_float_qparams)
        with pytest.raises(ConfigError, match=r"does not estimate .*per_tensor"):
            PerChannelHistogramObserver(torch.int8, qscheme=torch.per_tensor_affine)


def squared_error(x: Tensor, scale: Tensor, zero_point: Tensor, bounds: tuple[int, int]) -> float:
    integers = (torch.round(x / scale) + zero_point).clamp(*bounds)
    return float(((integers - zero_point) * scale - x).square().sum())


class Chain(nn.Module):
    """Activations of six and eight channels; none is read by two who want other channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        # Of what rounds, a batch of another size may have other last digits.
        return self.second(torch.relu(self.first(x)))


def prepared(observer: Any = PerChannelHistogramObserver) -> GraphModule:
    one = spec(observer, qscheme=AFFINE, ch_axis=-1)
    config = QuantizationConfig(one, one, WEIGHT, name="channels")
    return prepared_with(toy(LINEAR, RELU, config=config), exact(Chain()))


def calibrated(*batches: Tensor, observer: Any = PerChannelHistogramObserver) -> GraphModule:
    return qompose.calibrate(prepared(observer), batches or (DATA,))


def parameters(model: GraphModule) -> list[list[float]]:
    """Scales and zero points of the converted model's activations, with its weights' in between."""
    return [value.flatten().tolist() for _, value in qompose.convert_pt2e(model).named_buffers()]


class TestStatistics:
    @settings(max_examples=20, deadline=None)
    @given(
        cuts=st.lists(st.integers(1, 39), max_size=4).map(sorted),
        order=st.randoms(use_true_random=False),
    )
    def test_split_order_and_grouping_do_not_matter(
        self, tmp_path_factory: Any, cuts: list[int], order: Any
    ) -> None:
        path = tmp_path_factory.mktemp("statistics") / "one.json"
        parts = [part for part in DATA.tensor_split(cuts) if len(part)]
        order.shuffle(parts)
        first, *others = (qompose.statistics(calibrated(part)) for part in parts)
        merged = first.merged(*others)
        assert saved(merged, path) == saved(qompose.statistics(calibrated()), path)
        assert parameters(merged.apply(prepared())) == parameters(calibrated())

    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    def test_files_give_back_what_they_got(self, tmp_path: Path, suffix: str) -> None:
        found = qompose.statistics(calibrated())
        found.save(tmp_path / f"seen.{suffix}")
        loaded = Statistics.load(tmp_path / f"seen.{suffix}")
        assert saved(loaded, tmp_path / "a.json") == saved(found, tmp_path / "b.json")
        assert parameters(loaded.apply(prepared())) == parameters(calibrated())

    @pytest.mark.parametrize(
        ("key", "value"),
        [("values", 7), ("counts", [-1]), ("bins", [5000]), ("channels", [-2]), ("exponents", [0])],
    )
    def test_damaged_files_are_told(self, tmp_path: Path, key: str, value: Any) -> None:
        data = saved(qompose.statistics(calibrated()), path := tmp_path / "seen.json")
        part = data["entries"][0]["facts"]["channels"]["histograms"]
        part[key] = value if key in ("values", "exponents") else value + part[key][1:]
        path.write_text(json.dumps(data))
        with pytest.raises(StatisticsError, match="does not hold valid statistics"):
            Statistics.load(path)

    def test_they_serve_an_observer_of_ranges_but_not_the_other_way_round(self) -> None:
        source = qompose.statistics(calibrated())
        ranges = calibrated(observer=PerChannelMinMaxObserver)
        given_to = source.apply(prepared(PerChannelMinMaxObserver))
        assert parameters(given_to) == parameters(ranges)
        with pytest.raises(
            StatisticsError, match="PerChannelHistogramObserver finds no histograms of the slices"
        ):
            qompose.statistics(ranges).apply(prepared())

    @pytest.mark.parametrize("with_ranges", [0, 1])
    def test_where_one_part_has_ranges_alone_no_histogram_is_left(self, with_ranges: int) -> None:
        kinds = [PerChannelHistogramObserver, PerChannelMinMaxObserver]
        one, other = (
            qompose.statistics(calibrated(part, observer=kind))
            for part, kind in zip(
                DATA.split(20), (kinds[with_ranges], kinds[1 - with_ranges]), strict=True
            )
        )
        merged = one.merged(other)
        assert all(e.facts.channels and e.facts.channels.histograms is None for e in merged)
        applied = merged.apply(prepared(PerChannelMinMaxObserver))
        assert parameters(applied) == parameters(calibrated(observer=PerChannelMinMaxObserver))

    @pytest.mark.parametrize("kind", [PerChannelHistogramObserver, PerChannelMinMaxObserver])
    def test_a_range_of_ones_own_is_that_of_every_channel(self, kind: Any) -> None:
        found = qompose.statistics(calibrated(observer=kind)).with_range("first", -1.0, 3.0)
        converted = qompose.convert_pt2e(found.apply(prepared(kind)))
        scales = [v for n, v in converted.named_buffers() if n.endswith("scale")]
        assert any(torch.equal(s, torch.full_like(s, 4 / 255)) for s in scales)

    def test_a_range_of_ones_own_leaves_the_channels_that_are_balanced(self) -> None:
        """Those are balanced by what was seen of each."""

        def balanced() -> GraphModule:
            return prepared_with(toy(BALANCED_LINEAR, config=KINDS["balanced"]))

        found = qompose.statistics(qompose.calibrate(balanced(), [eighths(DATA)]))
        kept = [e.facts.channels for e in found if e.facts.channels is not None]
        site = str(next(e.sites[0] for e in found if e.facts.channels is not None))
        again = qompose.statistics(found.with_range(site, -9.0, 9.0).apply(balanced()))
        channels = [e.facts.channels for e in again if e.facts.channels is not None]
        assert kept and all(
            torch.equal(a.low, b.low) and torch.equal(a.high, b.high)
            for a, b in zip(kept, channels, strict=True)
        )
