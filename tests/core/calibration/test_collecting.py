# SPDX-License-Identifier: Apache-2.0
"""Statistics: merged exactly, kept in files, edited, compared, and used for other quantizers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationConfig, QuantizationSpec, RuleQuantizer, Statistics, UserError
from qompose.calibration import statistics_file
from qompose.errors import StatisticsError
from qompose.observers import (
    EntropyObserver,
    HistogramObserver,
    MovingAverageMinMaxObserver,
    PercentileObserver,
    PerChannelHistogramObserver,
)
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.ao.quantization import observer as peer
from torch.fx import GraphModule

from tests.core.qat import batch_for, product_model, product_quantizer
from tests.core.toy import (
    INT8,
    LINEAR,
    RULES,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    WEIGHT,
    Model,
    export,
    prepare,
    randn,
    seeded,
    toy,
)
from tests.sampling import at_once

BATCH = {0: torch.export.Dim("batch")}


def net(seed: int = 0) -> nn.Module:
    """Two products in modules, a sum of two of them, and values of a cat that share a range."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        return torch.cat([torch.sigmoid(m.second(y)), y], dim=1)

    return exact(Model(forward, first=nn.Linear(6, 8), second=nn.Linear(8, 8)), seed)


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


PROGRAM = export(net(), randn(4, 6), dynamic_shapes=(BATCH,))


def prepared(chosen: RuleQuantizer | None = None, model: nn.Module | None = None) -> GraphModule:
    program = PROGRAM if model is None else export(model, randn(4, 6), dynamic_shapes=(BATCH,))
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
def in_one_go(kind: str = "histogram") -> GraphModule:
    """A model that no test changes."""
    return calibrated(KINDS[kind])


@cache
def seen(kind: str = "histogram") -> Statistics:
    return qompose.statistics(in_one_go(kind))


class TestMerging:
    @pytest.mark.parametrize("kind", at_once(KINDS, "histogram", "balanced"))
    @settings(max_examples=5, deadline=None)
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
        merged = found[0].merged(*found[1:])
        if left and right:
            merged = right[0].merged(*right[1:]).merged(left[0].merged(*left[1:]))
        assert saved(merged, path) == saved(seen(kind), path)
        given_to = merged.apply(prepared(quantizer(KINDS[kind])))
        assert parameters(given_to) == parameters(in_one_go(kind))

    def test_what_depends_on_the_order_is_refused_by_name(self) -> None:
        one = qompose.statistics(calibrated(config(MovingAverageMinMaxObserver)))
        with pytest.raises(StatisticsError, match="MovingAverageMinMaxObserver"):
            one.merged(one)

    def test_other_models_are_refused(self) -> None:
        other = prepared(model=net(seed=1))
        other(DATA)
        with pytest.raises(StatisticsError, match="parameters"):
            seen().merged(qompose.statistics(other))

    def test_numbers_of_batches_add_up(self) -> None:
        one, other = (replace(seen(), batches=count) for count in (2, 3))
        assert one.merged(other).batches == 5

    def test_a_tensor_that_one_part_never_saw_is_taken_from_the_other(self) -> None:
        part = replace(seen(), entries=seen().entries[1:])
        assert len(part.merged(seen())) == len(seen())


