# SPDX-License-Identifier: Apache-2.0
"""What algorithms cannot use is a line of the report that names the layer and the reason, never silence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.algorithms import GPTQ, SequentialGPTQ, SignRound
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.algorithms.test_awq import FOUR
from tests.core.algorithms.test_gptq import AUTO, FOUR_BITS, data
from tests.core.toy import ADD, PRODUCTS, STATIC, Model, export, prepare, seeded, toy

WORDS = ["awq", "scale_search", "gptq", "gptq_sequential", SignRound(iterations=4)]
ODD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "one example": (lambda x: x[:1], "distinct examples"),
    "NaN": (lambda x: x.masked_fill(x > 3, float("nan")), "non-finite"),
    "NaN alone": (lambda x: x * float("nan"), "non-finite"),
    "zeros": (torch.zeros_like, "zero|distinct examples"),
}


def lines(word: Any, x: Tensor, spec: Any = FOUR, width: int = 48) -> tuple[list[str], list[str]]:
    """What a report says was changed, and what not."""
    config = QuantizationConfig(None, None, spec, algorithms=(word,))
    model = seeded(nn.Sequential(nn.Linear(width, 24))).eval()
    prepared = prepare(export(model, torch.ones_like(x)), toy(*PRODUCTS, config=config))
    return said(qompose.calibrate(prepared, [x], progress=False))


def said(prepared: GraphModule) -> tuple[list[str], list[str]]:
    report = qompose.report(qompose.convert_pt2e(prepared))
    return [*report.rewrites], [*report.notes]


@pytest.mark.parametrize("word", WORDS, ids=str)
@pytest.mark.parametrize("name", ODD)
def test_data_of_no_use(name: str, word: Any) -> None:
    change, reason = ODD[name]
    made, refused = lines(word, change(data(0, 64, 48)))
    assert not made and len(refused) == 1 and re.search(reason, refused[0]), refused


@pytest.mark.parametrize("word", WORDS, ids=str)
def test_dead_channels_and_fewer_rows_than_channels(word: Any) -> None:
    """Each is a line, of what was done or why nothing was."""
    dead = torch.ones(48).index_fill(0, torch.arange(0, 48, 3), 0.0)
    for x in (data(0, 64, 48) * dead, data(0, 6, 48)):
        made, refused = lines(word, x)
        assert len([*made, *refused]) == 1 and "0" in [*made, *refused][0]


@pytest.mark.parametrize("word", ["gptq", "gptq_sequential"])
def test_second_moments_without_full_rank_are_told(word: str) -> None:
    """Whether anything is made of them or not, which the examples held out decide."""
    of_use = set()
    for seed in range(10):
        made, refused = lines(word, data(seed, 6, 48))
        (line,) = [*made, *refused]
        assert "6 rows for 48 channels" in line
        of_use.add(bool(made))
    assert of_use == {True, False}
    assert "rows for" not in lines(word, data(0, 192, 48))[0][0]  # enough: there is nothing to tell


def test_a_bias_correction_that_is_not_measured_says_so() -> None:
    """Of three examples no rows are held back, and somebody asked by word."""
    config = replace(STATIC, algorithms=("bias_correction",), weight=FOUR_BITS)
    model = seeded(nn.Sequential(nn.Linear(48, 24))).eval()
    for rows, unmeasured in ((3, True), (64, False)):
        x = data(0, rows, 48) + 3
        auto = replace(config, input_activation=AUTO)
        prepared = prepare(export(model, x), toy(*PRODUCTS, config=auto))
        ((line,), _) = said(qompose.calibrate(prepared, [x], progress=False))
        assert ("not measured" in line) == unmeasured


def test_groups_that_do_not_divide() -> None:
    config = QuantizationConfig(None, None, FOUR, algorithms=("gptq",))
    model, x = seeded(nn.Sequential(nn.Linear(40, 24))).eval(), data(0, 64, 40)
    prepared = prepare(export(model, x), toy(*PRODUCTS, config=config))
    (row,) = qompose.report(qompose.convert_pt2e(prepared)).rows
    assert row.state == "float" and "(24, 40)" in row.reason


@pytest.mark.parametrize("kind", [GPTQ, SequentialGPTQ])
def test_an_option_that_changes_nothing_is_said(kind: type[GPTQ]) -> None:
    """A weight without groups has no scales to choose later."""
    for spec, says in ((FOUR_BITS, True), (FOUR, False)):
        made, refused = lines(kind(act_order=False, static_groups=False), data(0, 256, 48), spec)
        assert len(made) == 1 and not refused
        assert ("static_groups=False has no effect" in made[0]) == says


@pytest.mark.parametrize("words", [("gptq",), ("bias_correction", "gptq_sequential")])
def test_operators_without_weights_alone(words: tuple[str, ...]) -> None:
    """What asks for algorithms where nothing has a weight is named; beside a weight, it is no news."""
    model = seeded(Model(lambda m, x: m.linear(x) + x, linear=nn.Linear(48, 48)))
    x, config = data(0, 64, 48), replace(STATIC, algorithms=words)
    found = []
    for quantizer in (
        toy(*PRODUCTS, ADD, config=None).set_operator_type(torch.ops.aten.add.Tensor, config),
        toy(*PRODUCTS, ADD, config=config),
    ):
        prepared = qompose.calibrate(prepare(export(model, x), quantizer), [x], progress=False)
        found.append([line for line in said(prepared)[1] if "has a weight" in line])
    assert len(found[0]) == 1 and not found[1]
    assert all(word in found[0][0] for word in (*words, "aten.add"))
