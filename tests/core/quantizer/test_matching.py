# SPDX-License-Identifier: Apache-2.0
"""From matches to claims: what is specified where, and a reason for every match that is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.backend import OperatorPattern, Pattern, TensorConstraint
from qompose.errors import ConfigError, MemberError
from qompose.spec.claim import Point
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.core.toy import (
    ADD,
    CAT,
    CONV_RELU,
    DYNAMIC,
    INT8,
    LINEAR,
    LINEAR_RELU,
    RELU,
    STATIC,
    UINT8,
    WEIGHT,
    WEIGHT_ONLY,
    Model,
    claimed,
    export,
    groups_of,
    plan_of,
    prepare,
    randn,
    rule,
    toy,
)

aten = torch.ops.aten


X, Y = randn(2, 3), randn(2, 3, seed=1)


def program(function: Any) -> torch.export.ExportedProgram:
    """`function(linear, x, y)`."""
    return export(Model(lambda m, x, y: function(m.linear, x, y), linear=nn.Linear(3, 3)), X, Y)


def prepared_by(quantizer: qompose.Quantizer, function: Any) -> GraphModule:
    return prepare(program(function), quantizer)


def tanh(name: str, **facts: Any) -> Any:
    return rule(name, OperatorPattern((aten.tanh.default,)), activations=("self",), **facts)


TANH, STATIC_ONLY = tanh("tanh"), tanh("static_only", modes=frozenset({"static"}))
OPTIONAL = tanh("optional", option="slow")
SLOW = dataclasses.replace(STATIC, options=("slow",))
GUARDED = tanh(
    "guarded", guard=lambda match: "it is Tuesday" if match.node("self") is not None else None
)
TENSOR_WISE: dict[str, Any] = {
    "dtypes": {torch.int8}, "qschemes": {torch.per_tensor_affine},
}  # fmt: skip
NARROW = TensorConstraint(**TENSOR_WISE, quant_min_lower_bound=-127)
CONSTRAINED = tanh("constrained", accepts={"activation": NARROW})

BARE = QuantizationConfig(INT8, INT8, None, name="bare")
REASONS: dict[str, tuple[Any, Any, Any, str, str]] = {
    "a number": (ADD, STATIC, lambda m, x, y: x + 2, "add", "other"),
    "integers": (ADD, STATIC, lambda m, x, y: x + y.long(), "add", "other (to)"),
    "booleans in a list": (
        CAT, STATIC, lambda m, x, y: torch.cat([x, y > 0]).float(), "cat", "(gt) is bool",
    ),
    "a computed weight": (LINEAR, STATIC, lambda m, x, y: F.linear(x, y * 2), "linear", "weight"),
    "an input for a weight": (LINEAR, STATIC, lambda m, x, y: F.linear(x, y), "linear", "weight"),
    "a guard": (GUARDED, STATIC, lambda m, x, y: x.tanh(), "tanh", "it is Tuesday"),
    "a constraint": (CONSTRAINED, STATIC, lambda m, x, y: x.tanh(), "tanh", "quant_min=-128"),
    "a mode": (STATIC_ONLY, DYNAMIC, lambda m, x, y: x.tanh(), "tanh", "static_only"),
    "no role": (TANH, WEIGHT_ONLY, lambda m, x, y: x.tanh(), "tanh", "rule tanh"),
    "no weight": (LINEAR, BARE, lambda m, x, y: m(x), "linear", "activation-only"),
    "an option": (OPTIONAL, STATIC, lambda m, x, y: x.tanh(), "tanh", "option 'slow'"),
    "a condition": (CAT, STATIC, lambda m, x, y: torch.cat([x, y]), "cat", "input"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "config", "function", "operator", "reason"), REASONS.values(), ids=REASONS
)
def test_a_refused_match_has_a_reason(
    row: Any, config: Any, function: Any, operator: str, reason: str
) -> None:
    """Another rule accepts the configuration, so that it may be set at all."""
    accepting = rule("accepting", OperatorPattern((aten.erf.default,)), activations=("self",))
    other = rule(
        "weights", OperatorPattern((aten.embedding.default,)), activations=(), weight="weight"
    )
    prepared = prepared_by(toy(row, accepting, other, config=config), function)
    assert claimed(prepared) == {}
    found = {row.name: row.reason for row in qompose.report(prepared).rows}
    assert found[operator].startswith("toy: ")
    assert reason in found[operator]


def test_an_anchor_that_is_a_number_in_the_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"rule odd.*'other'"):
        prepared_by(
            toy(rule("odd", *ADD.patterns, anchor="other", activations=("self",))),
            lambda m, x, y: x + 1,
        )


def test_the_first_reason_in_order_of_the_rules_is_the_one_reported() -> None:
    prepared = prepared_by(toy(GUARDED, CONSTRAINED, ADD), lambda m, x, y: x.tanh())
    (row,) = qompose.report(prepared).rows
    assert row.reason == "toy: it is Tuesday"


def test_a_refused_fusion_leaves_no_reason_on_what_a_shorter_rule_took() -> None:
    quantizer = toy(LINEAR_RELU, LINEAR).set_object_type(aten.relu.default, None)
    prepared = prepared_by(quantizer, lambda m, x, y: m(x).relu())
    rows = {row.name: row for row in qompose.report(prepared).rows}
    assert (rows["linear"].rule, rows["linear"].reason) == ("linear", "")
    assert "relu" in rows["relu"].reason


MAX = rule(
    "max", OperatorPattern((aten.maximum.default,)), activations=("self", "other"), shares=True
)
NO_OUTPUT = rule("linear", *LINEAR.patterns, anchor="op", weight="weight", output=False)
ALWAYS = rule("cat", *CAT.patterns, activations=("tensors",), shares=True)
READS, OUTPUT = [{"x -> linear"}, {"linear_weight -> linear"}], {"output of linear"}
SPECIFIED: dict[str, tuple[Any, Any, Any, list[set[str]]]] = {
    "static": (LINEAR, STATIC, lambda m, x, y: m(x), [*READS, OUTPUT]),
    "dynamic": (LINEAR, DYNAMIC, lambda m, x, y: m(x), READS),
    "weight-only": (LINEAR, WEIGHT_ONLY, lambda m, x, y: m(x), READS[1:]),
    "one tensor twice": (ADD, STATIC, lambda m, x, y: x + x, [{"x -> add"}, {"output of add"}]),
    "two tensors": (
        ADD, STATIC, lambda m, x, y: x + y, [{"x -> add"}, {"y -> add"}, {"output of add"}],
    ),
    "no output": (NO_OUTPUT, STATIC, lambda m, x, y: m(x), READS),
    "all shared": (
        MAX, STATIC, lambda m, x, y: torch.maximum(x, y),
        [{"x -> maximum", "y -> maximum", "output of maximum"}],
    ),
    "all shared, one tensor twice": (
        MAX, STATIC, lambda m, x, y: torch.maximum(x, x), [{"x -> maximum", "output of maximum"}],
    ),
    "a list with one tensor twice": (
        ALWAYS, STATIC, lambda m, x, y: torch.cat([x, y, x]),
        [{"x -> cat", "y -> cat", "output of cat"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "config", "function", "expected"), SPECIFIED.values(), ids=SPECIFIED
)
def test_specifications(row: Any, config: Any, function: Any, expected: Any) -> None:
    prepared = prepared_by(toy(row, config=config), function)
    assert groups_of(prepared) == set(map(frozenset, expected))


def test_each_role_gets_its_own_specification() -> None:
    config = QuantizationConfig(INT8, UINT8, WEIGHT)
    prepared = prepared_by(toy(LINEAR, config=config), lambda m, x, y: m(x))
    assert {group.points[0]: group.spec for group in plan_of(prepared).groups} == {
        Point("x", "linear"): INT8,
        Point("linear_weight", "linear"): WEIGHT,
        Point("linear"): UINT8,
    }


def test_a_claim_says_all_that_a_kernel_and_a_report_need() -> None:
    (claim,) = plan_of(prepared_by(toy(LINEAR_RELU), lambda m, x, y: m(x).relu())).claims
    assert (claim.owner, claim.rule) == ("toy", "linear_relu")
    assert (claim.anchor, claim.output) == ("linear", "relu")
    assert (claim.config, claim.selector, claim.mode) == ("static", "global", "static")
    assert dict(claim.captures)["op"] == "linear"
    roles = {(operand.role, operand.user, operand.position) for operand in claim.operands}
    assert {("input", "linear", (0,)), ("weight", "linear", (1,))} <= roles


def test_a_configuration_that_no_rule_can_follow_is_refused_when_it_is_set() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'toy' .*static.*quant_min=-128"):
        toy(CONSTRAINED, config=STATIC)
    toy(CONSTRAINED, RELU, config=STATIC)  # one rule that can is enough
    with pytest.raises(ConfigError, match="dynamic"):
        toy(STATIC_ONLY, config=DYNAMIC)
    again = dataclasses.replace(STATIC_ONLY, name="again")
    picky = dataclasses.replace(CONSTRAINED, modes=frozenset({"dynamic"}))
    with pytest.raises(ConfigError, match=r"(?s)rule constrained, .*2 other rules"):
        toy(STATIC_ONLY, again, picky, config=DYNAMIC)


def test_an_option_that_no_rule_has_is_refused_when_it_is_set() -> None:
    with pytest.raises(ConfigError, match=r"'toy' .*'slwo'.*slow"):
        toy(OPTIONAL, config=dataclasses.replace(STATIC, options=("slwo",)))
    with pytest.raises(ConfigError, match="tuple of strings"):
        dataclasses.replace(STATIC, options="slow")


def test_a_rule_with_an_option_speaks_where_it_is_asked_for_alone() -> None:
    """Also of operators that its pattern does not fit."""
    pattern = Pattern(
        lambda input: input.tanh().relu(), ((2, 3),), (("tanh", torch.ops.aten.tanh.default),)
    )
    row = rule("fused", pattern, activations=("input",), anchor="tanh", option="slow")
    for config, taken, spoken_of in ((STATIC, 0, 1), (SLOW, 1, 2)):
        model = program(lambda m, x, y: x.tanh().relu() + y.tanh()).module(check_guards=False)
        found = toy(row, LINEAR, config=config).bound(model).propose(model, ())
        rejected = [r for r in found.rejections if r.rule == "fused"]
        assert (len(found.claims), len(found.claims) + len(rejected)) == (taken, spoken_of)


def test_without_a_selector_nothing_is_claimed_and_nothing_refused() -> None:
    silent = qompose.RuleQuantizer(toy(LINEAR).backend)
    (row,) = qompose.report(prepared_by(silent, lambda m, x, y: m(x))).rows
    assert (row.state, row.owner) == ("float", "")


def test_an_operator_whose_patterns_do_not_fit_says_which_and_what_stands_there() -> None:
    """Here a batch norm that goes by the statistics of each batch, which cannot be folded."""
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), norm, nn.ReLU())
    report = qompose.report(prepare(export(model, randn(1, 2, 4, 4)), toy(CONV_RELU)))
    reasons = {row.operator: row.reason for row in report.rows}
    assert "fold_batch_norm" in reasons["aten.batch_norm"]
    conv = reasons["aten.conv2d"]
    assert conv.startswith("toy: ") and "conv_relu" in conv and "aten.batch_norm in 1" in conv
    assert not reasons["aten.relu"].startswith("toy")
    assert [note for note in report.notes if "fold_batch_norm" in note]


def test_only_what_no_rule_spoke_of_is_a_near_miss() -> None:
    """The first of the rules that speak of an operator stands for all."""
    again = dataclasses.replace(LINEAR_RELU, name="again")
    model = program(lambda m, x, y: m(x) + (x + 2)).module(check_guards=False)
    found = toy(LINEAR_RELU, again, ADD).bound(model).propose(model, ())
    assert [claim.nodes for claim in found.claims] == [("add_1",)]
    refused = [(rejection.rule, rejection.nodes) for rejection in found.rejections]
    assert refused == [("add", ("add",)), ("linear_relu", ("linear",))]
    assert "again" in found.rejections[1].reason


def test_a_pattern_of_two_values_is_refused() -> None:
    two = rule("two", Pattern(lambda x: (x.sin(), x.cos()), ((2, 3),), ()), activations=("x",))  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="single operator"):
        prepare(export(nn.Tanh(), X), toy(two))


def test_bounds_may_leave_one_number() -> None:
    TensorConstraint(**TENSOR_WISE, quant_min_lower_bound=1, quant_max_upper_bound=1)


LEFT = {torch.ops.aten.matmul.default: "no unit for it", torch.ops.aten.softmax.int: "no table"}


@pytest.mark.parametrize(
    ("choose", "softmax", "matmul"),
    [
        (lambda q: q, "toy: no table", "toy: no unit for it"),
        (lambda q: q.set_module_name("part", None), "module name part", "toy: no unit for it"),
        (lambda q: q.set_global(None).set_module_name("linear", STATIC), "global", "global"),
    ],
    ids=["all", "but a part", "a part"],
)
def test_a_backend_says_why_operators_have_no_rule(choose: Any, softmax: str, matmul: str) -> None:
    quantizer = choose(toy(LINEAR, left_in_float=LEFT))
    layers = {"linear": nn.Linear(3, 3), "part": nn.Softmax(-1)}
    program = export(Model(lambda m, x: m.part(m.linear(x)) @ x.t(), **layers), randn(2, 3))
    reasons = {row.name: row.reason for row in qompose.report(prepare(program, quantizer)).rows}
    assert softmax in reasons["softmax"] and matmul in reasons["matmul"]
    answer = qompose.can_quantize(program, "matmul", quantizer)
    assert not answer and matmul in str(answer)


def test_what_a_rule_says_tells_more_than_that_there_is_none() -> None:
    quantizer = toy(GUARDED, left_in_float={torch.ops.aten.tanh.default: "never"})
    (row,) = qompose.report(prepare(export(nn.Tanh(), randn(2, 3)), quantizer)).rows
    assert row.reason == "toy: it is Tuesday"


@pytest.mark.parametrize("ask", ["node", "tensors"])
def test_a_guard_that_asks_for_a_name_that_no_pattern_has_is_named(ask: str) -> None:
    broken = dataclasses.replace(LINEAR, guard=lambda match: getattr(match, ask)("wieght") and None)
    with pytest.raises(ConfigError, match=r"rule linear.*did you mean 'weight'"):
        prepare(export(nn.Linear(3, 4), randn(2, 3)), toy(broken))
    absent = dataclasses.replace(LINEAR, guard=lambda match: getattr(match, ask)("bias") or None)
    prepare(export(nn.Linear(3, 4, bias=False), randn(2, 3)), toy(absent))


def test_a_guard_that_raises_is_named() -> None:
    def guard(match: qompose.backend.Match) -> str | None:
        raise KeyError("width")

    broken = dataclasses.replace(LINEAR, guard=guard)
    with pytest.raises(MemberError, match=r"toy: .*rule linear.*\(aten.linear\).*KeyError"):
        prepare(export(nn.Linear(3, 4), randn(2, 3)), toy(broken))
