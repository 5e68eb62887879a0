# SPDX-License-Identifier: Apache-2.0
"""`tune` with choices: the configuration of each operator, for few bytes or for little loss."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import qompose
import torch
from qompose import QuantizationConfig, UserError
from qompose.diagnosis import mixed_precision
from qompose.diagnosis.knapsack import efficient
from qompose.diagnosis.tuning_result import AS_IT_IS, Tuning
from qompose.errors import ConfigError, TuningError
from qompose.storage.artifact_file import stored_bytes
from torch import Tensor, nn

from tests.core.toy import (
    DYNAMIC,
    LINEAR,
    LINEAR_RELU,
    STATIC,
    WEIGHT,
    WEIGHT_ONLY,
    Model,
    convert,
    export,
    randn,
    seeded,
    toy,
)

SIZES = (64, 48, 32, 64, 16)
EIGHT = replace(WEIGHT_ONLY, algorithms=())


def bits(number: int) -> QuantizationConfig:
    """Weights alone, of so many bits."""
    low = -(1 << (number - 1))
    spec = replace(WEIGHT, quant_min=low, quant_max=-low - 1)
    return QuantizationConfig(None, None, spec, name=f"{number} bits", algorithms=())


FOUR, TWO = bits(4), bits(2)


def chain(m: Any, x: Tensor) -> Tensor:
    """Four linears, with a relu behind each but the last."""
    *layers, last = m.layers
    for layer in layers:
        x = layer(x).relu()
    return last(x)


def net() -> Any:
    """The second one has a row so large that few bits leave nothing of the others."""
    made = seeded(Model(chain, layers=nn.ModuleList(map(nn.Linear, SIZES, SIZES[1:]))))
    with torch.no_grad():
        made.layers[1].weight[:, 3] *= 40.0
    return made


X = randn(64, 64)
NET = net()
PROGRAM = export(NET, X)
LAYERS = [f"layers.{number}" for number in range(4)]


def error(reference: Callable[..., Tensor]) -> Callable[[Any], float]:
    """A metric: the power of the error over that of the outputs, below zero."""
    with torch.no_grad():
        wanted = reference(X)
    return lambda model: -float((model(X).detach() - wanted).square().sum() / wanted.square().sum())


METRIC = error(NET)


def tuned(quantizer: Any = None, program: Any = PROGRAM, **options: Any) -> Tuning:
    options = {"choices": {"four": FOUR, "two": TWO}, **options}
    metric = options.pop("metric", METRIC)
    quantizer = quantizer or toy(config=EIGHT)
    return qompose.tune(program, quantizer, [(X,)], metric, progress=False, **options)


def real(quantizer: Any) -> tuple[float, int]:
    """The score of the real pipeline, and the bytes of its tensors in a file."""
    prepared = qompose.prepare_pt2e(PROGRAM, quantizer)
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    return METRIC(converted), stored_bytes(converted.state_dict())


@pytest.fixture(scope="module")
def everything() -> list[tuple[float, int]]:
    """Brute force: scores and bytes of all 81 assignments."""
    found = []
    for configs in itertools.product((EIGHT, FOUR, TWO), repeat=len(LAYERS)):
        quantizer = toy(config=EIGHT)
        for layer, config in zip(LAYERS, configs, strict=True):
            quantizer.set_module_name(layer, config)
        found.append(real(quantizer))
    return found


@pytest.mark.parametrize("drop", [1e-3, 1e-2, 3e-2, 0.3])
def test_few_bytes_meet_a_drop(drop: float, everything: list[tuple[float, int]]) -> None:
    """At most a tenth more than the fewest there are; score and bytes are those of the real pipeline."""
    found = tuned(max_drop=drop)
    score, size = real(found.quantizer)
    assert (found.score, found.bytes) == (pytest.approx(score, rel=1e-5), size)
    assert found.score >= -drop
    assert found.bytes <= 1.1 * min(s for score, s in everything if score >= -drop)


@pytest.mark.parametrize("part", [0.45, 0.5, 0.7, 0.9])
def test_little_is_lost_in_so_many_bytes(part: float, everything: list[tuple[float, int]]) -> None:
    """At most half again as much as has to be."""
    most = int(part * max(size for _, size in everything))
    found = tuned(max_bytes=most)
    score, size = real(found.apply(toy(config=EIGHT)))
    assert (found.score, found.bytes) == (pytest.approx(score, rel=1e-5), size)
    assert size <= most
    assert found.score >= 1.5 * max(s for s, other in everything if other <= most)


def test_what_reads_one_tensor_has_one_choice_whose_bytes_count_once() -> None:
    """One of the readers was listed as it is, with the integers of the other's choice."""
    sizes = (32, 64, 64, 64, 8)
    model = seeded(Model(chain, layers=nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))), 1, 0.2)
    model.layers[2].weight = model.layers[1].weight
    x, found = randn(64, 32), {}
    program, metric = export(model, x), lambda m: -float((m(x) - model(x)).detach().square().sum())
    for first, tied, last in itertools.product(("as it is", "four"), repeat=3):
        quantizer, choices = toy(config=EIGHT), (first, tied, tied, last)
        for layer, choice in zip(LAYERS, choices, strict=True):
            quantizer.set_module_name(layer, FOUR if choice == "four" else EIGHT)
        converted = convert(program, quantizer, x)
        found[choices] = metric(converted), stored_bytes(converted.state_dict())
    for most in {size for _, size in found.values()}:
        got = qompose.tune(
            program, toy(config=EIGHT), [(x,)], metric, progress=False, max_bytes=most,
            choices={"four": FOUR},
        )  # fmt: skip
        chosen = {row.module: row.choice for row in got.assigned}
        best = max((s, -size) for s, size in found.values() if size <= most)
        assert (got.score, -got.bytes) == (pytest.approx(best[0], rel=1e-4), best[1])
        score, _ = found[tuple(chosen[layer] for layer in LAYERS)]
        assert got.score == pytest.approx(score, rel=1e-4)


