# SPDX-License-Identifier: Apache-2.0
"""Tuning leaves in float what a target needs and nothing more, as selectors that pick just that."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
from qompose.errors import ConfigError, MemberError, TuningError
from torch import Tensor, nn

from tests.core.toy import (
    DYNAMIC,
    LINEAR,
    PER_TENSOR,
    STATIC,
    Model,
    convert,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

aten = torch.ops.aten


def chain(m: Any, x: Tensor) -> Tensor:
    """Five linears of different sizes, three of them with relus."""
    for number, layer in enumerate(m.layers):
        x = layer(x)
        x = x.relu() if number % 2 == 0 else x
    return x


SIZES = (8, 16, 4, 12, 6, 3)


def net() -> Any:
    return seeded(Model(chain, layers=nn.ModuleList(map(nn.Linear, SIZES, SIZES[1:]))))


X = randn(64, 8)
NET = net()
PROGRAM = export(NET, X)


def error(reference: Callable[..., Tensor], *inputs: Tensor) -> Callable[[Any], float]:
    """A metric: the power of the error of a model's outputs, below zero."""
    with torch.no_grad():
        wanted = reference(*inputs)
    return lambda model: -float((model(*inputs).detach() - wanted).square().mean())


def tuned(program: Any = PROGRAM, quantizer: Any = None, drop: float = 0.1, **options: Any) -> Any:
    inputs = options.pop("inputs", (X,))
    data = options.pop("data", [inputs])
    metric = options.pop("metric", None) or error(program.module(), *inputs)
    quantizer = quantizer or toy(config=PER_TENSOR)
    return qompose.tune(program, quantizer, data, metric, drop, progress=False, **options)


@pytest.fixture(scope="module")
def scores() -> dict[frozenset[str], float]:
    """Brute force: the scores by the layers in float, which are never all of them."""
    names, found = [f"layers.{number}" for number in range(5)], {}
    for some in itertools.chain(*(itertools.combinations(names, size) for size in range(5))):
        quantizer = toy(config=PER_TENSOR)
        for name in some:
            quantizer.set_module_name(name, None)
        found[frozenset(some)] = error(NET, X)(convert(PROGRAM, quantizer, X))
    return found


@pytest.mark.parametrize(
    "part",
    [0.01, 0.2, 0.6, 1.0, *(pytest.param(p, marks=pytest.mark.full) for p in (0.05, 0.4, 0.8))],
)
def test_nothing_can_be_taken_back(part: float, scores: dict[frozenset[str], float]) -> None:
    """Whatever the target, no part of the setting meets it; and its score is that of the real pipeline."""
    drop = -part * scores[frozenset()]
    if max(scores.values()) < -drop:
        with pytest.raises(TuningError):
            tuned(drop=drop)
        return
    found = tuned(drop=drop)
    names = frozenset(site.module for site in found.excluded)
    assert found.score == pytest.approx(scores[names], rel=1e-5)
    assert found.float_score - found.score <= drop
    meeting = [some for some, score in scores.items() if -score <= drop]
    assert not [some for some in meeting if some < names]
    macs = {f"layers.{n}": layer.weight.numel() * 64 for n, layer in enumerate(NET.layers)}
    assert found.float_macs == sum(macs[name] for name in names)
    least = min(sum(map(macs.__getitem__, some)) for some in meeting)
    assert found.float_macs <= 2 * least


def test_what_costs_most_is_found_in_two_attempts() -> None:
    """The layer that reads the channel; it is the only one that quantizes it."""
    planted = net()
    layer, behind = planted.layers[3:]
    with torch.no_grad():  # one row much larger, which the next layer undoes: outputs stay the same
        layer.weight[1] *= 100.0
        layer.bias[1] *= 100.0
        behind.weight[:, 1] /= 100.0
    program, metric, quantizer = export(planted, X), error(planted, X), toy(config=DYNAMIC)
    prepared = prepare(program, quantizer)
    ranking = qompose.sensitivity(prepared, [(X,)], progress=False)
    assert ranking.rows[0].module == "layers.4"
    whole = metric(qompose.convert_pt2e(prepared))
    found = tuned(program, quantizer, -0.05 * whole, metric=metric)
    assert [site.module for site in found.excluded] == ["layers.4"]
    assert len(found.attempts) == 2
    assert found.quantized_score == pytest.approx(whole)


def test_a_target_that_is_met_leaves_nothing_in_float() -> None:
    quantizer = toy(config=PER_TENSOR)
    found = tuned(quantizer=quantizer, drop=1e9)
    assert found.excluded == ()
    assert found.selectors == ()
    assert found.score == found.quantized_score
    assert len(found.attempts) == 1
    assert found.float_macs == 0
    assert tuned(drop=0.0, metric=lambda model: 1.0).excluded == ()
    assert found.quantizer.to_json() == quantizer.to_json()


def test_quantizers_are_left_as_they_are(scores: dict[frozenset[str], float]) -> None:
    quantizer = qompose.compose(toy(config=PER_TENSOR), toy(config=DYNAMIC, name="other"))
    before = quantizer.to_json()
    found = tuned(quantizer=quantizer, drop=-0.5 * scores[frozenset()])
    assert found.excluded
    assert quantizer.to_json() == before
    assert found.quantizer.to_json() != before


