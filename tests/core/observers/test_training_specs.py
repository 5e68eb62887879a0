# SPDX-License-Identifier: Apache-2.0
"""A configuration of training asks for the integers of the one for calibration, and for fake-quantizers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec, activation_spec, training_config, weight_spec
from qompose.errors import ConfigError
from qompose.observers import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    HistogramObserver,
    LearnableFakeQuantize,
)
from qompose.spec.quantization_spec import class_of, integer_range_key
from torch import nn

from tests.core.toy import DYNAMIC, LINEAR, STATIC, WEIGHT_ONLY, export, randn, seeded, toy

USUAL = replace(
    STATIC, input_activation=activation_spec(torch.int8, -128, 127), weight=weight_spec(-127, 127)
)


def kinds(config: qompose.QuantizationConfig) -> list[Any]:
    specs = (config.input_activation, config.output_activation, config.weight)
    return [None if s is None else class_of(s.observer_or_fake_quant_ctr) for s in specs]  # type: ignore[union-attr]


@pytest.mark.parametrize("config", [USUAL, STATIC, DYNAMIC, WEIGHT_ONLY], ids=str)
@pytest.mark.parametrize("word", ["moving_average", "learned"])
def test_the_integers_are_the_same(config: qompose.QuantizationConfig, word: str) -> None:
    trained = training_config(config, word)
    assert trained.is_qat and not trained.balance and trained.mode == config.mode
    for role in ("input_activation", "output_activation", "weight"):
        one, other = getattr(config, role), getattr(trained, role)
        assert (one is None) == (other is None)
        assert one is None or integer_range_key(one) == integer_range_key(other)
    assert qompose.observers.config_from_json(qompose.observers.config_to_json(trained)) == trained


def test_moving_averages_take_the_place_of_a_search() -> None:
    assert kinds(training_config(USUAL)) == [
        FusedMovingAvgObsFakeQuantize,
        FakeQuantize,
        FakeQuantize,
    ]


def test_a_class_by_itself_is_the_default_too() -> None:
    spec = QuantizationSpec(torch.int8, HistogramObserver, -128, 127, torch.per_tensor_affine)
    assert kinds(training_config(replace(STATIC, input_activation=spec)))[0] is (
        FusedMovingAvgObsFakeQuantize
    )


@pytest.mark.parametrize("word", ["histogram", "mse"])
def test_capabilities_say_what_can_be_trained(word: str) -> None:
    spec = activation_spec(torch.int8, -128, 127, range=word)
    searched = replace(STATIC, input_activation=spec, name="one")
    quantizer = toy(LINEAR, config=searched)
    quantizer.backend.configs = {"one": searched}  # type: ignore[misc]
    (row,) = quantizer.quantization_capabilities()
    assert row.qat == (word == "histogram")


def test_learned_where_there_is_a_scale_to_learn() -> None:
    assert kinds(training_config(STATIC, "learned")) == [LearnableFakeQuantize] * 3
    assert kinds(training_config(DYNAMIC, "learned")) == [FakeQuantize, None, LearnableFakeQuantize]


@pytest.mark.parametrize("word", ["mse", "percentile", "entropy"])
def test_a_search_that_was_asked_for_is_refused(word: str) -> None:
    searched = replace(STATIC, input_activation=activation_spec(torch.int8, -128, 127, range=word))
    with pytest.raises(ConfigError, match="searches its range, which takes longer than a step"):
        training_config(searched)
    assert kinds(training_config(searched, "learned"))[0] is LearnableFakeQuantize, "once"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"fake_quantize": "learnd"}, "must be one of .*learned.*got 'learnd'"),
        ({"fake_quantize": "learned", "is_qat": False}, "it needs is_qat=True"),
    ],
)
def test_what_is_no_word(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        training_config(STATIC, **options)


def test_without_training_nothing_changes() -> None:
    assert training_config(STATIC, is_qat=False) is STATIC


def test_an_observer_of_another_package_is_said_to_simulate_nothing() -> None:
    spec = QuantizationSpec(
        torch.int8, torch.ao.quantization.MinMaxObserver, -128, 127, torch.per_tensor_affine
    )
    config = training_config(replace(STATIC, input_activation=spec, output_activation=None))
    assert config.input_activation == spec
    x = randn(4, 6)
    prepared = qompose.prepare_qat_pt2e(
        export(seeded(nn.Linear(6, 3)), x), toy(LINEAR, config=config)
    )
    (note,) = [n for n in qompose.report(prepared).notes if "fake-quantized" in n]
    assert (
        "linear (toy, rule linear)" in note and "MinMaxObserver is an observer of another" in note
    )


def test_histograms_of_calibration_can_be_trained_with_all_the_same() -> None:
    """Slowly: whoever prepares a configuration of calibration for training gets what it says."""
    spec = QuantizationSpec(torch.int8, HistogramObserver, -128, 127, torch.per_tensor_affine)
    x = randn(4, 6)
    prepared = qompose.prepare_qat_pt2e(
        export(seeded(nn.Linear(6, 3)), x),
        toy(LINEAR, config=replace(STATIC, input_activation=spec, output_activation=None)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(x).sum().backward()
    assert all(p.grad is not None for p in prepared.parameters())
