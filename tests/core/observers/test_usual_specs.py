# SPDX-License-Identifier: Apache-2.0
"""Specifications that backends need not spell out, and the configurations of training made of them."""

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
    FakeQuantizeBase,
    HistogramObserver,
    LearnableFakeQuantize,
)
from qompose.observers.fake_quantize import USUAL as NAMED
from qompose.spec.quantization_spec import class_of, integer_range_key
from torch import Tensor, nn

from tests.core.toy import DYNAMIC, LINEAR, STATIC, WEIGHT_ONLY, export, randn, seeded, toy


def qparams(spec: QuantizationSpec, data: Tensor) -> tuple[Tensor, Tensor]:
    observer: Any = spec.observer_or_fake_quant_ctr(  # as prepare makes it
        dtype=spec.dtype, quant_min=spec.quant_min, quant_max=spec.quant_max, qscheme=spec.qscheme,
        **({} if spec.ch_axis is None else {"ch_axis": spec.ch_axis}),
        **({} if spec.block_size is None else {"block_size": spec.block_size}),
    )  # fmt: skip
    observer(data)
    scale, zero_point = observer.calculate_qparams()
    return scale, zero_point


@pytest.mark.parametrize("word", ["histogram", "mse", "minmax", "moving_average"])
@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.int8, -128, 127), (torch.uint8, 0, 127)])
def test_static_activations(word: str, dtype: torch.dtype, low: int, high: int) -> None:
    scale, zero_point = qparams(
        activation_spec(dtype, low, high, range=word), torch.linspace(-1, 3, 99)
    )
    assert scale.numel() == 1 and float(scale) == pytest.approx(4 / (high - low), rel=0.05)
    assert low <= int(zero_point) <= high


@pytest.mark.parametrize("per_token", [False, True])
def test_dynamic_activations(per_token: bool) -> None:
    spec = activation_spec(torch.int8, -128, 127, is_dynamic=True, per_token=per_token)
    assert spec.is_dynamic and spec.block_size == ((-1,) if per_token else None)


def test_what_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"range must .*'widest'"):
        activation_spec(torch.int8, -128, 127, range="widest", is_dynamic=True)
    with pytest.raises(ConfigError):
        activation_spec(torch.int8, -128, 127, per_token=True)
    with pytest.raises(ConfigError):
        weight_spec(-8, 7, group_size=0)
    with pytest.raises(ConfigError, match=r"weight_range must .*'widest'"):
        weight_spec(-8, 7, range="widest")
    with pytest.raises(ConfigError, match=r"group_size=32.*'mse'"):
        weight_spec(-8, 7, group_size=32, range="mse")


@pytest.mark.parametrize(
    ("options", "shape"),
    [({}, (3,)), ({"per_channel": False}, ()), ({"group_size": 4}, (3, 2))],
    ids=["channels", "tensor", "groups"],
)
def test_weights(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    weight = torch.arange(1.0, 25.0).view(3, 8)
    scale, zero_point = qparams(weight_spec(-127, 127, **options), weight)
    assert scale.squeeze().shape == shape and not zero_point.any()
    largest = weight.amax() if shape == () else weight.view(*shape, -1).amax(-1)
    torch.testing.assert_close(
        scale.squeeze().float(), largest / 127, rtol=2**-8 if len(shape) == 2 else 0.01, atol=0
    )


@pytest.mark.parametrize("per_channel", [True, False])
def test_the_range_of_weights(per_channel: bool) -> None:
    """The less the power, the more is clipped of four bits. Small weights have as many steps."""
    weight = torch.randn(4, 900, generator=torch.Generator().manual_seed(0))
    scales = []
    for word in ("mse", "histogram", "minmax"):
        spec = weight_spec(-8, 7, per_channel=per_channel, range=word)
        scales.append(qparams(spec, weight)[0].amax())
        torch.testing.assert_close(
            qparams(spec, weight * 2**-16)[0], qparams(spec, weight)[0] * 2**-16, rtol=0, atol=0
        )
    assert scales[0] < scales[1] < scales[2]


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
    assert trained.is_qat and trained.mode == config.mode
    assert not trained.balance and trained.algorithms == ()
    for role in ("input_activation", "output_activation", "weight"):
        one, other = getattr(config, role), getattr(trained, role)
        assert (one is None) == (other is None)
        assert one is None or integer_range_key(one) == integer_range_key(other)
    assert qompose.observers.config_from_json(qompose.observers.config_to_json(trained)) == trained


def observed_by(factory: Any, **facts: Any) -> qompose.QuantizationConfig:
    spec = QuantizationSpec(torch.int8, factory, -128, 127, torch.per_tensor_affine)
    return replace(STATIC, input_activation=spec, **facts)


def searched(word: str) -> qompose.QuantizationConfig:
    spec = activation_spec(torch.int8, -128, 127, range=word)
    return replace(STATIC, input_activation=spec, name="one")


FAKE, LEARNED = FakeQuantize, LearnableFakeQuantize


@pytest.mark.parametrize(
    ("config", "word", "found"),
    [
        (USUAL, "moving_average", [FAKE] * 3),
        (observed_by(HistogramObserver), "moving_average", [FAKE] * 3),
        (STATIC, "learned", [LEARNED] * 3),
        (DYNAMIC, "learned", [FAKE, None, LEARNED]),
        (searched("mse"), "learned", [LEARNED] * 3),
    ],
    ids=["a search", "a class by itself", "scales", "no scale to learn", "searched once"],
)
def test_what_takes_the_place_of_an_observer(config: Any, word: str, found: list[Any]) -> None:
    assert kinds(training_config(config, word)) == found


@pytest.mark.parametrize("word", ["histogram", "mse"])
def test_capabilities_say_what_can_be_trained(word: str) -> None:
    quantizer = toy(LINEAR, config=searched(word))
    quantizer.backend.configs = {"one": searched(word)}  # type: ignore[misc]
    (row,) = quantizer.quantization_capabilities()
    assert row.qat == (word == "histogram")


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        *((searched(word), {}, None) for word in ("mse", "percentile", "entropy")),
        (STATIC, {"fake_quantize": "learnd"}, "'learnd'.*learned"),
        (STATIC, {"fake_quantize": "learned", "is_qat": False}, "is_qat=True"),
    ],
)
def test_what_is_refused(config: Any, options: dict[str, Any], named: str | None) -> None:
    with pytest.raises(ConfigError, match=named):
        training_config(config, **options)


