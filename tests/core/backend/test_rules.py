# SPDX-License-Identifier: Apache-2.0
"""What a rule refuses of a configuration, with the bound in the message."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.backend import Backend, Kernel, OperatorPattern, Pattern, Rule, TensorConstraint
from qompose.errors import ConfigError
from torch import nn
from torch.nn import functional as F

from tests.core.toy import LINEAR, STATIC, ToyBackend, aten, export, prepare, toy

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
    with pytest.raises(ConfigError, match="QuantizationConfig"):
        qompose.RuleQuantizer(toy(ROW, config=None).backend).set_global(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "remedy"),
    [("alpha", r"quantizer_of\('alpha'\)"), (ToyBackend, "create an instance"), (None, "None")],
)
def test_a_rule_quantizer_takes_a_backend(given: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        qompose.RuleQuantizer(given)


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
    "kernels without targets": ({"kernels": Kernel("k")}, "kernels .*target"),
    "constraints without roles": ({"accepts": INT8}, "accepts .*role"),
    "no patterns": ({"patterns": ()}, "patterns"),
    "a pattern of another kind": ({"patterns": (len,)}, "Pattern"),
    "own of another kind": ({"own": {"activation": 3}}, r"own\['activation'\] .*3"),
    "own of no role": ({"own": {"input": ACTIVATION}}, "own .*'input'"),
    "state of no pattern": ({"state": "cache"}, "unknown name cache"),
    "no modes": ({"modes": frozenset()}, "modes .*non-empty"),
    "modes of another kind": ({"modes": None}, "modes .*None"),
    "a guard of another kind": ({"guard": "never"}, "guard .*'never'"),
    "guards of another kind": ({"guard": (len, 5)}, "guard .*5"),
    **{
        f"{name} as text": ({name: "no"}, f"{name} must be True or False, got 'no'")
        for name in ("integer_bias", "output", "shares", "carries")
    },
    "an option of another kind": ({"option": 3}, "option .*string, got 3"),
    "a weight of another kind": ({"weight": 3}, "weight .*string or None, got 3"),
    **{
        f"channels {given!r}": ({"channels": given}, f"channels .*{re.escape(repr(given))}")
        for given in (1, "ab", (1,), (1, 1, 1), [1, 1], (1.0, 1.0), (True, True))
    },
    "a bias that is the weight": ({"bias": "weight"}, "weight and bias .*'weight'"),
    "a buffer that is an input": ({"state": "input"}, "activations and state .*'input'"),
    "own that would be shared": (
        {"shares": True, "option": "x", "own": {"output": ACTIVATION}}, r"own\['output'\] .*shares"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "named"), TYPOS.values(), ids=TYPOS)
def test_a_row_that_could_never_do_what_it_says_is_refused(
    facts: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"rule linear: .*{named}"):
        replace(LINEAR, **facts)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"name": len}, "name"), ({"name": "k", "emit": "emit"}, "emit"),
        ({"name": "k", "otherwise": len}, "otherwise"),
    ],
)  # fmt: skip
def test_a_kernel_of_other_things_is_refused(facts: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"Kernel\(.*: {named} must be"):
        Kernel(**facts)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"rules": LINEAR}, "rules .*tuple"), ({"rules": (len,)}, "rules must contain"),
        ({"configs": [STATIC]}, "configs .*dict"), ({"configs": {"a": INT8}}, "configs must contain"),
        ({"rewrites": "fold_batch_norm"}, "rewrites .*tuple"),
        ({"rules": (LINEAR, LINEAR)}, "2 rules are named"),
        ({"left_in_float": ["relu"]}, "left_in_float .*relu"),
        ({"rules": (rule for rule in (LINEAR,))}, r"rules .*got generator: write rules = tuple\("),
        ({"rules": {LINEAR.name: LINEAR}}, r"rules .*got dict: write rules = tuple\("),
        ({"rewrites": (name for name in ())}, r"rewrites .*got generator: write rewrites = tuple\("),
        ({"rewrites": (["add_bias"],)}, "rewrites .*unknown"),
        ({"rewrites": ("fold_batchnorm",)}, "rewrites .*'fold_batchnorm'.*'fold_batch_norm'"),
        ({"api_version": 0}, "api_version .*got 0"), ({"api_version": "1"}, "api_version .*got '1'"),
        ({"api_version": 2}, ".*version 2 .*upgrade qompose"),
    ],
)  # fmt: skip
def test_tables_of_other_things_are_refused(facts: dict[str, Any], named: str) -> None:
    kind = type("Mine", (Backend,), {"name": "mine", "api_version": 1, **facts})
    with pytest.raises(ConfigError, match=f"backend mine: {named}"):
        qompose.RuleQuantizer(kind())


@pytest.mark.parametrize(
    ("name", "given", "kind"), [("rules", LINEAR, "Rule"), ("configs", [STATIC], "list")]
)
def test_a_long_value_is_told_by_its_type(name: str, given: Any, kind: str) -> None:
    backend = type("Mine", (Backend,), {"name": "mine", "api_version": 1, name: given})
    with pytest.raises(ConfigError, match=f"backend mine: {name} .*got {kind}") as caught:
        qompose.RuleQuantizer(backend())
    assert len(str(caught.value)) < 200


def test_a_backend_without_rules_says_so() -> None:
    with pytest.raises(ConfigError, match="'alpha' has no rules"):
        qompose.RuleQuantizer(ToyBackend((), "alpha")).set_global(STATIC)


@pytest.mark.parametrize("name", [None, "", 3])
def test_names_are_text(name: Any) -> None:
    with pytest.raises(ConfigError, match=f"name .*{name!r}"):
        replace(LINEAR, name=name)
    kind = type("Mine", (Backend,), {"name": name, "api_version": 1})
    with pytest.raises(ConfigError, match=f"name .*{name!r}"):
        qompose.RuleQuantizer(kind())


def test_what_is_no_specification_is_refused() -> None:
    with pytest.raises(ConfigError, match="QuantizationSpec, got 'int8'"):
        TensorConstraint.like("int8")  # type: ignore[arg-type]
    for role in ("input_activation", "output_activation", "weight", "bias"):
        with pytest.raises(ConfigError, match=f"{role} .*'int8'"):
            replace(STATIC, **{role: "int8"})
    for name, given in (("name", 3), ("is_qat", "no"), ("balance", "no")):
        with pytest.raises(ConfigError, match=f"{name} must be .*, got {given!r}"):
            replace(STATIC, **{name: given})
    with pytest.raises(ConfigError, match="ch_axis"):
        replace(WEIGHT, ch_axis="0")


def test_a_guard_gives_a_reason_or_none() -> None:
    program = export(nn.Linear(3, 4), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="the guard returned True"):
        prepare(program, toy(replace(LINEAR, guard=lambda _: True)))


def test_channels_are_dimensions_of_the_tensors() -> None:
    program = export(nn.Linear(3, 4), torch.zeros(2, 3))
    quantizer = toy(replace(LINEAR, channels=(5, 7)), config=replace(STATIC, balance=True))
    with pytest.raises(ConfigError, match=r"rule linear: channels=\(5, 7\) .*dimension 5"):
        prepare(program, quantizer)


def test_a_backend_is_not_its_quantizer() -> None:
    with pytest.raises(qompose.UserError, match="RuleQuantizer"):
        qompose.compose(ToyBackend((LINEAR,), "mine"))


LINEAR_OF = (("op", aten.linear.default),)
SHAPES = ((2, 3), (4, 3), (4,))


def linear(input: Any, weight: Any, bias: Any) -> Any:
    return F.linear(input, weight, bias)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda: Pattern(F.linear, SHAPES, LINEAR_OF), "linear has no.*lambda", id="builtin"),
        pytest.param(lambda: Pattern(3, SHAPES, LINEAR_OF), "function of tensors", id="no function"),
        pytest.param(lambda: Pattern(linear, list(SHAPES), LINEAR_OF), "shapes must be a tuple", id="a list"),
        pytest.param(lambda: Pattern(linear, SHAPES[:2], LINEAR_OF), "bias.*2 shapes", id="too few shapes"),
        pytest.param(lambda: Pattern(linear, (*SHAPES, (1,)), LINEAR_OF), "4 shapes", id="too many"),
        pytest.param(lambda: Pattern(linear, SHAPES, (("op", aten.linear),)), "linear.default", id="packet"),
        pytest.param(lambda: Pattern(linear, SHAPES, (aten.linear.default,)), "pairs", id="no name"),
        pytest.param(lambda: Pattern(linear, SHAPES, LINEAR_OF * 2), "'op'.*taken", id="one name for two"),
        pytest.param(
            lambda: Pattern(linear, SHAPES, (("weight", aten.linear.default),)), "'weight'.*taken",
            id="a parameter's name",
        ),
        pytest.param(lambda: OperatorPattern((aten.relu,)), r"aten\.relu\.default", id="packet alone"),
        pytest.param(lambda: OperatorPattern(aten.relu.default), "tuple of operators", id="no tuple"),
        pytest.param(lambda: OperatorPattern((torch.relu,)), r"torch\.ops", id="a function"),
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_is_refused_with_its_rule(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)rule mine: .*{said}"):
        Rule(name="mine", patterns=(make(),), activations=())


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        pytest.param(Pattern(linear, ((2, 3), (4, 5), (4,)), LINEAR_OF), r"weight: \[4, 5\]", id="shapes"),
        pytest.param(
            Pattern(linear, SHAPES, (*LINEAR_OF, ("relu", aten.relu.default))),
            r"aten\.relu\.default .*'relu'\. It calls aten\.linear\.default$", id="not called",
        ),
        pytest.param(
            Pattern(lambda input, weight, bias: F.linear(input, weight), SHAPES, LINEAR_OF),
            "never uses bias", id="unused",
        ),
        pytest.param(Pattern(lambda x: x.nothing(), ((2, 3),), LINEAR_OF), "nothing", id="raises"),
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_captured_is_refused_with_its_rule(
    pattern: Any, said: str
) -> None:
    rule = Rule(name="mine", patterns=(pattern,), activations=(), anchor="op")
    with pytest.raises(ConfigError, match=f"(?s)rule mine: .*{said}"):
        toy(rule).quantization_capabilities().to_dict()
    with pytest.raises(ConfigError, match=f"(?s)rule mine: .*{said}"):
        prepare(export(nn.Linear(3, 4), torch.ones(2, 3)), toy(rule))


def test_torch_logs_no_traceback_of_shapes_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[logging.LogRecord] = []
    traces = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(traces, "handle", logged.append)
    rule = Rule(
        name="mine",
        patterns=(Pattern(linear, ((2, 3), (4, 7), (4,)), LINEAR_OF),),
        activations=(),
        anchor="op",
    )
    with pytest.raises(ConfigError):
        toy(rule).quantization_capabilities().to_dict()
    assert not logged
    assert not traces.disabled


def test_modes_are_a_set() -> None:
    with pytest.raises(ConfigError, match=r"rule linear: modes .*'static'.*\{'static'\}"):
        replace(LINEAR, modes="static")


@pytest.mark.parametrize(
    "target", ["torhc", "Torch", "torc", "ttorch", "torcx", "TORCH", "pytorch", "PyTorch"]
)
def test_a_target_one_slip_away_from_a_known_one_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=f"rule linear: .*'{target}'.*'torch'"):
        replace(LINEAR, kernels={target: Kernel("k")})


@pytest.mark.parametrize("target", ["torch", "chip", "thcro", "tch", "torch_xla", "executorch", ""])
def test_another_target_may_be_somebody_elses(target: str) -> None:
    assert replace(LINEAR, kernels={target: Kernel("k")}).kernels
