# SPDX-License-Identifier: Apache-2.0
"""Configurations go into JSON text and come out equal; what JSON cannot hold is refused by its place."""

from __future__ import annotations

import functools
import json
from dataclasses import fields, replace
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, strategies as st
from qompose import QuantizationConfig, QuantizationSpec
from qompose.errors import ConfigError
from qompose.observers import HistogramObserver, MinMaxObserver
from qompose.observers.config import (
    OBSERVERS,
    ROLES,
    config_from_json,
    config_to_json,
    spec_from_json,
    spec_to_json,
)
from qompose.observers.histogram_observers import ACTIVATION_RANGES
from qompose.spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    SharedQuantizationSpec,
)
from qompose.spec.quantization_spec import ObserverFactory
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMaxObserver

from tests.core.toy import DYNAMIC, INT8, STATIC, WEIGHT, WEIGHT_ONLY

SIGMOID = FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)
BLOCKS = replace(
    WEIGHT,
    ch_axis=None,
    block_size=(1, 32),
    observer_or_fake_quant_ctr=qompose.observers.PerBlockMinMaxObserver.with_args(
        block_size=(1, 32)
    ),
)
CONFIGS = {
    "static": STATIC,
    "dynamic": DYNAMIC,
    "weight-only": WEIGHT_ONLY,
    "blocks": replace(WEIGHT_ONLY, weight=BLOCKS),
    "fixed output": replace(STATIC, output_activation=SIGMOID),
    "qat": replace(
        STATIC, is_qat=True, balance=True, name="all set", bias=INT8, repairs=("equalization",)
    ),
    "half": QuantizationConfig(
        None, None, QuantizationSpec(torch.float16, qompose.observers.PlaceholderObserver)
    ),
    "nothing": QuantizationConfig(None, None, None),
}


def through_text(config: QuantizationConfig) -> Any:
    return config_from_json(json.loads(json.dumps(config_to_json(config), allow_nan=False)))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_comes_back_is_equal(config: QuantizationConfig) -> None:
    found = through_text(config)

    assert found == config
    assert hash(found) == hash(config)
    assert found.name == config.name
    assert [type(getattr(found, role)) for role in ROLES] == [
        type(getattr(config, role)) for role in ROLES
    ]


def test_none_is_null_and_null_is_none() -> None:
    assert config_to_json(None) is None
    assert config_from_json(None) is None
    assert spec_to_json(None) is None
    assert spec_from_json(None) is None


def test_the_form_is_short() -> None:
    assert config_to_json(WEIGHT_ONLY) == {
        "input_activation": None,
        "output_activation": None,
        "weight": {
            "dtype": "int8",
            "observer": {"observer": "PerChannelMinMaxObserver"},
            "quant_min": -127,
            "quant_max": 127,
            "qscheme": "per_channel_symmetric",
            "ch_axis": 0,
        },
        "name": "weight-only",
    }


@pytest.mark.parametrize("word", ACTIVATION_RANGES)
def test_every_way_to_estimate_a_range_can_be_written(word: str) -> None:
    spec = replace(INT8, observer_or_fake_quant_ctr=qompose.observers.observer_for_range(word))
    assert spec_from_json(spec_to_json(spec)) == spec


@pytest.mark.parametrize("name", OBSERVERS)
def test_every_argument_of_every_observer_can_be_written(name: str) -> None:
    """Constructors say what there is: a new argument without a form in JSON fails here."""
    values = {
        "dtype": torch.int8, "qscheme": torch.per_tensor_affine, "quant_min": -8, "quant_max": 7,
        "eps": 2**-12, "is_dynamic": True, "ch_axis": 1, "block_size": (-1,), "power": 2.0,
        "averaging_constant": 0.5, "percentile": 99.0, "scale": 0.5, "zero_point": 3,
        "scale_dtype": torch.bfloat16, "use_grad_scaling": False,
        "observer": MinMaxObserver.with_args(eps=2**-12),
    }  # fmt: skip
    made = OBSERVERS[name].with_args()
    with pytest.raises(ConfigError, match="unknown key 'nonsense'") as refusal:
        spec_to_json(replace(INT8, observer_or_fake_quant_ctr=made.with_args(nonsense=1)))
    known = str(refusal.value).rpartition("known: ")[2].split(", ")
    assert {"dtype", "eps"} <= set(known) or "FixedQParams" in name

    spec = replace(INT8, observer_or_fake_quant_ctr=made.with_args(**{k: values[k] for k in known}))

    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_class_and_a_factory_without_arguments_stay_apart() -> None:
    for factory in (MinMaxObserver, MinMaxObserver.with_args()):
        found = spec_from_json(spec_to_json(replace(INT8, observer_or_fake_quant_ctr=factory)))
        assert found.observer_or_fake_quant_ctr == factory


