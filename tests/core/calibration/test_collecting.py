# SPDX-License-Identifier: Apache-2.0
"""Statistics: merged exactly, kept in files, edited, compared, and used for other quantizers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationConfig, QuantizationSpec, RuleQuantizer, Statistics
from qompose.errors import ConfigError, StatisticsError
from qompose.observers import (
    EntropyObserver,
    HistogramObserver,
    MovingAverageMinMaxObserver,
    PercentileObserver,
)
from torch import Tensor, nn
from torch.ao.quantization import observer as peer
from torch.fx import GraphModule

from tests.core.toy import (
    INT8,
    LINEAR,
    RULES,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    WEIGHT,
    export,
    prepare,
    randn,
    seeded,
    toy,
)

BATCH = {0: torch.export.Dim("batch")}


class Net(nn.Module):
    """Two products in modules, a sum of two of them, and values of a cat that share a range."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return torch.cat([torch.sigmoid(self.second(y)), y], dim=1)


def spec(observer: Any, low: int = -128, high: int = 127, **changes: Any) -> QuantizationSpec:
    made = QuantizationSpec(torch.int8, observer, low, high, torch.per_tensor_affine)
    return replace(made, **changes)


def config(observer: Any, low: int = -128, high: int = 127) -> QuantizationConfig:
    one = spec(observer, low, high)
    return QuantizationConfig(one, one, WEIGHT, name="static")


HISTOGRAM = config(HistogramObserver)
KINDS = {
    "histogram": HISTOGRAM,
    "minmax": STATIC,
    "percentile": config(PercentileObserver.with_args(percentile=99.0)),
    "entropy": config(EntropyObserver),
    "balanced": replace(HISTOGRAM, balance=True),
}
BALANCED_LINEAR = replace(LINEAR, channels=(-1, -1))


def quantizer(chosen: QuantizationConfig = HISTOGRAM, *rules: Any) -> RuleQuantizer:
    if chosen.balance:
        rules = (BALANCED_LINEAR,)
    return toy(*(rules or RULES), config=chosen)


def eighths(x: Tensor) -> Tensor:
    """Numbers whose products and sums are exact: else a batch of another size gives other last bits."""
    return (x * 8).round() / 8


def exact(module: nn.Module, seed: int = 0) -> nn.Module:
    with torch.no_grad():
        for parameter in seeded(module, seed).parameters():
            parameter.copy_(eighths(parameter))
    return module


def prepared(chosen: RuleQuantizer | None = None, model: nn.Module | None = None) -> GraphModule:
    program = export(model or exact(Net()), randn(4, 6), dynamic_shapes=(BATCH,))
    return prepare(program, chosen or quantizer())


DATA = eighths(randn(40, 6))


def calibrated(chosen: QuantizationConfig = HISTOGRAM, *batches: Tensor) -> GraphModule:
    return qompose.calibrate(prepared(quantizer(chosen)), batches or (DATA,))


def parameters(model: GraphModule) -> list[tuple[Any, ...]]:
    """Scales, zero points and bounds of the converted model's activations."""
    converted = qompose.convert_pt2e(model)
    return [n.args[1:] for n in converted.graph.nodes if "quantize_per_tensor" in str(n.target)]


def saved(found: Statistics, path: Path) -> Any:
    found.save(path)
    return json.loads(path.read_text())


@cache
def in_one_go(kind: str) -> Any:
    return calibrated(KINDS[kind])


class TestMerging:
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=10, deadline=None)
    @given(
        cuts=st.lists(st.integers(1, 39), max_size=4).map(sorted),
        order=st.randoms(use_true_random=False),
    )
    def test_split_order_and_grouping_do_not_matter(
        self, tmp_path_factory: Any, kind: str, cuts: list[int], order: Any
    ) -> None:
        path = tmp_path_factory.mktemp("statistics") / "one.json"
        parts = [part for part in DATA.tensor_split(cuts) if len(part)]
        order.shuffle(parts)
        found = [qompose.statistics(calibrated(KINDS[kind], part)) for part in parts]
        middle = order.randint(0, len(found))
        left, right = found[:middle], found[middle:]
        if left and right:
            merged = right[0].merged(*right[1:]).merged(left[0].merged(*left[1:]))
        else:
            merged = found[0].merged(*found[1:])
        whole = in_one_go(kind)
        assert saved(merged, path) == saved(qompose.statistics(whole), path)
        given_to = merged.apply(prepared(quantizer(KINDS[kind])))
        assert parameters(given_to) == parameters(whole)

    def test_what_depends_on_the_order_is_refused_by_name(self) -> None:
        one = qompose.statistics(calibrated(config(MovingAverageMinMaxObserver)))
        with pytest.raises(
            StatisticsError, match=r"MovingAverageMinMaxObserver depends on the order"
        ):
            one.merged(one)

    def test_other_models_are_refused(self) -> None:
        one = qompose.statistics(calibrated())
        other = prepared(model=exact(Net(), seed=1))
        other(DATA)
        with pytest.raises(StatisticsError, match="its parameters differ"):
            one.merged(qompose.statistics(other))

    def test_a_tensor_that_one_part_never_saw_is_taken_from_the_other(self) -> None:
        whole = qompose.statistics(calibrated())
        part = replace(whole, entries=whole.entries[1:])
        assert len(part.merged(whole)) == len(whole)


