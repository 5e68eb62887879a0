# SPDX-License-Identifier: Apache-2.0
"""Configurations from options: their specifications, their names, and what excludes what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.backend import kit
from qompose.errors import ConfigError

MAKE = kit.ConfigFactory(group_sizes=(32, 64))


def integers(spec: Any) -> tuple[torch.dtype, int, int]:
    assert isinstance(spec, QuantizationSpec)
    assert spec.quant_min is not None and spec.quant_max is not None
    return spec.dtype, spec.quant_min, spec.quant_max


@pytest.mark.parametrize(
    ("options", "activation", "weight", "name"),
    [
        ({}, (-128, 127), (-127, 127), "static"),
        ({"is_per_channel": False}, (-128, 127), (-127, 127), "static per-tensor"),
        ({"act_qmax": 63}, (-128, 63), (-127, 127), "static, activations [-128, 63]"),
        ({"bits": 4}, (-128, 127), (-8, 7), "static int4"),
        ({"bits": 2}, (-128, 127), (-2, 1), "static int2"),
        ({"bits": 8}, (-128, 127), (-128, 127), "static, weights [-128, 127]"),
        ({"weight_qmin": -63, "weight_qmax": 63}, (-128, 127), (-63, 63), "static, weights [-63, 63]"),
        ({"is_dynamic": True}, (-128, 127), (-127, 127), "dynamic"),
        ({"is_dynamic": True, "per_token": True}, (-128, 127), (-127, 127), "dynamic per token"),
        ({"weight_only": True}, None, (-127, 127), "weight-only"),
        ({"weight_only": True, "group_size": 32}, None, (-8, 7), "weight-only int4 groups of 32"),
        ({"weight_only": True, "group_size": 32, "symmetric": False}, None, (-8, 7),
         "weight-only int4 groups of 32, weights with zero points"),
        ({"weight_only": True, "group_size": 64, "bits": 3}, None, (-4, 3),
         "weight-only int3 groups of 64"),
        ({"range": "mse", "weight_range": "mse", "balance": False, "algorithms": ()}, (-128, 127),
         (-127, 127), "static, range mse, weight range mse, balance False, algorithms none"),
    ],
)  # fmt: skip
def test_options_become_specifications_and_a_name(
    options: dict[str, Any],
    activation: tuple[int, int] | None,
    weight: tuple[int, int],
    name: str,
) -> None:
    config = MAKE(**options)
    assert str(config) == name
    assert integers(config.weight) == (torch.int8, *weight)
    assert (config.input_activation is None) == (activation is None)
    if activation is not None:
        assert integers(config.input_activation) == (torch.int8, *activation)
    assert (config.output_activation is None) == (not name.startswith("static"))
    assert config.balance == (name.startswith("static") and options.get("balance", True))


def test_what_the_kernels_take_is_said_once() -> None:
    make = kit.ConfigFactory(activation=(torch.uint8, 0, 255), weight=(-64, 63), outputs=False)
    config = make()
    assert integers(config.input_activation) == (torch.uint8, 0, 255)
    assert config.output_activation is None and integers(config.weight) == (torch.int8, -64, 63)
    assert str(config) == "static"  # these bounds are the usual ones here
    in_training = make(is_qat=True)
    assert in_training.is_qat and not in_training.balance


def test_a_backend_names_them_in_its_own_way() -> None:
    make = kit.ConfigFactory(head=lambda options, bits: f"{options.mode}/w{bits}")
    assert [str(make(bits=4)), str(make(is_dynamic=True, act_qmin=-127))] == [
        "static/w4",
        "dynamic/w8, activations [-127, 127]",
    ]


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("'group_sizes'.*'group_size'", {"group_sizes": 32}),
        ("is_dynamic must be True or False, got 1", {"is_dynamic": 1}),
        ("symmetric must be True or False, got 0", {"symmetric": 0}),
        ("bits must be an integer, got True", {"bits": True}), ("between 2 and 8, got 9", {"bits": 9}),
        ("weight_qmin", {"bits": 4, "weight_qmin": -7}),
        ("group_size must be an integer, got '32'", {"group_size": "32", "weight_only": True}),
        ("group_size must be one of 32, 64, got 48", {"group_size": 48, "weight_only": True}),
        ("group_size=32 requires weight_only=True", {"group_size": 32}),
        ("is_dynamic=True", {"weight_only": True, "is_dynamic": True}),
        ("per_token=True requires is_dynamic=True", {"per_token": True}),
        ("symmetric=False requires group_size", {"symmetric": False}),
        ("act_qmin=-127, range='mse'", {"weight_only": True, "act_qmin": -127, "range": "mse"}),
        ("is_dynamic=True.*range='mse'", {"is_dynamic": True, "range": "mse"}),
        (r"\[-1, 127\]", {"weight_qmin": -1}), (r"\[-127, 3\]", {"weight_qmax": 3}),
        ("learned", {"fake_quantize": "learned"}),
    ],
)  # fmt: skip
def test_options_that_exclude_others_or_mean_nothing(named: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=named):
        MAKE(**options)


@pytest.mark.parametrize("exact", [False, True])
def test_constraints_admit_what_a_configuration_asks_for(exact: bool) -> None:
    config = MAKE()
    taken = kit.accepts(config, exact=exact)
    assert [*taken] == ["activation", "weight", "output"]
    assert [*kit.accepts(MAKE(is_dynamic=True))] == ["activation", "weight"]
    for spec, role in ((config.input_activation, "activation"), (config.weight, "weight")):
        assert isinstance(spec, QuantizationSpec)
        assert taken[role].objection(role, spec) is None
        narrow = replace(spec, quant_min=-7, quant_max=7)
        # A kernel with the bounds of an activation built in reads any weights.
        assert (taken[role].objection(role, narrow) is None) == (role == "weight" or not exact)
        wide = replace(spec, dtype=torch.int16, quant_min=-500, quant_max=500)
        assert taken[role].objection(role, wide) is not None


def test_names_are_told_apart() -> None:
    static, dynamic = MAKE(), MAKE(is_dynamic=True)
    assert [*kit.named(static, dynamic)] == ["static", "dynamic"]
    other = QuantizationConfig(static.input_activation, None, static.weight, name="static")
    with pytest.raises(ConfigError, match="'static'"):
        kit.named(static, other)
