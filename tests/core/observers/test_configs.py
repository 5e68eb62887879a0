# SPDX-License-Identifier: Apache-2.0
"""Configurations go into JSON text and come out equal; what JSON cannot hold is refused by its place."""

from __future__ import annotations

import functools
import inspect
import json
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.errors import ConfigError
from qompose.observers import MinMaxObserver
from qompose.observers.config import (
    ACTIVATION_RANGES,
    OBSERVERS,
    ROLES,
    config_from_json,
    config_to_json,
    spec_from_json,
    spec_to_json,
)
from qompose.spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    SharedQuantizationSpec,
)
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMaxObserver

from tests.core.toy import DYNAMIC, INT8, STATIC, WEIGHT, WEIGHT_ONLY

SIGMOID = FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)
BY_BLOCKS = qompose.observers.PerBlockMinMaxObserver.with_args(block_size=(1, 32))
BLOCKS = replace(WEIGHT, ch_axis=None, block_size=(1, 32), observer_or_fake_quant_ctr=BY_BLOCKS)
CONFIGS = {
    "static": STATIC,
    "dynamic": DYNAMIC,
    "weight-only": WEIGHT_ONLY,
    "blocks": replace(WEIGHT_ONLY, weight=BLOCKS),
    "fixed output": replace(STATIC, output_activation=SIGMOID),
    "qat": replace(
        STATIC,
        is_qat=True,
        balance=True,
        name="all set",
        bias=INT8,
        algorithms=("equalization",),
        options=("slow", "exact"),
    ),
    "half": QuantizationConfig(
        None, None, QuantizationSpec(torch.float16, qompose.observers.PlaceholderObserver)
    ),
    "nothing": QuantizationConfig(None, None, None),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_comes_back_is_equal(config: QuantizationConfig) -> None:
    found: Any = config_from_json(json.loads(json.dumps(config_to_json(config), allow_nan=False)))
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
    kind, known = OBSERVERS[name], {}
    for key, value in values.items():
        with suppress(ConfigError):
            written = kind.with_args(**{key: value})
            spec_to_json(replace(INT8, observer_or_fake_quant_ctr=written))
            known[key] = value
    assert set(inspect.signature(kind).parameters) - {"arguments"} <= known.keys()
    assert {"dtype", "eps"} <= known.keys() or "FixedQParams" in name

    spec = replace(INT8, observer_or_fake_quant_ctr=kind.with_args(**known))

    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_class_and_a_factory_without_arguments_stay_apart() -> None:
    for factory in (MinMaxObserver, MinMaxObserver.with_args()):
        found = spec_from_json(spec_to_json(replace(INT8, observer_or_fake_quant_ctr=factory)))
        assert found.observer_or_fake_quant_ctr == factory


SPEC = spec_to_json(INT8)
assert SPEC is not None
CONFIG = config_to_json(STATIC)
assert CONFIG is not None
FIXED = spec_to_json(SIGMOID)
assert FIXED is not None
MALFORMED = {  # the data, and the places and names in the message
    "no object": ([], "config"),
    "an unknown key": ({**CONFIG, "wieght": None}, "config .*'wieght'.*'weight'"),
    "a role left out": ({k: v for k, v in CONFIG.items() if k != "weight"}, "config .*weight"),
    "a role of another type": ({**CONFIG, "weight": "int8"}, "config.weight .*'int8'"),
    "a flag that is a number": ({**CONFIG, "is_qat": 1}, "config.is_qat .*1"),
    "a name that is a number": ({**CONFIG, "name": 3}, "config.name .*3"),
    **{
        f"fixed parameters, {what}": ({**CONFIG, "weight": data}, rf"config\.weight.*{named}")
        for what, data, named in (
            ("nor an observer", {"dtype": "int8"}, "observer"),
            ("and an observer", {**SPEC, "scale": 0.5}, "'scale'"),
            ("half of them", {k: v for k, v in FIXED.items() if k != "zero_point"}, "zero_point"),
            ("a negative scale", {**FIXED, "scale": -1}, "scale"),
            ("a float for an integer", {**FIXED, "zero_point": 1.0}, "zero_point"),
        )
    },
}  # fmt: skip


def observed_by(**args: Any) -> dict[str, Any]:
    return {"observer": {"observer": "MinMaxObserver", "args": args}}


IN_A_SPEC = {
    "an unknown key": ({"quant_mni": 0}, "'quant_mni'.*'quant_min'"),
    "an unknown dtype": ({"dtype": "int7"}, "dtype .*'int7'"),
    "no dtype": ({"dtype": None}, "dtype .*None"),
    "torch's own name": ({"dtype": "torch.int8"}, "dtype .*'torch.int8'"),
    "an unknown scheme": ({"qscheme": "per_channel"}, "qscheme .*'per_channel'"),
    "a bound that is a fraction": ({"quant_min": -1.5}, "quant_min .*-1.5"),
    "a bound that is a flag": ({"quant_max": True}, "quant_max .*True"),
    "a bound outside the dtype": ({"quant_max": 128}, "quant_max=128"),
    "blocks that are a number": ({"block_size": 32}, "block_size .*32"),
    "an observer by name alone": ({"observer": "MinMaxObserver"}, "observer .*'MinMaxObserver'"),
    "an unknown observer": (
        {"observer": {"observer": "MinMaxObserve"}}, "observer.observer .*'MinMaxObserve'.*'MinMaxObserver'"
    ),
    "an observer's unknown key": ({"observer": {"observer": "MinMaxObserver", "arg": {}}}, "'arg'.*'args'"),
    "an unknown argument": (observed_by(powr=2), "observer.args .*'powr'"),
    "another observer's argument": (observed_by(power=2), "observer.args .*'power'"),
    "an argument of another type": (observed_by(eps="small"), "observer.args.eps .*'small'"),
    "an argument that is not finite": (observed_by(eps=float("inf")), "observer.args.eps .*inf"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "named"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_configurations_are_refused_by_their_place(data: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_json(data)


@pytest.mark.parametrize(("change", "named"), IN_A_SPEC.values(), ids=IN_A_SPEC)
def test_malformed_specifications_are_refused_by_their_place(change: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.weight.*{named}"):
        config_from_json({**CONFIG, "weight": {**SPEC, **change}})


UNWRITABLE = {
    "another engine's observer": (TorchMinMaxObserver, "MinMaxObserver"),
    "its partial": (TorchMinMaxObserver.with_args(eps=2**-12), ""),
    "a partial of ours": (functools.partial(MinMaxObserver, eps=1.0), ""),
    "a lambda": (lambda **_: MinMaxObserver(), "<lambda>"),
    "a subclass of ours": (type("MinMaxObserver", (MinMaxObserver,), {}), ""),
    "an argument that is no number": (MinMaxObserver.with_args(eps=torch.tensor(1.0)), r"args\.eps"),
    "blocks as a list": (
        qompose.observers.PerBlockMinMaxObserver.with_args(block_size=[32]), r"args\.block_size .*32"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("factory", "named"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_callables_that_are_not_ours_are_refused_when_written(factory: Any, named: str) -> None:
    spec = replace(INT8, observer_or_fake_quant_ctr=factory)
    with pytest.raises(ConfigError, match=rf"^config\.weight\.observer.*{named}"):
        config_to_json(replace(STATIC, weight=spec))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (SharedQuantizationSpec(()), "SharedQuantizationSpec"),  # type: ignore[arg-type]
        (DerivedQuantizationSpec([], max, torch.int32), "DerivedQuantizationSpec"),
        (replace(INT8, is_dynamic=1), r"spec\.is_dynamic"),  # type: ignore[arg-type]
    ],
    ids=["shared", "derived", "flag"],
)
def test_what_a_graph_or_a_wrong_type_holds_is_refused_when_written(spec: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        spec_to_json(spec)


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="'static'"):
        config_to_json("static")  # type: ignore[arg-type]


def test_every_field_of_a_configuration_is_written() -> None:
    data = config_to_json(CONFIGS["qat"])
    assert data is not None
    assert set(data) == {field.name for field in fields(QuantizationConfig)}
