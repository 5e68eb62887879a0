# SPDX-License-Identifier: Apache-2.0
"""Calibration takes batches as they come, and says which one does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
from qompose.calibration import calibrator
from qompose.errors import CalibrationError
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.data import DataLoader, TensorDataset

from tests.core.toy import LINEAR, export, prepare, randn, seeded, toy


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x + y)


X, Y = randn(4, 3), randn(4, 3, seed=1)


def prepared_pair() -> GraphModule:
    batch = torch.export.Dim("batch")
    program = export(seeded(TwoInputs()), X, Y, dynamic_shapes=({0: batch}, {0: batch}))
    return prepare(program, toy(LINEAR))


def prepared_single() -> GraphModule:
    program = export(seeded(nn.Linear(3, 4)), X, dynamic_shapes=({0: torch.export.Dim("batch")},))
    return prepare(program, toy(LINEAR))


def scales(prepared: GraphModule) -> list[float]:
    converted = qompose.convert_pt2e(prepared)
    return [n.args[1] for n in converted.graph.nodes if "quantize_per_tensor" in str(n.target)]


def plain_loop(prepared: GraphModule, *batches: tuple[Tensor, ...]) -> list[float]:
    for batch in batches:
        prepared(*batch)
    return scales(prepared)


@pytest.mark.parametrize(
    ("batches", "options"),
    [
        pytest.param([(X, Y), (Y, Y)], {}, id="tuples"),
        pytest.param([[X, Y], [Y, Y]], {}, id="lists"),
        pytest.param([{"x": X, "y": Y}, {"y": Y, "x": Y}], {}, id="dicts"),
        pytest.param(iter([(X, Y), (Y, Y)]), {}, id="an iterator"),
        pytest.param(
            [("label", X, Y), ("label", Y, Y)], {"transform": lambda b: b[1:]}, id="a transform"
        ),
        pytest.param([(X, Y), (Y, Y)], {"progress": True}, id="with a progress bar"),
    ],
)
def test_batches_are_those_of_a_plain_loop(batches: Any, options: Any) -> None:
    prepared = prepared_pair()
    assert qompose.calibrate(prepared, batches, **options) is prepared
    assert scales(prepared) == plain_loop(prepared_pair(), (X, Y), (Y, Y))


def test_tensors_and_data_loaders() -> None:
    data = randn(10, 3)
    expected = plain_loop(prepared_single(), (data,))
    assert scales(qompose.calibrate(prepared_single(), list(data.split(3)))) == expected
    loader = DataLoader(TensorDataset(data, torch.arange(10)), batch_size=4)
    calibrated = qompose.calibrate(prepared_single(), loader, transform=lambda batch: batch[0])
    assert scales(calibrated) == expected


def test_the_result_does_not_depend_on_the_split() -> None:
    data = torch.round(randn(12, 3) * 64) / 64
    results = []
    for size in (1, 5, 12):
        prepared = prepared_single()
        with torch.no_grad():  # sums of few bits: matrix products of any batch size are equal then
            for parameter in prepared.parameters():
                parameter.copy_(torch.round(parameter * 64) / 64)
        results.append(scales(qompose.calibrate(prepared, list(data.split(size)))))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("batches", [[], iter(()), (b for b in [])], ids=["list", "iter", "used"])
def test_no_batch_is_an_error(batches: Any) -> None:
    with pytest.raises(CalibrationError, match="no batches: the iterable was empty"):
        qompose.calibrate(prepared_pair(), batches)


@pytest.mark.parametrize(
    ("single", "message"),
    [
        (X, r"a single one, float32\[4, 3\]: pass \[batch\]; where its slices .* list\(tensor\)"),
        (X[0], r"a single one, float32\[3\]: pass \[batch\]$"),
        ({"x": X, "y": Y}, r"a single one, \{x: float32.*pass \[batch\]$"),
        (3, r"got int; for one batch pass \[batch\]"),
    ],
    ids=["tensor", "row", "dict", "number"],
)
def test_a_single_batch_is_not_gone_through(single: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"calibrate takes .*{message}"):
        qompose.calibrate(prepared_pair(), single)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param(
            (X,), r"batch 3 does not fit.*The batch is \(float32\[4, 3\]\)", id="too few"
        ),
        pytest.param(
            (X, randn(4, 5)), r"batch 3 does not fit.*\(float32\[4, 3\], float32\[4, 5\]\)",
            id="wrong shape",
        ),
        pytest.param({"x": X, "z": Y}, r"batch 3 does not fit.*\{x: float32", id="wrong name"),
        pytest.param(
            (X, Y, torch.arange(4)),
            r"batch 3 .*The model takes x, y: pass transform= .* batch: batch\[:2\]",
            id="labels",
        ),
        pytest.param((X, "y"), r"batch 3 does not fit.*\(float32\[4, 3\], str\)", id="wrong type"),
        pytest.param("xy", "batch 3 cannot be used: it is a str.*transform=", id="no batch at all"),
        pytest.param(3, "batch 3 cannot be used: it is a int", id="a number"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_is_named_by_number(bad: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=f"(?s)calibration {message}"):
        qompose.calibrate(prepared_pair(), [(X, Y), (X, Y), bad, (X, Y)])


def test_nan_is_named_with_its_batch_and_its_tensor() -> None:
    bad = X.clone()
    bad[0, 0] = math.nan
    with pytest.raises(CalibrationError, match=r"(?s)batch 2 .*NaN") as caught:
        qompose.calibrate(prepared_pair(), [(X, Y), (bad, Y)])
    assert "add" in str(caught.value), "the observed tensor is the sum"


def test_no_gradients_are_kept() -> None:
    prepared = prepared_single()
    modes = []
    hook = prepared.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    qompose.calibrate(prepared, [X])
    hook.remove()
    assert modes == [False]


def test_batches_are_read_one_at_a_time() -> None:
    prepared, alive = prepared_single(), []

    def batches() -> Iterator[Tensor]:
        for _ in range(3):
            alive.append(len(alive))
            yield X

    calls = []
    prepared.register_forward_hook(lambda *_: calls.append(len(alive)))
    qompose.calibrate(prepared, batches())
    assert calls == [1, 2, 3]


def test_the_progress_bar_is_on_stderr_and_off_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    qompose.calibrate(prepared_single(), [X])
    assert capsys.readouterr() == ("", "")
    qompose.calibrate(prepared_single(), [X], progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "calibrating" in printed.err
    assert "1/1" in printed.err


class Scaled(nn.Module):
    """A number and an optional tensor, which export makes constants of the program."""

    def forward(self, x: Tensor, *, n: float, d: dict[str, Tensor | None]) -> Tensor:
        bias = d["bias"]
        return x * n if bias is None else x * n + bias


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"n": 4}, "the input n is 4, and the program was exported for 3"),
        ({"n": torch.tensor(3)}, r"the input n is a tensor of shape \[\], and the program was"),
        ({"d": {"bias": randn(3)}}, None),
        ({"n": None}, "the input n is None, and the program was"),
    ],
    ids=["same", "number", "tensor for a number", "tensor", "none"],
)
def test_a_constant_of_the_export_stays_what_it_was(
    changed: dict[str, Any], said: str | None
) -> None:
    """The program computes with the value of the export, whatever it is given."""
    first = {"n": 3, "d": {"bias": randn(3)}}
    program = torch.export.export(Scaled(), (randn(2, 3),), first)
    prepared = prepare(program, toy(LINEAR))
    batch = {"x": randn(2, 3), **first}
    if said is None:
        qompose.calibrate(prepared, [{**batch, **changed}])
        return
    with pytest.raises(
        CalibrationError, match=f"calibration batch 2 does not fit the model: {said}"
    ):
        qompose.calibrate(prepared, [batch, {**batch, **changed}])


def test_what_was_absent_in_the_export_stays_absent() -> None:
    program = torch.export.export(Scaled(), (randn(2, 3),), {"n": 3, "d": {"bias": None}})
    prepared = prepare(program, toy(LINEAR))
    with pytest.raises(
        CalibrationError, match=r"the input d_bias is a tensor .* exported for None"
    ):
        qompose.calibrate(prepared, [{"x": randn(2, 3), "n": 3, "d": {"bias": randn(3)}}])


class TestOptions:
    """A number of batches, statistics in place of data, and calibration that goes on."""

    def test_a_number_of_batches(self) -> None:
        batches = [randn(4, 3, seed=seed) for seed in range(9)]
        seen = qompose.calibrate(prepared_single(), iter(batches), limit=4)
        assert scales(seen) == plain_loop(prepared_single(), *[(b,) for b in batches[:4]])
        with pytest.raises(qompose.UserError, match="at least 1, got 0"):
            qompose.calibrate(prepared_single(), batches, limit=0)

    def test_what_was_stopped_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(calibrator, "EVERY", 0.0)
        batches, ran = [randn(4, 3, seed=seed) for seed in range(9)], []

        def loaded(stop: int) -> Iterator[Tensor]:
            for number, batch in enumerate(batches):
                if number == stop:
                    raise KeyboardInterrupt
                yield batch

        def noted(batch: Tensor) -> Tensor:
            ran.append(batch)
            return batch

        path = tmp_path / "seen.safetensors"
        with pytest.raises(KeyboardInterrupt):
            qompose.calibrate(prepared_single(), loaded(5), resume=path)
        model = prepared_single()
        qompose.calibrate(model, loaded(99), resume=path, transform=noted)
        assert [torch.equal(*pair) for pair in zip(ran, batches[5:], strict=True)] == [True] * 4
        assert scales(model) == plain_loop(prepared_single(), *[(b,) for b in batches])
        done = qompose.calibrate(prepared_single(), loaded(99), resume=path, transform=noted)
        assert len(ran) == 4 and scales(done) == scales(model)

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"transform": lambda batch: batch}, "transform="),
            ({"limit": 3, "sharded": True}, "limit=, sharded="),
            ({"resume": "seen.json"}, "resume="),
        ],
        ids=["transform", "limit", "resume"],
    )
    def test_what_is_for_batches_does_not_go_with_statistics(
        self, options: dict[str, Any], named: str
    ) -> None:
        seen = qompose.statistics(qompose.calibrate(prepared_single(), [X]))
        with pytest.raises(qompose.UserError, match=f"^{named} is for batches"):
            qompose.calibrate(prepared_single(), seen, **options)
        qompose.calibrate(prepared_single(), seen, progress=True)

    def test_statistics_of_a_whole_calibration_are_not_gone_on_with(self, tmp_path: Path) -> None:
        path = tmp_path / "seen.json"
        qompose.statistics(qompose.calibrate(prepared_single(), [X])).save(path)
        with pytest.raises(qompose.errors.StatisticsError, match="cannot be resumed"):
            qompose.calibrate(prepared_single(), [X], resume=path)
