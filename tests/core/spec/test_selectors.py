# SPDX-License-Identifier: Apache-2.0
"""Selectors: the most specific one wins, None is float, and a name that is not there is an error."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, RuleQuantizer
from qompose.errors import SelectorError
from torch import nn

from tests.core.toy import (
    DYNAMIC,
    LINEAR,
    LINEAR_RELU,
    PER_TENSOR,
    STATIC,
    WEIGHT_ONLY,
    Model,
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


class Block(Model):
    def __init__(self) -> None:
        super().__init__(lambda self, x: torch.tanh(self.linear(x)), linear=nn.Linear(3, 3))


BODY = nn.Sequential(Block(), Block())
NET = Model(lambda self, x: self.head(self.body(x)), body=BODY, head=nn.Linear(3, 2))
PROGRAM = export(seeded(NET), X)
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
REACHED = dict(
    zip(LEVELS, (PATHS, PATHS, PATHS[:2], PATHS[::2], PATHS[:1], PATHS[:2], PATHS[:1]), strict=True)
)


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


NEIGHBOURS = [*itertools.pairwise(LEVELS)]
FURTHER = [p for p in itertools.combinations(LEVELS, 2) if p not in NEIGHBOURS]


@pytest.mark.parametrize("value", [None, DYNAMIC], ids=["None", "config"])
@pytest.mark.parametrize(
    ("lower", "higher"),
    [*NEIGHBOURS, *(pytest.param(*pair, marks=pytest.mark.full) for pair in FURTHER)],
)
def test_the_more_specific_level_wins(
    lower: str, higher: str, value: QuantizationConfig | None
) -> None:
    settings = [(lower, WEIGHT_ONLY), (higher, value)]
    for order in (1, -1):
        quantizer = silent()
        for level, config in settings[::order]:
            LEVELS[level](quantizer, config)
        assert configs(quantizer)["body.0.linear"] == ("float" if value is None else "dynamic")


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_alone_reaches_what_it_names_and_nothing_else(level: str) -> None:
    quantizer = silent()
    LEVELS[level](quantizer, DYNAMIC)
    assert configs(quantizer) == {
        path: "dynamic" if path in REACHED[level] else "float" for path in PATHS
    }
    row = qompose.report(prepare(PROGRAM, quantizer)).rows[0]
    assert row.selector.startswith(
        {"regex": "module name regex", "name": "module name"}.get(level, level)
    )


EVERY: Callable[[Any], bool] = lambda node: True  # noqa: E731
FEW: Callable[[Any], bool] = lambda node: node.name < "m"  # noqa: E731
OVERLOAD = aten.linear.default
SEQUENCES: dict[str, tuple[str, list[tuple[Any, Any, str]]]] = {
    "the longer name": ("module_name", [("body", STATIC, "static"), ("body.0", None, "float")]),
    "the longer name, first": (
        "module_name", [("body.0", WEIGHT_ONLY, "weight-only"), ("body", STATIC, "weight-only")]
    ),
    "the later of one name": (
        "module_name", [("body.0", STATIC, "static"), ("body.0", DYNAMIC, "dynamic")]
    ),
    "the later type": (
        "object_type",
        [(nn.Linear, WEIGHT_ONLY, "weight-only"), (OVERLOAD, DYNAMIC, "dynamic"),
         (nn.Linear, PER_TENSOR, "per tensor")],
    ),
    "the later filter": (
        "filter",
        [(EVERY, WEIGHT_ONLY, "weight-only"), (FEW, DYNAMIC, "dynamic"), (EVERY, PER_TENSOR, "per tensor")],
    ),
}  # fmt: skip
"""Settings of one level, with the configuration that body.0.linear has after each."""


@pytest.mark.parametrize(("setter", "settings"), SEQUENCES.values(), ids=SEQUENCES)
def test_within_a_level(setter: str, settings: list[tuple[Any, Any, str]]) -> None:
    quantizer = silent()
    for key, config, expected in settings:
        getattr(quantizer, f"set_{setter}")(key, config)
        assert configs(quantizer)["body.0.linear"] == expected


def test_of_regular_expressions_the_first_wins_as_in_a_qconfig_mapping() -> None:
    quantizer = silent()
    for regex, config, expected in (
        ("body.*linear", WEIGHT_ONLY, "weight-only"),
        ("body.*", DYNAMIC, "weight-only"),
        ("body.*", STATIC, "weight-only"),
        ("body.*linear", PER_TENSOR, "per tensor"),  # it keeps its place
    ):
        quantizer.set_module_name_regex(regex, config)
        assert configs(quantizer)["body.0.linear"] == expected


def reached_by(quantizer: RuleQuantizer) -> tuple[str, ...]:
    return tuple(path for path, config in configs(quantizer).items() if config != "float")


@pytest.mark.parametrize(
    ("key", "reached"),
    [
        (Block, PATHS[:2]), (aten.linear.default, PATHS), (aten.linear, PATHS), (nn.functional.linear, PATHS),
        (aten.tanh.default, ()), (torch.tanh, ()),
    ],
    ids=["around", "overload", "operator", "function", "another operator", "another function"],
)  # fmt: skip
def test_types(key: Any, reached: tuple[str, ...]) -> None:
    assert reached_by(silent().set_object_type(key, DYNAMIC)) == reached


@pytest.mark.parametrize(
    ("regex", "reached"),
    [
        ("body", PATHS[:2]),
        (r"body\.1", PATHS[1:2]),
        ("bod", ()),
        ("linear", ()),
        (".*", PATHS),
        (r"body\.", PATHS[:2]),  # as in a qconfig mapping
        (r"(?!body\.0).*", PATHS[1:]),
        (r"(?i)BODY\.0", PATHS[:1]),
        (r"head|body\.1", PATHS[1:]),
        (r".*linear$", PATHS[:2]),
        ("", ()),
    ],
)
def test_a_regex_matches_up_to_the_end_of_a_modules_name(
    regex: str, reached: tuple[str, ...]
) -> None:
    assert reached_by(silent().set_module_name_regex(regex, DYNAMIC)) == reached


def test_a_filter_function_narrows_everything() -> None:
    quantizer = silent().set_global(DYNAMIC).set_module_name("body.0", STATIC)
    quantizer.set_filter_function(lambda node: node.name == "linear_1")
    assert list(configs(quantizer).values()) == ["float", "dynamic", "float"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("body.0.lineer", "'body.0.linear'"),
        ("heed", "'head'"),
        ("something.else.entirely", ""),
        ("body.2", "'body.0'"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_with_near_names(name: str, near: str) -> None:
    quantizer = silent().set_global(STATIC).set_module_name(name, None)
    with pytest.raises(SelectorError) as caught:
        prepare(PROGRAM, quantizer)
    assert repr(name) in str(caught.value)
    assert near in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "note"),
    [
        (lambda q: q.set_module_name_regex("tail.*", STATIC), "'tail.*'"),
        (lambda q: q.set_object_type(nn.Conv2d, STATIC), "Conv2d"),
        (lambda q: q.set_object_type(aten.conv2d, None), "aten.conv2d"),
    ],
    ids=["regex", "module type", "operator"],
)
def test_what_else_matches_nothing_is_a_note(setting: Any, note: str) -> None:
    quantizer = silent().set_global(STATIC)
    setting(quantizer)
    (line,) = qompose.report(prepare(PROGRAM, quantizer)).notes
    assert line.startswith("toy: ")
    assert note in line


@pytest.mark.parametrize(
    "setting",
    [
        lambda q: q.set_module_name_regex("(", STATIC),
        lambda q: q.set_module_name_regex(b"x", STATIC),
        lambda q: q.set_subgraph(3, "head", STATIC),
        lambda q: q.set_subgraph([], "head", STATIC),
        lambda q: q.set_object_type("linear", STATIC),
        lambda q: q.set_object_type(int, STATIC),
        lambda q: q.set_object_type(len, STATIC),
        lambda q: q.set_object_type(nn.functional.normalize, STATIC),
        lambda q: q.set_module_type(aten.linear, STATIC),
        lambda q: q.set_operator_type(nn.Linear, STATIC),
        lambda q: q.set_module_name("", STATIC),
        lambda q: q.set_filter("linear", STATIC),
        lambda q: q.set_filter_function(None),
        lambda q: q.set_module_name_object_type_order("body", nn.Linear, -1, STATIC),
        lambda q: q.set_module_name_object_type_order(None, nn.Linear, 0, STATIC),
    ],
)
def test_senseless_selectors_are_refused_when_they_are_set(setting: Any) -> None:
    with pytest.raises(SelectorError):
        setting(silent())


@pytest.mark.parametrize(
    ("act", "expected", "named"),
    [
        (STATIC, {"linear_relu": ("linear", "relu")}, ""),
        (None, {"linear": ("linear",)}, "module name act"),
        (PER_TENSOR, {"linear": ("linear",)}, "module name act"),
    ],
    ids=["the same", "float", "another"],
)
def test_the_anchor_decides_and_another_members_config_blocks(
    act: Any, expected: Any, named: str
) -> None:
    model = nn.Sequential(OrderedDict(linear=nn.Linear(3, 3), act=nn.ReLU()))
    quantizer = toy(LINEAR_RELU, LINEAR).set_module_name("act", act)
    prepared = prepare(export(seeded(model), X), quantizer)
    assert claimed(prepared) == expected
    row = next(row for row in qompose.report(prepared).rows if row.name == "relu")
    assert named in row.reason