INVALID: dict[str, dict[str, Any]] = {
    "one end": {"maximum": None},
    "ends the wrong way round": {"maximum": -3.0},
    "an infinite end": {"minimum": math.inf},
    "an end that is no number": {"maximum": "NaN"},
    "a chosen range of one value": {"set_range": [1.0, 1.0]},
    "a bin before the first": {"histogram": {"bins": {0: -1}}},
    "a bin after the last": {"histogram": {"bins": {0: 4096}}},
    "a bin twice": {"histogram": {"bins": {0: 832}}},
    "a count below zero": {"histogram": {"counts": {0: -1}}},
    "a part of a count": {"histogram": {"counts": {0: 0.5}}},
    "a far exponent": {"histogram": {"exponent": 10**4}},
    "an infinite exponent": {"histogram": {"exponent": math.inf}},
    "whole ranges of channels": {"channels": {"low": [0] * 6, "high": [1] * 6}},
    "a channel without range": {"channels": {"low": {0: 9.0}}},
    "a channel too few": {"channels": {"low": [0.0] * 5}},
    "rows without order": {"sample": {"order": [[0, 0, 0]]}},
    "rows of an empty stratum": {"sample": {"counts": {0: 0}}},
}
INVALID_FILES: dict[str, Callable[[Any], None]] = {
    **{n: lambda data, c=c: put(data["entries"][0]["facts"], c) for n, c in INVALID.items()},
    "batches in words": lambda data: data.update(batches="x"),
    "fewer batches than none": lambda data: data.update(batches=-5),
    "no list of what was left out": lambda data: data.update(left_out=5),
    "no names of what was left out": lambda data: data.update(left_out=[5]),
    "sums of nothing": lambda data: data["means"][0][1].update(count=0),
    "parts of sums": lambda data: data["means"][0][1].update(total=[0.5]),
    "a tensor twice": lambda data: data["entries"].append(data["entries"][0]),
}


# The ends are places for values, and a value may be the only one.
FARTHEST = {
    "minimum": 3.0, "maximum": 3.0,
    "histogram": {"exponent": 200, "bins": {0: 0, -1: 4095}, "counts": {1: 0}},
}  # fmt: skip


def put(facts: Any, changes: dict[Any, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict):
            put(facts[key], value)
        else:
            facts[key] = value


def assert_refused(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))
    with pytest.raises(StatisticsError, match=path.name):
        Statistics.load(path)


