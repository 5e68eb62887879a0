# SPDX-License-Identifier: Apache-2.0
"""Compose: of all claims, which stand. Greedy by (member order, rule order), so order is priority.

A claim loses as a whole when one of its nodes is taken; a shorter rule then wins what remains. Claims
that apply only behind quantized tensors are decided after the others of their member, in graph order,
and again once the later members have been heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from qompose.claims import Claim, Composition, Conflict, Point, PointSpec, Proposal, Rejection
from qompose.errors import AnnotationConflictError

Propose = Callable[[GraphModule, Sequence[Claim], str], Proposal]

_LOSS = "its rule {} lost "
_WAITED = "its input is not quantized"


def is_loss(rejection: Rejection) -> bool:
    """Tell whether a claim was admissible, and another member had taken its nodes."""
    return rejection.reason.startswith(_LOSS.format(rejection.rule))


def most_telling(rejections: Iterable[Rejection]) -> list[Rejection]:
    """Leave out what a member's rules refuse at once where another of them got further with the same nodes.

    What that one waited for, or lost, is what is missing there.
    """
    listed = list(rejections)
    further = {(r.owner, r.nodes) for r in listed if _was_admissible(r)}
    return [r for r in listed if _was_admissible(r) or (r.owner, r.nodes) not in further]


def _was_admissible(rejection: Rejection) -> bool:
    return is_loss(rejection) or rejection.reason == _WAITED


def compose_claims(
    model: GraphModule, members: Iterable[tuple[str, Propose]], on_conflict: str = "error"
) -> Composition:
    """Ask each (label, propose) in order of priority and decide.

    Raises:
        AnnotationConflictError: a member that annotates changed what an earlier one had annotated.
    """
    arbiter = _Arbiter({node.name: i for i, node in enumerate(model.graph.nodes)})
    for label, propose in members:
        taken = tuple(arbiter.result.chosen)
        try:
            proposal = propose(model, taken, on_conflict)
        except AnnotationConflictError as e:  # a member knows its name, but not its label
            raise AnnotationConflictError(e.earlier, label, e.node, e.change) from None
        arbiter.hear([claim.owned_by(label) for claim in proposal.claims])
        arbiter.result.rejections += [replace(r, owner=label) for r in proposal.rejections]
        arbiter.result.notes += proposal.notes
    arbiter.refuse_what_waits()
    arbiter.result.chosen = reanchored(arbiter.result.chosen, arbiter.lost)
    return arbiter.result


class _Arbiter:
    def __init__(self, position: dict[str, int]) -> None:
        self.position = position
        self.result = Composition()
        self.taken: dict[str, Claim] = {}
        self.quantized: dict[str, set[str]] = {}  # value name -> owners for whom it is quantized
        self.waiting: list[Claim] = []
        self.lost: list[Claim] = []

    def hear(self, claims: Sequence[Claim]) -> None:
        """Decide on one member's claims, which come in the order of its rules."""
        for claim in claims:
            if not claim.needs_quantized:
                self._decide(claim)
        self.waiting += [claim for claim in claims if claim.needs_quantized]
        self._decide_waiting()

    def _decide_waiting(self) -> None:
        """Walk the conditional claims in graph order, so that a chain of views is settled in one pass."""
        remaining = []
        # Claims that begin at one operator keep the order of their rules: the longer fusion comes first.
        for claim in sorted(self.waiting, key=lambda claim: self.position[claim.nodes[0]]):
            if self._stands_on_quantized(claim) and not self._is_same_region(claim):
                self._decide(claim)
            else:
                remaining.append(claim)
        self.waiting = [claim for claim in remaining if not self._is_same_region(claim)]

    def _is_same_region(self, claim: Claim) -> bool:
        """Tell whether the claim's own member took its nodes by a better rule, which is no conflict."""
        owners = {self.taken[node].owner for node in claim.nodes if node in self.taken}
        return owners == {claim.owner}

    def _stands_on_quantized(self, claim: Claim) -> bool:
        checks = [self._is_quantized(name, claim.owner) for name in claim.needs_quantized]
        return all(checks) if claim.needs_all else any(checks)

    def _is_quantized(self, value: str, owner: str) -> bool:
        owners = self.quantized.get(value, set())
        return "" in owners or owner in owners

    def _decide(self, claim: Claim) -> None:
        winners = {
            id(c): c for c in (self.taken.get(node) for node in claim.nodes) if c is not None
        }
        if not winners:
            self._choose(claim)
        else:
            self.lost.append(claim)
        for winner in winners.values():
            if winner.owner != claim.owner:
                self._record_loss(winner, claim)

    def _choose(self, claim: Claim) -> None:
        self.result.chosen.append(claim)
        self.taken.update(dict.fromkeys(claim.nodes, claim))
        if claim.mode == "static":
            self.quantized.setdefault(claim.output, set()).add(claim.owner)
        for spec in claim.specs:
            if spec.point.user is None:
                self.quantized.setdefault(spec.point.source, set()).add("")

    def _record_loss(self, winner: Claim, loser: Claim) -> None:
        shared = tuple(node for node in loser.nodes if self.taken.get(node) is winner)
        self.result.conflicts.append(
            Conflict(winner.owner, winner.rule, loser.owner, loser.rule, shared)
        )
        reason = f"{_LOSS.format(loser.rule)}{', '.join(shared)} to {winner.owner}"
        self.result.rejections.append(Rejection(loser.owner, loser.rule, loser.nodes, reason))

    def refuse_what_waits(self) -> None:
        """List the conditional claims whose condition never came true."""
        for claim in self.waiting:
            if not any(node in self.taken for node in claim.nodes):
                self.result.rejections.append(
                    Rejection(claim.owner, claim.rule, claim.nodes, _WAITED)
                )


def reanchored(chosen: Sequence[Claim], lost: Sequence[Claim]) -> list[Claim]:
    """Give claims that shared the parameters of a losing claim's tensor a specification of their own.

    The first point that referred to a lost one takes over what that one had; the others share with it.
    """
    standing = {spec.point for claim in chosen for spec in claim.specs}
    fallen = {spec.point: spec for claim in lost for spec in claim.specs}
    heirs: dict[Point, Point] = {}
    return [
        replace(claim, specs=tuple(_inherit(spec, standing, fallen, heirs) for spec in claim.specs))
        for claim in chosen
    ]


def _inherit(
    spec: PointSpec, standing: set[Point], fallen: dict[Point, PointSpec], heirs: dict[Point, Point]
) -> PointSpec:
    if not spec.shared or spec.references[0] in standing:
        return spec
    anchor, visited = spec.references[0], set()
    while anchor in fallen and fallen[anchor].shared and anchor not in visited:
        visited.add(anchor)
        anchor = fallen[anchor].references[0]
    if anchor in standing:
        return replace(spec, references=(anchor,))
    if anchor not in fallen or fallen[anchor].shared:
        return spec  # nobody ever gave it a specification: planning says so
    heir = heirs.setdefault(anchor, spec.point)
    if heir == spec.point:
        return replace(spec, spec=fallen[anchor].spec, references=())
    return replace(spec, references=(heir,))
