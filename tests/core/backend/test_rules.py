# SPDX-License-Identifier: Apache-2.0
"""What a rule refuses of a configuration, with the bound in the message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.backend import TensorConstraint
from qompose.errors import ConfigError

from tests.core.toy import LINEAR, STATIC, toy

INT8 = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_tensor_affine, torch.per_channel_symmetric}),
    quant_min_lower_bound=-127,
)
FULL = replace(INT8, quant_min_lower_bound=None, quant_range=(-128, 127))
ROW = replace(LINEAR, accepts={"activation": FULL, "weight": INT8})

ACTIVATION, WEIGHT = STATIC.input_activation, STATIC.weight
REFUSED = {
    "a quantized bias": (replace(STATIC, bias=ACTIVATION), "leaves biases in float"),
    "a float weight": (replace(STATIC, weight=None), "leaves the weight"),
    "another type": (
        replace(STATIC, input_activation=replace(ACTIVATION, dtype=torch.uint8, quant_min=0, quant_max=255)),
        "activation is torch.uint8, and the kernel takes torch.int8",
    ),
    "a weight beyond its bound": (
        replace(STATIC, weight=replace(WEIGHT, quant_min=-128, quant_max=127)),
        "weight has quant_min=-128, below the bound -127",
    ),
    "a narrow activation": (
        replace(STATIC, input_activation=replace(ACTIVATION, quant_min=-64, quant_max=63)),
        r"activation has the range \[-64, 63\], and the kernel takes \(-128, 127\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "complaint"), REFUSED.values(), ids=REFUSED)
def test_a_configuration_that_cannot_be_followed_is_refused_when_it_is_set(
    config: QuantizationConfig, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        toy(ROW, config=config)


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a QuantizationConfig"):
        qompose.RuleQuantizer(toy(ROW, config=None).backend).set_global("static")  # type: ignore[arg-type]


def test_a_configuration_within_the_bounds_is_taken() -> None:
    assert (
        ROW.objection(replace(STATIC, weight=replace(WEIGHT, quant_min=-127, quant_max=127)))
        is None
    )


LIKE = {
    "activation": ACTIVATION,
    "weight": WEIGHT,
    "seven bits": replace(ACTIVATION, quant_min=-64, quant_max=63),
    "blocks": replace(WEIGHT, block_size=(32,), ch_axis=None),
    "no scheme": replace(ACTIVATION, qscheme=None),
    "cast": replace(ACTIVATION, dtype=torch.float16, qscheme=None, quant_min=None, quant_max=None),
}


NARROWER = {"activation": {"seven bits"}, "blocks": {"weight"}}
"""By specification, others that lie within it."""


@pytest.mark.parametrize("name", LIKE)
def test_a_constraint_like_a_specification_takes_it(name: str) -> None:
    """And those within it, and no other."""
    constraint = TensorConstraint.like(LIKE[name])
    taken = {other for other, spec in LIKE.items() if constraint.objection("x", spec) is None}
    assert taken == {name} | NARROWER.get(name, set())


# (the fields that are wrong, what is said of them)
TYPOS: dict[str, tuple[dict[str, Any], str]] = {
    "a condition": ({"condition": "al"}, "condition must be one of all, any, no_float, got 'al' .*'all'"),
    "a mode": ({"modes": frozenset({"statik"})}, "modes must be one of .*'statik'.*did you mean 'static'"),
    "a role": ({"accepts": {"activaton": INT8}}, "accepts must be one of .* got 'activaton'.*'activation'"),
    "no role": ({"accepts": {"bias": INT8}}, "accepts must be one of activation, weight, output, got 'bias'"),
    "a weight": ({"weight": "wieght"}, "unknown name wieght .did you mean 'weight'..; its pattern"),
    "an activation": ({"activations": ("inputs",)}, "unknown name inputs"),
    "an anchor": ({"anchor": "opp"}, "unknown name opp"),
    "a bias": ({"bias": "bais"}, "no pattern has the bias bais"),
    "one activation": ({"activations": "input"}, "must be a tuple of names, got the string"),
    "a bare function": ({"kernels": {"torch": len}}, "must be a Kernel"),
    "a constraint of another kind": ({"accepts": {"weight": torch.int8}}, "must be a TensorConstraint"),
    "no patterns": ({"patterns": ()}, "must be a tuple of patterns"),
    "a pattern of another kind": ({"patterns": (len,)}, "expected a Pattern or an OperatorPattern"),
    "a guard of another kind": ({"guard": "never"}, "guard must be a function of a match, got 'never'"),
    "guards of another kind": ({"guard": (len, 5)}, "guard must be a function of a match, got .*5"),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "told"), TYPOS.values(), ids=TYPOS)
def test_a_row_that_could_never_do_what_it_says_is_refused(
    facts: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"rule linear: .*{told}"):
        replace(LINEAR, **facts)


def test_a_bias_of_some_variants_is_fine() -> None:
    assert replace(LINEAR, bias="bias").bias == "bias"
