# SPDX-License-Identifier: Apache-2.0
"""Plan: chosen claims in, sharing groups out. Union-find over edges and outputs, in any order.

A group is a set of points with one scale and zero point. Points are joined by shared specifications and,
where annotations allow it, implicitly: an edge with its producer's output, and edges from one producer,
whose specifications are alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from qompose.balancing import INPUT, OUTPUT, Balance
from qompose.claims import Claim, Point, PointSpec
from qompose.errors import SharingError
from qompose.graph import address_of, constant_of, count_readers
from qompose.plan import Group
from qompose.specs import QuantizationSpecBase, describe_spec


def plan_groups(model: GraphModule, claims: Sequence[Claim]) -> tuple[Group, ...]:
    """Return the sharing groups, those that others are derived from before them.

    Raises:
        SharingError: a shared specification leads nowhere or only to others, two different ones meet in
            a group, or derived ones form a circle.
    """
    position = {node.name: i for i, node in enumerate(model.graph.nodes)}
    solver = _Solver(claims)
    solver.join_shared()
    solver.join_implicitly()
    nodes = {node.name: node for node in model.graph.nodes}
    groups = solver.groups(position)
    if any(claim.product for claim in claims):
        readers = count_readers(model)
        groups = [replace(g, balance=_balance(g, solver, nodes, readers)) for g in groups]
    return _in_order_of_dependency(groups, solver)


def _balance(
    group: Group, solver: _Solver, nodes: dict[str, Node], readers: dict[int, int]
) -> Balance | None:
    """Return how a group's channels may be balanced: at the border to float, on one side of products."""
    products = [solver.claims[number].product for number in group.claims]
    source = group.points[0].source
    if any(p is None for p in products) or any(point.source != source for point in group.points):
        return None
    known = [product for product in products if product is not None]
    parameters = [name for p in known for name in (p.weight, p.bias) if name]
    if not all(_is_private(nodes[name], readers) for name in parameters):
        return None
    sides = {point.user is None for point in group.points}
    if sides == {True} and solver.count(source) == 1:
        side, dims = OUTPUT, {product.output_dim for product in known}
    elif sides == {False} and source not in solver.produced and constant_of(nodes[source]) is None:
        side, dims = INPUT, {product.input_dim for product in known}
        if len(group.points) != len(known) or solver.count(source) != len(known):
            return None
    else:
        return None
    weights, biases = tuple(p.weight for p in known), tuple(p.bias for p in known)
    return Balance(side, dims.pop(), weights, biases) if len(dims) == 1 else None


def _is_private(node: Node, readers: dict[int, int]) -> bool:
    """Tell whether a parameter is read in one place of the program, under no other name either."""
    constant = constant_of(node)
    return constant is not None and readers[address_of(constant)] == 1


