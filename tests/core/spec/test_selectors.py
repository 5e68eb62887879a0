# SPDX-License-Identifier: Apache-2.0
"""Selectors: the most specific one wins, None is float, and a name that is not there is an error."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, RuleQuantizer
from qompose.errors import SelectorError
from torch import Tensor, nn

from tests.core.toy import (
    ADD,
    CONV,
    DYNAMIC,
    LINEAR,
    LINEAR_RELU,
    PER_TENSOR,
    STATIC,
    WEIGHT_ONLY,
    ToyBackend,
    claimed,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

aten = torch.ops.aten
X = randn(4, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


PROGRAM = export(seeded(Net()), X)
PATHS = ("body.0.linear", "body.1.linear", "head")
Setting = Callable[[RuleQuantizer, QuantizationConfig | None], Any]

# Least specific first; each speaks of body.0.linear.
LEVELS: dict[str, Setting] = {
    "global": lambda q, c: q.set_global(c),
    "type": lambda q, c: q.set_module_type(nn.Linear, c),
    "regex": lambda q, c: q.set_module_name_regex(r"body\.\d\.linear", c),
    "filter": lambda q, c: q.set_filter(lambda node: node.name in ("linear", "linear_2"), c),
    "name": lambda q, c: q.set_module_name("body.0.linear", c),
    "subgraph": lambda q, c: q.set_subgraph("body.0", "tanh_1", c),
    "call": lambda q, c: q.set_module_name_object_type_order("body.0", nn.Linear, 0, c),
}
REACHED = {
    "global": PATHS,
    "type": PATHS,
    "regex": PATHS[:2],
    "filter": PATHS[::2],
    "name": PATHS[:1],
    "subgraph": PATHS[:2],
    "call": PATHS[:1],
}


def silent() -> RuleQuantizer:
    return RuleQuantizer(ToyBackend([LINEAR]))


def configs(quantizer: RuleQuantizer) -> dict[str, str]:
    """Module path -> the configuration of its claim."""
    plan = plan_of(prepare(PROGRAM, quantizer))
    return {
        o.module: "float" if o.claim is None else plan.claims[o.claim].config
        for o in plan.operators
        if o.operator == "aten.linear"
    }


@pytest.mark.parametrize("order", [1, -1], ids=["as listed", "set in reverse"])
@pytest.mark.parametrize("value", [None, DYNAMIC], ids=["None", "config"])
@pytest.mark.parametrize(("lower", "higher"), list(itertools.combinations(LEVELS, 2)))
def test_the_more_specific_level_wins(
    lower: str, higher: str, value: QuantizationConfig | None, order: int
) -> None:
    quantizer = silent()
    settings = [(lower, WEIGHT_ONLY), (higher, value)]
    for level, config in settings[::order]:
        LEVELS[level](quantizer, config)
    assert configs(quantizer)["body.0.linear"] == ("float" if value is None else "dynamic")


def test_all_levels_at_once() -> None:
    """Every operator has what the most specific level that reaches it says, however many speak of it."""
    quantizer = silent()
    for number, setting in enumerate(reversed(LEVELS.values())):
        setting(quantizer, dataclasses.replace(DYNAMIC, name=f"level {len(LEVELS) - 1 - number}"))
    expected = [max(i for i, level in enumerate(LEVELS) if p in REACHED[level]) for p in PATHS]
    assert list(configs(quantizer).values()) == [f"level {number}" for number in expected]


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_alone_reaches_what_it_names_and_nothing_else(level: str) -> None:
    quantizer = silent()
    LEVELS[level](quantizer, DYNAMIC)
    assert configs(quantizer) == {
        path: "dynamic" if path in REACHED[level] else "float" for path in PATHS
    }


@pytest.mark.parametrize("level", LEVELS)
def test_the_report_names_the_selector(level: str) -> None:
    quantizer = silent()
    LEVELS[level](quantizer, DYNAMIC)
    row = qompose.report(prepare(PROGRAM, quantizer)).rows[0]
    assert row.selector.startswith(
        {"regex": "module name regex", "name": "module name"}.get(level, level)
    )


@pytest.mark.parametrize("level", LEVELS)
def test_none_is_float_with_a_reason(level: str) -> None:
    quantizer = silent()
    LEVELS[level](quantizer, None)
    row = qompose.report(prepare(PROGRAM, quantizer)).rows[0]
    assert (row.state, row.reason[:20]) == ("float", "toy: left in float b")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(
            [("body", STATIC), ("body.1", None)],
            ["static", "float", "float"],
            id="the longer path wins",
        ),
        pytest.param(
            [("body.1", None), ("body", STATIC)],
            ["static", "float", "float"],
            id="whatever the order",
        ),
        pytest.param(
            [("head", STATIC), ("head", DYNAMIC)],
            ["float", "float", "dynamic"],
            id="the later setting of one name wins",
        ),
    ],
)
def test_names(settings: Any, expected: list[str]) -> None:
    quantizer = silent()
    for name, config in settings:
        quantizer.set_module_name(name, config)
    assert list(configs(quantizer).values()) == expected


@pytest.mark.parametrize(
    ("setter", "first", "second"),
    [
        pytest.param("set_object_type", nn.Linear, aten.linear.default, id="types"),
        pytest.param("set_filter", lambda node: True, lambda node: node.name < "m", id="filters"),
    ],
)
def test_within_a_level_the_later_setting_wins(setter: str, first: Any, second: Any) -> None:
    for one, other in ((first, second), (second, first)):
        quantizer = silent()
        getattr(quantizer, setter)(one, WEIGHT_ONLY)
        getattr(quantizer, setter)(other, DYNAMIC)
        assert configs(quantizer)["body.0.linear"] == "dynamic"
        getattr(quantizer, setter)(one, PER_TENSOR)
        assert configs(quantizer)["body.0.linear"] == "per tensor"


def test_of_regular_expressions_the_first_wins_as_in_a_qconfig_mapping() -> None:
    quantizer = silent()
    quantizer.set_module_name_regex(r"body.*linear", WEIGHT_ONLY).set_module_name_regex(
        "body.*", DYNAMIC
    )
    assert configs(quantizer)["body.0.linear"] == "weight-only"
    quantizer.set_module_name_regex("body.*", STATIC)
    assert configs(quantizer)["body.0.linear"] == "weight-only"
    quantizer.set_module_name_regex(r"body.*linear", PER_TENSOR)  # it keeps its place
    assert configs(quantizer)["body.0.linear"] == "per tensor"


@pytest.mark.parametrize(
    ("key", "reached"),
    [
        pytest.param(Block, PATHS[:2], id="a module around the operator"),
        pytest.param(nn.Linear, PATHS, id="the module itself"),
        pytest.param(aten.linear.default, PATHS, id="an overload"),
        pytest.param(aten.linear, PATHS, id="an operator"),
        pytest.param(nn.functional.linear, PATHS, id="a function"),
        pytest.param(aten.tanh.default, (), id="another operator"),
        pytest.param(torch.tanh, (), id="another function"),
    ],
)
def test_types(key: Any, reached: tuple[str, ...]) -> None:
    quantizer = silent().set_object_type(key, DYNAMIC)
    assert [path for path, config in configs(quantizer).items() if config != "float"] == list(
        reached
    )


@pytest.mark.parametrize(
    ("regex", "reached"),
    [
        pytest.param("body", PATHS[:2], id="a module around the operators"),
        pytest.param(r"body\.1", PATHS[1:2], id="a module inside"),
        pytest.param("bod", (), id="a part of a path"),
        pytest.param("linear", (), id="the end of a path"),
        pytest.param(".*", PATHS, id="everything"),
        pytest.param(r"body\.", PATHS[:2], id="up to a dot, as in a qconfig mapping"),
        pytest.param(r"(?!body\.0).*", PATHS[1:], id="looking ahead"),
        pytest.param(r"(?i)BODY\.0", PATHS[:1], id="flags"),
        pytest.param(r"head|body\.1", PATHS[1:], id="alternatives"),
        pytest.param(r".*linear$", PATHS[:2], id="an end"),
        pytest.param("", (), id="nothing"),
    ],
)
def test_a_regex_matches_up_to_the_end_of_a_modules_name(
    regex: str, reached: tuple[str, ...]
) -> None:
    found = configs(silent().set_module_name_regex(regex, DYNAMIC))
    assert tuple(path for path, config in found.items() if config != "float") == reached


def test_a_filter_function_narrows_everything() -> None:
    quantizer = silent().set_global(DYNAMIC).set_module_name("body.0", STATIC)
    quantizer.set_filter_function(lambda node: node.name == "linear_1")
    assert list(configs(quantizer).values()) == ["float", "dynamic", "float"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("body.0.lineer", "did you mean 'body.0.linear'"),
        ("heed", "did you mean 'head'"),
        ("something.else.entirely", "names no module"),
        ("body.2", "did you mean"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_with_near_names(name: str, near: str) -> None:
    quantizer = silent().set_global(STATIC).set_module_name(name, None)
    with pytest.raises(SelectorError) as caught:
        prepare(PROGRAM, quantizer)
    assert repr(name) in str(caught.value)
    assert near in str(caught.value)
    assert str(caught.value).startswith("toy: ")


@pytest.mark.parametrize(
    ("setting", "note"),
    [
        pytest.param(
            lambda q: q.set_module_name_regex("tail.*", STATIC), "'tail.*' matches no", id="regex"
        ),
        pytest.param(
            lambda q: q.set_object_type(nn.Conv2d, STATIC),
            "Conv2d occurs nowhere",
            id="module type",
        ),
        pytest.param(
            lambda q: q.set_object_type(aten.conv2d, None),
            "aten.conv2d occurs nowhere",
            id="operator",
        ),
    ],
)
def test_what_else_matches_nothing_is_a_note(setting: Any, note: str) -> None:
    quantizer = silent().set_global(STATIC)
    setting(quantizer)
    (line,) = qompose.report(prepare(PROGRAM, quantizer)).notes
    assert line.startswith("toy: ")
    assert note in line


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        pytest.param(lambda q: q.set_module_name_regex("(", STATIC), "regular expr", id="regex"),
        pytest.param(lambda q: q.set_module_name_regex(b"x", STATIC), "as a string", id="bytes"),
        pytest.param(lambda q: q.set_subgraph(3, "head", STATIC), "one at least", id="number"),
        pytest.param(lambda q: q.set_object_type("linear", STATIC), "neither", id="a string"),
        pytest.param(lambda q: q.set_object_type(int, STATIC), "neither", id="no module"),
        pytest.param(
            lambda q: q.set_object_type(len, STATIC),
            "expected a function of torch",
            id="not torch's",
        ),
        pytest.param(
            lambda q: q.set_object_type(nn.functional.normalize, STATIC),
            "no single aten operator",
            id="no single operator",
        ),
        pytest.param(
            lambda q: q.set_module_type(aten.linear, STATIC), "expected a torch.nn.Module", id="op"
        ),
        pytest.param(
            lambda q: q.set_operator_type(nn.Linear, STATIC), "expected an operator", id="module"
        ),
        pytest.param(lambda q: q.set_module_name("", STATIC), "set_global is for", id="empty name"),
        pytest.param(lambda q: q.set_filter("linear", STATIC), "a function of a node", id="filter"),
        pytest.param(
            lambda q: q.set_filter_function(None), "a function of a node", id="filter function"
        ),
        pytest.param(lambda q: q.set_subgraph([], "head", STATIC), "one at least", id="subgraph"),
        pytest.param(
            lambda q: q.set_module_name_object_type_order("body", nn.Linear, -1, STATIC),
            "must be the number of a call",
            id="negative call",
        ),
    ],
)
def test_senseless_selectors_are_refused_when_they_are_set(setting: Any, message: str) -> None:
    with pytest.raises(SelectorError, match=message):
        setting(silent())


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) + 1.0


@pytest.mark.parametrize(
    ("act", "expected", "reason"),
    [
        pytest.param(STATIC, {"linear_relu": ("linear", "relu")}, "", id="the same"),
        pytest.param(None, {"linear": ("linear",)}, "module name act gives relu float", id="float"),
        pytest.param(
            PER_TENSOR,
            {"linear": ("linear",)},
            "module name act gives relu per tensor",
            id="another",
        ),
    ],
)
def test_the_anchor_decides_and_another_members_config_blocks(
    act: Any, expected: Any, reason: str
) -> None:
    quantizer = toy(LINEAR_RELU, LINEAR, ADD).set_module_name("act", act)
    prepared = prepare(export(seeded(Fused()), X), quantizer)
    assert claimed(prepared) == expected
    row = next(row for row in qompose.report(prepared).rows if row.name == "relu")
    assert reason in row.reason


@pytest.mark.parametrize("select", [
    lambda q: q.set_module_name("norm", None),
    lambda q: q.set_module_type(nn.BatchNorm2d, None),
], ids=["name", "type"])  # fmt: skip
def test_a_selector_on_a_batch_norm_keeps_it_from_being_folded(select: Any) -> None:
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(2, 3, 1))
    model.add_module("norm", nn.BatchNorm2d(3))
    x = torch.randn(2, 2, 4, 4)
    quantizer = qompose.ComposableQuantizer([select(toy(CONV))])
    report = qompose.report(prepare(export(model.eval(), x), quantizer))
    assert {row.operator: row.state for row in report.rows} == {
        "aten.conv2d": "observed",
        "aten.batch_norm": "float",
    }
    assert not report.rewrites
    assert any("was not made" in note and "wants float" in note for note in report.notes)
