# SPDX-License-Identifier: Apache-2.0
"""Calibration takes batches as they come, says which one does not fit, and what looks wrong after it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, UserError
from qompose.calibration import calibrator
from qompose.errors import BatchError, CalibrationError, StatisticsError
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.data import DataLoader, TensorDataset

from tests.core.toy import (
    ADD_RELU,
    LINEAR,
    PRODUCTS,
    STATIC,
    Model,
    export,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)
from tests.zoo import by_name

X, Y = randn(4, 3), randn(4, 3, seed=1)
ROWS = {0: torch.export.Dim("batch")}
TWO_INPUTS = seeded(Model(lambda m, x, y: m.linear(x + y), linear=nn.Linear(3, 4)))
PAIR = export(TWO_INPUTS, X, Y, dynamic_shapes=(ROWS, ROWS))
SINGLE = export(seeded(nn.Linear(3, 4)), X, dynamic_shapes=(ROWS,))


def prepared_pair() -> GraphModule:
    return prepare(PAIR, toy(LINEAR))


def prepared_single() -> GraphModule:
    return prepare(SINGLE, toy(LINEAR))


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
        pytest.param([(3, X, Y), (3, Y, Y)], {"transform": lambda b: b[1:]}, id="a transform"),
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


@pytest.mark.parametrize("batches", [[], iter(()), (b for b in [])], ids=["list", "iter", "used"])
def test_no_batch_is_an_error(batches: Any) -> None:
    with pytest.raises(CalibrationError):
        qompose.calibrate(prepared_pair(), batches)


@pytest.mark.parametrize(
    "single", [X, X[0], {"x": X, "y": Y}, 3], ids=["tensor", "row", "dict", "number"]
)
def test_a_single_batch_is_not_gone_through(single: Any) -> None:
    with pytest.raises(UserError, match="calibrate"):
        qompose.calibrate(prepared_pair(), single)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        pytest.param((X,), r"\(float32\[4, 3\]\)", id="too few"),
        pytest.param((X, randn(4, 5)), r"float32\[4, 3\], float32\[4, 5\]\)\.$", id="wrong shape"),
        pytest.param({"x": X, "z": Y}, r"\{x: float32", id="wrong name"),
        pytest.param((X, Y, torch.arange(4)), r"x, y; .*batch\[:2\]", id="labels"),
        pytest.param((X, "y"), r"\(float32\[4, 3\], str\)", id="wrong type"),
        pytest.param("xy", "str.*transform=", id="no batch at all"),
        pytest.param(3, "int", id="a number"),
    ],
)
def test_a_batch_that_does_not_fit_is_named_by_number(bad: Any, named: str) -> None:
    with pytest.raises(CalibrationError, match=f"(?s){named}") as caught:
        qompose.calibrate(prepared_pair(), [(X, Y), (X, Y), bad, (X, Y)])
    assert isinstance(caught.value, BatchError)
    assert caught.value.number == 3


def test_batches_are_read_one_at_a_time_and_no_gradients_are_kept() -> None:
    prepared, alive = prepared_single(), []

    def batches() -> Iterator[Tensor]:
        for _ in range(3):
            alive.append(len(alive))
            yield X

    calls = []
    prepared.register_forward_hook(lambda *_: calls.append((len(alive), torch.is_grad_enabled())))
    qompose.calibrate(prepared, batches())
    assert calls == [(1, False), (2, False), (3, False)]


def test_the_progress_bar_is_on_stderr_and_off_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    qompose.calibrate(prepared_single(), [X])
    assert capsys.readouterr() == ("", "")
    qompose.calibrate(prepared_single(), [X], progress=True)
    printed = capsys.readouterr()
    assert printed.out == "" and "calibrating" in printed.err and "1/1" in printed.err


def scaled(m: Any, x: Tensor, *, n: float, d: dict[str, Tensor | None]) -> Tensor:
    """A number and an optional tensor, which export makes constants of the program."""
    bias = d["bias"]
    return x * n if bias is None else x * n + bias


BIASED = {"n": 3, "d": {"bias": randn(3)}}


@pytest.mark.parametrize(
    ("exported", "changed", "named"),
    [
        pytest.param(BIASED, {}, None, id="same"),
        pytest.param(BIASED, {"d": {"bias": randn(3, seed=1)}}, None, id="tensor"),
        pytest.param(BIASED, {"n": 4}, "input n is 4", id="number"),
        pytest.param(BIASED, {"n": torch.tensor(3)}, "input n ", id="tensor for a number"),
        pytest.param(BIASED, {"n": None}, "input n is None", id="none"),
        pytest.param(
            {"n": 3, "d": {"bias": None}}, {"d": {"bias": randn(3)}}, "input d_bias", id="absent"
        ),
    ],
)
def test_a_constant_of_the_export_stays_what_it_was(
    exported: dict[str, Any], changed: dict[str, Any], named: str | None
) -> None:
    """The program computes with the value of the export, whatever it is given."""
    program = torch.export.export(Model(scaled), (randn(2, 3),), exported)
    prepared = prepare(program, toy(LINEAR))
    batch = {"x": randn(2, 3), **exported}
    if named is None:
        qompose.calibrate(prepared, [{**batch, **changed}])
        return
    with pytest.raises(BatchError, match=named) as caught:
        qompose.calibrate(prepared, [batch, {**batch, **changed}])
    assert caught.value.number == 2


class TestOptions:
    """A number of batches, statistics in place of data, and calibration that goes on."""

    def test_a_number_of_batches(self) -> None:
        batches = [randn(4, 3, seed=seed) for seed in range(9)]
        seen = qompose.calibrate(prepared_single(), iter(batches), limit=4)
        assert scales(seen) == plain_loop(prepared_single(), *[(b,) for b in batches[:4]])
        qompose.calibrate(seen, batches[4:])
        assert scales(seen) == plain_loop(prepared_single(), *[(b,) for b in batches])

    def test_a_key_that_was_pressed_leaves_nothing(self) -> None:
        def loaded() -> Iterator[Tensor]:
            yield randn(4, 3, seed=0)
            raise KeyboardInterrupt

        prepared = prepared_single()
        with pytest.raises(KeyboardInterrupt):
            qompose.calibrate(prepared, loaded())
        assert not len(qompose.statistics(prepared))

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
        with pytest.raises(qompose.UserError, match=f"^{named} "):
            qompose.calibrate(prepared_single(), seen, **options)
        qompose.calibrate(prepared_single(), seen, progress=True)

    def test_statistics_of_a_whole_calibration_are_not_gone_on_with(self, tmp_path: Path) -> None:
        path = tmp_path / "seen.json"
        qompose.statistics(qompose.calibrate(prepared_single(), [X])).save(path)
        with pytest.raises(qompose.errors.StatisticsError, match=r"seen.json"):
            qompose.calibrate(prepared_single(), [X], resume=path)


ROWS_OF_8 = randn(32, 8)


def layers(between: Callable[[Tensor], Tensor]) -> nn.Module:
    """Several layers, before the last of which something happens to the values."""
    first = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    parts = {"first": first, "last": nn.Linear(8, 8)}
    return seeded(Model(lambda m, x: m.last(between(torch.sigmoid(m.first(x)))), **parts))


def calibrated(between: Callable[[Tensor], Tensor]) -> tuple[GraphModule, list[str]]:
    prepared = prepare(export(layers(between), ROWS_OF_8), toy(LINEAR, ADD_RELU))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qompose.calibrate(prepared, [ROWS_OF_8])
    messages = [str(w.message) for w in caught if issubclass(w.category, QomposeWarning)]
    return prepared, messages


def test_what_is_well_is_not_mentioned() -> None:
    prepared, messages = calibrated(lambda x: x)
    assert messages == []
    assert calibrator.lint(prepared) == []
    one = torch.ones(1, 1)  # is no constant
    alone = qompose.calibrate(prepare(export(seeded(nn.Linear(1, 1)), one), toy(LINEAR)), [one])
    assert calibrator.lint(alone) == []


@pytest.mark.parametrize(
    ("between", "said"),
    [
        pytest.param(lambda x: x * 0 + 0.5, "was constant (0.5)", id="constant"),
        pytest.param(lambda x: x * 0, "was constant (0)", id="zero"),
        pytest.param(lambda x: x * 1e5, "reaches ", id="outlier"),
        pytest.param(lambda x: (x + 1) * -1e5, "mul -> linear_4", id="outlier below zero"),
        pytest.param(
            lambda x: x.masked_fill(torch.eye(32, 8) > 0, -math.inf), "has 8 infinite", id="mask"
        ),
    ],
)
def test_each_is_named_with_its_module_and_rule(
    between: Callable[[Tensor], Tensor], said: str
) -> None:
    prepared, messages = calibrated(between)
    lines = calibrator.lint(prepared)
    assert said in lines[0]
    assert all(" in last (toy, rule linear) " in line for line in lines)
    assert messages == ["\n  - ".join(["Suspicious calibration statistics:", *lines])]


def test_a_tensor_that_no_batch_came_to() -> None:
    rare = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    layers = {"layer": nn.Linear(8, 8), "rare": rare}
    model = Model(lambda m, x: torch.cond(x.sum() > 1e9, m.rare, m.layer, (x,)), **layers)
    prepared = prepare(export(seeded(model), ROWS_OF_8), toy(LINEAR))
    with pytest.warns(QomposeWarning, match="rare"):
        qompose.calibrate(prepared, [ROWS_OF_8])


def test_a_model_that_was_not_prepared() -> None:
    with pytest.raises(qompose.errors.StageError, match="prepare_pt2e"):
        calibrator.lint(export(seeded(nn.Linear(8, 8)), ROWS_OF_8).module())  # type: ignore[arg-type]


ABOVE_ZERO = randn(6, 4).abs()


# Both branches read one tensor and give one: all scales of `yes` are scales of `no`.
LAYERS = {"yes": nn.Linear(4, 4), "no": nn.Linear(4, 4)}
LOUD = seeded(Model(lambda m, x: torch.cond(x.sum() > 0, m.yes, m.no, (x,)), **LAYERS))
with torch.no_grad():
    LAYERS["yes"].weight.mul_(100)
BRANCHES = export(LOUD, ABOVE_ZERO)


def idle(prepared: Any) -> tuple[str, ...]:
    with pytest.raises(qompose.errors.UncalibratedError) as caught:
        qompose.convert_pt2e(prepared)
    return caught.value.tensors


def test_a_branch_that_never_ran_is_named_though_the_other_saw_its_tensors() -> None:
    prepared = prepare(BRANCHES, toy(LINEAR))
    qompose.calibrate(prepared, [-ABOVE_ZERO])
    tensors = idle(prepared)
    places = [tensor.partition(" in ")[0] for tensor in tensors]
    assert places == ["true_graph_0_x -> true_graph_0_linear", "output of true_graph_0_linear"]
    assert all("in yes" in tensor and "toy" in tensor for tensor in tensors)
    qompose.calibrate(prepared, [ABOVE_ZERO])
    assert sqnr(LOUD(ABOVE_ZERO), qompose.convert_pt2e(prepared)(ABOVE_ZERO)) > 30


def test_it_may_stay_in_float() -> None:
    prepared = prepare(BRANCHES, toy(LINEAR))
    qompose.calibrate(prepared, [-ABOVE_ZERO])
    converted = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    rows = {r.module: r for r in qompose.report(converted).rows if r.operator == "aten.linear"}
    assert (rows["yes"].state, rows["no"].state) == ("float", "simulated (Q/DQ)")
    assert torch.equal(converted(ABOVE_ZERO), LOUD(ABOVE_ZERO))
    assert sqnr(LOUD(-ABOVE_ZERO), converted(-ABOVE_ZERO)) > 30


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch 2.13, about itself
def test_copies_know_what_ran() -> None:
    prepared = prepare(BRANCHES, toy(LINEAR))
    prepared(ABOVE_ZERO)
    twin = copy.deepcopy(prepared)
    twin(-ABOVE_ZERO)
    qompose.convert_pt2e(twin)
    assert any("false_graph_0" in tensor for tensor in idle(prepared))


def test_regions_inside_an_idle_branch_are_idle() -> None:
    model = by_name("mixed_regions")
    prepared = prepare(model.export(), toy(LINEAR))
    prepared(*model.inputs())
    tensors = idle(prepared)
    named = {tensor.split(" in ")[1] for tensor in tensors}
    assert named == {"frozen.before", "frozen.head", "frozen.frozen.first", "frozen.frozen.second"}
    assert all("true_graph_0_" in tensor for tensor in tensors)


def test_a_loop_without_an_iteration_is_idle() -> None:
    """The value before the loop has a layer's scale, which is also that of the body's input."""
    model = by_name("loop")
    prepared = prepare(model.export(), toy(LINEAR))
    x, times = model.inputs()
    prepared(x, torch.full_like(times, -1))
    where = "in body in while_loop_body_graph_0"
    assert [where in tensor for tensor in idle(prepared)] == [True] * 2
    prepared(x, times.clamp(min=1))
    qompose.convert_pt2e(prepared)


def test_batches_are_as_they_were_though_the_program_writes_to_them() -> None:
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 4)}
    module = seeded(Model(lambda m, x: m.second(m.first(x.mul_(2))), **layers))
    batches = [randn(2, 3, seed=seed) for seed in range(3)]
    kept = [batch.clone() for batch in batches]
    result = qompose.quantize(module, batches[0], backends=toy(LINEAR), calibration=batches)
    comparison = qompose.compare(result.exported, result.model, batches)
    prepared = qompose.prepare_pt2e(result.exported, toy(LINEAR))
    qompose.sensitivity(qompose.calibrate(prepared, batches), batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever is slower
        result.benchmark(batches[0], seconds=0.001)
    assert all(map(torch.equal, batches, kept))
    assert min(row.sqnr for row in comparison.rows) > 20, "each program had inputs of its own"


@pytest.mark.parametrize("name", ["2.weight", "0.bias"])
def test_parameters_that_hold_nan_are_named_and_no_batch(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = math.nan
    prepared = prepare(export(model, torch.ones(2, 4)), toy(LINEAR))
    with pytest.raises(CalibrationError, match=name) as caught:
        qompose.calibrate(prepared, [torch.ones(2, 4)])
    assert not isinstance(caught.value, BatchError)


def filled(module: nn.Module, x: Tensor, cache: Tensor) -> Tensor:
    return module.linear(cache.mul_(0.5).add_(x).clone())


@pytest.mark.parametrize("reset", ["never", "in torch", "in numpy"])
def test_a_cache_that_the_program_fills_goes_from_batch_to_batch(reset: str) -> None:
    program = export(seeded(Model(filled, linear=nn.Linear(3, 4))), X, torch.zeros(4, 3))
    caches = torch.zeros(2, 4, 3)

    def batches(cache: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(4):
            if reset == "in torch":
                cache.zero_()
            elif reset == "in numpy":
                cache.numpy().fill(number)
            yield X, cache[1]

    calibrated = qompose.calibrate(prepare(program, toy(LINEAR)), batches(caches))
    looped = prepare(program, toy(LINEAR))
    for batch in batches(caches.clone()):
        looped(*batch)
    assert scales(calibrated) == scales(looped)
    assert bool((caches == (3 if reset == "in numpy" else 0)).all()), "the user's is as it was"
    with torch.inference_mode():  # no version tells whether these were reset
        caches = torch.zeros(2, 4, 3)
    with pytest.raises(BatchError):
        qompose.calibrate(prepare(program, toy(LINEAR)), [(X, caches[0])] * 2)


def buffered(module: nn.Module, x: Tensor, cache: Tensor) -> Tensor:
    return module.linear(module.cache.mul_(0.5).add_(x).clone())


def in_a_branch(module: nn.Module, x: Tensor, cache: Tensor) -> Tensor:
    def write(x: Tensor, seen: Tensor) -> Tensor:
        return seen * 0.5 + x

    module.cache.copy_(
        torch.cond(x.sum() > -99, write, lambda x, seen: x - seen, (x, module.cache))
    )
    return module.linear(module.cache.clone())


@pytest.mark.parametrize(
    ("function", "algorithms"),
    [(filled, ()), (filled, ("gptq_sequential",)), (buffered, ()), (in_a_branch, ())],
)
def test_a_cache_goes_on_where_a_calibration_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any, algorithms: tuple[str, ...]
) -> None:
    monkeypatch.setattr(calibrator, "EVERY", 0.0)
    module = Model(function, linear=nn.Linear(3, 4))
    module.register_buffer("cache", torch.zeros(4, 3))
    program = export(seeded(module), X, torch.zeros(4, 3))
    quantizer = toy(*PRODUCTS, config=replace(STATIC, algorithms=algorithms))

    def calibrated(stop: int, prepared: GraphModule, **options: Any) -> GraphModule:
        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            cache = torch.zeros(4, 3)
            for number in range(6):
                if number == stop:
                    raise KeyboardInterrupt
                yield randn(4, 3, seed=number), cache

        return qompose.calibrate(prepared, batches(), **options)

    path, model = tmp_path / "seen.safetensors", prepare(program, quantizer)
    with pytest.raises(KeyboardInterrupt):
        calibrated(4, model, resume=path)
    whole = calibrated(9, prepare(program, quantizer))
    half = path.read_bytes()
    for resumed in (model, prepare(program, quantizer)):
        path.write_bytes(half)
        done = calibrated(9, resumed, resume=path)
        assert scales(done) == scales(whole)
        one, other = (qompose.convert_pt2e(m).state_dict() for m in (done, whole))
        assert all(torch.equal(one[key], other[key]) for key in other)


@pytest.mark.parametrize("function", [buffered, in_a_branch])
def test_a_failure_leaves_buffers_as_they_were(function: Any) -> None:
    module = Model(function, linear=nn.Linear(3, 4))
    module.register_buffer("cache", torch.ones(4, 3))
    prepared = prepare(export(seeded(module), X, torch.zeros(4, 3)), toy(*PRODUCTS))
    qompose.calibrate(prepared, [(X, X)])
    before = prepared.cache.clone()
    with pytest.raises(BatchError):
        qompose.calibrate(prepared, [(X, X), (X,)])
    assert prepared.cache.equal(before) and not before.equal(module.cache)
    twice = qompose.calibrate(prepared, [(X, X)])
    assert not twice.cache.equal(before)


def test_what_is_trained_and_has_a_cache_cannot_be_resumed(tmp_path: Path) -> None:
    """Its cache holds what was rounded by the ranges of that time."""
    program = export(seeded(Model(filled, linear=nn.Linear(3, 4))), X, torch.zeros(4, 3))
    prepared = qompose.prepare_qat_pt2e(program, toy(LINEAR))
    with pytest.raises(StatisticsError):
        qompose.calibrate(prepared, [(X, torch.zeros(4, 3))], resume=tmp_path / "seen.json")


def test_two_views_of_one_memory_are_views_of_one_copy() -> None:
    module = Model(lambda m, x, y: m.linear(y + x.add_(1)), linear=nn.Linear(3, 4))
    program, memory = export(seeded(module), X, Y), torch.zeros(5, 3)
    views = memory[:4], memory[1:]
    got = qompose.calibrate(prepare(program, toy(LINEAR)), [views])
    assert scales(got) == plain_loop(prepare(program, toy(LINEAR)), views)