def test_no_setting_is_good_enough() -> None:
    """Not even one operator can be quantized; the error has the best of what was tried."""
    with pytest.raises(TuningError) as caught:
        tuned(drop=0.0)
    best = caught.value.tuning
    assert best.score == max(a.score for a in best.attempts if a.quantized)
    assert 0.0 in {a.score for a in best.attempts if not a.quantized}  # of the float model again
    assert best.score < best.float_score
    assert len(best.excluded) == 4


@pytest.mark.parametrize("drop", [-0.1, math.nan, math.inf, "much", True])
def test_drops_that_are_none(drop: Any) -> None:
    with pytest.raises(UserError, match="max_drop"):
        tuned(drop=drop)


@pytest.mark.parametrize(
    ("said", "kind", "named"),
    [
        (lambda model: math.nan, UserError, "NaN"),
        (lambda model: None, UserError, "None"),
        (lambda model: True, UserError, "True"),
        (lambda model: 1 / 0, MemberError, "ZeroDivisionError"),
        (lambda model: math.inf, UserError, "inf"),
        (lambda model: 0.0 if "qompose" in model.meta else -math.inf, UserError, "-inf"),
        (lambda model: math.nan if "qompose" in model.meta else 1.0, UserError, "NaN"),
    ],
)
def test_metrics_that_say_nothing(said: Any, kind: type[Exception], named: str) -> None:
    with pytest.raises(kind, match=named):
        tuned(metric=said)


def test_saved_and_read(tmp_path: Path, scores: dict[frozenset[str], float]) -> None:
    found = tuned(drop=-0.2 * scores[frozenset()])
    found.save(tmp_path / "tuned.json")
    loaded = qompose.diagnosis.Tuning.load(tmp_path / "tuned.json")
    assert loaded == found
    assert loaded.to_text() == found.to_text()
    assert loaded.to_markdown() == found.to_markdown()
    again = loaded.apply(toy(config=PER_TENSOR))
    assert again.to_json() == found.quantizer.to_json()
    one, other = (plan_of(prepare(PROGRAM, q)) for q in (again, found.quantizer))
    assert one.to_dict() == other.to_dict()
    data = {**found.to_dict(), "quantizer": None}  # as of one that is code
    (tmp_path / "tuned.json").write_text(json.dumps(data), "utf-8")
    with pytest.raises(ConfigError, match="apply"):
        qompose.diagnosis.Tuning.load(tmp_path / "tuned.json").quantizer  # noqa: B018
    (tmp_path / "tuned.json").write_text(json.dumps({**data, "format": 2}), "utf-8")
    with pytest.raises(UserError):
        qompose.diagnosis.Tuning.load(tmp_path / "tuned.json")


