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
    "a quantized bias": (replace(STATIC, bias=ACTIVATION), "bias"),
    "a float weight": (replace(STATIC, weight=None), "weight"),
    "a weight beyond its bound": (
        replace(STATIC, weight=replace(WEIGHT, quant_min=-128, quant_max=127)), "weight .*quant_min=-128"
    ),
    "a narrow activation": (
        replace(STATIC, input_activation=replace(ACTIVATION, quant_min=-64, quant_max=63)),
        r"activation .*\[-64, 63\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "named"), REFUSED.values(), ids=REFUSED)
def test_a_configuration_that_cannot_be_followed_is_refused_when_it_is_set(
    config: QuantizationConfig, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        toy(ROW, config=config)


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="'static'"):
        qompose.RuleQuantizer(toy(ROW, config=None).backend).set_global("static")  # type: ignore[arg-type]


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


# (the fields that are wrong, the names in the message)
TYPOS: dict[str, tuple[dict[str, Any], str]] = {
    "a condition": ({"condition": "al"}, "condition .*'al'.*'all'"),
    "a mode": ({"modes": frozenset({"statik"})}, "modes .*'statik'.*'static'"),
    "a role": ({"accepts": {"activaton": INT8}}, "accepts .*'activaton'.*'activation'"),
    "no role": ({"accepts": {"bias": INT8}}, "accepts .*'bias'"),
    "a weight": ({"weight": "wieght"}, "wieght .*'weight'"),
    "an activation": ({"activations": ("inputs",)}, "inputs"),
    "an anchor": ({"anchor": "opp"}, "opp"),
    "a bias": ({"bias": "bais"}, "bais"),
    "one activation": ({"activations": "input"}, "activations"),
    "a bare function": ({"kernels": {"torch": len}}, "kernels|Kernel"),
    "a constraint of another kind": ({"accepts": {"weight": torch.int8}}, "TensorConstraint"),
    "no patterns": ({"patterns": ()}, "patterns"),
    "a pattern of another kind": ({"patterns": (len,)}, "Pattern"),
    "a guard of another kind": ({"guard": "never"}, "guard .*'never'"),
    "guards of another kind": ({"guard": (len, 5)}, "guard .*5"),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "named"), TYPOS.values(), ids=TYPOS)
def test_a_row_that_could_never_do_what_it_says_is_refused(
    facts: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"rule linear: .*{named}"):
        replace(LINEAR, **facts)