class TestFiles:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    def test_they_come_back_exactly(self, tmp_path: Path, kind: str, suffix: str) -> None:
        seen(kind).save(tmp_path / f"seen.{suffix}")
        loaded = Statistics.load(tmp_path / f"seen.{suffix}")
        assert saved(loaded, tmp_path / "a.json") == saved(seen(kind), tmp_path / "b.json")
        loaded.apply(again := prepared(quantizer(KINDS[kind])))
        assert parameters(again) == parameters(in_one_go(kind))

    @pytest.mark.parametrize("change", INVALID_FILES.values(), ids=INVALID_FILES)
    def test_what_cannot_be_is_refused(self, change: Callable[[Any], None], tmp_path: Path) -> None:
        path = tmp_path / "seen.json"
        data = saved(seen("balanced"), path)
        facts = data["entries"][0]["facts"]
        put(facts, FARTHEST)
        put(facts["channels"]["low"], {1: facts["channels"]["high"][1]})
        put(data["means"][0][1], {"count": 1, "largest": 0.0})
        path.write_text(json.dumps(data))
        Statistics.load(path)
        change(data)
        assert_refused(path, data)

    def test_a_channel_without_a_range_has_no_histogram(self, tmp_path: Path) -> None:
        path = tmp_path / "seen.json"
        scheme = {"qscheme": torch.per_channel_affine, "ch_axis": -1}
        one = spec(PerChannelHistogramObserver, **scheme)  # type: ignore[arg-type]
        model = prepared(quantizer(QuantizationConfig(one, one, WEIGHT), LINEAR))
        data = saved(qompose.statistics(qompose.calibrate(model, [DATA])), path)
        found = data["entries"][0]["facts"]["channels"]["histograms"]
        for name, value in (
            ("exponents", 0),
            ("channels", 6),
            ("bins", 0),
            ("counts", found["values"]),
        ):
            found[name].append(value)
        assert_refused(path, data)

    def test_other_names_are_refused(self, tmp_path: Path) -> None:
        for call in (seen().save, Statistics.load):
            with pytest.raises(StatisticsError, match=r"seen.pt"):
                call(tmp_path / "seen.pt")

    def test_a_full_disk_is_told_and_costs_no_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "seen.safetensors"
        seen().save(path)
        before = path.read_bytes()
        full = Mock(side_effect=SafetensorError("no space left"))
        monkeypatch.setattr(statistics_file, "save_file", full)
        with pytest.raises(OSError, match="no space left"):
            seen().save(path)
        assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]

    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    def test_damage_is_told(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"seen.{suffix}"
        seen().save(path)
        whole = path.read_bytes()
        half, other = whole[: len(whole) // 2], whole.replace(b"counts", b"kounts")
        for part in (half, b"", b"[]", b"{}", b"[" * 100_000, other):
            path.write_bytes(part)
            with pytest.raises(StatisticsError, match=path.name):
                Statistics.load(path)
        version = re.compile(rb'(format_version\\?": )4')
        path.write_bytes(version.sub(rb"\g<1>7", whole))
        with pytest.raises(StatisticsError, match=r"format.* 7"):
            Statistics.load(path)
        with pytest.raises(FileNotFoundError):
            Statistics.load(tmp_path / f"absent.{suffix}")


class TestUse:
    @pytest.mark.parametrize("kind", [k for k in KINDS if k != "balanced"])
    @pytest.mark.parametrize("bounds", [(-128, 127), (-8, 7)], ids=str)
    def test_one_histogram_serves_every_estimate_and_width(
        self, kind: str, bounds: tuple[int, int]
    ) -> None:
        """Without data: the model is never run again."""
        one: Any = KINDS[kind].input_activation
        chosen = config(one.observer_or_fake_quant_ctr, *bounds)
        other = prepared(quantizer(chosen))
        other.forward = None  # type: ignore[assignment]
        assert parameters(seen().apply(other)) == parameters(calibrated(chosen))

    def test_other_rules_that_see_fewer_tensors_by_calibrate(self) -> None:
        fewer = quantizer(HISTOGRAM, LINEAR)
        expected = parameters(qompose.calibrate(prepared(fewer), [DATA]))
        assert parameters(qompose.calibrate(prepared(fewer), seen())) == expected

    def test_what_is_lacking_is_named_and_nothing_changes(self) -> None:
        fewer = qompose.calibrate(prepared(quantizer(HISTOGRAM, LINEAR)), [DATA])
        source, model = qompose.statistics(fewer), prepared(quantizer(HISTOGRAM, LINEAR, SIGMOID))
        with pytest.raises(StatisticsError, match=r"aten\.sigmoid\.default, output"):
            source.apply(model)
        assert len(qompose.statistics(model)) == 0
        source.apply(model, partial=True)
        with pytest.raises(qompose.errors.UncalibratedError, match="sigmoid"):
            qompose.convert_pt2e(model)

    def test_a_range_gives_no_histogram(self) -> None:
        source = seen("minmax")
        with pytest.raises(StatisticsError, match="HistogramObserver"):
            source.apply(prepared())
        assert parameters(source.apply(prepared(quantizer(STATIC_UINT8))))

    def test_another_model_has_to_be_meant(self) -> None:
        source, other = seen(), prepared(model=net(seed=1))
        with pytest.raises(StatisticsError, match="parameters"):
            source.apply(other)
        source.apply(other, another_model=True)
        assert parameters(other)[0] == parameters(in_one_go())[0]

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
        fixed = prepare(export(net(), randn(3, 6)), quantizer())
        assert parameters(seen().apply(fixed)) == parameters(in_one_go())

    def test_observers_of_other_packages_are_left_out_by_name(self) -> None:
        torchs = spec(peer.HistogramObserver)
        mixed = QuantizationConfig(torchs, INT8, WEIGHT, name="mixed")
        model = prepared(quantizer(mixed, LINEAR))
        found = qompose.statistics(qompose.calibrate(model, [DATA]))
        assert any("HistogramObserver" in name for name in found.left_out)
        with pytest.raises(StatisticsError, match=r"HistogramObserver|not in these"):
            found.apply(model)
        with pytest.raises(StatisticsError, match="HistogramObserver"):
            seen().apply(model)

    def test_a_model_that_was_not_prepared(self) -> None:
        with pytest.raises(qompose.errors.StageError, match="statistics"):
            qompose.statistics(qompose.convert_pt2e(calibrated()))


class TestByHand:
    def test_a_range_of_ones_own(self, tmp_path: Path) -> None:
        found = seen()
        site = next(site for e in found for site in e.sites if "sigmoid" in site.operator)
        changed = found.with_range(site, -0.5, 2.0)
        changed.save(tmp_path / "seen.json")
        model = Statistics.load(tmp_path / "seen.json").apply(prepared())
        scale = (2.0 + 0.5) / 255
        assert any(p[0] == pytest.approx(scale) for p in parameters(model))
        assert str(site) in [str(d.site) for d in found.diff(changed)]
        assert "set manually" in str(changed.diff(found)[0])

    def test_the_path_of_a_module_is_enough_where_it_has_one_tensor(self) -> None:
        assert seen().with_range("second", -1.0, 1.0).diff(seen())
        with pytest.raises(StatisticsError, match="'secnd'"):
            seen().with_range("secnd", -1.0, 1.0)

    def test_equal_statistics_do_not_differ(self) -> None:
        assert seen().diff(qompose.statistics(calibrated())) == ()
        twice = qompose.statistics(calibrated(HISTOGRAM, DATA, DATA))
        assert twice.diff(seen().merged(seen())) == ()
        wider = qompose.statistics(calibrated(HISTOGRAM, 2 * DATA))
        assert {str(d.site) for d in seen().diff(wider)} >= {"the program: input, x"}

    def test_they_print_a_line_for_each_tensor(self) -> None:
        assert len(str(seen()).splitlines()) == len(seen())
        assert "first: aten.linear.default, output: [" in str(seen())


def test_a_bit_that_was_flipped(tmp_path: Path) -> None:
    path = tmp_path / "seen.safetensors"
    seen("balanced").save(path)
    whole = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in range(start, len(whole), max(1, (len(whole) - start) // 40)):
        whole[place] ^= 4
        path.write_bytes(whole)
        with pytest.raises(StatisticsError, match=r"seen.safetensors"):
            Statistics.load(path)
        whole[place] ^= 4


@pytest.mark.parametrize(
    "bounds", [(-math.inf, 1.0), (0.0, 1e39), (1.0, 1.0), (math.nan, 1.0), (1.0, -1.0)]
)
def test_a_range_of_ones_own_that_is_none(bounds: tuple[float, float], tmp_path: Path) -> None:
    with pytest.raises(StatisticsError):
        seen().with_range(next(iter(seen())).sites[0], *bounds)
    data = saved(seen(), path := tmp_path / "seen.json")
    ends = [end if math.isfinite(end) else str(end) for end in bounds]
    data["entries"][0]["facts"]["set_range"] = ends
    path.write_text(json.dumps(data))
    with pytest.raises(StatisticsError):
        Statistics.load(path)


def test_other_groups_and_ranges_are_not_merged() -> None:
    """One quantizer shares what the other does not: neither has what the other saw."""
    without_cat = toy(*(rule for rule in RULES if rule.name != "cat"), config=HISTOGRAM)
    other = qompose.statistics(qompose.calibrate(prepared(without_cat), [DATA]))
    with pytest.raises(StatisticsError, match="quantizer"):
        seen().merged(other)
    with pytest.raises(StatisticsError):  # what somebody chose
        seen().merged(seen().with_range(next(iter(seen())).sites[0], -1.0, 1.0))


def test_a_difference_that_ranges_do_not_show() -> None:
    one, other = DATA.clone(), DATA.clone()
    middle = DATA.abs().argmin()
    other.view(-1)[middle] += 1 / 8
    first, second = (qompose.statistics(qompose.calibrate(prepared(), [x])) for x in (one, other))
    assert first.diff(second)
    assert first.diff(first) == ()


class TestFailures:
    @pytest.mark.parametrize("kind", KINDS)
    def test_leave_observers_as_they_were(self, kind: str) -> None:
        model = calibrated(KINDS[kind])
        before = qompose.statistics(model)
        bad = DATA.clone()
        bad[3, 2] = math.inf
        with pytest.raises(qompose.errors.CalibrationError):
            qompose.calibrate(model, [DATA * 9, bad])
        assert qompose.statistics(model).diff(before) == ()
        assert len(qompose.convert_pt2e(model).state_dict())

    def test_leave_foreign_observers_as_they_were(self) -> None:
        model = prepared(quantizer(config(peer.MinMaxObserver)))
        qompose.calibrate(model, [DATA])
        x = DATA[:4]
        out = qompose.convert_pt2e(model)(x)
        with pytest.raises(qompose.errors.CalibrationError):
            qompose.calibrate(model, [DATA * 9, DATA * math.nan])
        assert torch.equal(qompose.convert_pt2e(model)(x), out)

    def test_of_transform_have_the_number_of_the_batch(self) -> None:
        def transform(batch: Any) -> Any:
            return batch["x"] if batch is last else batch

        last = DATA * 1
        with pytest.raises(qompose.errors.CalibrationError, match=r"batch 2 .*transform"):
            qompose.calibrate(prepared(), [DATA, last], transform=transform)


@pytest.mark.parametrize(
    ("limit", "sharded"), [(0, False), (2.5, False), ("3", False), (True, False), (1, True)]
)
def test_what_is_no_limit(limit: Any, sharded: bool) -> None:
    """Nor is there one of each process."""
    with pytest.raises(UserError, match="limit"):
        qompose.calibrate(prepared(), [DATA], limit=limit, sharded=sharded)


@pytest.mark.parametrize(
    ("name", "observer", "said"),
    [
        ("x.pt", HistogramObserver, r"x\.pt"),
        ("absent/x.json", HistogramObserver, "absent"),
        ("x.json", peer.MinMaxObserver, "MinMaxObserver"),
    ],
)
def test_what_cannot_be_resumed(tmp_path: Path, name: str, observer: Any, said: str) -> None:
    """Where nothing can be kept, or of observers that give nothing away."""
    model = prepared(quantizer(config(observer)))
    untouched = (pytest.fail("a batch was read") for _ in range(1))
    with pytest.raises(StatisticsError, match=said):
        qompose.calibrate(model, untouched, resume=tmp_path / name)


def test_resuming_with_observers_that_need_more(tmp_path: Path) -> None:
    """The batches behind the file would be skipped, and never seen."""
    path = tmp_path / "x.json"
    qompose.calibrate(prepared(quantizer(KINDS["minmax"])), [DATA], resume=path)
    with pytest.raises(StatisticsError, match=r"HistogramObserver|histogram"):
        qompose.calibrate(prepared(), [DATA, DATA], resume=path)


class TestInTraining:
    def test_calibration_trains_nothing(self) -> None:
        x = batch_for("conv2d")
        program = torch.export.export(product_model("conv2d", "relu", bias=True).train(), (x,))
        model = qompose.prepare_qat_pt2e(program, product_quantizer())
        before = {k: v.clone() for k, v in model.named_buffers() if "running" in k}
        qompose.calibrate(model, [x, x])
        assert model.training
        assert all(torch.equal(v, model.get_buffer(k)) for k, v in before.items())

    def test_statistics_go_both_ways(self) -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3))
        program = export(net, DATA)
        minmax = KINDS["minmax"]
        plain = prepare(program, toy(config=minmax))
        trained = qompose.prepare_qat_pt2e(program, toy(config=minmax))
        qompose.calibrate(trained, [DATA])
        qompose.statistics(trained).apply(plain)
        assert qompose.statistics(plain).diff(qompose.statistics(trained)) == ()
        qompose.statistics(plain).apply(trained)


@pytest.fixture(scope="module")
def branches() -> torch.export.ExportedProgram:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: m.yes(y).sin(), m.no, (x.sin(),))

    model = exact(Model(forward, yes=nn.Linear(6, 8), no=nn.Linear(6, 8)))
    return export(model, randn(4, 6), dynamic_shapes=(BATCH,))


@pytest.mark.filterwarnings("ignore::qompose.errors.QomposeWarning")  # one branch never ran
@pytest.mark.parametrize("batches", [(DATA.abs(), -DATA.abs()), (DATA.abs(),)], ids=["both", "one"])
def test_branches_that_ran_for_the_statistics_count_as_run(
    branches: torch.export.ExportedProgram, batches: tuple[Tensor, ...]
) -> None:
    seen, told = (prepare(branches, quantizer()) for _ in range(2))
    found = qompose.statistics(qompose.calibrate(seen, batches))
    found.apply(told, partial=True)
    one, other = (qompose.convert_pt2e(m, allow_uncalibrated=True) for m in (seen, told))
    assert str(qompose.report(one)) == str(qompose.report(other))
