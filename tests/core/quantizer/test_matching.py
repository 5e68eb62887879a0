# SPDX-License-Identifier: Apache-2.0
"""From matches to claims: what is specified where, and a reason for every match that is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.backend import OperatorPattern, TensorConstraint
from qompose.errors import MemberError
from qompose.spec.claim import Point
from torch import Tensor, nn
from torch.nn import functional as F

from tests.core.toy import (
    ADD,
    CAT,
    CONV_RELU,
    DYNAMIC,
    INT8,
    LINEAR,
    LINEAR_PATTERN,
    LINEAR_RELU,
    PER_TENSOR,
    RELU,
    STATIC,
    UINT8,
    WEIGHT,
    WEIGHT_ONLY,
    claimed,
    export,
    groups_of,
    plan_of,
    prepare,
    randn,
    rule,
    seeded,
    toy,
)

aten = torch.ops.aten


class Calls(nn.Module):
    """`function(linear, x, y)`."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self.linear, x, y)


X, Y = randn(2, 3), randn(2, 3, seed=1)
IDS = torch.tensor([[1, 2, 0], [0, 1, 2]])
GUARDED = rule(
    "guarded", OperatorPattern((aten.tanh.default,)), activations=("self",),
    guard=lambda match: "it is Tuesday" if match.node("self") is not None else None,
)  # fmt: skip
NARROW = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_tensor_affine}),
    quant_min_lower_bound=-127,
)
CONSTRAINED = rule(
    "constrained", OperatorPattern((aten.tanh.default,)), activations=("self",),
    accepts={"activation": NARROW},
)  # fmt: skip
STATIC_ONLY = rule(
    "static_only", OperatorPattern((aten.tanh.default,)), activations=("self",),
    modes=frozenset({"static"}),
)  # fmt: skip
TANH = rule("tanh", OperatorPattern((aten.tanh.default,)), activations=("self",))

REASONS = [
    pytest.param(
        ADD, STATIC, lambda m, x, y: x + 2, "add", "other is a number, not a tensor", id="a number"
    ),
    pytest.param(
        ADD, STATIC, lambda m, x, y: x + y.long(), "add", "other (to) is int64", id="integers"
    ),
    pytest.param(
        CAT, STATIC, lambda m, x, y: torch.cat([x, y > 0]).float(), "cat", "(gt) is bool",
        id="booleans in a list",
    ),
    pytest.param(
        LINEAR, STATIC, lambda m, x, y: F.linear(x, y * 2), "linear",
        "weight is computed, not a parameter", id="a computed weight",
    ),
    pytest.param(
        LINEAR, STATIC, lambda m, x, y: F.linear(x, y), "linear",
        "weight is computed, not a parameter", id="an input for a weight",
    ),
    pytest.param(GUARDED, STATIC, lambda m, x, y: x.tanh(), "tanh", "it is Tuesday", id="a guard"),
    pytest.param(
        CONSTRAINED, STATIC, lambda m, x, y: x.tanh(), "tanh",
        "quant_min=-128, below the bound -127", id="a constraint",
    ),
    pytest.param(
        STATIC_ONLY, DYNAMIC, lambda m, x, y: x.tanh(), "tanh",
        "rule static_only has no dynamic form", id="a mode",
    ),
    pytest.param(
        TANH, WEIGHT_ONLY, lambda m, x, y: x.tanh(), "tanh",
        "weight-only leaves every role of rule tanh in float", id="no role",
    ),
    pytest.param(
        LINEAR, QuantizationConfig(INT8, INT8, None, name="bare"), lambda m, x, y: m(x), "linear",
        "bare leaves the weight of rule linear in float, and it has no activation-only form", id="no weight",
    ),
    pytest.param(
        CAT, STATIC, lambda m, x, y: torch.cat([x, y]), "cat", "its input is not quantized",
        id="a condition",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "config", "function", "operator", "reason"), REASONS)
def test_a_refused_match_has_a_reason(
    row: Any, config: Any, function: Any, operator: str, reason: str
) -> None:
    """Another rule accepts the configuration, so that it may be set at all."""
    accepting = rule("accepting", OperatorPattern((aten.erf.default,)), activations=("self",))
    other = rule(
        "weights", OperatorPattern((aten.embedding.default,)), activations=(), weight="weight"
    )
    program = export(Calls(function), X, Y)
    prepared = prepare(program, toy(row, accepting, other, config=config))
    assert claimed(prepared) == {}
    found = {row.name: row.reason for row in qompose.report(prepared).rows}
    assert found[operator].startswith("toy: ")
    assert reason in found[operator]


def test_the_first_reason_in_order_of_the_rules_is_the_one_reported() -> None:
    prepared = prepare(
        export(Calls(lambda m, x, y: x.tanh()), X, Y), toy(GUARDED, CONSTRAINED, ADD)
    )
    (row,) = qompose.report(prepared).rows
    assert row.reason == "toy: it is Tuesday"