def test_without_training_nothing_changes() -> None:
    assert training_config(STATIC, is_qat=False) is STATIC


def prepared_for_training(config: qompose.QuantizationConfig) -> torch.fx.GraphModule:
    return qompose.prepare_qat_pt2e(
        export(seeded(nn.Linear(6, 3)), randn(4, 6)), toy(LINEAR, config=config)
    )


def test_an_observer_of_another_package_is_said_to_simulate_nothing() -> None:
    plain = observed_by(torch.ao.quantization.MinMaxObserver, output_activation=None)
    config = training_config(plain)
    assert config.input_activation == plain.input_activation
    prepared = prepared_for_training(config)
    (note,) = [n for n in qompose.report(prepared).notes if "MinMaxObserver" in n]
    assert "linear (toy, rule linear)" in note


def test_histograms_of_calibration_can_be_trained_with_all_the_same() -> None:
    """Slowly: whoever prepares a configuration of calibration for training gets what it says."""
    prepared = prepared_for_training(observed_by(HistogramObserver, output_activation=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(randn(4, 6)).sum().backward()
    assert all(p.grad is not None for p in prepared.parameters())


@pytest.mark.filterwarnings("ignore:.*reduce_range")  # of torch, about its own defaults
@pytest.mark.parametrize("name", [*NAMED])
def test_usual_names_are_what_torch_has_under_them(name: str) -> None:
    """The same scales and zero points of the same data, and in training the same output."""
    theirs = getattr(torch.ao.quantization.observer, name, None)
    theirs = theirs or getattr(torch.ao.quantization.fake_quantize, name)
    ours = getattr(qompose.observers, name)(), theirs()
    for module in ours:
        module.train()
    data = randn(4, 3, seed=1)
    for module in ours:
        module(data)
    if "dynamic" in name or "placeholder" in name:
        assert [bool(module.is_dynamic) for module in ours] == ["dynamic" in name] * 2
        return
    found, wanted = (module.calculate_qparams() for module in ours)
    rtol = 0.02 if "histogram" in name else 1e-6  # qompose's own histogram keeps finer bins
    for value, other in zip(found, wanted, strict=True):
        assert torch.allclose(value.reshape(-1).float(), other.reshape(-1).float(), rtol, atol=1e-6)
    low, high = ((m.quant_min, m.quant_max) for m in ours)
    assert low == high


def test_there_are_no_other_names() -> None:
    assert "default_observer" in dir(qompose.observers)
    with pytest.raises(AttributeError):
        qompose.observers.default_observr  # noqa: B018


class Halving(FakeQuantizeBase):
    """A fake-quantizer written from nothing: halves the steps of a sixteenth."""

    def __init__(self, dtype: torch.dtype, **of_the_specification: Any) -> None:
        super().__init__(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.round(x * 16) / 16 if self.fake_quant_enabled else x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(1 / 16), torch.tensor(0)


def test_one_written_from_nothing_is_trained_with_and_converted() -> None:
    spec = QuantizationSpec(torch.int8, Halving, -128, 127, torch.per_tensor_affine)
    quantizer = toy(LINEAR).set_global(training_config(replace(STATIC, input_activation=spec)))
    x = randn(2, 4)
    prepared = qompose.prepare_qat_pt2e(export(nn.Linear(4, 4).train(), x), quantizer)
    own = next(module for module in prepared.modules() if isinstance(module, Halving))
    prepared(x)
    assert torch.equal(own(x), torch.round(x * 16) / 16)
    prepared.apply(qompose.training.disable_fake_quant)
    prepared.apply(qompose.training.disable_observer)
    assert torch.equal(own(x), x) and not own.observer_enabled
    prepared.apply(qompose.training.enable_fake_quant)
    text = qompose.convert_pt2e(prepared).code
    assert "0.0625, 0, -128, 127, torch.int8" in text
