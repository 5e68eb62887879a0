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
from qompose.errors import ConfigError, MemberError
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
    LINEAR_RELU,
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
        ADD, STATIC, lambda m, x, y: x + 2, "add", "other", id="a number"
    ),
    pytest.param(
        ADD, STATIC, lambda m, x, y: x + y.long(), "add", "other (to)", id="integers"
    ),
    pytest.param(
        CAT, STATIC, lambda m, x, y: torch.cat([x, y > 0]).float(), "cat", "(gt) is bool",
        id="booleans in a list",
    ),
    pytest.param(
        LINEAR, STATIC, lambda m, x, y: F.linear(x, y * 2), "linear",
        "weight", id="a computed weight",
    ),
    pytest.param(
        LINEAR, STATIC, lambda m, x, y: F.linear(x, y), "linear",
        "weight", id="an input for a weight",
    ),
    pytest.param(GUARDED, STATIC, lambda m, x, y: x.tanh(), "tanh", "it is Tuesday", id="a guard"),
    pytest.param(
        CONSTRAINED, STATIC, lambda m, x, y: x.tanh(), "tanh",
        "quant_min=-128", id="a constraint",
    ),
    pytest.param(
        STATIC_ONLY, DYNAMIC, lambda m, x, y: x.tanh(), "tanh",
        "static_only", id="a mode",
    ),
    pytest.param(
        TANH, WEIGHT_ONLY, lambda m, x, y: x.tanh(), "tanh",
        "rule tanh", id="no role",
    ),
    pytest.param(
        LINEAR, QuantizationConfig(INT8, INT8, None, name="bare"), lambda m, x, y: m(x), "linear",
        "activation-only", id="no weight",
    ),
    pytest.param(
        CAT, STATIC, lambda m, x, y: torch.cat([x, y]), "cat", "input",
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
    assert "relu" in rows["relu"].reason


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


def test_without_a_selector_nothing_is_claimed_and_nothing_refused() -> None:
    silent = qompose.RuleQuantizer(toy(LINEAR).backend)
    prepared = prepare(export(Calls(lambda m, x, y: m(x)), X, Y), silent)
    (row,) = qompose.report(prepared).rows
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
        (lambda q: q.set_module_name("part", None), "module name part", "toy: no unit for it"),
        (lambda q: q.set_global(None).set_module_name("linear", STATIC), "global", "global"),
    ],
    ids=["all", "but a part", "a part"],
)
def test_a_backend_says_why_operators_have_no_rule(choose: Any, softmax: str, matmul: str) -> None:
    quantizer = choose(toy(LINEAR, left_in_float=LEFT))
    program = export(Heads(), randn(2, 3))
    reasons = {row.name: row.reason for row in qompose.report(prepare(program, quantizer)).rows}
    assert softmax in reasons["softmax"] and matmul in reasons["matmul"]
    answer = qompose.can_quantize(program, "matmul", quantizer)
    assert not answer and matmul in str(answer)


def test_what_a_rule_says_tells_more_than_that_there_is_none() -> None:
    quantizer = toy(GUARDED, left_in_float={torch.ops.aten.tanh.default: "never"})
    (row,) = qompose.report(prepare(export(nn.Tanh(), randn(2, 3)), quantizer)).rows
    assert row.reason == "toy: it is Tuesday"


def test_a_guard_that_raises_is_named() -> None:
    def guard(match: qompose.backend.Match) -> str | None:
        raise KeyError("width")

    broken = dataclasses.replace(LINEAR, guard=guard)
    with pytest.raises(MemberError, match=r"toy: .*rule linear.*\(aten.linear\).*KeyError"):
        prepare(export(nn.Linear(3, 4), randn(2, 3)), toy(broken))
