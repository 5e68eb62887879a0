# SPDX-License-Identifier: Apache-2.0
"""Chosen claims that refer to claims which lost: what they shared they inherit, what they derived falls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qompose.claims import Claim, Point, PointSpec, reasons_of_dependents
from qompose.likeness import integers_asked


def orphaned(chosen: Sequence[Claim], lost: Sequence[Claim]) -> dict[Point, str]:
    """Return the points that are derived from what only losing claims annotate, with the reason.

    What nobody annotates at all is left to planning, which says so.
    """
    specs = [spec for claim in chosen for spec in claim.specs]
    standing = {spec.point for spec in specs}
    losers = {spec.point: claim for claim in reversed(lost) for spec in claim.specs}
    reasons = {}
    for spec in specs:
        for reference in spec.references if spec.derived else ():
            if reference not in standing and reference in losers:
                why = _why(losers[reference], chosen)
                reasons[spec.point] = f"it is derived from {reference}, {why}"
    return reasons_of_dependents(specs, reasons)


def _why(loser: Claim, chosen: Sequence[Claim]) -> str:
    winners = dict.fromkeys(
        claim.owner for claim in chosen if not claim.territory.isdisjoint(loser.territory)
    )
    if not winners:
        return f"which {loser.owner} wanted to annotate, and could not"
    lost = f"{', '.join(loser.nodes)} to {', '.join(winners)}"
    return f"which only {loser.owner} annotates, in a claim that loses {lost}"


def reanchored(chosen: Sequence[Claim], lost: Sequence[Claim]) -> list[Claim]:
    """Give claims that shared the parameters of a losing claim's tensor a specification of their own.

    The first point that referred to a lost one takes over what that one had; the others share with it.
    """
    specs = _Specs(
        standing={spec.point: spec for claim in chosen for spec in claim.specs},
        fallen={spec.point: spec for claim in lost for spec in claim.specs},
        own={(claim.owner, spec.point): spec for claim in lost for spec in claim.specs},
    )
    return [
        replace(claim, specs=tuple(specs.inherit(claim.owner, spec) for spec in claim.specs))
        for claim in chosen
    ]


@dataclass
class _Specs:
    """What points have, or would have if all claims stood: `own` is by the owner of the claim too."""

    standing: Mapping[Point, PointSpec]
    fallen: Mapping[Point, PointSpec]
    own: Mapping[tuple[str, Point], PointSpec]
    heirs: dict[tuple[str, Point], Point] = field(default_factory=dict)

    def inherit(self, owner: str, spec: PointSpec) -> PointSpec:
        """Return a specification that leads to what its claim's owner meant."""
        if not spec.shared or self._stands(owner, spec.references[0]):
            return spec
        anchor, visited = spec.references[0], set()
        fallen = self._fallen(owner, anchor)
        while fallen and fallen.shared and anchor not in visited:
            visited.add(anchor)
            anchor = fallen.references[0]
            fallen = None if self._stands(owner, anchor) else self._fallen(owner, anchor)
        if self._stands(owner, anchor):
            return replace(spec, references=(anchor,))
        if fallen is None or fallen.shared:
            return spec  # nobody ever gave it a specification: planning says so
        heir = self.heirs.setdefault((owner, anchor), spec.point)
        if heir == spec.point:
            return replace(spec, spec=fallen.spec, references=fallen.references)
        return replace(spec, references=(heir,))

    def _fallen(self, owner: str, point: Point) -> PointSpec | None:
        return self.own.get((owner, point)) or self.fallen.get(point)

    def _stands(self, owner: str, point: Point) -> bool:
        """Tell whether a point has integers like those that an owner wanted there."""
        if point not in self.standing:
            return False
        given = self._end(point, self.standing.get)
        wanted = self._end(point, lambda place: self.own.get((owner, place)))
        if given is None or wanted is None:
            return True
        return integers_asked(given.spec) == integers_asked(wanted.spec)

    def _end(self, point: Point, at: Callable[[Point], PointSpec | None]) -> PointSpec | None:
        """Follow shared specifications to one that is not, None where there is none."""
        visited: set[Point] = set()
        spec = at(point)
        while spec is not None and spec.shared:
            visited.add(point)
            point = spec.references[0]
            spec = None if point in visited else at(point)
        return spec
