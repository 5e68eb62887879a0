# SPDX-License-Identifier: Apache-2.0
"""The graph of a report, drawn in layers: what reads a value stands below what makes it.

The steps are those of Sugiyama, Tagawa and Toda (1981): layers by the longest way from a source, lanes for
edges that pass layers, an order within each layer by the mean of the neighbours, and then positions: those
nearest to the neighbours' that keep the order and the gaps, which is a regression on monotone values.

A page has a drawing of all operators, and drawings with those of a module as one. Colours, by owner, by state
and by error, are classes of the page's style sheet; whatever has one says the same in words.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, takewhile
from typing import TYPE_CHECKING, Any

from qompose.console import as_decibels

if TYPE_CHECKING:
    from qompose.reporting.report_data import MeasuredRow

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


Neighbours = dict[int, list[int]]
"""Of nodes and lanes, those that they are linked to in the next layer."""


def _links(
    lanes: dict[tuple[int, int], int], edges: Sequence[Edge], layers: Sequence[int]
) -> tuple[Neighbours, Neighbours]:
    """Return the neighbours of nodes and lanes in the layer above, and in the layer below."""
    pairs: dict[Edge, None] = {}
    for producer, reader in edges:
        passed = range(layers[producer] + 1, layers[reader])
        stops = [producer, *(lanes[producer, layer] for layer in passed), reader]
        if layers[producer] < layers[reader]:
            pairs.update(dict.fromkeys(pairwise(stops)))
    above, below = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for upper, lower in pairs:
        below[upper].append(lower)
        above[lower].append(upper)
    return above, below


def _sweeps(
    rows: list[list[int]], links: tuple[Neighbours, Neighbours]
) -> Iterator[tuple[list[int], Neighbours]]:
    """Yield layers with the neighbours that they are to follow, down and up in turn."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            yield row, links[0] if down else links[1]


def _order(rows: list[list[int]], links: tuple[Neighbours, Neighbours]) -> None:
    """Put each layer into the order of the means of its neighbours' places, in place."""
    place = {node: float(i) for row in rows for i, node in enumerate(row)}
    for row, neighbours in _sweeps(rows, links):
        wanted = {node: _mean(neighbours[node], place, place[node]) for node in row}
        row.sort(key=lambda node: (wanted[node], place[node]))
        place.update((node, float(i)) for i, node in enumerate(row))


def _mean(nodes: Sequence[int], place: dict[int, float], default: float) -> float:
    return sum(place[node] for node in nodes) / len(nodes) if nodes else default


def _places(rows: list[list[int]], links: tuple[Neighbours, Neighbours], count: int) -> list[float]:
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


_MANY = 60
"""Up to how many boxes a page shows at first."""
Run = range
"""Operators that are drawn as one: they stand one behind the other in the program."""


def graph_of(entries: Sequence[MeasuredRow], states: Mapping[str, str]) -> dict[str, Any]:
    """Return the drawings of a program, the coarsest first, as data, and the number of the first shown."""
    levels = [
        *_module_levels(entries),
        ("all operators", [range(i, i + 1) for i in range(len(entries))]),
    ]
    fitting = [number for number, (_, runs) in enumerate(levels) if len(runs) <= _MANY]
    return {
        "levels": [_level(title, runs, entries, states) for title, runs in levels],
        "first": max(fitting, default=0),
        "box": BOX,
    }


def _module_levels(entries: Sequence[MeasuredRow]) -> Iterator[tuple[str, list[Run]]]:
    """Yield the depths of modules at which something is drawn as one, and something apart."""
    deepest, last = max((e.module.count(".") + 1 for e in entries if e.module), default=0), 1
    for depth in range(1, deepest + 1):
        runs = list(_runs([".".join(e.module.split(".")[:depth]) for e in entries]))
        if last < len(runs) < len(entries):
            last = len(runs)
            yield f"modules, {depth} deep", runs


def _runs(keys: Sequence[str]) -> Iterator[Run]:
    """Yield the longest ranges of equal keys.

    Not all of a key at once: a module that is called twice would read what it made itself.
    """
    start = 0
    for _, group in groupby(keys):
        length = sum(1 for _ in group)
        yield range(start, start + length)
        start += length


