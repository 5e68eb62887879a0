# SPDX-License-Identifier: Apache-2.0
"""The order of members that do not compete changes nothing, however the work is divided among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import Quantizer
from qompose.spec import qdq
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import (
    ADD,
    ADD_RELU,
    CAT,
    CONV,
    CONV_ADD_RELU,
    CONV_RELU,
    DYNAMIC,
    LINEAR,
    LINEAR_RELU,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    VIEW,
    Model,
    convert,
    export,
    graph_text,
    prepare,
    randn,
    seeded,
    toy,
)
from tests.counting import check

# Rules of two families never want the same operator, so that members of whole families are disjoint.
FAMILIES = (
    (CONV_ADD_RELU, CONV_RELU, CONV, ADD_RELU, ADD),
    (LINEAR_RELU, LINEAR),
    (SIGMOID,),
    (VIEW,),
    (CAT,),
)


def mixed(m: Any, x: Tensor) -> Tensor:
    """Every family, next to every other."""
    y = torch.relu(m.one(x))
    y = torch.relu(m.two(y) + y)
    z = torch.sigmoid(y.reshape(-1, 16))
    w = m.flat(z).relu()
    return m.last(torch.cat([w, torch.sigmoid(w)], 1)) + 1


def branches(m: Any, x: Tensor) -> Tensor:
    y = torch.cond(x.sum() > 0, lambda x: torch.sigmoid(m.yes(x)), lambda x: m.no(x).relu(), (x,))
    return torch.cat([y.view(-1, 2), y.view(-1, 2)], 1)


INPUTS = {mixed: randn(3, 2, 2, 2), branches: randn(3, 4)}
LAYERS = {
    mixed: lambda: {
        "one": nn.Conv2d(2, 4, 1), "two": nn.Conv2d(4, 4, 1),
        "flat": nn.Linear(16, 8), "last": nn.Linear(16, 3),
    },
    branches: lambda: {"yes": nn.Linear(4, 4), "no": nn.Linear(4, 4)},
}  # fmt: skip
Function = Callable[..., Tensor]


@cache
def program(kind: Function) -> torch.export.ExportedProgram:
    return export(seeded(Model(kind, **LAYERS[kind]())), INPUTS[kind])


def rows(model: GraphModule) -> list[tuple[Any, ...]]:
    """What became of every operator; who took it, or says why not, has a name of his own in each test."""
    left_out = ("owner", "reason")
    names = [n for n in qompose.reporting.Row.__dataclass_fields__ if n not in left_out]
    return [tuple(getattr(row, name) for name in names) for row in qompose.report(model).rows]


def results(kind: Function, members: list[Quantizer]) -> tuple[Any, ...]:
    """What a composition makes of a program: text of the graph, scales, rows, and who meets whom."""
    prepared = prepare(program(kind), qompose.compose(*members))
    with torch.no_grad():
        prepared(INPUTS[kind])
        prepared(-INPUTS[kind])
    converted = qompose.convert_pt2e(prepared)
    report = check(converted)
    assert not report.conflicts
    meetings = {(r.tensor, r.from_owner, r.to_owner) for r in report.requantizations}
    return graph_text(prepared), graph_text(converted), rows(prepared), rows(converted), meetings


PARTITIONS = st.lists(st.integers(0, 4), min_size=5, max_size=5)


@settings(max_examples=6)
@given(parts=PARTITIONS, order=st.permutations(range(5)), kind=st.sampled_from([mixed, branches]))
def test_rules_divided_among_members(parts: list[int], order: list[int], kind: Function) -> None:
    """Any division of the families, in any order, makes the graph that one quantizer makes."""
    members: list[Quantizer] = []
    for part in order:
        owned = [
            rule for family, p in zip(FAMILIES, parts, strict=True) if p == part for rule in family
        ]
        members += [toy(*owned, name=f"m{part}")] if owned else []
    alone = results(kind, [toy(*itertools.chain(*FAMILIES), name="alone")])
    assert results(kind, members) == alone


CONFIGS = {"static": STATIC, "unsigned": STATIC_UINT8, "dynamic": DYNAMIC, "float": None}


@settings(max_examples=6)
@given(
    words=st.lists(st.sampled_from(sorted(CONFIGS)), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    kind=st.just(mixed),
)
def test_modules_divided_among_members(words: list[str], order: list[int], kind: Function) -> None:
    """Members of one backend, each with a module of its own and a configuration of its own."""

    def members() -> list[Quantizer]:
        return [
            toy(config=None, name=name).set_module_name(name, CONFIGS[word])
            for name, word in zip(("one", "two", "flat", "last"), words, strict=True)
        ]

    made = members()
    assert results(kind, [made[i] for i in order]) == results(kind, members())


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")], ids="-".join)
def test_a_requantized_border_is_one_dequantize_and_one_quantize(names: tuple[str, str]) -> None:
    configs = {"a": ("flat", STATIC), "b": ("last", STATIC_UINT8)}
    members = [
        toy(LINEAR, LINEAR_RELU, CAT, config=None, name=n).set_module_name(*configs[n])
        for n in names
    ]
    sums = toy(CAT, SIGMOID, name="sums", config=STATIC)
    converted = convert(program(mixed), qompose.compose(*members, sums), INPUTS[mixed])
    (meeting,) = qompose.report(converted).requantizations
    assert (meeting.from_owner, meeting.to_owner, meeting.readers) == ("sums", "b", ("linear_1",))
    (linear,) = (node for node in converted.graph.nodes if node.name == "linear_1")
    quantize = linear.args[0].args[0]
    assert qdq.is_quantize(quantize)
    assert qdq.is_dequantize(quantize.args[0])
    assert quantize.args[0].args[0].args[5] is torch.int8
    assert quantize.args[5] is torch.uint8
