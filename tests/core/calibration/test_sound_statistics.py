# SPDX-License-Identifier: Apache-2.0
"""Statistics that cannot be are refused where they come in, and what failed leaves nothing behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import Statistics, UserError
from qompose.errors import StatisticsError
from torch import nn
from torch.ao.quantization import observer as peer

from tests.core.calibration.test_collecting import (
    DATA,
    HISTOGRAM,
    KINDS,
    RULES,
    calibrated,
    config,
    prepared,
    quantizer,
)
from tests.core.qat import batch_for, product_model, product_quantizer
from tests.core.toy import export, prepare, toy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("minimum", math.inf), ("minimum", 1e9), ("maximum", "NaN"), ("set_range", [5, -5]),
        ("set_range", ["-inf", 1]), ("set_range", [0, 1e39]),
    ],
)  # fmt: skip
def test_ends_that_are_none(tmp_path: Path, name: str, value: Any) -> None:
    refused_by_load(tmp_path, lambda data: data["entries"][0]["facts"].__setitem__(name, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [("exponent", 5000), ("exponent", math.inf), ("bins", None), ("counts", None)],
)
def test_histograms_that_are_none(tmp_path: Path, name: str, value: Any) -> None:
    def change(data: Any) -> None:
        part = data["entries"][0]["facts"]["histogram"]
        if name == "bins":
            part["bins"][1] = part["bins"][0]
        elif name == "counts":
            part["counts"][0] += 0.5
        else:
            part[name] = value

    refused_by_load(tmp_path, change)


@pytest.mark.parametrize(
    ("name", "value"), [("batches", "x"), ("batches", -5), ("left_out", 5), ("left_out", [5])]
)
def test_what_stands_beside_entries(tmp_path: Path, name: str, value: Any) -> None:
    refused_by_load(tmp_path, lambda data: data.__setitem__(name, value))


def test_a_tensor_with_two_entries(tmp_path: Path) -> None:
    refused_by_load(tmp_path, lambda data: data["entries"].append(data["entries"][0]))


def test_nesting_without_end(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(StatisticsError, match="does not hold valid statistics"):
        Statistics.load(path)


def refused_by_load(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "seen.json"
    qompose.statistics(calibrated()).save(path)
    Statistics.load(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(StatisticsError):
        Statistics.load(path)


def test_a_bit_that_was_flipped(tmp_path: Path) -> None:
    path = tmp_path / "seen.safetensors"
    qompose.statistics(calibrated(KINDS["balanced"])).save(path)
    whole = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in range(start, len(whole), max(1, (len(whole) - start) // 40)):
        whole[place] ^= 4
        path.write_bytes(whole)
        with pytest.raises(StatisticsError, match="not those that were written"):
            Statistics.load(path)
        whole[place] ^= 4


@pytest.mark.parametrize("bounds", [(-math.inf, 1.0), (0.0, 1e39), (1.0, 1.0), (math.nan, 1.0)])
def test_a_range_of_ones_own_that_is_none(bounds: tuple[float, float]) -> None:
    seen = qompose.statistics(calibrated())
    with pytest.raises(StatisticsError, match="is not a range"):
        seen.with_range(next(iter(seen)).sites[0], *bounds)


def test_other_groups_are_not_merged() -> None:
    """One quantizer shares what the other does not: neither has what the other saw."""
    without_cat = toy(*(rule for rule in RULES if rule.name != "cat"), config=HISTOGRAM)
    other = qompose.statistics(qompose.calibrate(prepared(without_cat), [DATA]))
    with pytest.raises(StatisticsError, match="different quantizers"):
        qompose.statistics(calibrated()).merged(other)


def test_a_difference_that_ranges_do_not_show() -> None:
    one, other = DATA.clone(), DATA.clone()
    middle = DATA.abs().argmin()
    other.view(-1)[middle] += 1 / 8
    seen = [qompose.statistics(qompose.calibrate(prepared(), [x])) for x in (one, other)]
    (told, *_) = seen[0].diff(seen[1])
    assert "but not the same ones" in str(told)
    assert seen[0].diff(seen[0]) == ()


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
        with pytest.raises(qompose.errors.CalibrationError, match=r"batch 2 .*transform raised"):
            qompose.calibrate(prepared(), [DATA, last], transform=transform)


@pytest.mark.parametrize("limit", [0, 2.5, "3", True])
def test_what_is_no_limit(limit: Any) -> None:
    with pytest.raises(UserError, match="limit must be a number of batches"):
        qompose.calibrate(prepared(), [DATA], limit=limit)


def test_a_limit_of_each_process() -> None:
    with pytest.raises(UserError, match="shorten what each is given"):
        qompose.calibrate(prepared(), [DATA], limit=1, sharded=True)


class TestResuming:
    @pytest.mark.parametrize(
        ("name", "said"), [("x.pt", "must end in"), ("absent/x.json", "no directory")]
    )
    def test_where_nothing_can_be_kept(self, tmp_path: Path, name: str, said: str) -> None:
        with pytest.raises(StatisticsError, match=said):
            qompose.calibrate(prepared(), [DATA], resume=tmp_path / name)

    def test_observers_that_give_nothing_away(self, tmp_path: Path) -> None:
        model = prepared(quantizer(config(peer.MinMaxObserver)))
        with pytest.raises(StatisticsError, match="come from other packages"):
            qompose.calibrate(model, [DATA], resume=tmp_path / "x.json")

    def test_observers_that_need_more(self, tmp_path: Path) -> None:
        """The batches behind the file would be skipped, and never seen."""
        path = tmp_path / "x.json"
        qompose.calibrate(prepared(quantizer(KINDS["minmax"])), [DATA], resume=path)
        with pytest.raises(StatisticsError, match="no histogram"):
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
