# SPDX-License-Identifier: Apache-2.0
"""The observer of channels by histograms: its ranges, and its statistics where it sees activations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, Statistics
from qompose.errors import ConfigError, StatisticsError, UncalibratedError
from qompose.observers import (
    HistogramObserver,
    PerChannelHistogramObserver,
    PerChannelMinMaxObserver,
)
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.calibration.test_collecting import DATA, exact, saved, spec
from tests.core.toy import LINEAR, RELU, WEIGHT, export, prepare, randn, toy

AFFINE, SYMMETRIC = torch.per_channel_affine, torch.per_channel_symmetric


def seen(x: Tensor, **arguments: Any) -> PerChannelHistogramObserver:
    observer = PerChannelHistogramObserver(torch.int8, **arguments)
    assert not observer.calibrated
    with pytest.raises(UncalibratedError):
        observer.calculate_qparams()
    observer(x)
    return observer


class TestRanges:
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

    def test_four_bits_clip_more_than_eight_and_less_power_than_more(self) -> None:
        x = randn(5, 900)
        ends = [
            seen(x, qscheme=SYMMETRIC, quant_min=low, quant_max=high).calculate_qparams()[0] * high
            for low, high in ((-7, 7), (-127, 127))
        ]
        assert bool((ends[0] < 0.95 * ends[1]).all())
        assert bool((ends[1] <= x.abs().amax(1) * (1 + 1e-6)).all())
        facts = {"qscheme": SYMMETRIC, "quant_min": -7, "quant_max": 7}
        square, fourth = (seen(x, power=power, **facts) for power in (2.0, 4.0))
        assert bool((square.calculate_qparams()[0] < fourth.calculate_qparams()[0]).all())

    def test_a_weight_of_many_channels_takes_little_memory(self) -> None:
        """Four kilobytes for each: no more than a convolution's weights."""
        observer = seen(randn(512, 1024), qscheme=SYMMETRIC)
        assert observer.histograms.counts.nbytes == 512 * 4096

    def test_float_zero_points_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="float_qparams"):
            PerChannelHistogramObserver(torch.uint8, qscheme=torch.per_channel_affine_float_qparams)
        with pytest.raises(ConfigError, match="per_tensor"):
            PerChannelHistogramObserver(torch.int8, qscheme=torch.per_tensor_affine)


def squared_error(x: Tensor, scale: Tensor, zero_point: Tensor, bounds: tuple[int, int]) -> float:
    integers = (torch.round(x / scale) + zero_point).clamp(*bounds)
    return float(((integers - zero_point) * scale - x).square().sum())


# Activations of six and eight channels; none is read by two who want other channels.
@cache
def program() -> torch.export.ExportedProgram:
    return export(
        exact(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))),
        DATA[:4],
        dynamic_shapes=({0: torch.export.Dim("batch", max=64)},),
    )


def prepared(observer: Any = PerChannelHistogramObserver) -> GraphModule:
    one = spec(observer, qscheme=AFFINE, ch_axis=-1)
    config = QuantizationConfig(one, one, WEIGHT, name="channels")
    return prepare(program(), toy(LINEAR, RELU, config=config))


def calibrated(*batches: Tensor, observer: Any = PerChannelHistogramObserver) -> GraphModule:
    return qompose.calibrate(prepared(observer), batches or (DATA,))


@cache
def in_one_go(observer: Any = PerChannelHistogramObserver) -> GraphModule:
    return calibrated(observer=observer)


def parameters(model: GraphModule) -> list[list[float]]:
    """Scales and zero points of the converted model's activations, with its weights' in between."""
    return [value.flatten().tolist() for _, value in qompose.convert_pt2e(model).named_buffers()]


class TestStatistics:
    def test_split_and_order_do_not_matter(self, tmp_path: Path) -> None:
        parts = [qompose.statistics(calibrated(part)) for part in DATA.tensor_split([3, 20])]
        merged = parts[2].merged(parts[0], parts[1])
        one, other = tmp_path / "one.json", tmp_path / "other.json"
        assert saved(merged, one) == saved(qompose.statistics(in_one_go()), other)
        assert parameters(merged.apply(prepared())) == parameters(in_one_go())

    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    def test_files_give_back_what_they_got(self, tmp_path: Path, suffix: str) -> None:
        found = qompose.statistics(in_one_go())
        found.save(tmp_path / f"seen.{suffix}")
        loaded = Statistics.load(tmp_path / f"seen.{suffix}")
        assert saved(loaded, tmp_path / "a.json") == saved(found, tmp_path / "b.json")
        assert parameters(loaded.apply(prepared())) == parameters(in_one_go())

    @pytest.mark.parametrize(
        ("key", "value"),
        [("values", 7), ("counts", [-1]), ("bins", [5000]), ("channels", [-2]), ("exponents", [0])],
    )
    def test_damaged_files_are_told(self, tmp_path: Path, key: str, value: Any) -> None:
        data = saved(qompose.statistics(in_one_go()), path := tmp_path / "seen.json")
        part = data["entries"][0]["facts"]["channels"]["histograms"]
        part[key] = value if key in ("values", "exponents") else value + part[key][1:]
        path.write_text(json.dumps(data))
        with pytest.raises(StatisticsError, match=r"seen.json"):
            Statistics.load(path)

    def test_they_serve_an_observer_of_ranges_but_not_the_other_way_round(self) -> None:
        source = qompose.statistics(in_one_go())
        ranges = in_one_go(PerChannelMinMaxObserver)
        assert parameters(source.apply(prepared(PerChannelMinMaxObserver))) == parameters(ranges)
        with pytest.raises(StatisticsError, match="PerChannelHistogramObserver"):
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
        assert parameters(applied) == parameters(in_one_go(PerChannelMinMaxObserver))

    @pytest.mark.parametrize("kind", [PerChannelHistogramObserver, PerChannelMinMaxObserver])
    def test_a_range_of_ones_own_is_that_of_every_channel(self, kind: Any) -> None:
        found = qompose.statistics(in_one_go(kind)).with_range("0", -1.0, 3.0)
        converted = qompose.convert_pt2e(found.apply(prepared(kind)))
        scales = [v for n, v in converted.named_buffers() if n.endswith("scale")]
        assert any(torch.equal(s, torch.full_like(s, 4 / 255)) for s in scales)
