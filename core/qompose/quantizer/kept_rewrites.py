# SPDX-License-Identifier: Apache-2.0
"""Which tentative rewrites stay, because a claim that stands covers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torch.fx import GraphModule, Node

from qompose.program.control_flow import nodes_in
from qompose.program.rewrites import ADD_BIAS, FOLD_BATCH_NORM, Candidate, find_rewrites, splits
from qompose.spec.claim import Claim, Composition
from qompose.spec.quantization_spec import BIAS_CORRECTION

Objection = Callable[[Claim, Sequence[Node]], "str | None"]
"""Why operators of the exported program must not be merged for a claim, None where they may be."""


class Attempt(Protocol):
    """A program with some rewrites made, the names of each one's pieces, and the claims on it."""

    @property
    def composition(self) -> Composition: ...

    @property
    def pieces(self) -> Sequence[tuple[str, ...]]: ...


Made = TypeVar("Made", bound=Attempt)


def wanted_rewrites(exported: GraphModule, quantizer: Any) -> list[Candidate]:
    """Return where the rewrites apply that the members of a quantizer ask for, and batch norm folding."""
    wanted = {FOLD_BATCH_NORM}.union(*(member.rewrites for member in quantizer.members))
    return find_rewrites(exported, wanted)


def covered_rewrites(
    exported: GraphModule,
    found: Sequence[Candidate],
    attempt: Callable[[Sequence[Candidate]], Made],
    objection: Objection,
) -> tuple[Made, list[Candidate], list[Candidate]]:
    """Attempt all rewrites, then those that turned out to be covered, until all of them are.

    Their number only shrinks. An operator that a claim takes whole is not taken apart.

    Args:
        found: candidates in `exported`; those with an obstacle are not attempted.

    Returns:
        the last attempt, the rewrites that it made, and those that were refused, each with its obstacle.
    """
    nodes = {node.name: node for node in nodes_in(exported)}
    candidates = [candidate for candidate in found if candidate.obstacle is None]
    refused = [candidate for candidate in found if candidate.obstacle is not None]
    merging = [candidate for candidate in candidates if not splits(candidate)]
    if merging != candidates:
        whole = _claimed(attempt(merging).composition)
        candidates = [c for c in candidates if not (splits(c) and c.nodes[0] in whole)]
    while True:
        made = attempt(candidates)
        covered = [
            _with_objection(candidate, claims, nodes, objection)
            for candidate, pieces in zip(candidates, made.pieces, strict=True)
            if (claims := _claims_using(made.composition, candidate, pieces))
        ]
        if covered == candidates:
            return made, candidates, refused
        refused += [candidate for candidate in covered if candidate.obstacle is not None]
        candidates = [candidate for candidate in covered if candidate.obstacle is None]


def _claims_using(
    composition: Composition, candidate: Candidate, pieces: Sequence[str]
) -> list[Claim]:
    """Return the claims that hold a piece of a rewrite; of one for a repair, those that ask for that."""
    return [
        claim
        for claim in composition.chosen
        if not {*claim.nodes}.isdisjoint(pieces)
        and (candidate.rewrite != ADD_BIAS or BIAS_CORRECTION in claim.repairs)
    ]


def _claimed(composition: Composition) -> frozenset[str]:
    return frozenset(name for claim in composition.chosen for name in claim.nodes)


def _with_objection(
    candidate: Candidate,
    claims: Sequence[Claim],
    nodes: Mapping[str, Node],
    objection: Objection,
) -> Candidate:
    """Refuse a rewrite that joins operators which the selectors of who claims them treat differently."""
    places = [nodes[name] for name in candidate.nodes]
    objections = (objection(claim, places) for claim in claims)
    return replace(candidate, obstacle=next(filter(None, objections), None))