def test_a_refused_fusion_leaves_no_reason_on_what_a_shorter_rule_took() -> None:
    program = export(Calls(lambda m, x, y: m(x).relu()), X, Y)
    quantizer = toy(LINEAR_RELU, LINEAR).set_object_type(aten.relu.default, None)
    rows = {row.name: row for row in qompose.report(prepare(program, quantizer)).rows}
    assert (rows["linear"].rule, rows["linear"].reason) == ("linear", "")
    assert "relu float" in rows["relu"].reason or "left in float" in rows["relu"].reason


@pytest.mark.parametrize(
    ("row", "config", "function", "expected"),
    [
        pytest.param(
            LINEAR, STATIC, lambda m, x, y: m(x),
            [{"x -> linear"}, {"linear_weight -> linear"}, {"output of linear"}], id="static",
        ),
        pytest.param(
            LINEAR, DYNAMIC, lambda m, x, y: m(x), [{"x -> linear"}, {"linear_weight -> linear"}],
            id="dynamic",
        ),
        pytest.param(
            LINEAR, WEIGHT_ONLY, lambda m, x, y: m(x), [{"linear_weight -> linear"}],
            id="weight-only",
        ),
        pytest.param(
            ADD, STATIC, lambda m, x, y: x + x, [{"x -> add"}, {"output of add"}],
            id="one tensor twice",
        ),
        pytest.param(
            ADD, STATIC, lambda m, x, y: x + y, [{"x -> add"}, {"y -> add"}, {"output of add"}],
            id="two tensors",
        ),
        pytest.param(
            rule("linear", *LINEAR.patterns, anchor="op", weight="weight", output=False), STATIC,
            lambda m, x, y: m(x), [{"x -> linear"}, {"linear_weight -> linear"}],
            id="no output",
        ),
        pytest.param(
            rule("max", OperatorPattern((aten.maximum.default,)), activations=("self", "other"),
                 shares=True), STATIC, lambda m, x, y: torch.maximum(x, y),
            [{"x -> maximum", "y -> maximum", "output of maximum"}], id="all shared",
        ),
        pytest.param(
            rule("max", OperatorPattern((aten.maximum.default,)), activations=("self", "other"),
                 shares=True), STATIC, lambda m, x, y: torch.maximum(x, x),
            [{"x -> maximum", "output of maximum"}], id="all shared, one tensor twice",
        ),
        pytest.param(
            rule("cat", *CAT.patterns, activations=("tensors",), shares=True), STATIC,
            lambda m, x, y: torch.cat([x, y, x]), [{"x -> cat", "y -> cat", "output of cat"}],
            id="a list with one tensor twice",
        ),
    ],
)  # fmt: skip
def test_specifications(row: Any, config: Any, function: Any, expected: Any) -> None:
    prepared = prepare(export(Calls(function), X, Y), toy(row, config=config))
    assert groups_of(prepared) == set(map(frozenset, expected))


def test_each_role_gets_its_own_specification() -> None:
    config = QuantizationConfig(INT8, UINT8, WEIGHT)
    prepared = prepare(export(Calls(lambda m, x, y: m(x)), X, Y), toy(LINEAR, config=config))
    assert {group.points[0]: group.spec for group in plan_of(prepared).groups} == {
        Point("x", "linear"): INT8,
        Point("linear_weight", "linear"): WEIGHT,
        Point("linear"): UINT8,
    }


def test_a_claim_says_all_that_a_kernel_and_a_report_need() -> None:
    prepared = prepare(export(Calls(lambda m, x, y: m(x).relu()), X, Y), toy(LINEAR_RELU))
    (claim,) = plan_of(prepared).claims
    assert (claim.owner, claim.rule, claim.anchor, claim.output) == (
        "toy", "linear_relu", "linear", "relu",
    )  # fmt: skip
    assert (claim.config, claim.selector, claim.mode) == ("static", "global", "static")
    assert dict(claim.captures)["op"] == "linear"
    roles = {(operand.role, operand.user, operand.position) for operand in claim.operands}
    assert {("input", "linear", (0,)), ("weight", "linear", (1,))} <= roles


def test_integer_inputs_are_never_specified() -> None:
    everything = rule("embedding", OperatorPattern((aten.embedding.default,)), activations=(),
                      weight="weight")  # fmt: skip
    model = nn.Sequential(nn.Embedding(3, 4))
    prepared = prepare(export(model, IDS), toy(everything, ADD))
    assert groups_of(prepared) == {
        frozenset({"_0_weight -> embedding"}), frozenset({"output of embedding"}),
    }  # fmt: skip
    assert torch.equal(prepared(IDS), model(IDS))


def test_a_configuration_that_no_rule_can_follow_is_refused_when_it_is_set() -> None:
    with pytest.raises(qompose.errors.ConfigError) as caught:
        toy(CONSTRAINED, config=STATIC)
    text = str(caught.value)
    assert "'toy' cannot follow static" in text
    assert "quant_min=-128, below the bound -127" in text
    toy(CONSTRAINED, RELU, config=STATIC)  # one rule that can is enough
    with pytest.raises(qompose.errors.ConfigError, match="no dynamic form"):
        toy(STATIC_ONLY, config=DYNAMIC)
    with pytest.raises(qompose.errors.ConfigError) as caught:
        again = dataclasses.replace(STATIC_ONLY, name="again")
        picky = dataclasses.replace(CONSTRAINED, modes=frozenset({"dynamic"}))
        toy(STATIC_ONLY, again, picky, config=DYNAMIC)
    _, why, others = str(caught.value).splitlines()
    assert "(rule constrained, " in why
    assert others == "  - 2 other rules have no dynamic form"


