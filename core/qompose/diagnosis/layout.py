# SPDX-License-Identifier: Apache-2.0
"""A drawing of a directed graph in layers: what reads a value stands below what makes it.

The steps are those of Sugiyama, Tagawa and Toda (1981): layers by the longest way from a source, lanes for
edges that pass layers, an order within each layer by the mean of the neighbours, and then positions: those
nearest to the neighbours' that keep the order and the gaps, which is a regression on monotone values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

BOX, LANE, GAP = 176, 8, 16
"""Widths of a node and of an edge on its way past other nodes, and the least distance between any two."""

_SWEEPS = 6
_LANE_WEIGHT = 0.02
"""How much less a lane resists being pushed than a node does; else each skip would push the rest aside."""

Edge = tuple[int, int]


@dataclass(frozen=True)
class Drawing:
    """Where the nodes stand and the edges go.

    Attributes:
        layers: of each node, the number of its layer.
        places: of each node, the middle.
        lanes: of each node, where edges from it pass layers: (layer, middle) of the first and the last, and
            wherever the middle changes. An edge leaves the lane in the layer above its reader.
        width: of all.
    """

    layers: tuple[int, ...]
    places: tuple[int, ...]
    lanes: tuple[tuple[tuple[int, int], ...], ...]
    width: int


def drawn(count: int, edges: Sequence[Edge]) -> Drawing:
    """Return a drawing of nodes 0 to `count` - 1 and edges from what makes values to what reads them.

    An edge that closes a circle goes upwards, straight.
    """
    layers = layers_of(count, edges)
    lanes, rows = _with_lanes(layers, edges)
    links = _links(lanes, edges, layers)
    _order(rows, links)
    places = _places(rows, links, count)
    left = min((places[n] - _width(n, count) / 2 for n in range(len(places))), default=0)
    right = max((places[n] + _width(n, count) / 2 for n in range(len(places))), default=0)
    middle = [round(place - left) for place in places]
    return Drawing(
        tuple(layers),
        tuple(middle[:count]),
        tuple(tuple(_bends(lane)) for lane in _ways(lanes, middle, count)),
        round(right - left),
    )


def layers_of(count: int, edges: Sequence[Edge]) -> list[int]:
    """Return the layer of each node: one more than the last that it reads; a circle is cut open somewhere.

    What reads nothing stands right above its first reader, not at the top.
    """
    readers: list[list[int]] = [[] for _ in range(count)]
    waiting, layers, done = [0] * count, [0] * count, [False] * count
    for producer, reader in edges:
        readers[producer].append(reader)
        waiting[reader] += 1
    sources = [node for node in range(count) if not waiting[node]]
    ready, others = deque(sources), iter(range(count))
    for _ in range(count):
        while not ready:  # all that are left are in circles, or behind one
            ready.extend(node for node in [next(others)] if not done[node])
        node = ready.popleft()
        done[node] = True
        for reader in readers[node]:
            if not done[reader]:
                layers[reader] = max(layers[reader], layers[node] + 1)
                waiting[reader] -= 1
                if not waiting[reader]:
                    ready.append(reader)
    for node in sources:
        layers[node] = max(0, min((layers[r] for r in readers[node]), default=1) - 1)
    return layers


def _with_lanes(
    layers: Sequence[int], edges: Sequence[Edge]
) -> tuple[dict[tuple[int, int], int], list[list[int]]]:
    """Return the numbers of lanes by (producer, layer), and what stands in each layer.

    All edges from one producer share its lanes.
    """
    rows: list[list[int]] = [[] for _ in range(max(layers, default=-1) + 1)]
    farthest = list(layers)
    for producer, reader in edges:
        farthest[producer] = max(farthest[producer], layers[reader])
    lanes: dict[tuple[int, int], int] = {}
    for node, layer in enumerate(layers):
        rows[layer].append(node)
        for passed in range(layer + 1, farthest[node]):
            lanes[node, passed] = len(layers) + len(lanes)
            rows[passed].append(lanes[node, passed])
    return lanes, rows


class _Links:
    """The neighbours of nodes and lanes in the layer above and in the layer below."""

    def __init__(self, count: int) -> None:
        self.above: list[list[int]] = [[] for _ in range(count)]
        self.below: list[list[int]] = [[] for _ in range(count)]


def _links(
    lanes: dict[tuple[int, int], int], edges: Sequence[Edge], layers: Sequence[int]
) -> _Links:
    pairs: dict[Edge, None] = {}
    for producer, reader in edges:
        passed = range(layers[producer] + 1, layers[reader])
        stops = [producer, *(lanes[producer, layer] for layer in passed), reader]
        if layers[producer] < layers[reader]:
            pairs.update(dict.fromkeys(pairwise(stops)))
    links = _Links(len(layers) + len(lanes))
    for upper, lower in pairs:
        links.below[upper].append(lower)
        links.above[lower].append(upper)
    return links


def _sweeps(rows: list[list[int]], links: _Links) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Yield layers with the neighbours that they are to follow, down and up in turn."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            yield row, links.above if down else links.below


def _order(rows: list[list[int]], links: _Links) -> None:
    """Put each layer into the order of the means of its neighbours' places, in place."""
    place = {node: float(i) for row in rows for i, node in enumerate(row)}
    for row, neighbours in _sweeps(rows, links):
        wanted = {node: _mean(neighbours[node], place, place[node]) for node in row}
        row.sort(key=lambda node: (wanted[node], place[node]))
        place.update((node, float(i)) for i, node in enumerate(row))


