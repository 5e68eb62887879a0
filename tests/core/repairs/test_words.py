# SPDX-License-Identifier: Apache-2.0
"""Which repairs a configuration can ask for, and how it is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from qompose import (
    ConfigError,
    QuantizationConfig,
    config_from_json,
    config_to_json,
    training_config,
)
from qompose.repairs.words import REPAIRS

from tests.core.toy import DYNAMIC, STATIC, WEIGHT_ONLY


@pytest.mark.parametrize(
    ("config", "repairs", "message"),
    [
        (STATIC, ("equalisation",), "did you mean 'equalization'"),
        (STATIC, "equalization", "is no tuple of words"),
        (STATIC, 3, "is no tuple of words"),
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


def test_a_wrong_word_in_data_is_named() -> None:
    data = {**(config_to_json(STATIC) or {}), "repairs": ["smooth"]}
    with pytest.raises(ConfigError, match=r"there is no repair 'smooth'.*smooth_quant"):
        config_from_json(data)


def test_not_for_training() -> None:
    with pytest.raises(ConfigError, match="training finds weights"):
        training_config(replace(STATIC, repairs=REPAIRS[:1]))
