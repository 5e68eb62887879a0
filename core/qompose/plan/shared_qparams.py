# SPDX-License-Identifier: Apache-2.0
"""Which tensors share a scale and zero point (union-find), with one specification per group.

A group is a set of points with one scale and zero point. Points are joined by shared specifications and,
where annotations allow it, implicitly: an edge with its producer's output, and edges from one producer,
whose specifications ask for the same integers. The producer's observer, else the first reader's, then
estimates the range for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

from torch.fx import GraphModule, Node

from qompose.errors import ConfigError, SharingError
from qompose.plan.plan import Group
from qompose.program.aliasing import DisjointSets
from qompose.program.aten_operators import VALUE_PRESERVING
from qompose.program.control_flow import nodes_in, same_tensors
from qompose.program.graph import constant_of, layout_of, value_of
from qompose.spec.claim import Claim, Point, PointSpec
from qompose.spec.qparams import CASTS, DEFAULT_EPS, PER_CHANNEL, full_blocks
from qompose.spec.quantization_spec import (
    describe_spec,
    eps_made,
    granularity,
    integer_range_key,
    observer_name,
    sharing_key,
)


def plan_groups(model: GraphModule, claims: Sequence[Claim]) -> tuple[Group, ...]:
    """Return the sharing groups, those that others are derived from before them.

    Raises:
        SharingError: a shared specification leads nowhere or only to others, two different ones meet in
            a group, or derived ones form a circle; tensors of one group differ in channels or blocks.
        ConfigError: a tensor lacks the dimension that a specification gives the channels to, or cannot
            be divided into its blocks.
    """
    nodes = {node.name: node for node in nodes_in(model)}
    position = {name: i for i, name in enumerate(nodes)}
    solver = _Solver(claims, _tensors(model, nodes))
    solver.join_shared()
    solver.join_implicitly(position)
    solver.join_moves(nodes)
    groups = solver.groups(position)
    for group in groups:
        _check_scales(group, solver, nodes)
    return _in_order_of_dependency(groups, solver)


def notes_on_ranges(claims: Sequence[Claim], groups: Sequence[Group]) -> list[str]:
    """Describe the points whose range is estimated by another observer than was asked for there."""
    asked = {spec.point: (spec.spec, claim) for claim in claims for spec in claim.specs}
    notes = []
    for group in groups:
        given = [point for point in group.points if asked[point][0] is group.spec]
        if not given:
            continue
        giver, by = asked[given[0]][1], observer_name(group.spec)
        for point in group.points:
            spec, claim = asked[point]
            other = observer_name(spec)
            elsewhere = (claim.owner, claim.config) != (giver.owner, giver.config)
            if elsewhere and other not in (None, by):
                notes.append(
                    f"{point} uses the range of {given[0]}, estimated by {by} for "
                    f"{giver.owner}; {claim.owner} requested {other}"
                )
    return notes


def notes_on_least_scales(claims: Sequence[Claim]) -> list[str]:
    """Describe the points whose observer gives a least scale that the operators per token do not take."""
    notes = []
    for claim in claims:
        for point, spec in ((each.point, each.spec) for each in claim.specs):
            by_token = getattr(spec, "is_dynamic", False) and getattr(spec, "block_size", None)
            if by_token and (eps := eps_made(spec)) != DEFAULT_EPS:
                notes.append(
                    f"{point} is not scaled by at least eps={eps:g}, as {claim.owner} requested: "
                    f"torch's operators with a scale {granularity(spec)} take no eps"
                )
    return notes


def _check_scales(group: Group, solver: _Solver, nodes: Mapping[str, Node]) -> None:
    """Check that every tensor of a group has as many scales as the others, and can have them at all."""
    counts: dict[Point, tuple[int, ...]] = {}
    for point in group.points:
        shape = _shape_of(nodes.get(point.source))
        if shape is not None:
            try:
                counts[point] = _scales(group.spec, shape)
            except ConfigError as error:
                raise ConfigError(f"{solver.who(point)}: {error}") from None
    for point, count in counts.items():
        first = next(iter(counts))
        if count != counts[first]:
            raise SharingError(
                f"{solver.who(first)} and {solver.who(point)} share quantization parameters ("
                f"{describe_spec(group.spec)}) but need scales of shape {counts[first]} and {count}"
            )


def _shape_of(node: Node | None) -> tuple[int, ...] | None:
    shape = None if node is None else getattr(value_of(node), "shape", None)
    return None if shape is None else tuple(shape)


def _scales(spec: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many scales a static tensor has, along each of its dimensions."""
    if getattr(spec, "is_dynamic", False) or spec.dtype in CASTS:
        return ()
    if getattr(spec, "block_size", None) is not None:
        blocks = full_blocks(shape, spec.block_size)
        return tuple(dim // size for dim, size in zip(shape, blocks, strict=True))
    if spec.qscheme not in PER_CHANNEL:
        return ()
    try:
        channels = shape[spec.ch_axis]
    except IndexError:
        raise ConfigError(
            f"ch_axis={spec.ch_axis} is out of range for a tensor of shape {shape}"
        ) from None
    if not isinstance(channels, int):
        raise ConfigError(
            f"dimension {spec.ch_axis} of a tensor of shape {shape} has no fixed size, so static scales "
            "along it would fit only the size that calibration saw. Choose another ch_axis or a "
            "per-tensor qscheme, or export that dimension with a fixed size"
        )
    return (channels,)


def _tensors(model: GraphModule, nodes: dict[str, Node]) -> dict[str, str]:
    """Name the tensor behind each value that has several names: tied parameters, values across borders."""
    names = same_tensors(model)
    first: dict[object, str] = {}
    for name, node in nodes.items():
        constant = constant_of(node)
        if constant is not None and constant.numel():
            names[name] = first.setdefault(layout_of(constant), name)
    return names


def _place(position: Mapping[str, int], point: Point) -> tuple[int, int, Point]:
    """Order by producer; its output comes before its edges, those in order of the users."""
    return position.get(point.source, -1), position.get(point.user or "", -1), point


class _Solver:
    def __init__(self, claims: Sequence[Claim], tensors: Mapping[str, str]) -> None:
        self.claims, self.tensors = claims, tensors
        self.specs: dict[Point, PointSpec] = {}
        self.claim_of: dict[Point, int] = {}
        for number, claim in enumerate(claims):
            for spec in claim.specs:
                self._add(spec, number)
        self.sets = DisjointSets(self.specs)
        self.find = self.sets.find
        self.concrete = {point: spec for point, spec in self.specs.items() if not spec.shared}

    def _add(self, spec: PointSpec, number: int) -> None:
        earlier = self.specs.get(spec.point)
        if earlier is not None and sharing_key(earlier.spec) != sharing_key(spec.spec):
            raise SharingError(
                f"conflicting specifications for {self.who(spec.point)}: "
                f"{describe_spec(earlier.spec)}, but {self.claims[number].owner}, rule "
                f"{self.claims[number].rule}, requires {describe_spec(spec.spec)}. Leave the "
                "operator of one of these rules in float (config None)."
            )
        if earlier is None:
            self.specs[spec.point], self.claim_of[spec.point] = spec, number

    def join(self, one: Point, other: Point) -> None:
        """Put two points into one group; its specification is that of either."""
        one, other = self.find(one), self.find(other)
        if one != other:
            self.sets.join(one, other)
            spec = self.concrete.pop(one, None)
            if spec is not None:
                self.concrete.setdefault(other, spec)

    def who(self, point: Point) -> str:
        """Name a point with its owner and rule, for messages."""
        claim = self.claims[self.claim_of[point]]
        return f"{point} ({claim.owner}, rule {claim.rule})"

    def join_shared(self) -> None:
        """Join every point whose specification is that of another with the other."""
        for point, spec in self.specs.items():
            if spec.shared:
                (target,) = spec.references
                if target not in self.sets:
                    raise SharingError(
                        f"{self.who(point)} shares the quantization parameters of {target}, "
                        f"which no quantizer annotates. Annotate {target} too, or give this "
                        "tensor its own specification."
                    )
                self.join(point, target)

    def join_implicitly(self, position: Mapping[str, int]) -> None:
        """Join points of one tensor whose groups have the same integers, to the first of them."""
        by_source: dict[str, list[Point]] = defaultdict(list)
        for point in sorted(self.specs, key=partial(_place, position)):
            by_source[self.tensors.get(point.source, point.source)].append(point)
        for points in by_source.values():
            first_of: dict[object, Point] = {}
            for point in points:
                alike = self._implicit_key(point)
                if alike is not None:
                    self.join(point, first_of.setdefault(alike, point))

    def _implicit_key(self, point: Point) -> object | None:
        """Return what a point must agree in to share implicitly, None where it may not share."""
        spec = self.concrete.get(self.find(point))
        if spec is None or spec.derived or not self.specs[point].allow_implicit_sharing:
            return None
        return integer_range_key(spec.spec)

    def join_moves(self, nodes: Mapping[str, Node]) -> None:
        """Join the input and output of operators that only move values, where their specs are alike.

        Backends refuse a slice or a transpose whose two sides differ in scale.
        """
        for point in [point for point in self.specs if point.user is not None]:
            user = nodes[point.user or ""]
            output = Point(user.name)
            one_scale = self._one_scale(point)  # moves change what is a channel, and what a block
            if user.target in VALUE_PRESERVING and output in self.specs and one_scale:
                alike = self._implicit_key(point)
                if alike is not None and alike == self._implicit_key(output):
                    inner, outer = (self.concrete[self.find(p)].spec for p in (point, output))
                    if sharing_key(inner) == sharing_key(outer):  # estimated in the same way, too
                        self.join(point, output)

    def _one_scale(self, point: Point) -> bool:
        spec = self.concrete.get(self.find(point))
        return getattr(spec and spec.spec, "qscheme", None) not in PER_CHANNEL

    def groups(self, position: Mapping[str, int]) -> list[Group]:
        members: dict[Point, list[Point]] = defaultdict(list)
        for point in self.specs:
            members[self.find(point)].append(point)

        place = partial(_place, position)
        ordered = [sorted(points, key=place) for points in members.values()]
        ordered.sort(key=lambda points: place(points[0]))
        return [self._group(points) for points in ordered]

    def _group(self, points: list[Point]) -> Group:
        spec = self.concrete.get(self.find(points[0]))
        if spec is None:
            chain = ", ".join(self.who(point) for point in points)
            raise SharingError(
                f"Shared specifications form a cycle without quantization parameters: {chain}"
            )
        claims = tuple(sorted({self.claim_of[point] for point in points}))
        return Group(tuple(points), spec.spec, claims)

    def references(self, group: Group) -> list[Point]:
        """Return the points from whose observers a group's parameters are derived."""
        derived = [point for point in group.points if self.specs[point].derived]
        return [p for point in derived for p in self.specs[point].references]


def _in_order_of_dependency(groups: list[Group], solver: _Solver) -> tuple[Group, ...]:
    number_of = {solver.find(group.points[0]): i for i, group in enumerate(groups)}
    needs: list[tuple[int, ...]] = []
    for group in groups:
        for point in solver.references(group):
            if point not in solver.sets:
                raise SharingError(
                    f"{solver.who(group.points[0])} is derived from {point}, "
                    f"which no quantizer annotates. Annotate {point} too."
                )
        needs.append(tuple(number_of[solver.find(p)] for p in solver.references(group)))
    order = _topological(needs, [solver.who(group.points[0]) for group in groups])
    renumbered = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(groups[old], depends_on=tuple(renumbered[n] for n in needs[old])) for old in order
    )


def _topological(needs: list[tuple[int, ...]], names: list[str]) -> list[int]:
    sorter = TopologicalSorter(dict(enumerate(needs)))
    try:
        sorter.prepare()
    except CycleError as error:
        circle = ", ".join(names[number] for number in sorted(set(error.args[1])))
        raise SharingError(
            f"Derived quantization parameters depend on each other in a cycle: {circle}"
        ) from error
    order: list[int] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return order