def _mean(nodes: Sequence[int], place: dict[int, float], default: float) -> float:
    return sum(place[node] for node in nodes) / len(nodes) if nodes else default


def _places(rows: list[list[int]], links: _Links, count: int) -> list[float]:
    """Return the middle of each node and lane; nodes follow lanes only where no node is beside them."""
    place: dict[int, float] = {}
    for row in rows:
        place.update(zip(row, _gaps(row, count), strict=True))
    for row, neighbours in _sweeps(rows, links):
        wanted = []
        for node in row:
            others = neighbours[node]
            nodes = [other for other in others if other < count] if node < count else []
            wanted.append(_mean(nodes or others, place, place[node]))
        weights = [1 if node < count else _LANE_WEIGHT for node in row]
        place.update(zip(row, spread(wanted, weights, _gaps(row, count)), strict=True))
    return [place[node] for node in range(len(place))]


def _gaps(row: Sequence[int], count: int) -> list[float]:
    """Return the places of a layer that is packed as closely as may be, from 0."""
    steps = ((_width(one, count) + _width(other, count)) / 2 + GAP for one, other in pairwise(row))
    return list(accumulate(steps, initial=0.0))


def _width(node: int, count: int) -> int:
    return BOX if node < count else LANE


def spread(
    wanted: Sequence[float], weights: Sequence[float], packed: Sequence[float]
) -> list[float]:
    """Return the places nearest to those wanted that are no closer to one another than when packed.

    Nearest by the weighted squares: pool adjacent violators.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for want, weight, offset in zip(wanted, weights, packed, strict=True):
        mean, mass, number = want - offset, float(weight), 1
        while pools and pools[-1][0] > mean:
            other, more, members = pools.pop()
            mean = (mean * mass + other * more) / (mass + more)
            mass, number = mass + more, number + members
        pools.append((mean, mass, number))
    shifts = [mean for mean, _, number in pools for _ in range(number)]
    return [shift + offset for shift, offset in zip(shifts, packed, strict=True)]


def _ways(
    lanes: dict[tuple[int, int], int], middle: Sequence[int], count: int
) -> list[list[tuple[int, int]]]:
    ways: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for (producer, layer), lane in lanes.items():
        ways[producer].append((layer, middle[lane]))
    return ways


def _bends(way: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the layers of a way without those that it passes straight."""
    for i, (layer, place) in enumerate(way):
        if i in (0, len(way) - 1) or not way[i - 1][1] == place == way[i + 1][1]:
            yield layer, place
