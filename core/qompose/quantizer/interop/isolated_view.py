# SPDX-License-Identifier: Apache-2.0
"""Members that work apart: on a program that no other member changes, and what that means for their claims.

Their engines show them a program whose batch norms are folded, and nobody else's rewrites; so it is here.
In the common program, values of that one may be called otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule

from qompose.spec.claim import Change, Claim, Point, PointSpec, Proposal


@dataclass(frozen=True)
class Apart:
    """The program that members see who work apart.

    `called` is how the common program calls values of this one that it has not got under their name: those
    of operators into which nothing is folded there, or which are taken apart.
    """

    program: GraphModule
    called: Mapping[str, str] = field(default_factory=dict)


def works_apart(propose: object) -> bool:
    """Tell whether a `propose` is that of a quantizer that works apart (`Quantizer.works_apart`)."""
    return bool(getattr(getattr(propose, "__self__", None), "works_apart", False))


def seen_from_apart(proposal: Proposal, called: Mapping[str, str]) -> Proposal:
    """Return a proposal with the names of the common program."""
    if not called:
        return proposal

    def apply(working: GraphModule, changes: Collection[Change], _: Mapping[str, str]) -> None:
        proposal.apply(working, changes, called)

    return replace(
        proposal, claims=[_renamed(claim, called) for claim in proposal.claims], apply=apply
    )


def _renamed(claim: Claim, called: Mapping[str, str]) -> Claim:
    def point(place: Point) -> Point:
        return Point(called.get(place.source, place.source), place.user)

    def spec(one: PointSpec) -> PointSpec:
        references = tuple(point(reference) for reference in one.references)
        return replace(one, point=point(one.point), references=references)

    return replace(claim, specs=tuple(spec(one) for one in claim.specs))
