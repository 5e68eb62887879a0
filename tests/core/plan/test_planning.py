# SPDX-License-Identifier: Apache-2.0
"""Sharing groups: the same whatever the order, and an error that names nodes and owners where impossible."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationSpec
from qompose.errors import SharingError
from qompose.observers.histogram_observers import HistogramObserver
from qompose.plan.plan import Group
from qompose.plan.shared_qparams import notes_on_ranges, plan_groups
from qompose.spec import DerivedQuantizationSpec, SharedQuantizationSpec
from qompose.spec.claim import Claim, Point, PointSpec
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import INT8, UINT8, export, randn


class Chain(nn.Module):
    """Nodes, in order: x, sigmoid, relu, cat (of both), tanh."""

    def forward(self, x: Tensor) -> Tensor:
        a = torch.sigmoid(x)
        b = torch.relu(a)
        return torch.tanh(torch.cat([a, b]))


@pytest.fixture(scope="module")
def model() -> GraphModule:
    return export(Chain(), randn(2, 3)).module(check_guards=False)


def at(text: str) -> Point:
    """`"relu"` is the output of relu, `"sigmoid>relu"` the edge between them."""
    source, _, user = text.partition(">")
    return Point(source, user or None)


def spec(point: str, what: Any, *references: str, implicit: bool = True) -> PointSpec:
    """`what` is a specification, or "share" or "derive" of `references`."""
    places = tuple(map(at, references))
    if what == "share":
        what = SharedQuantizationSpec(places)  # type: ignore[arg-type]
    elif what == "derive":
        what = DerivedQuantizationSpec(list(places), _first, torch.int32)  # type: ignore[arg-type]
    return PointSpec(at(point), what, places, implicit)


def _first(observers: list[nn.Module]) -> Any:
    return observers[0].calculate_qparams()  # type: ignore[operator]


def claims(*specs: PointSpec, owner: str = "me") -> list[Claim]:
    """One claim for each specification."""
    return [
        Claim(owner=owner, rule=f"rule{i}", anchor="sigmoid", nodes=(), output="", specs=(s,))
        for i, s in enumerate(specs)
    ]


def points(groups: tuple[Group, ...]) -> set[frozenset[str]]:
    return {
        frozenset(f"{p.source}>{p.user}" if p.user else p.source for p in group.points)
        for group in groups
    }


HISTOGRAM = replace(INT8, observer_or_fake_quant_ctr=HistogramObserver)
SHARED = [
    pytest.param(
        [spec("sigmoid>relu", INT8), spec("sigmoid>cat", INT8)],
        [{"sigmoid>relu", "sigmoid>cat"}],
        id="edges of one tensor",
    ),
    pytest.param(
        [spec("sigmoid", INT8), spec("sigmoid>relu", INT8), spec("relu", INT8)],
        [{"sigmoid", "sigmoid>relu"}, {"relu"}],
        id="an edge and its producer",
    ),
    pytest.param(
        [spec("sigmoid", INT8), spec("sigmoid>relu", HISTOGRAM)],
        [{"sigmoid", "sigmoid>relu"}],
        id="the same integers, estimated by another observer",
    ),
    pytest.param(
        [spec("sigmoid", INT8), spec("sigmoid>relu", UINT8), spec("sigmoid>cat", UINT8)],
        [{"sigmoid"}, {"sigmoid>relu", "sigmoid>cat"}],
        id="different specifications stay apart",
    ),
    pytest.param(
        [spec("sigmoid", INT8), spec("sigmoid>relu", INT8, implicit=False)],
        [{"sigmoid"}, {"sigmoid>relu"}],
        id="not where an annotation forbids it",
    ),
    pytest.param(
        [
            spec("sigmoid>relu", INT8, implicit=False),
            spec("relu", "share", "sigmoid>relu", implicit=False),
        ],
        [{"sigmoid>relu", "relu"}],
        id="explicitly, where implicitly is forbidden",
    ),
    pytest.param(
        [
            spec("x>sigmoid", INT8),
            spec("sigmoid", "share", "x>sigmoid"),
            spec("relu", "share", "sigmoid"),
            spec("cat", "share", "relu"),
            spec("tanh", INT8),
        ],
        [{"x>sigmoid", "sigmoid", "relu", "cat"}, {"tanh"}],
        id="transitively",
    ),
    pytest.param(
        [
            spec("sigmoid>relu", "share", "cat>tanh"),
            spec("relu", "share", "sigmoid>relu"),
            spec("cat>tanh", INT8),
        ],
        [{"sigmoid>relu", "relu", "cat>tanh"}],
        id="anchor later than its users",
    ),
    pytest.param(
        [
            spec("sigmoid>cat", INT8),
            spec("relu>cat", "share", "sigmoid>cat"),
            spec("cat", "share", "sigmoid>cat"),
            spec("cat>tanh", INT8),
            spec("sigmoid>relu", INT8),
        ],
        [{"sigmoid>cat", "relu>cat", "cat", "cat>tanh", "sigmoid>relu"}],
        id="a concatenation and all around it",
    ),
    pytest.param(
        [
            spec("sigmoid", INT8),
            spec("sigmoid>cat", "share", "relu>cat"),
            spec("relu>cat", UINT8),
            spec("relu", INT8),
        ],
        [{"sigmoid"}, {"sigmoid>cat", "relu>cat"}, {"relu"}],
        id="a requantization on both edges of a concatenation",
    ),
]


@pytest.mark.parametrize(("specs", "expected"), SHARED)
def test_groups(model: GraphModule, specs: list[PointSpec], expected: list[set[str]]) -> None:
    assert points(plan_groups(model, claims(*specs))) == set(map(frozenset, expected))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_the_producers_observer_estimates_for_all_and_the_others_are_listed(
    model: GraphModule, order: tuple[int, ...]
) -> None:
    specs = [spec("sigmoid", INT8), spec("sigmoid>relu", HISTOGRAM)]
    asked = [*claims(specs[0], owner="a"), *claims(specs[1], owner="b")]
    ordered = [asked[i] for i in order]
    (group,) = plan_groups(model, ordered)
    assert group.spec is INT8
    (note,) = notes_on_ranges(ordered, [group])
    assert note == (
        "sigmoid -> relu has the range of output of sigmoid, estimated by MinMaxObserver for "
        "a; b asked for HistogramObserver there"
    )
    assert notes_on_ranges(claims(*specs), plan_groups(model, claims(*specs))) == []


@pytest.mark.parametrize(("specs", "expected"), SHARED)
def test_groups_do_not_depend_on_the_order_of_claims(
    model: GraphModule, specs: list[PointSpec], expected: list[set[str]]
) -> None:
    """Not even their own order does: it is that of the graph."""
    results = {
        tuple(group.points for group in plan_groups(model, claims(*order)))
        for order in itertools.permutations(specs)
    }
    assert len(results) == 1
    assert {frozenset(group) for group in next(iter(results))} == {
        frozenset(map(at, group)) for group in expected
    }


@pytest.mark.parametrize("specs", [param.values[0] for param in SHARED], ids=lambda s: len(s))
def test_every_point_is_in_one_group_with_its_claims(
    model: GraphModule, specs: list[PointSpec]
) -> None:
    groups = plan_groups(model, claims(*specs))
    listed = [point for group in groups for point in group.points]
    assert sorted(map(str, listed)) == sorted(str(s.point) for s in specs)
    for group in groups:
        assert group.claims == tuple(i for i, s in enumerate(specs) if s.point in group.points)
        assert isinstance(group.spec, QuantizationSpec)


CYCLES = [
    pytest.param([spec("sigmoid", "share", "sigmoid")], "output of sigmoid", id="itself"),
    pytest.param(
        [spec("sigmoid", "share", "relu"), spec("relu", "share", "sigmoid")],
        "output of sigmoid.*output of relu",
        id="two",
    ),
    pytest.param(
        [
            spec("x>sigmoid", "share", "cat>tanh"),
            spec("sigmoid", "share", "x>sigmoid"),
            spec("cat>tanh", "share", "sigmoid"),
        ],
        "x -> sigmoid.*output of sigmoid.*cat -> tanh",
        id="three",
    ),
    pytest.param(
        [spec("sigmoid", "share", "relu")],
        "output of sigmoid.*output of relu, which no quantizer annotates",
        id="leads nowhere",
    ),
    pytest.param(
        [spec("sigmoid", "derive", "relu")],
        "output of sigmoid.*derived from output of relu",
        id="derived from nothing",
    ),
    pytest.param(
        [spec("sigmoid", "derive", "relu"), spec("relu", "derive", "sigmoid")],
        "circle.*output of sigmoid.*output of relu",
        id="derived in a circle",
    ),
    pytest.param([spec("relu", "derive", "relu")], "circle.*output of relu", id="of itself"),
]


@pytest.mark.parametrize(("specs", "message"), CYCLES)
def test_impossible_sharing_names_nodes_and_owners(
    model: GraphModule, specs: list[PointSpec], message: str
) -> None:
    with pytest.raises(SharingError, match=message):
        plan_groups(model, claims(*specs))
    for order in itertools.permutations(specs):
        with pytest.raises(SharingError, match=r"owner1, rule rule\d") as caught:
            plan_groups(model, claims(*order, owner="owner1"))
        assert all(str(s.point) in str(caught.value) for s in specs)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_derived_groups_come_after_what_they_are_derived_from(
    model: GraphModule, order: tuple[int, ...]
) -> None:
    specs = [
        spec("x>sigmoid", "derive", "relu", "cat"),
        spec("relu", "derive", "cat"),
        spec("cat", "share", "tanh"),
        spec("tanh", INT8),
    ]
    groups = plan_groups(model, claims(*(specs[i] for i in order)))
    assert [sorted(p.source for p in group.points) for group in groups] == [
        ["cat", "tanh"], ["relu"], ["x"],
    ]  # fmt: skip
    assert [group.depends_on for group in groups] == [(), (0,), (1, 0)]


def test_a_long_chain_of_shared_points_needs_no_recursion(model: GraphModule) -> None:
    chain = [spec("n0", INT8), *(spec(f"n{i}", "share", f"n{i - 1}") for i in range(1, 1200))]
    assert len(plan_groups(model, claims(*chain))) == 1
    assert len(plan_groups(model, claims(*reversed(chain)))) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_the_groups_are_the_connected_components(
    model: GraphModule, targets: list[int], random: Any
) -> None:
    """Each point shares with an earlier one, or has a specification of its own where it points to itself."""
    parents = [min(target, i) for i, target in enumerate(targets)]
    specs = [
        spec(f"n{i}", INT8) if parent == i else spec(f"n{i}", "share", f"n{parent}")
        for i, parent in enumerate(parents)
    ]
    roots = list(range(8))
    for i, parent in enumerate(parents):
        roots[i] = i if parent == i else roots[parent]
    random.shuffle(specs)
    groups = points(plan_groups(model, claims(*specs)))
    assert groups == {frozenset(f"n{i}" for i in range(8) if roots[i] == root) for root in roots}