class _Solver:
    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims = claims
        self.specs: dict[Point, PointSpec] = {}
        self.claim_of: dict[Point, int] = {}
        for number, claim in enumerate(claims):
            for spec in claim.specs:
                self.specs[spec.point] = spec
                self.claim_of[spec.point] = number
        self.parent = {point: point for point in self.specs}
        self.produced = {claim.output for claim in claims}
        self._points = Counter(point.source for point in self.specs)

    def find(self, point: Point) -> Point:
        root = point
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[point] != root:
            self.parent[point], point = root, self.parent[point]
        return root

    def count(self, source: str) -> int:
        """Return how many points a value has."""
        return self._points[source]

    def who(self, point: Point) -> str:
        """Name a point with its owner and rule, for messages."""
        claim = self.claims[self.claim_of[point]]
        return f"{point} ({claim.owner}, rule {claim.rule})"

    def join_shared(self) -> None:
        """Join every point whose specification is that of another with the other."""
        for point, spec in self.specs.items():
            if spec.shared:
                (target,) = spec.references
                if target not in self.parent:
                    raise SharingError(
                        f"{self.who(point)} shares the parameters of {target}, which no quantizer "
                        "annotates. Annotate it too, or give the point a specification of its own."
                    )
                self.parent[self.find(point)] = self.find(target)

    def join_implicitly(self) -> None:
        """Join points of one tensor whose groups have like specifications."""
        roots = {point: self.find(point) for point in self.specs}
        concrete: dict[Point, PointSpec] = {}
        for point, spec in self.specs.items():
            if not spec.shared:
                concrete.setdefault(roots[point], spec)
        by_source: dict[str, list[Point]] = defaultdict(list)
        for point, spec in self.specs.items():
            if spec.allow_implicit_sharing and not spec.derived and roots[point] in concrete:
                by_source[point.source].append(point)
        for points in by_source.values():
            first_of: dict[object, Point] = {}
            for point in points:
                likeness = _likeness(concrete[roots[point]].spec)
                self.parent[self.find(point)] = self.find(first_of.setdefault(likeness, point))

    def groups(self, position: dict[str, int]) -> list[Group]:
        members: dict[Point, list[Point]] = defaultdict(list)
        for point in self.specs:
            members[self.find(point)].append(point)

        def place(point: Point) -> tuple[int, int, Point]:
            """Order by producer; its output comes before its edges, those in order of the users."""
            return position.get(point.source, -1), position.get(point.user or "", -1), point

        ordered = [sorted(points, key=place) for points in members.values()]
        ordered.sort(key=lambda points: place(points[0]))
        return [self._group(points) for points in ordered]

    def _group(self, points: list[Point]) -> Group:
        own = [point for point in points if not self.specs[point].shared]
        if not own:
            chain = ", ".join(self.who(point) for point in points)
            raise SharingError(f"These share parameters with one another and none has any: {chain}")
        first = own[0]
        for other in own[1:]:
            if _likeness(self.specs[other].spec) != _likeness(self.specs[first].spec):
                raise SharingError(
                    f"{self.who(first)} is {describe_spec(self.specs[first].spec)} and "
                    f"{self.who(other)} is {describe_spec(self.specs[other].spec)}, and they must share "
                    "parameters. Give both the same specification, or one of them a config of None."
                )
        claims = tuple(sorted({self.claim_of[point] for point in points}))
        return Group(tuple(points), self.specs[first].spec, claims)

    def references(self, group: Group) -> list[Point]:
        """Return the points from whose observers a group's parameters are derived."""
        derived = [point for point in group.points if self.specs[point].derived]
        return [p for point in derived for p in self.specs[point].references]


def _likeness(spec: QuantizationSpecBase) -> object:
    """Return what must agree for two points to share: all but the way the range is estimated."""
    facts = {k: v for k, v in vars(spec).items() if k != "observer_or_fake_quant_ctr"}
    return type(spec).__name__, tuple((key, str(value)) for key, value in facts.items())


def _in_order_of_dependency(groups: list[Group], solver: _Solver) -> tuple[Group, ...]:
    number_of = {solver.find(group.points[0]): i for i, group in enumerate(groups)}
    needs: list[tuple[int, ...]] = []
    for group in groups:
        for point in solver.references(group):
            if point not in solver.parent:
                raise SharingError(
                    f"{solver.who(group.points[0])} is derived from {point}, "
                    "which no quantizer annotates"
                )
        needs.append(tuple(number_of[solver.find(p)] for p in solver.references(group)))
    order = _topological(needs, [solver.who(group.points[0]) for group in groups])
    renumbered = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(groups[old], depends_on=tuple(renumbered[n] for n in needs[old])) for old in order
    )


def _topological(needs: list[tuple[int, ...]], names: list[str]) -> list[int]:
    order: list[int] = []
    done: set[int] = set()
    remaining = list(range(len(needs)))
    while remaining:
        ready = [i for i in remaining if done.issuperset(needs[i])]
        if not ready:
            circle = ", ".join(names[i] for i in remaining)
            raise SharingError(f"Derived parameters depend on one another in a circle: {circle}")
        order += ready
        done.update(ready)
        remaining = [i for i in remaining if i not in done]
    return order