def _level(
    title: str, runs: Sequence[Run], entries: Sequence[MeasuredRow], states: Mapping[str, str]
) -> dict[str, Any]:
    edges, owners = edges_between(runs, entries), owner_classes(entries)
    drawing = drawn(len(runs), edges)
    shown = [looks([entries[i] for i in run], owners, states) for run in runs]
    return {
        "title": title,
        "width": drawing.width,
        "layers": max(drawing.layers, default=-1) + 1,
        "nodes": [
            {
                "rows": [run.start, run.stop],
                "at": [layer, place],
                "label": _label(run, entries),
                "kind": entries[run.start].operator if len(run) == 1 else f"{len(run)} operators",
                "looks": look,
                "border": border,
                "lane": lane,
            }
            for run, layer, place, lane, (look, border) in zip(
                runs, drawing.layers, drawing.places, drawing.lanes, shown, strict=True
            )
        ],
        "edges": edges,
    }


def _label(run: Run, entries: Sequence[MeasuredRow]) -> str:
    """Return the name of an operator, or the module that those of a run have in common."""
    if len(run) == 1:
        return entries[run.start].name
    paths = [entries[i].module.split(".") for i in run]
    shared = takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared) or "outside modules"


def edges_between(runs: Sequence[Run], entries: Sequence[MeasuredRow]) -> list[tuple[int, int]]:
    """Return (producer, reader) by the numbers of runs, each once, in the order of the program."""
    run_of = {entries[i].name: number for number, run in enumerate(runs) for i in run}
    edges = {
        (run_of[name], number): None
        for number, run in enumerate(runs)
        for i in run
        for name in entries[i].inputs
        if run_of.get(name, number) != number
    }
    return list(edges)


_HUES = 7
"""How many colours the style sheet has for owners; more owners have them in turn."""
_STEPS = (40.0, 30.0, 20.0, 10.0)
"""From which SQNR on a value is in a step, in dB: from exact to 16 bits or so, to one with no bit right."""
MODES = ("owner", "state", "sqnr", "own")
FULL, DASHED, DOTTED = "full", "dashed", "dotted"
"""Borders of boxes: of operators that run on kernels for integers, that are about to, and of floats."""


def owner_classes(entries: Sequence[MeasuredRow]) -> dict[str, str]:
    """Return the class of each owner, the one of most operators first; that of nobody is grey."""
    counted = Counter(entry.owner for entry in entries if entry.owner)
    owners = sorted(counted, key=lambda owner: (-counted[owner], owner))
    classes = {owner: f"hue{i % _HUES}" for i, owner in enumerate(owners)}
    return {**classes, **({NOBODY: "none"} if any(not e.owner for e in entries) else {})}


def state_class(state: str, states: Mapping[str, str]) -> str:
    """Return the class of a state; one with a dotted border, float, is grey."""
    return "none" if states[state] == DOTTED else f"hue{[*states].index(state) % _HUES}"


def step_class(sqnr: float | None) -> str:
    """Return the class of an SQNR: a darker one for each ten decibels less."""
    if sqnr is None:
        return "none"
    return f"step{sum(sqnr < limit for limit in _STEPS)}"


def step_legend() -> list[tuple[str, str]]:
    """Return (class, words) of each step, and of what has no number."""
    words = [f"at least {_STEPS[0]:.0f} dB"]
    words += [f"{low:.0f} to {high:.0f} dB" for high, low in pairwise(_STEPS)]
    words += [f"less than {_STEPS[-1]:.0f} dB"]
    return [*((f"step{i}", text) for i, text in enumerate(words)), ("none", "not compared")]


def worst(entries: Sequence[MeasuredRow], own: bool) -> float | None:
    """Return the least SQNR of operators, None where none of them has one."""
    values = [entry.own_sqnr if own else entry.sqnr for entry in entries]
    return min((value for value in values if value is not None), default=None)


def looks(
    entries: Sequence[MeasuredRow], owners: Mapping[str, str], states: Mapping[str, str]
) -> tuple[dict[str, list[str]], str]:
    """Return, of operators that are drawn as one, the class and the words for each of `MODES`; the border."""
    work = Counter[tuple[str, str]]()
    for entry in entries:
        work[entry.who, entry.state] += entry.macs + 1  # those without products count as well
    (owner, state), _ = max(work.items(), key=lambda item: item[1])
    several = len({entry.who for entry in entries}), len({entry.state for entry in entries})
    sqnr, own = (worst(entries, own) for own in (False, True))
    found = {
        "owner": [owners[owner], owner if several[0] == 1 else f"{several[0]} owners"],
        "state": [
            state_class(state, states),
            state if several[1] == 1 else f"{several[1]} states",
        ],
        "sqnr": [step_class(sqnr), as_decibels(sqnr) or "not compared"],
        "own": [step_class(own), as_decibels(own) or "not compared"],
    }
    return found, states[state]


NOBODY = "nobody"
"""The owner of what no quantizer took."""
