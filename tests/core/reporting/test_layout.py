# SPDX-License-Identifier: Apache-2.0
"""Drawings: readers below producers, nothing on top of anything else, edges past what they do not touch."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st
from qompose.reporting.graph_drawing import (
    BOX,
    DASHED,
    DOTTED,
    FULL,
    GAP,
    LANE,
    Drawing,
    _bends,
    drawn,
    graph_of,
    layers_of,
    spread,
    step_class,
)
from qompose.reporting.report_data import STATES, Comparison, Report, Row, measured_rows

from tests.core.diagnosis.reports import comparison, in_float, report, row

GRAPHS = st.integers(0, 14).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(
            st.tuples(st.integers(0, max(0, count - 1)), st.integers(0, max(0, count - 1))),
            unique=True, max_size=30 if count else 0,
        ),
    )
)  # fmt: skip


def forwards(edges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(producer, reader) for producer, reader in edges if producer < reader]


def lane_at(drawing: Drawing, node: int, layer: int) -> int:
    """Where the lane of a node passes a layer."""
    return [place for at, place in drawing.lanes[node] if at <= layer][-1]


class TestLayers:
    """`layers_of`."""

    @pytest.mark.parametrize(
        ("edges", "layers"),
        [
            ([(0, 1), (1, 2), (0, 2), (2, 3), (0, 3)], [0, 1, 2, 3]),
            ([(0, 1), (1, 2), (3, 2)], [0, 1, 2, 1]),
            ([(0, 1)], [0, 1, 0, 0]),
        ],
        ids=["the longest way", "a source above its reader", "at the top what nothing reads"],
    )
    def test_where_they_are(self, edges: list[tuple[int, int]], layers: list[int]) -> None:
        assert layers_of(4, edges) == layers

    @given(GRAPHS)
    def test_readers_are_below(self, graph: tuple[int, list[tuple[int, int]]]) -> None:
        count, edges = graph
        layers = layers_of(count, forwards(edges))
        assert all(layers[producer] < layers[reader] for producer, reader in forwards(edges))

    def test_circles_are_cut(self) -> None:
        layers = layers_of(4, [(0, 1), (1, 2), (2, 1), (2, 3), (3, 3)])
        assert layers[0] < layers[1] < layers[2] < layers[3]


class TestSpread:
    """`spread`."""

    def test_what_has_room_stays(self) -> None:
        assert spread([0, 50, 90], [1, 1, 1], [0, 10, 20]) == [0, 50, 90]

    def test_two_that_want_one_place_share_it(self) -> None:
        assert spread([10, 10], [1, 1], [0, 10]) == [5, 15]
        assert spread([10, 10], [1, 3], [0, 10]) == [2.5, 12.5]

    @given(st.lists(st.floats(-1e3, 1e3), max_size=12))
    def test_gaps_are_kept(self, wanted: list[float]) -> None:
        found = spread(wanted, [1.0] * len(wanted), [7.0 * i for i in range(len(wanted))])
        assert all(b - a >= 7 - 1e-6 for a, b in pairwise(found))


class TestDrawing:
    """`drawn`."""

    @given(GRAPHS)
    def test_nothing_overlaps(self, graph: tuple[int, list[tuple[int, int]]]) -> None:
        """Rounded to pixels, so that one may be missing."""
        count, edges = graph
        found = drawn(count, edges)
        for one, other in combinations(range(count), 2):
            if found.layers[one] == found.layers[other]:
                assert abs(found.places[one] - found.places[other]) >= BOX + GAP - 1
        for node in range(count):
            passed = [at for at, _ in found.lanes[node]]
            for layer in range(min(passed, default=0), max(passed, default=-1) + 1):
                place = lane_at(found, node, layer)
                beside = [o for o in range(count) if found.layers[o] == layer]
                assert all(
                    abs(found.places[o] - place) >= (BOX + LANE) / 2 + GAP - 1 for o in beside
                )

    @given(GRAPHS)
    def test_all_is_inside(self, graph: tuple[int, list[tuple[int, int]]]) -> None:
        found = drawn(*graph)
        assert all(BOX // 2 - 1 <= x <= found.width - BOX // 2 + 1 for x in found.places)

    def test_a_chain_is_a_line(self) -> None:
        found = drawn(30, [(i, i + 1) for i in range(29)])
        assert set(found.places) == {BOX // 2}
        assert [drawn(count, []).width for count in (0, 1)] == [0, BOX]
        assert found.width == BOX

    def test_a_long_edge_has_a_lane_to_the_layer_above_its_reader(self) -> None:
        found = drawn(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
        assert [at for at, _ in found.lanes[0]] == [1, 2]
        assert found.lanes[1:] == ((), (), ())
        assert max(found.places) - min(found.places) < GAP, "boxes make no way for it"

    def test_boxes_hardly_give_way_to_a_lane(self) -> None:
        """Each edge beside the second box pushes it, by the weight of a lane, and so those around it."""
        lane = (1, 5), (2, 4)
        expected = Drawing((0, 1, 2, 3), (113, 113, 112, 110), (lane, (), (), ()), 201)
        assert drawn(4, [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)]) == expected

    def test_an_edge_within_a_layer_pulls_at_nothing(self) -> None:
        found = drawn(3, [(1, 0), (1, 2), (2, 1)])
        assert found.layers == (0, 0, 1) and found.places[1] == found.places[2]

    def test_a_lane_bends_where_either_side_is_elsewhere(self) -> None:
        way = [(1, 5), (2, 5), (3, 5), (4, 7), (5, 7), (6, 7)]
        assert list(_bends(way)) == [(1, 5), (3, 5), (4, 7), (6, 7)]

    def test_blocks_with_skips_stay_below_one_another(self) -> None:
        """Two hundred blocks of a residual network, all of which read one mask."""
        edges, last = [], 1
        for _ in range(200):
            edges += [(last, last + 1), (last + 1, last + 2), (0, last + 2), (last + 2, last + 3)]
            edges.append((last, last + 3))
            last += 3
        assert drawn(last + 1, edges).width < 6 * BOX


BORDERS = dict(zip(STATES, (FULL, FULL, FULL, DASHED, DASHED, DASHED, DOTTED), strict=True))


def graph(*rows: Row, compared: Comparison | None = None) -> dict[str, Any]:
    made: Report = report(*rows)
    return graph_of(measured_rows(made.rows, compared), BORDERS)


def edges(level: dict[str, Any]) -> set[tuple[str, str]]:
    labels = [node["label"] for node in level["nodes"]]
    return {(labels[one], labels[other]) for one, other in level["edges"]}


def test_all_operators_with_their_edges() -> None:
    level = graph()["levels"][-1]
    assert level["title"] == "all operators"
    assert edges(level) == {
        ("first", "second"), ("second", "third"), ("first", "sum"), ("third", "sum"),
        ("sum", "last"),
    }  # fmt: skip
    assert [node["at"][0] for node in level["nodes"]] == [0, 1, 2, 3, 4]
    assert [node["rows"] for node in level["nodes"]] == [[i, i + 1] for i in range(5)]


def test_modules_as_one() -> None:
    first, second, *_ = graph()["levels"]
    assert (first["title"], second["title"]) == ("modules, 1 deep", "modules, 2 deep")
    assert [(n["label"], n["kind"]) for n in first["nodes"]] == [
        ("body", "4 operators"), ("last", "aten.tanh"),
    ]  # fmt: skip
    assert edges(first) == {("body", "last")}
    assert edges(second) == {("body.0", "body.1"), ("body.1", "last")}


def test_a_module_that_is_called_twice_stands_twice() -> None:
    rows = (
        row("a", module="m"), row("b", "a", module="m"), row("c", "b"), row("d", "c", module="m"),
    )  # fmt: skip
    level = graph(*rows)["levels"][0]
    assert [node["rows"] for node in level["nodes"]] == [[0, 2], [2, 3], [3, 4]]
    assert level["edges"] == [(0, 1), (1, 2)]


def test_the_finest_level_with_few_boxes_is_shown_first() -> None:
    many = [row(f"r{i}", module=f"m{i // 40}.{i}") for i in range(200)]
    found = graph(*many)
    assert [len(level["nodes"]) for level in found["levels"]] == [5, 200]
    assert found["first"] == 0
    assert graph()["first"] == 3
    sizes = {count: graph(*many[:count])["first"] for count in (60, 61)}
    assert sizes == {60: 1, 61: 0}


def test_levels_without_a_difference_are_left_out() -> None:
    rows = (row("a", module="x.y.z"), row("b", module="x.y.z"), row("c", module="x.y.w"))
    assert [level["title"] for level in graph(*rows)["levels"]] == [
        "modules, 3 deep",
        "all operators",
    ]


def test_looks_of_one_and_of_several() -> None:
    level, finest = (graph(compared=comparison())["levels"][i] for i in (1, -1))
    looks = {node["label"]: node["looks"] for node in (*level["nodes"], *finest["nodes"])}
    assert looks["first"] == {
        "owner": ["hue0", "one"], "state": ["hue0", "int8 kernel"],
        "sqnr": ["step0", "45.0 dB"], "own": ["step0", "45.0 dB"],
    }  # fmt: skip
    assert looks["second"]["owner"] == ["hue1", "two"]
    assert looks["second"]["sqnr"] == ["step0", "equal"]
    assert looks["third"]["sqnr"] == ["step2", "21.5 dB"]  # of two values, the first
    assert looks["last"]["owner"] == ["none", "nobody"]
    assert looks["last"]["sqnr"] == ["none", "not compared"]
    assert looks["body.0"]["owner"] == ["hue0", "2 owners"]
    assert looks["body.1"]["sqnr"] == ["step2", "21.5 dB"]  # the worst of those inside
    borders = {node["label"]: node["border"] for node in finest["nodes"]}
    assert (borders["first"], borders["third"], borders["last"]) == ("full", "dashed", "dotted")


def test_several_look_like_those_that_do_most_of_the_work() -> None:
    rows = (
        row("a", module="m", macs=5), in_float("b", "a", module="m", macs=90),
        row("c", "b", module="m", macs=5), row("d", "c", module="n"),
    )  # fmt: skip
    node = graph(*rows)["levels"][0]["nodes"][0]
    assert node["looks"]["owner"] == ["none", "2 owners"]
    assert node["looks"]["state"] == ["none", "2 states"]
    assert node["border"] == "dotted"


def test_without_products_the_look_is_that_of_most() -> None:
    rows = (row("a", module="m", owner="two"), row("b", "a", module="m"), row("c", "b", module="m"))
    node = graph(*rows, row("d", "c", module="n", owner="two"))["levels"][0]["nodes"][0]
    assert node["looks"]["owner"] == ["hue0", "2 owners"]


def test_strange_inputs_do_no_harm() -> None:
    """Of data that was written by hand: unknown names, circles, operators that read themselves."""
    rows = (row("a", "b", "nowhere"), row("b", "a"), row("c", "c"), in_float("d", "a", "a"))
    assert edges(graph(*rows)["levels"][-1]) == {("a", "b"), ("b", "a"), ("a", "d")}


def test_no_operators() -> None:
    assert [level["nodes"] for level in graph_of([], BORDERS)["levels"]] == [[]]


def test_colours_are_of_ten_decibels_each_and_more_at_the_ends() -> None:
    found = [step_class(sqnr) for sqnr in (99.0, 40.0, 39.9, 10.0, 9.9)]
    assert found == ["step0", "step0", "step1", "step3", "step4"]
