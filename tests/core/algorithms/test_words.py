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
    ("config", "repairs", "message"),
    [
        (STATIC, ("equalisation",), "did you mean 'equalization'"),
        (STATIC, "equalization", "repairs must be a tuple of"),
        (STATIC, 3, "repairs must be a tuple of"),
        (
            DYNAMIC,
            ("bias_correction",),
            "bias_correction has no dynamic form: it goes by the means",
        ),
        (WEIGHT_ONLY, ("bias_correction",), "has no weight-only form"),
        (WEIGHT_ONLY, ("smooth_quant",), "smooth_quant has no weight-only form"),
        (replace(STATIC, weight=None), ("equalization",), "leaves them in float"),
    ],
)
def test_what_cannot_be_asked_for(config: QuantizationConfig, repairs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config, repairs=repairs)


def test_order_and_repetition_do_not_matter() -> None:
    one = replace(STATIC, repairs=[*reversed(REPAIRS), REPAIRS[0]])
    assert one.repairs == REPAIRS
    assert one == replace(STATIC, repairs=REPAIRS)
    assert one != STATIC


@pytest.mark.parametrize("repairs", [(), REPAIRS[:1], REPAIRS])
def test_written_and_read(repairs: tuple[str, ...]) -> None:
    config = replace(STATIC, repairs=repairs)
    data = config_to_json(config)
    assert data is not None
    assert ("repairs" in data) == bool(repairs)
    assert config_from_json(data) == config


def test_a_strength_of_ones_own_is_written_and_read() -> None:
    config = replace(STATIC, repairs=("bias_correction", SmoothQuant(alpha=0.5)))
    assert config.repairs == (SmoothQuant(0.5), "bias_correction")
    assert config != replace(STATIC, repairs=("bias_correction", SmoothQuant(alpha=0.6)))
    data = config_to_json(config)
    assert data is not None
    assert data["repairs"] == [{"smooth_quant": {"alpha": 0.5}}, "bias_correction"]
    assert config_from_json(json.loads(json.dumps(data))) == config


def test_without_a_strength_it_is_the_word() -> None:
    assert replace(STATIC, repairs=(SmoothQuant(),)) == replace(STATIC, repairs=("smooth_quant",))
    assert replace(STATIC, repairs=(SmoothQuant(),)).repairs == ("smooth_quant",)
    assert (str(SmoothQuant()), str(SmoothQuant(1))) == (
        "smooth_quant",
        "smooth_quant with alpha 1",
    )


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf, "0.5", True])
def test_strengths_that_are_none(alpha: Any) -> None:
    with pytest.raises(ConfigError, match=r"alpha of SmoothQuant must be a number from 0 to 1"):
        SmoothQuant(alpha)


@pytest.mark.parametrize(
    "repairs",
    [(SmoothQuant(0.5), SmoothQuant(0.6)), ("smooth_quant", SmoothQuant(0.6)),
     (SmoothQuant(0.6), "smooth_quant")],
)  # fmt: skip
def test_two_strengths_at_once(repairs: Any) -> None:
    with pytest.raises(ConfigError, match=r"asks for smooth_quant.* and for smooth_quant.*one out"):
        replace(STATIC, repairs=repairs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"smoothquant": {"alpha": 0.5}}, "did you mean 'smooth_quant'"),
        ({"smooth_quant": {"beta": 0.5}}, "unknown key 'beta'"),
        ({"smooth_quant": {"alpha": 2}}, r"repairs\[0\].smooth_quant: alpha of SmoothQuant"),
        ({"smooth_quant": {"alpha": "half"}}, "alpha"),
        ({}, "must be an object with keys"),
        (3, "must be a string, got 3"),
    ],
)
def test_a_wrong_strength_in_data_is_named(data: Any, message: str) -> None:
    written = {**(config_to_json(STATIC) or {}), "repairs": [data]}
    with pytest.raises(ConfigError, match=message):
        config_from_json(written)


def test_a_wrong_word_in_data_is_named() -> None:
    data = {**(config_to_json(STATIC) or {}), "repairs": ["smooth"]}
    with pytest.raises(ConfigError, match=r"there is no repair 'smooth'.*smooth_quant"):
        config_from_json(data)


def test_not_for_training() -> None:
    with pytest.raises(ConfigError, match="training finds weights"):
        training_config(replace(STATIC, repairs=REPAIRS[:1]))