def test_files_that_hold_no_tuning(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    for text in ("", "{}", "[1]", '{"format": 1, "excluded": [{}]}', '{"format": 99}'):
        file.write_text(text, "utf-8")
        with pytest.raises(UserError, match=file.name):
            qompose.diagnosis.Tuning.load(file)


def test_data_that_can_be_gone_through_once(scores: dict[frozenset[str], float]) -> None:
    program = export(NET, X, dynamic_shapes=({0: torch.export.Dim("rows")},))
    batches = ((x,) for x in X.split(16))
    drop = -0.2 * scores[frozenset()]
    assert qompose.tune(program, toy(config=PER_TENSOR), batches, error(NET, X), drop).excluded


def test_lowered_models_are_what_is_measured() -> None:
    stages = []

    def metric(model: Any) -> float:
        stages.append(getattr(model.meta.get("qompose"), "stage", "float"))
        return 0.0

    quantizer = toy(LINEAR, config=STATIC)
    tuned(quantizer=quantizer, metric=metric, target="torch")
    tuned(quantizer=quantizer, metric=metric)
    assert stages == ["float", "lowered", "float", "converted"]


def test_the_callers_program_is_left_as_it_is() -> None:
    """One that writes to a buffer too."""

    def counts(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.linear(x) + m.calls

    program = export(
        seeded(Model(counts, linear=nn.Linear(8, 3), calls=nn.Buffer(torch.zeros(1)))), X
    )
    before = copy.deepcopy(program.state_dict)
    tuned(program, drop=1e9, metric=lambda model: float(model(X).mean()))
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict.items())


def test_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    qompose.tune(PROGRAM, toy(config=PER_TENSOR), [(X,)], error(NET, X), 1e9, progress=True)
    captured = capfd.readouterr()
    assert "settings" in captured.err
    assert captured.out == ""


def test_what_the_ranking_could_not_measure_is_named() -> None:
    """A mask keeps the sum in float, whatever is set."""
    masked = Model(
        lambda m, x, mask: m.two((m.one(x) + mask).clamp(-5, 5)),
        one=nn.Linear(8, 8),
        two=nn.Linear(8, 3),
    )
    mask = torch.zeros(64, 8)
    mask[0, 0] = -torch.inf
    program = export(seeded(masked), X, mask)

    def metric(model: Any) -> float:
        record = model.meta.get("qompose")
        taken = set() if record is None else {o.claim for o in record.plan.operators} - {None}
        return -float(len(taken))

    found = tuned(program, drop=2.0, metric=metric, inputs=(X, mask))
    assert len(found.attempts) > 1
    assert [note for note in found.notes if "add" in note]


def branching(m: Any, x: Tensor) -> Tensor:
    """A cond between two layers, which takes both branches over the batches."""
    x = m.above(x).sin()
    taken = torch.cond(x.sum() > 0, lambda y: m.yes(y).sin(), lambda y: m.no(y).sin(), (x,))
    return m.below(taken.sin())


def test_ranges_in_branches_are_kept_from_one_setting_to_the_next() -> None:
    batches = [(randn(2, 4, seed=seed),) for seed in range(10)]
    with torch.no_grad():  # else Dynamo asks the input of cond, which is no leaf, for its gradient
        layers = {name: nn.Linear(4, 4) for name in ("above", "below", "yes", "no")}
        program = export(seeded(Model(branching, **layers)), *batches[0])
    model = program.module()
    wanted = [model(*batch) for batch in batches]

    def metric(tried: Any) -> float:
        pairs = zip(batches, wanted, strict=True)
        return -sum(float((tried(*x) - y).detach().abs().mean()) for x, y in pairs)

    def tune(drop: float) -> Any:
        return qompose.tune(program, toy(config=PER_TENSOR), batches, metric, drop, progress=False)

    found = tune(-0.5 * tune(1e6).quantized_score)
    assert found.excluded and found.score > found.quantized_score


@pytest.mark.parametrize("limit", [0, -1, 2.5, "two", True])
def test_limits_that_are_none(limit: Any) -> None:
    prepared = prepare(PROGRAM, toy())
    prepared(X)
    with pytest.raises(UserError, match="limit"):
        qompose.sensitivity(prepared, [X], limit=limit)
    with pytest.raises(UserError, match="limit"):
        tuned(data=iter([X]), limit=limit)


def test_an_iterator_may_fill_one_memory_with_all_batches() -> None:
    """All of them are kept, though what was given holds the last alone."""
    memory, given = torch.empty_like(X), [X, 0.1 * X]
    expected = tuned(data=given, transform=torch.neg, drop=1e6).score
    found = tuned(data=map(memory.copy_, given), transform=torch.neg, drop=1e6)
    assert found.score == expected


def test_a_cache_that_an_iterator_yields_again_goes_from_batch_to_batch() -> None:
    def fill(m: Any, x: Tensor, cache: Tensor) -> Tensor:
        return m.linear(cache.mul_(0.5).add_(x).clone())

    program = export(seeded(Model(fill, linear=nn.Linear(X.shape[1], 4))), X, torch.zeros_like(X))
    cache, scored = torch.zeros_like(X), list[Any]()

    def metric(model: Any) -> float:
        scored.append(model)
        return 0.0

    def ranges(data: Any) -> list[Any]:
        qompose.tune(program, toy(), data, metric, max_drop=1.0)
        return [
            n.args[1:3] for n in scored[-1].graph.nodes if "quantize_per_tensor" in str(n.target)
        ]

    batches = [(X, cache), (2 * X, cache), (3 * X, cache)]
    assert ranges(iter(batches)) == ranges(batches)
    assert not bool(cache.any())


def test_single_batches_and_rankings_of_another_model() -> None:
    with pytest.raises(UserError, match="tune"):
        tuned(data=X)
    with pytest.raises(UserError, match="ranking"):
        tuned(ranking=["layers.1"])
    image = randn(1, 3, 4, 4)
    other = prepare(export(seeded(nn.Conv2d(3, 3, 1)), image), toy())
    other(image)
    with pytest.raises(UserError, match="ranking"):
        tuned(ranking=qompose.sensitivity(other, [image]))


def test_scores_without_bound_are_written(
    tmp_path: Path, scores: dict[frozenset[str], float]
) -> None:
    exact = error(NET, X)

    def metric(model: Any) -> float:
        score = exact(model)
        return -math.inf if math.isclose(score, scores[frozenset()], rel_tol=1e-4) else score

    found = tuned(metric=metric, drop=1e9)
    assert found.quantized_score == -math.inf
    assert found.attempts[0].drop == math.inf
    json.dumps(found.to_dict(), allow_nan=False)
    found.save(tmp_path / "tuned.json")
    assert qompose.diagnosis.Tuning.load(tmp_path / "tuned.json") == found


def test_scores_without_bound_are_told_in_words() -> None:
    asked: list[Any] = []

    def metric(model: Any) -> float:
        asked.append(model)
        return 0.0 if len(asked) == 1 else -math.inf

    with pytest.raises(TuningError) as caught:
        tuned(metric=metric)
    assert "-inf" in str(caught.value)
    assert caught.value.tuning.score == -math.inf
    assert "inf dB" not in str(caught.value.tuning)
