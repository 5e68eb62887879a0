# SPDX-License-Identifier: Apache-2.0
"""Which repairs a configuration can ask for, and how it is written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from qompose import QuantizationConfig, SmoothQuant, training_config
from qompose.errors import ConfigError
from qompose.observers import config_from_json, config_to_json
from qompose.spec.quantization_spec import REPAIRS

from tests.core.toy import DYNAMIC, STATIC, WEIGHT_ONLY


@pytest.mark.parametrize(
    ("config", "repairs", "named"),
    [
        (STATIC, ("equalisation",), "'equalization'"),
        (STATIC, "equalization", "repairs"),
        (STATIC, 3, "repairs"),
        (DYNAMIC, ("bias_correction",), "bias_correction .*dynamic"),
        (WEIGHT_ONLY, ("bias_correction",), "bias_correction .*weight-only"),
        (WEIGHT_ONLY, ("smooth_quant",), "smooth_quant .*weight-only"),
        (replace(STATIC, weight=None), ("equalization",), "equalization"),
    ],
)
def test_what_cannot_be_asked_for(config: QuantizationConfig, repairs: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(config, repairs=repairs)


def test_order_and_repetition_do_not_matter() -> None:
    one = replace(STATIC, repairs=[*reversed(REPAIRS), REPAIRS[0]])
    assert one.repairs == REPAIRS
    assert one == replace(STATIC, repairs=REPAIRS)
    assert one != STATIC


OWN = SmoothQuant(alpha=0.5)


@pytest.mark.parametrize("repairs", [(), REPAIRS[:1], REPAIRS, (OWN, "bias_correction")], ids=str)
def test_written_and_read(repairs: tuple[Any, ...]) -> None:
    config = replace(STATIC, repairs=repairs[::-1])
    assert config.repairs == repairs
    data: Any = config_to_json(config)
    written = [{"smooth_quant": {"alpha": 0.5}} if r is OWN else r for r in repairs]
    assert data["repairs"] == written
    assert config_from_json(json.loads(json.dumps(data))) == config


def test_without_a_strength_it_is_the_word() -> None:
    assert replace(STATIC, repairs=(OWN,)) != replace(STATIC, repairs=(SmoothQuant(0.6),))
    assert replace(STATIC, repairs=(SmoothQuant(),)) == replace(STATIC, repairs=("smooth_quant",))
    assert replace(STATIC, repairs=(SmoothQuant(),)).repairs == ("smooth_quant",)
    assert (str(SmoothQuant()), str(SmoothQuant(0))) == (
        "smooth_quant",
        "smooth_quant with alpha 0",
    )


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf, "0.5", True])
def test_strengths_that_are_none(alpha: Any) -> None:
    with pytest.raises(ConfigError, match="alpha of SmoothQuant"):
        SmoothQuant(alpha)


@pytest.mark.parametrize(
    "repairs",
    [(SmoothQuant(0.5), SmoothQuant(0.6)), ("smooth_quant", SmoothQuant(0.6)),
     (SmoothQuant(0.6), "smooth_quant")],
)  # fmt: skip
def test_two_strengths_at_once(repairs: Any) -> None:
    with pytest.raises(ConfigError, match=r"smooth_quant.*smooth_quant"):
        replace(STATIC, repairs=repairs)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"smoothquant": {"alpha": 0.5}}, "'smooth_quant'"),
        ({"smooth_quant": {"beta": 0.5}}, "'beta'"),
        ({"smooth_quant": {"alpha": 2}}, r"repairs\[0\].smooth_quant: alpha"),
        ({"smooth_quant": {"alpha": "half"}}, "alpha"),
        ("smooth", "'smooth'.*smooth_quant"),
        ({}, "repairs"),
        (3, "repairs.*3"),
    ],
)
def test_a_wrong_repair_in_data_is_named(data: Any, named: str) -> None:
    written = {**(config_to_json(STATIC) or {}), "repairs": [data]}
    with pytest.raises(ConfigError, match=named):
        config_from_json(written)


def test_not_for_training() -> None:
    with pytest.raises(ConfigError, match="repairs"):
        training_config(replace(STATIC, repairs=REPAIRS[:1]))