def test_the_order_of_an_observers_arguments_means_nothing() -> None:
    one = ObserverFactory(HistogramObserver, (("power", 2.0), ("eps", 0.5)))
    assert one == HistogramObserver.with_args(eps=0.5, power=2.0)


SPEC = spec_to_json(INT8)
assert SPEC is not None
CONFIG = config_to_json(STATIC)
assert CONFIG is not None
MALFORMED = {
    "no object": ([], "config must be an object"),
    "an unknown key": (
        {**CONFIG, "wieght": None}, r"config has the unknown key 'wieght' \(did you mean 'weight'"
    ),
    "a role left out": (
        {k: v for k, v in CONFIG.items() if k != "weight"}, "config needs weight"
    ),
    "a role of another type": ({**CONFIG, "weight": "int8"}, "config.weight must be .*'int8'"),
    "a flag that is a number": ({**CONFIG, "is_qat": 1}, "config.is_qat must be true or false, got 1"),
    "a name that is a number": ({**CONFIG, "name": 3}, "config.name must be a string, got 3"),
}  # fmt: skip
IN_A_SPEC = {
    "an unknown key": ({"quant_mni": 0}, r"unknown key 'quant_mni' \(did you mean 'quant_min'"),
    "an unknown dtype": ({"dtype": "int7"}, r"dtype must be a dtype .*got 'int7' \(did you mean"),
    "no dtype": ({"dtype": None}, "dtype must be a dtype .*got None"),
    "torch's own name": ({"dtype": "torch.int8"}, "dtype must be .*'torch.int8'"),
    "an unknown scheme": (
        {"qscheme": "per_channel"}, r"qscheme must be a scheme .*got 'per_channel' \(did you mean"
    ),
    "a bound that is a fraction": ({"quant_min": -1.5}, "quant_min must be an integer, got -1.5"),
    "a bound that is a flag": ({"quant_max": True}, "quant_max must be an integer, got True"),
    "a bound outside the dtype": ({"quant_max": 128}, r"weight: quant_min=-128, quant_max=128 is not"),
    "blocks that are a number": ({"block_size": 32}, "block_size must be a list, got 32"),
    "a channel scheme without axis": ({"qscheme": "per_channel_affine"}, "weight: .* needs ch_axis"),
    "an observer by name alone": ({"observer": "MinMaxObserver"}, "observer must be .*'MinMaxObserver'"),
    "an unknown observer": (
        {"observer": {"observer": "MinMaxObserve"}},
        r"observer.observer must be an observer.*got 'MinMaxObserve' \(did you mean 'MinMaxO",
    ),
    "an observer's unknown key": (
        {"observer": {"observer": "MinMaxObserver", "arg": {}}}, r"unknown key 'arg' \(did you mean"
    ),
    "an unknown argument": (
        {"observer": {"observer": "MinMaxObserver", "args": {"powr": 2}}},
        "observer.args has the unknown key 'powr'",
    ),
    "another observer's argument": (
        {"observer": {"observer": "MinMaxObserver", "args": {"power": 2}}},
        "observer.args has the unknown key 'power'",
    ),
    "an argument of another type": (
        {"observer": {"observer": "MinMaxObserver", "args": {"eps": "small"}}},
        "observer.args.eps must be a finite number, got 'small'",
    ),
    "an argument that is not finite": (
        {"observer": {"observer": "MinMaxObserver", "args": {"eps": float("inf")}}},
        "observer.args.eps must be a finite number, got inf",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "complaint"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_configurations_are_refused_by_their_place(data: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config_from_json(data)


@pytest.mark.parametrize(("change", "complaint"), IN_A_SPEC.values(), ids=IN_A_SPEC)
def test_malformed_specifications_are_refused_by_their_place(change: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.weight.*{complaint}|{complaint}") as refusal:
        config_from_json({**CONFIG, "weight": {**SPEC, **change}})
    assert str(refusal.value).startswith("config.weight")


FIXED = spec_to_json(SIGMOID)
assert FIXED is not None


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        pytest.param({"dtype": "int8"}, "spec needs observer", id="neither"),
        pytest.param({**SPEC, "scale": 0.5}, "unknown key 'scale'", id="both"),
        pytest.param(
            {k: v for k, v in FIXED.items() if k != "zero_point"}, "spec needs zero_point", id="half"
        ),
        pytest.param({**FIXED, "scale": -1}, "spec: scale must be positive", id="negative scale"),
        pytest.param({**FIXED, "zero_point": 1.0}, "zero_point must be an integer, got 1.0", id="float"),
    ],
)  # fmt: skip
def test_fixed_parameters_need_both_of_them_and_no_observer(data: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        spec_from_json(data)


UNWRITABLE = {
    "another engine's observer": (TorchMinMaxObserver, "MinMaxObserver.*none of qompose's observers"),
    "its partial": (TorchMinMaxObserver.with_args(eps=2**-12), "none of qompose's observers"),
    "a partial of ours": (functools.partial(MinMaxObserver, eps=1.0), "none of qompose's observers"),
    "a lambda": (lambda **_: MinMaxObserver(), "<lambda>.*none of qompose's observers"),
    "a subclass of ours": (
        type("MinMaxObserver", (MinMaxObserver,), {}), "none of qompose's observers"
    ),
    "an argument that is no number": (
        MinMaxObserver.with_args(eps=torch.tensor(1.0)), r"args\.eps must be a finite number, got tens"
    ),
    "blocks as a list": (
        qompose.observers.PerBlockMinMaxObserver.with_args(block_size=[32]),
        "args.block_size must be a tuple, got .32."
    ),
}  # fmt: skip


@pytest.mark.parametrize(("factory", "complaint"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_callables_that_are_not_ours_are_refused_when_written(factory: Any, complaint: str) -> None:
    spec = replace(INT8, observer_or_fake_quant_ctr=factory)
    with pytest.raises(ConfigError, match=rf"^config\.weight\.observer.*{complaint}|{complaint}"):
        config_to_json(replace(STATIC, weight=spec))


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        pytest.param(SharedQuantizationSpec(()), "SharedQuantizationSpec", id="shared"),  # type: ignore[arg-type]
        pytest.param(
            DerivedQuantizationSpec([], max, torch.int32), "DerivedQuantizationSpec", id="derived"
        ),
        pytest.param(
            replace(INT8, is_dynamic=1), "spec.is_dynamic must be true or false, got 1", id="flag"  # type: ignore[arg-type]
        ),
    ],
)  # fmt: skip
def test_what_a_graph_or_a_wrong_type_holds_is_refused_when_written(
    spec: Any, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        spec_to_json(spec)


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a QuantizationConfig, got 'static'"):
        config_to_json("static")  # type: ignore[arg-type]


def test_every_field_of_a_configuration_is_written() -> None:
    data = config_to_json(CONFIGS["qat"])
    assert data is not None
    assert set(data) == {field.name for field in fields(QuantizationConfig)}


_TENSOR = st.sampled_from([torch.per_tensor_affine, torch.per_tensor_symmetric])
_OBSERVERS = st.one_of(
    st.sampled_from([MinMaxObserver, HistogramObserver]),
    st.builds(
        MinMaxObserver.with_args, eps=st.floats(min_value=0, allow_infinity=False, exclude_min=True)
    ),
    st.builds(HistogramObserver.with_args, power=st.floats(1, 9), dtype=st.just(torch.int8)),
)
_SPECS = st.one_of(
    st.none(),
    st.builds(
        QuantizationSpec,
        dtype=st.sampled_from([torch.int8, torch.int16, torch.int32]),
        observer_or_fake_quant_ctr=_OBSERVERS,
        quant_min=st.one_of(st.none(), st.integers(-128, -1)),
        quant_max=st.one_of(st.none(), st.integers(1, 127)),
        qscheme=_TENSOR,
        is_dynamic=st.booleans(),
    ),
    st.builds(
        FixedQParamsQuantizationSpec,
        dtype=st.just(torch.uint8),
        scale=st.floats(min_value=1e-300, allow_infinity=False),
        zero_point=st.integers(0, 255),
        qscheme=st.one_of(st.none(), _TENSOR),
    ),
)


@given(
    st.builds(
        QuantizationConfig,
        input_activation=_SPECS,
        output_activation=_SPECS,
        weight=_SPECS,
        bias=_SPECS,
        is_qat=st.booleans(),
        balance=st.booleans(),
        name=st.text(),
    )
)
def test_any_configuration_comes_back_equal(config: QuantizationConfig) -> None:
    found = through_text(config)
    assert (found, found.name) == (config, config.name)
