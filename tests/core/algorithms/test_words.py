# SPDX-License-Identifier: Apache-2.0
"""Which algorithms a configuration can ask for, and how it is written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from qompose import QuantizationConfig, SmoothQuant, training_config
from qompose.algorithms import GPTQ, Algorithm, SequentialGPTQ, SignRound
from qompose.errors import ConfigError
from qompose.observers import config_from_json, config_to_json
from qompose.spec.algorithm_choice import ALGORITHM_WORDS

from tests.core.toy import DYNAMIC, STATIC, WEIGHT_ONLY


@pytest.mark.parametrize(
    ("config", "algorithms", "named"),
    [
        (STATIC, ("equalisation",), "'equalization'"),
        (STATIC, "equalization", "algorithms"),
        (STATIC, 3, "algorithms"),
        (DYNAMIC, ("awq",), "awq .*dynamic"),
        (WEIGHT_ONLY, ("smooth_quant",), "smooth_quant .*weight-only"),
        (replace(STATIC, weight=None), ("equalization",), "equalization"),
        (STATIC, ("gptq", "sign_round"), "gptq and sign_round cannot be combined"),
        (STATIC, (GPTQ(), SequentialGPTQ()), "gptq and gptq_sequential cannot be combined"),
        (STATIC, ("gptq", "gptq"), "gptq 2 times.*keep one"),
        (STATIC, ["gptq", GPTQ()], "gptq 2 times.*keep one"),
        (STATIC, (SmoothQuant(0.5),) * 3, "smooth_quant with alpha 0.5 3 times.*keep one"),
    ],
)
def test_what_cannot_be_asked_for(config: QuantizationConfig, algorithms: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(config, algorithms=algorithms)


OTHERS = ("awq", "gptq_sequential", "sign_round")
OF_STATIC = tuple(word for word in ALGORITHM_WORDS if word not in OTHERS)
"""Those that a static configuration can have together."""


def test_order_does_not_matter_nor_whether_it_is_a_list() -> None:
    one, other = (
        replace(STATIC, algorithms=words) for words in ([*reversed(OF_STATIC)], OF_STATIC)
    )
    assert one.algorithms == OF_STATIC
    assert one == other and hash(one) == hash(other)
    assert one != STATIC and replace(STATIC, algorithms=[]) == STATIC


OWN = SmoothQuant(alpha=0.5)


@pytest.mark.parametrize(
    "algorithms", [(), OF_STATIC[:1], OF_STATIC, (OWN, "bias_correction")], ids=str
)
def test_written_and_read(algorithms: tuple[Any, ...]) -> None:
    config = replace(STATIC, algorithms=algorithms[::-1])
    assert config.algorithms == algorithms
    data: Any = config_to_json(config)
    written = [{"smooth_quant": {"alpha": 0.5}} if r is OWN else r for r in algorithms]
    assert data["algorithms"] == written
    assert config_from_json(json.loads(json.dumps(data))) == config


def test_without_a_strength_it_is_the_word() -> None:
    assert replace(STATIC, algorithms=(OWN,)) != replace(STATIC, algorithms=(SmoothQuant(0.6),))
    assert replace(STATIC, algorithms=(SmoothQuant(),)) == replace(
        STATIC, algorithms=("smooth_quant",)
    )
    assert replace(STATIC, algorithms=(SmoothQuant(),)).algorithms == ("smooth_quant",)
    assert (str(SmoothQuant()), str(SmoothQuant(0))) == (
        "smooth_quant",
        "smooth_quant with alpha 0",
    )


@pytest.mark.parametrize(
    "choice, word",
    [(GPTQ(), "gptq"), (SequentialGPTQ(), "gptq_sequential"), (SignRound(), "sign_round")],
)
def test_without_options_an_object_is_its_word(choice: Algorithm, word: str) -> None:
    assert replace(STATIC, algorithms=(choice,)).algorithms == (word,)


def test_options_of_sign_round_are_kept() -> None:
    fewer = SignRound(iterations=50)
    config = replace(STATIC, algorithms=(fewer,))
    assert config.algorithms == (fewer,) and str(fewer) == "sign_round with iterations 50"
    data: Any = config_to_json(config)
    assert data["algorithms"] == [{"sign_round": {"iterations": 50}}]
    assert config_from_json(json.loads(json.dumps(data))) == config
    with pytest.raises(ConfigError, match="iterations"):
        SignRound(iterations=0)
    with pytest.raises(ConfigError, match="ranges"):
        SignRound(ranges="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind, word", [(GPTQ, "gptq"), (SequentialGPTQ, "gptq_sequential")])
def test_options_of_gptq_are_kept(kind: Any, word: str) -> None:
    damped = kind(damping=0.01, act_order=False)
    config = replace(STATIC, algorithms=(damped,))
    assert config.algorithms == (damped,) and damped != kind() and damped != kind(damping=0.02)
    assert str(damped) == f"{word} with damping 0.01, act_order False"
    data: Any = config_to_json(config)
    assert data["algorithms"][0][word]["damping"] == 0.01
    assert config_from_json(json.loads(json.dumps(data))) == config


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf, "0.5", True])
def test_strengths_that_are_none(alpha: Any) -> None:
    with pytest.raises(ConfigError, match="SmoothQuant option alpha"):
        SmoothQuant(alpha)


@pytest.mark.parametrize(
    "algorithms",
    [(SmoothQuant(0.5), SmoothQuant(0.6)), ("smooth_quant", SmoothQuant(0.6)),
     (SmoothQuant(0.6), "smooth_quant")],
)  # fmt: skip
def test_two_strengths_at_once(algorithms: Any) -> None:
    with pytest.raises(ConfigError, match=r"smooth_quant.*smooth_quant"):
        replace(STATIC, algorithms=algorithms)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"smoothquant": {"alpha": 0.5}}, "'smooth_quant'"),
        ({"smooth_quant": {"beta": 0.5}}, "'beta'"),
        ({"smooth_quant": {"alpha": 2}}, r"algorithms\[0\].smooth_quant: .*alpha"),
        ({"smooth_quant": {"alpha": "half"}}, "alpha"),
        ("smooth", "'smooth'.*smooth_quant"),
        ({}, "algorithms"),
        (3, "algorithms.*3"),
    ],
)
def test_a_wrong_repair_in_data_is_named(data: Any, named: str) -> None:
    written = {**(config_to_json(STATIC) or {}), "algorithms": [data]}
    with pytest.raises(ConfigError, match=named):
        config_from_json(written)


def test_not_for_training() -> None:
    with pytest.raises(ConfigError, match="algorithms"):
        training_config(replace(STATIC, algorithms=ALGORITHM_WORDS[:1]))