def test_without_a_selector_nothing_is_claimed_and_nothing_refused() -> None:
    silent = qompose.RuleQuantizer(toy(LINEAR).backend)
    prepared = prepare(export(Calls(lambda m, x, y: m(x)), X, Y), silent)
    (row,) = qompose.report(prepared).rows
    assert (row.state, row.owner) == ("float", "")
    assert "no selector gives it a configuration" in row.reason


def test_two_configurations_on_two_modules() -> None:
    model = seeded(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    prepared = prepare(export(model, X), toy(LINEAR).set_module_name("2", PER_TENSOR))
    assert [claim.config for claim in plan_of(prepared).claims] == ["static", "per tensor"]


def _normed(eps_only: bool) -> nn.Module:
    """A convolution, a batch norm and a relu; the norm has statistics of its own, or those of each batch."""
    norm = nn.BatchNorm2d(3, track_running_stats=not eps_only)
    return nn.Sequential(nn.Conv2d(2, 3, 1), norm, nn.ReLU())


def test_a_batch_norm_that_can_be_folded_leaves_the_shorter_pattern() -> None:
    prepared = prepare(export(_normed(False), randn(1, 2, 4, 4)), toy(CONV_RELU))
    assert claimed(prepared) == {"conv_relu": ("conv2d", "relu")}
    assert qompose.report(prepared).rewrites == ("fold_batch_norm: conv2d, batch_norm",)


def test_an_operator_whose_patterns_do_not_fit_says_which_and_what_stands_there() -> None:
    report = qompose.report(prepare(export(_normed(True), randn(1, 2, 4, 4)), toy(CONV_RELU)))
    reasons = {row.operator: row.reason for row in report.rows}
    assert reasons.pop("aten.batch_norm").startswith("fold_batch_norm was not made: ")
    assert reasons == {
        "aten.conv2d": "toy: no pattern of conv_relu fits here, where its value goes to "
        "batch_norm (aten.batch_norm in 1)",
        "aten.relu": "no rule claims it",
    }
    (note,) = (note for note in report.notes if "fold_batch_norm" in note)
    assert "was not made" in note


class Heads(nn.Module):
    """A product of two activations behind a linear, and one in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(3, 3), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.linear(x)) @ x.t()


LEFT = {torch.ops.aten.matmul.default: "no unit for it", torch.ops.aten.softmax.int: "no table"}


@pytest.mark.parametrize(
    ("choose", "softmax", "matmul"),
    [
        (lambda q: q, "toy: no table", "toy: no unit for it"),
        (
            lambda q: q.set_module_name("part", None),
            "toy: left in float by module name part",
            "toy: no unit for it",
        ),
        (
            lambda q: q.set_global(None).set_module_name("linear", STATIC),
            "toy: left in float by global",
            "toy: left in float by global",
        ),
    ],
    ids=["all", "but a part", "a part"],
)
def test_a_backend_says_why_operators_have_no_rule(choose: Any, softmax: str, matmul: str) -> None:
    quantizer = choose(toy(LINEAR, left_in_float=LEFT))
    program = export(Heads(), randn(2, 3))
    reasons = {row.name: row.reason for row in qompose.report(prepare(program, quantizer)).rows}
    assert (reasons["softmax"], reasons["matmul"]) == (softmax, matmul)
    answer = qompose.can_quantize(program, "matmul", quantizer)
    assert not answer and str(answer).endswith(f"no: {matmul}")


def test_what_a_rule_says_tells_more_than_that_there_is_none() -> None:
    quantizer = toy(GUARDED, left_in_float={torch.ops.aten.tanh.default: "never"})
    (row,) = qompose.report(prepare(export(nn.Tanh(), randn(2, 3)), quantizer)).rows
    assert row.reason == "toy: it is Tuesday"


def test_a_missing_variant_is_named() -> None:
    """A layer without bias, and a rule that has only the pattern with one, anchored at its output."""
    biased = rule("linear", LINEAR_PATTERN, weight="weight")
    report = qompose.report(prepare(export(nn.Linear(3, 4, bias=False), randn(2, 3)), toy(biased)))
    assert "no pattern of linear fits here, where its value goes to output" in report.rows[0].reason


def test_a_guard_that_raises_is_named() -> None:
    def guard(match: qompose.backend.Match) -> str | None:
        raise KeyError("width")

    broken = dataclasses.replace(LINEAR, guard=guard)
    message = (
        r"toy: .*guard of rule linear, asked about linear \(aten.linear\), raised KeyError: 'width'"
    )
    with pytest.raises(MemberError, match=message):
        prepare(export(nn.Linear(3, 4), randn(2, 3)), toy(broken))