class TestFiles:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    def test_they_come_back_exactly(self, tmp_path: Path, kind: str, suffix: str) -> None:
        found = qompose.statistics(calibrated(KINDS[kind]))
        found.save(tmp_path / f"seen.{suffix}")
        loaded = Statistics.load(tmp_path / f"seen.{suffix}")
        assert saved(loaded, tmp_path / "a.json") == saved(found, tmp_path / "b.json")
        loaded.apply(again := prepared(quantizer(KINDS[kind])))
        assert parameters(again) == parameters(calibrated(KINDS[kind]))

    def test_other_names_are_refused(self, tmp_path: Path) -> None:
        found = qompose.statistics(calibrated())
        for call in (found.save, Statistics.load):
            with pytest.raises(StatisticsError, match=r"must end in \.safetensors or \.json"):
                call(tmp_path / "seen.pt")

    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    def test_damage_is_told(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"seen.{suffix}"
        qompose.statistics(calibrated()).save(path)
        whole = path.read_bytes()
        for part in (
            whole[: len(whole) // 2],
            b"",
            b"[]",
            b"{}",
            whole.replace(b"counts", b"kounts"),
        ):
            path.write_bytes(part)
            with pytest.raises(
                StatisticsError, match=f"{path.name} does not hold valid statistics"
            ):
                Statistics.load(path)
        version = re.compile(rb'(format_version\\?": )2')
        path.write_bytes(version.sub(rb"\g<1>7", whole))
        with pytest.raises(StatisticsError, match="format version 7; this qompose reads 2"):
            Statistics.load(path)
        with pytest.raises(FileNotFoundError):
            Statistics.load(tmp_path / f"absent.{suffix}")

    def test_a_failed_write_leaves_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "seen.json"
        found = qompose.statistics(calibrated())
        found.save(path)
        before = path.read_bytes()
        broken = replace(found, left_out=(object(),))  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            broken.save(path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["seen.json"]


class TestUse:
    @pytest.mark.parametrize("kind", [k for k in KINDS if k != "balanced"])
    @pytest.mark.parametrize("bounds", [(-128, 127), (-64, 63), (-8, 7)], ids=str)
    def test_one_histogram_serves_every_estimate_and_width(
        self, kind: str, bounds: tuple[int, int]
    ) -> None:
        """Without data: the model is never run again."""
        one = KINDS[kind].input_activation
        assert isinstance(one, QuantizationSpec)
        chosen = config(one.observer_or_fake_quant_ctr, *bounds)
        source = qompose.statistics(calibrated(HISTOGRAM))
        other = prepared(quantizer(chosen))
        other.forward = None  # type: ignore[assignment]
        assert parameters(source.apply(other)) == parameters(calibrated(chosen))

    def test_other_rules_that_see_fewer_tensors(self) -> None:
        source = qompose.statistics(calibrated())
        fewer = quantizer(HISTOGRAM, LINEAR)
        expected = prepared(fewer)
        expected(DATA)
        assert parameters(source.apply(prepared(fewer))) == parameters(expected)

    def test_calibrate_takes_them_for_data(self) -> None:
        source = qompose.statistics(calibrated())
        assert parameters(qompose.calibrate(prepared(), source)) == parameters(calibrated())

    def test_what_is_lacking_is_named_and_nothing_changes(self) -> None:
        source = qompose.statistics(
            qompose.calibrate(prepared(quantizer(HISTOGRAM, LINEAR)), [DATA])
        )
        model = prepared(quantizer(HISTOGRAM, LINEAR, SIGMOID))
        with pytest.raises(
            StatisticsError, match=r"lack.*\n.*aten\.sigmoid\.default, output: not in"
        ):
            source.apply(model)
        assert len(qompose.statistics(model)) == 0
        source.apply(model, partial=True)
        with pytest.raises(qompose.errors.UncalibratedError, match="sigmoid"):
            qompose.convert_pt2e(model)

    def test_a_range_gives_no_histogram(self) -> None:
        source = qompose.statistics(calibrated(STATIC))
        with pytest.raises(StatisticsError, match="HistogramObserver finds no histogram there"):
            source.apply(prepared())
        assert parameters(source.apply(prepared(quantizer(STATIC_UINT8))))

    def test_another_model_has_to_be_meant(self) -> None:
        source, other = qompose.statistics(calibrated()), prepared(model=exact(Net(), seed=1))
        with pytest.raises(StatisticsError, match=r"hash .*its parameters differ"):
            source.apply(other)
        source.apply(other, another_model=True)
        assert parameters(other)[0] == parameters(calibrated())[0]

    def test_statistics_do_not_change_when_calibration_goes_on(self, tmp_path: Path) -> None:
        model = calibrated()
        found = qompose.statistics(model)
        before = saved(found, tmp_path / "a.json")
        model(100 * DATA)
        assert saved(found, tmp_path / "a.json") == before
        other = found.apply(prepared())
        other(100 * DATA)
        assert saved(found, tmp_path / "a.json") == before

    def test_an_export_for_other_sizes_is_the_same_model(self) -> None:
        source = qompose.statistics(calibrated())
        fixed = prepare(export(exact(Net()), randn(3, 6)), quantizer())
        assert parameters(source.apply(fixed)) == parameters(calibrated())

    def test_observers_of_other_packages_are_left_out_by_name(self) -> None:
        torchs = spec(peer.HistogramObserver)
        mixed = QuantizationConfig(torchs, INT8, WEIGHT, name="mixed")
        model = prepared(quantizer(mixed, LINEAR))
        found = qompose.statistics(qompose.calibrate(model, [DATA]))
        assert any("HistogramObserver" in name for name in found.left_out)
        with pytest.raises(StatisticsError, match=r"HistogramObserver finds no way|not in these"):
            found.apply(model)

    def test_a_model_that_was_not_prepared(self) -> None:
        with pytest.raises(qompose.errors.StageError, match="statistics"):
            qompose.statistics(qompose.convert_pt2e(calibrated()))


class TestByHand:
    def test_a_range_of_ones_own(self, tmp_path: Path) -> None:
        found = qompose.statistics(calibrated())
        site = next(site for e in found for site in e.sites if "sigmoid" in site.operator)
        changed = found.with_range(site, -0.5, 2.0)
        changed.save(tmp_path / "seen.json")
        model = Statistics.load(tmp_path / "seen.json").apply(prepared())
        scale = (2.0 + 0.5) / 255
        assert any(p[0] == pytest.approx(scale) for p in parameters(model))
        assert str(site) in [str(d.site) for d in found.diff(changed)]
        assert "set by hand" in str(changed.diff(found)[0])

    def test_the_path_of_a_module_is_enough_where_it_has_one_tensor(self) -> None:
        found = qompose.statistics(calibrated())
        assert found.with_range("second", -1.0, 1.0).diff(found)
        with pytest.raises(
            StatisticsError, match=r"'secnd' is not the name of one tensor, but of none"
        ):
            found.with_range("secnd", -1.0, 1.0)
        with pytest.raises(StatisticsError, match="is not a range"):
            found.with_range("second", 1.0, -1.0)

    def test_equal_statistics_do_not_differ(self) -> None:
        one, other = (qompose.statistics(calibrated()) for _ in range(2))
        assert one.diff(other) == ()
        wider = qompose.statistics(calibrated(HISTOGRAM, 2 * DATA))
        assert {str(d.site) for d in one.diff(wider)} >= {"the program: input, x"}

    def test_they_print_a_line_for_each_tensor(self) -> None:
        found = qompose.statistics(calibrated())
        assert len(str(found).splitlines()) == len(found)
        assert "first: aten.linear.default, output: [" in str(found)


class Branch(nn.Module):
    """Two products, of which each call makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.yes(y).sin(), self.no, (x.sin(),))


@pytest.mark.filterwarnings("ignore::qompose.errors.QomposeWarning")  # one branch never ran
@pytest.mark.parametrize("batches", [(DATA.abs(), -DATA.abs()), (DATA.abs(),)], ids=["both", "one"])
def test_branches_that_ran_for_the_statistics_count_as_run(batches: tuple[Tensor, ...]) -> None:
    def convert(model: GraphModule) -> str:
        again = qompose.convert_pt2e(model, allow_uncalibrated=True)
        return str(qompose.report(again))

    branch = exact(Branch())
    seen = qompose.calibrate(prepared(quantizer(), branch), batches)
    told = qompose.statistics(seen).apply(prepared(quantizer(), branch), partial=True)
    assert convert(told) == convert(seen)