def test_the_smallest_there_is_can_be_asked_for() -> None:
    """Also where the parts are said to be larger than the whole, as of layers that share tensors."""
    spec = qompose.weight_spec(-2, 1, group_size=48)  # which one layer alone can have
    options = {"choices": [QuantizationConfig(None, None, spec, name="blocks", algorithms=())]}
    smallest = tuned(max_drop=1e9, **options).bytes

    def none_fits(options: Any, most: float = math.inf) -> Any:
        return efficient(options) if most == math.inf else []

    for fits in (efficient, none_fits):
        with mock.patch.object(mixed_precision, "efficient", fits):
            found = tuned(max_bytes=smallest, **options)
        assert found.bytes == smallest
    with pytest.raises(TuningError):
        tuned(max_bytes=smallest - 1, **options)


def test_what_is_read_in_a_body_of_control_flow_is_named() -> None:
    def branch(m: Any, x: Tensor) -> Tensor:
        taken = torch.cond(x.sum() > 0, lambda x: m.a(x), lambda x: m.b(x), (x,))
        return m.c(taken)

    module = seeded(Model(branch, a=nn.Linear(64, 64), b=nn.Linear(64, 64), c=nn.Linear(64, 32)))
    found = tuned(program=export(module, X), metric=error(module), max_drop=1e9)
    assert [site.module for site in found.assigned] == ["c"]
    assert sum("control-flow" in note for note in found.notes) >= 1


def test_the_site_that_cannot_bear_few_bits_keeps_more() -> None:
    """All others have few; the row of each says what it costs and takes."""
    found = tuned(max_drop=0.05, choices=[TWO, FOUR])
    given = {site.module: site for site in found.assigned}
    assert given.keys() == {*LAYERS}
    assert given["layers.1"].choice != "2 bits"
    assert sum(site.bytes for site in found.assigned) <= found.bytes
    tried = {a.assigned for a in found.attempts}
    assert (
        tuple((site.name, AS_IT_IS) for site in sorted(found.assigned, key=lambda s: s.name))
        in tried
    )
    assert "layers.1" in str(found)


def test_float_can_be_chosen() -> None:
    """Where even the quantizer's own configuration loses too much."""
    found = tuned(toy(config=TWO), max_drop=2e-4, choices={"eight": EIGHT, "exact": None})
    choices = {site.module: site.choice for site in found.assigned}
    assert choices["layers.1"] == "exact"
    assert set(choices.values()) == {"eight", "exact"}
    assert found.score >= -2e-4
    assert found.float_macs > 0
    assert real(found.quantizer) == (pytest.approx(found.score, rel=1e-5), found.bytes)


def test_a_file_gives_the_same_quantizer(tmp_path: Path) -> None:
    found = tuned(max_bytes=5000)
    found.save(tmp_path / "tuned.json")
    loaded = Tuning.load(tmp_path / "tuned.json")
    assert loaded.to_dict() == found.to_dict()
    assert real(loaded.apply(toy(config=EIGHT))) == (pytest.approx(found.score), found.bytes)


def test_a_member_gets_the_choices_of_its_own_sites() -> None:
    """And the others none; a member that cannot follow a choice keeps what it has."""
    first = toy(LINEAR_RELU, config=EIGHT, name="first")
    second = toy(LINEAR, config=EIGHT, name="second")
    found = tuned(qompose.compose(first, second), max_drop=1.0)
    assert {site.owner for site in found.assigned} == {"first", "second"}
    assert {site.choice for site in found.assigned} == {"two"}
    for member in found.quantizer.members:
        sites = [site for site in found.assigned if site.owner == member.name]
        own = {setting.label for site in sites for setting in site.settings}
        assert {s.label for s in member.selectors.settings[1:]} == own  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="second"):
        found.apply(first)


