# SPDX-License-Identifier: Apache-2.0
"""Claims in the order in which other engines read their annotations: what is referred to comes first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from qompose.claims import Claim, Point, PointSpec
from qompose.errors import SharingError


def in_order_of_reading(
    model: GraphModule, claims: Sequence[Claim], standing: frozenset[str]
) -> list[Claim]:
    """Return claims in the order in which hosts read, what others share before those, without standing nodes.

    Hosts make observers as they come by: the edges of a node in the order of its annotation, then its
    output, in graph order. What is shared or derived has to refer to what was made before.

    Args:
        standing: the names of nodes whose annotations are those of others, and stay as they are.

    Raises:
        SharingError: a specification refers to a tensor that nobody annotates, or is derived from one that
            hosts come by later.
    """
    position = {node.name: number for number, node in enumerate(model.graph.nodes)}

    def place(spec: PointSpec) -> tuple[int, bool, bool]:
        point = spec.point
        return position[point.user or point.source], point.user is None, spec.derived

    ordered = [
        replace(
            claim,
            specs=tuple(sorted((s for s in claim.specs if _holder(s) not in standing), key=place)),
        )
        for claim in claims
    ]
    specs = sorted((spec for claim in ordered for spec in claim.specs), key=place)
    anchored = _anchored(specs, standing)
    return [replace(c, specs=tuple(anchored[s.point] for s in c.specs)) for c in ordered]


def _holder(spec: PointSpec) -> str:
    """Return the node whose annotation holds a specification."""
    return spec.point.user or spec.point.source


def _anchored(specs: Sequence[PointSpec], standing: frozenset[str]) -> dict[Point, PointSpec]:
    """Give what a group of points shares to the first of them; the others share with that one."""
    known: dict[Point, PointSpec] = {}
    for spec in specs:
        known.setdefault(spec.point, spec)
    groups: dict[Point, list[PointSpec]] = defaultdict(list)
    for spec in known.values():
        groups[_root(spec, known, standing)].append(spec)
    result = dict(known)
    for root, members in groups.items():
        first = members[0]
        if root in known and first.point != root:
            result[first.point] = replace(known[root], point=first.point)
            shared = replace(first, references=(first.point,))
            result.update({s.point: replace(shared, point=s.point) for s in members[1:]})
    _check_derived(result.values(), standing)
    return result


def _check_derived(specs: Iterable[PointSpec], standing: frozenset[str]) -> None:
    """Refuse what is derived from what hosts come by later, or never."""
    made: set[Point] = set()
    for spec in specs:
        for source in spec.references if spec.derived else ():
            if source not in made and (source.user or source.source) not in standing:
                raise SharingError(
                    f"{spec.point} is derived from {source}, which this engine comes by later, or nobody "
                    "annotates; qompose.prepare_pt2e takes specifications in any order"
                )
        made.add(spec.point)


def _root(spec: PointSpec, known: Mapping[Point, PointSpec], standing: frozenset[str]) -> Point:
    """Return the point whose specification is not shared, at the end of the references from one."""
    visited = {spec.point}
    start = spec
    while spec.shared:
        (target,) = spec.references
        if target not in known and (target.user or target.source) in standing:
            return target
        if target not in known or target in visited:
            raise SharingError(
                f"{start.point} shares the parameters of {target}, to which nobody gives any. Annotate "
                "that too, or give the point a specification of its own."
            )
        visited.add(target)
        spec = known[target]
    return spec.point
