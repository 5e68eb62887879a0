# SPDX-License-Identifier: Apache-2.0
"""Drawings: readers below producers, nothing on top of anything else, edges past what they do not touch."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st
from qompose.reporting.graph_drawing import BOX, GAP, LANE, Drawing, drawn, layers_of, spread

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

    def test_the_longest_way_counts(self) -> None:
        assert layers_of(4, [(0, 1), (1, 2), (0, 2), (2, 3), (0, 3)]) == [0, 1, 2, 3]

    def test_a_source_stands_above_its_reader(self) -> None:
        assert layers_of(4, [(0, 1), (1, 2), (3, 2)]) == [0, 1, 2, 1]

    def test_what_nothing_reads_stands_at_the_top(self) -> None:
        assert layers_of(3, [(0, 1)]) == [0, 1, 0]

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
        assert found.width == BOX

    def test_a_long_edge_has_a_lane_to_the_layer_above_its_reader(self) -> None:
        found = drawn(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
        assert [at for at, _ in found.lanes[0]] == [1, 2]
        assert found.lanes[1:] == ((), (), ())

    def test_blocks_with_skips_stay_below_one_another(self) -> None:
        """Two hundred blocks of a residual network, all of which read one mask."""
        edges, last = [], 1
        for _ in range(200):
            edges += [(last, last + 1), (last + 1, last + 2), (0, last + 2), (last + 2, last + 3)]
            edges.append((last, last + 3))
            last += 3
        assert drawn(last + 1, edges).width < 6 * BOX

    def test_it_is_the_same_each_time_and_quick(self) -> None:
        draw = random.Random(0)
        edges = [(max(0, i - draw.choice([1, 1, 1, 2, 5, 40])), i) for i in range(1, 1500)]
        edges = [*dict.fromkeys(edges)]
        start = time.perf_counter()
        assert drawn(1500, edges) == drawn(1500, edges)
        assert time.perf_counter() - start < 20

    @pytest.mark.parametrize("count", [0, 1])
    def test_small_ones(self, count: int) -> None:
        assert drawn(count, []).width == count * BOX