def test_a_choice_that_an_operator_cannot_have_is_noted() -> None:
    """Blocks of 48 divide the rows of one layer alone."""
    spec = qompose.weight_spec(-8, 7, group_size=48)
    blocks = QuantizationConfig(None, None, spec, name="blocks", algorithms=())
    found = tuned(choices=[blocks, FOUR], max_drop=10.0)
    refused = [note for note in found.notes if "cannot be 'blocks'" in note]
    assert len(refused) == 3
    assert {site.module for site in found.assigned if site.choice == "blocks"} <= {"layers.1"}


def test_dynamic_and_static_configurations_are_choices_too() -> None:
    found = tuned(toy(config=STATIC), choices=[DYNAMIC, FOUR], max_drop=0.1)
    assert {"static", "dynamic", "4 bits"} >= {s.choice for s in found.assigned} - {AS_IT_IS}
    assert found.score >= -0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "max_drop and max_bytes"),
        ({"max_drop": 0.1, "max_bytes": 10}, "max_drop and max_bytes"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": True}, "max_bytes"),
        ({"max_bytes": 1e6}, "max_bytes"),
        ({"max_drop": -1.0}, "max_drop"),
        ({"max_bytes": 10, "choices": None}, "max_bytes"),
        ({"max_drop": 0.1, "choices": []}, "choices"),
        ({"max_drop": 0.1, "choices": 4}, "choices"),
        ({"max_drop": 0.1, "choices": "four"}, "choices"),
        ({"max_drop": 0.1, "choices": ["four"]}, "four"),
        ({"max_drop": 0.1, "choices": {AS_IT_IS: FOUR}}, AS_IT_IS),
        ({"max_drop": 0.1, "choices": [FOUR, replace(TWO, name="4 bits")]}, "4 bits"),
        ({"max_drop": 0.1, "ranking": 1}, "ranking"),
        (
            {"max_drop": 0.1, "choices": {"qat": replace(STATIC, is_qat=True, algorithms=None)}},
            "qat",
        ),
    ],
)
def test_bad_targets_and_choices(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        tuned(**options)


def test_without_data_it_is_tune_that_says_so() -> None:
    with pytest.raises(UserError, match="tune got no inputs"):
        qompose.tune(
            PROGRAM, toy(config=EIGHT), [], METRIC, choices=[FOUR], max_drop=1.0, progress=False
        )


def test_a_choice_that_another_reader_of_the_weight_overrules_does_not_hold() -> None:
    """Both readers get the integers of the first, whatever the second was given."""

    def twice(m: Any, x: Tensor) -> Tensor:
        return m.second(m.first(x).relu())

    model = seeded(Model(twice, first=nn.Linear(64, 64), second=nn.Linear(64, 64)))
    model.second.weight = model.first.weight
    found: dict[tuple[str, str], bool] = {}
    tried = mixed_precision.MixedSearch._tried

    def both(search: Any, given: Any, converted: Any) -> None:
        for alone in (name for name in search.sites if not found.get((name, "four"))):
            if len(given) == len(search.sites) and len(found) < len(search.sites):
                found[alone, "four"] = search.attempt({alone: "four"}).met
        tried(search, given, converted)

    with mock.patch.object(mixed_precision.MixedSearch, "_tried", both):
        tuned(program=export(model, X), choices={"four": FOUR}, max_drop=1e9, metric=error(model))
    assert sorted(found.values()) == [False, True]


def test_what_no_backend_can_follow_is_an_error() -> None:
    static_only = toy(replace(LINEAR, modes=frozenset({"static"})), config=STATIC)
    with pytest.raises(ConfigError):
        tuned(static_only, choices=[FOUR], max_drop=1.0)


def test_where_nothing_meets_the_target_the_nearest_is_told() -> None:
    with pytest.raises(TuningError) as few:
        tuned(max_bytes=10)
    assert few.value.tuning.bytes == min(a.bytes for a in few.value.tuning.attempts)
    with pytest.raises(TuningError) as near:
        tuned(max_drop=0.0)
    assert near.value.tuning.score == max(a.score for a in near.value.tuning.attempts)


def test_without_parameters_there_is_nothing_to_choose() -> None:
    program = export(Model(lambda m, x: x + x.sigmoid()), X)
    with pytest.raises(UserError, match="parameters"):
        tuned(
            toy(config=STATIC),
            program,
            choices=[FOUR],
            max_drop=1.0,
            metric=error(lambda x: x + x.sigmoid()),
        )
