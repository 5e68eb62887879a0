# SPDX-License-Identifier: Apache-2.0
"""Which of several competing claims stand.

Compose: of all claims, which stand. Greedy by (member order, rule order), so order is priority.

A claim loses as a whole when one of its nodes is taken; a shorter rule then wins what remains. Claims
that apply only behind quantized tensors are decided after the others of their member, in graph order,
and again once the later members have been heard. A change that a member's claims stand on is made once
one of them is chosen; the next member is asked about the program as it is then.

Chosen claims that refer to claims which lost: what they shared they inherit, what they derived falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule

from qompose.errors import AnnotationConflictError
from qompose.program.graph import copy_graph_module
from qompose.program.meta import mark
from qompose.quantizer.interop.isolated_view import Apart, seen_from_apart, works_apart
from qompose.spec.claim import (
    LOSS,
    WAITED,
    Change,
    Claim,
    Composition,
    Conflict,
    Point,
    PointSpec,
    Proposal,
    Rejection,
    reasons_of_dependents,
    standing_on,
)
from qompose.spec.quantization_spec import integer_range_key

Propose = Callable[[GraphModule, Sequence[Claim], str], Proposal]
_UNREAD = "it computes nothing, and nothing quantized reads it"


def compose_claims(
    model: GraphModule,
    members: Iterable[tuple[str, Propose]],
    on_conflict: str = "error",
    apart: Apart | None = None,
) -> Composition:
    """Ask each (label, propose) in order of priority and decide; make the changes of chosen claims, in place.

    Args:
        apart: what members see who work apart; if None, a copy of `model`.

    Raises:
        AnnotationConflictError: a member that annotates changed what an earlier one had annotated.
    """
    arbiter = _Arbiter(model)
    for label, propose in members:
        alone = works_apart(propose)
        if alone:  # only such members change the program
            apart = apart or Apart(copy_graph_module(model))
            proposal = seen_from_apart(propose(apart.program, (), on_conflict), apart.called)
        else:
            proposal = _asked(label, propose, model, arbiter.result.chosen, on_conflict)
        claims = [claim.owned_by(label) for claim in proposal.claims]
        arbiter.hear(claims, proposal.changes, apart if alone else None)
        if apart is not None and not alone and arbiter.result.changes:
            wanted = propose(apart.program, (), "first").claims
            arbiter.list_what_is_gone([claim.owned_by(label) for claim in wanted])
        arbiter.settle(label, proposal)
        arbiter.result.rejections += [replace(r, owner=label) for r in proposal.rejections]
        arbiter.result.notes += proposal.notes
    arbiter.refuse_what_waits()
    arbiter.refuse_what_nobody_reads()
    arbiter.drop_orphans()
    arbiter.result.chosen = reanchored(arbiter.result.chosen, arbiter.lost)
    arbiter.drop_orphans()  # what was inherited may be derived, too
    return arbiter.result


def _asked(
    label: str, propose: Propose, model: GraphModule, chosen: Sequence[Claim], on_conflict: str
) -> Proposal:
    try:
        return propose(model, tuple(chosen), on_conflict)
    except AnnotationConflictError as e:  # a member knows its name, but not its label
        raise AnnotationConflictError(e.earlier, label, e.node, e.change) from None


class _Arbiter:
    def __init__(self, model: GraphModule) -> None:
        self.model = model
        self.position = _positions(model)
        self.values = {n.name: n for n in model.graph.nodes if n.op != "call_function"}
        self.result = Composition()
        self.taken: dict[str, Claim] = {}
        self.replaced: dict[str, Claim] = {}  # operators in whose place a change puts others
        self.apart: dict[str, Apart] = {}  # what members saw that work apart
        self.called: Mapping[str, str] | None = None  # of the member that is heard, if it is one
        self.quantized: dict[str, set[str]] = {}  # value name -> owners for whom it is quantized
        self.waiting: list[Claim] = []
        self.lost: list[Claim] = []

    def hear(
        self,
        claims: Sequence[Claim],
        changes: tuple[Change, ...] = (),
        apart: Apart | None = None,
    ) -> None:
        """Decide on one member's claims, which come in the order of its rules and may stand on changes.

        Args:
            apart: what a member saw that works apart.
        """
        self.apart.update((claim.owner, apart) for claim in claims if apart is not None)
        self._turn_to(apart)
        self.pieces = frozenset(name for change in changes for name in change.pieces)
        idle = []
        for claim in (standing_on(claim, changes) for claim in claims):
            if claim.nodes[0] in self.values:
                idle.append(claim)
            elif not claim.needs_quantized:
                self._decide(claim)
        for claim in idle:
            self._decide_idle(claim)
        self.waiting += [claim for claim in claims if claim.needs_quantized]
        self._decide_waiting()

    def _turn_to(self, apart: Apart | None) -> None:
        self.called = None if apart is None else apart.called
        nodes = () if apart is None else apart.program.graph.nodes
        self.shown = frozenset(node.name for node in nodes)

    def list_what_is_gone(self, wanted: Sequence[Claim]) -> None:
        """List, of one member's claims on the program before all changes, those whose operators are gone."""
        for claim in wanted:
            nodes = set(claim.nodes)
            had = {
                name for own in self.result.chosen if own.owner == claim.owner for name in own.nodes
            }
            changing = [c for c in self.result.chosen if not nodes.isdisjoint(c.instead_of)]
            winners = {c.owner: c for c in changing if c.owner != claim.owner}
            if winners and not nodes <= had:
                self.lost.append(claim)
                for winner in winners.values():
                    self._record_loss(winner, claim)

    def _decide_idle(self, claim: Claim) -> None:
        """Decide on a claim without an operator, as on an input.

        It falls where others have all operators around it, or everything that its member wanted.
        """
        value = self.values[claim.nodes[0]]
        around = [n for n in (*value.users, *value.all_input_nodes) if n.op == "call_function"]
        holders = [self.taken.get(node.name) for node in around]
        others = [holder for holder in holders if holder and holder.owner != claim.owner]
        if not others or len(others) < len(holders):
            others = self._winners_of_all(claim.owner)
        if not others:
            self._decide(claim)
            return
        self.lost.append(claim)
        for winner in {id(other): other for other in others}.values():
            nodes = tuple(n.name for n in around if self.taken.get(n.name) is winner)
            self._record_loss(winner, claim, nodes or claim.nodes)

    def _winners_of_all(self, owner: str) -> list[Claim]:
        """Return a claim of each member to whom an owner lost all that it wanted; none if it has anything."""
        if any(claim.owner == owner for claim in self.result.chosen):
            return []
        winners = {conflict.winner for conflict in self.result.conflicts if conflict.loser == owner}
        return list({c.owner: c for c in self.result.chosen if c.owner in winners}.values())

    def settle(self, label: str, proposal: Proposal) -> None:
        """Make the changes that a member's chosen claims stand on, and mark their operators."""
        own = [claim for claim in self.result.chosen if claim.owner == label]
        held = {name for claim in own for name in claim.nodes}
        needed = [change for change in proposal.changes if any(map(change.carries, own))]
        if needed:
            proposal.apply(self.model, needed, {})
            self.position = _positions(self.model)
            self.result.changes += [(label, change) for change in needed]
        if proposal.marks:
            for node in self.model.graph.nodes:
                if node.name in held:
                    mark(node, proposal.marks.get(node.name, {}))

    def _refuse_changed(self, winner: Claim) -> None:
        """Let the conditional claims of earlier members fall whose operators a claim wants changed."""
        fallen = [c for c in self.waiting if not set(c.nodes).isdisjoint(winner.instead_of)]
        self.waiting = [claim for claim in self.waiting if claim not in fallen]
        self.lost += fallen
        for claim in fallen:
            self._record_loss(winner, claim)

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
        winners = {id(winner): winner for winner in self._winners(claim)}
        obstacle = None if winners else self._obstacle(claim)
        if obstacle is not None:
            self.lost.append(claim)
            rejection = Rejection(claim.owner, claim.rule, claim.nodes, obstacle)
            self.result.rejections.append(rejection)
        elif not winners:
            self._choose(claim)
        else:
            self.lost.append(claim)
        for winner in winners.values():
            if winner.owner != claim.owner:
                self._record_loss(winner, claim)

    def _winners(self, claim: Claim) -> Iterator[Claim]:
        """Yield the claims that hold its place; a member's claims may stand on one change side by side."""
        for name in (*claim.nodes, *claim.instead_of):
            winner = self.taken.get(name)
            if winner is not None and (name in claim.nodes or winner.owner != claim.owner):
                yield winner
            changing = None if self.called is None else self.replaced.get(name)
            if changing is not None and changing.owner != claim.owner:
                yield changing

    def _obstacle(self, claim: Claim) -> str | None:
        """Return why a claim of a member that works apart has no place in the common program, or None."""
        called = self.called or {}
        other = next((name for name in claim.nodes if name in called), None)
        if other is not None:
            return (
                f"{other} is not the operator here that it wants: {called[other]} gives its value"
            )
        read = (spec.point.source for spec in claim.specs)
        here = {*self.position, *self.pieces}
        gone = next((n for n in (*claim.nodes, *read) if n in self.shown and n not in here), None)
        return gone and f"{gone} is taken apart in this program"

    def _choose(self, claim: Claim) -> None:
        self.result.chosen.append(claim)
        self.taken.update(dict.fromkeys(claim.nodes, claim))
        self.replaced.update(dict.fromkeys(claim.instead_of, claim))
        self._refuse_changed(claim)
        if claim.mode == "static":
            self.quantized.setdefault(claim.output, set()).add(claim.owner)
        for spec in claim.specs:
            if spec.point.user is None:
                self.quantized.setdefault(spec.point.source, set()).add("")

    def _record_loss(self, winner: Claim, loser: Claim, around: tuple[str, ...] = ()) -> None:
        """List a loss of nodes in common; of a claim without an operator, those around its value."""
        places = dict.fromkeys((*loser.nodes, *loser.instead_of))
        held = {name for name in places if self.taken.get(name) is winner}
        shared = (
            tuple(name for name in places if name in held or name in winner.instead_of) or around
        )
        self.result.conflicts.append(
            Conflict(winner.owner, winner.rule, loser.owner, loser.rule, shared)
        )
        reason = f"{LOSS.format(loser.rule)}{', '.join(shared)} to {winner.owner}"
        called = self.called or {}  # batch norms that it had wanted folded
        nodes = (*loser.nodes, *(called[name] for name in loser.nodes if name in called))
        self.result.rejections.append(Rejection(loser.owner, loser.rule, nodes, reason))

    def refuse_what_waits(self) -> None:
        """List the conditional claims whose condition never came true."""
        for claim in self.waiting:
            if not any(node in self.taken for node in claim.nodes):
                self.result.rejections.append(
                    Rejection(claim.owner, claim.rule, claim.nodes, WAITED)
                )

    def refuse_what_nobody_reads(self) -> None:
        """Let claims fall that only pass integers on, from the last of a chain to its first."""
        unread = [claim for claim in self.result.chosen if claim.needs_reader]
        for claim in sorted(unread, key=lambda claim: -self.position[claim.nodes[0]]):
            read = {s.point.source for c in self.result.chosen for s in c.specs if s.point.user}
            if claim.output not in read:
                self.result.chosen.remove(claim)
                self.lost.append(claim)
                self.result.rejections.append(
                    Rejection(claim.owner, claim.rule, claim.nodes, _UNREAD)
                )

    def drop_orphans(self) -> None:
        """Drop what is derived from specifications of claims that lost.

        A claim that has nothing left falls, and those that lost to it are decided about again.
        """
        reasons = orphaned(self.result.chosen, self.lost)
        fallen = []
        for number, claim in enumerate(self.result.chosen if reasons else ()):
            specs = tuple(spec for spec in claim.specs if spec.point not in reasons)
            if len(specs) == len(claim.specs):
                continue
            self.result.notes += [
                f"{claim.owner} annotates {spec.point}, which was not followed: {reasons[spec.point]}"
                for spec in claim.specs
                if spec.point in reasons
            ]
            left = self.result.chosen[number] = replace(claim, specs=specs)
            self.taken.update({name: left for name, c in self.taken.items() if c is claim})
            self.replaced.update({name: left for name, c in self.replaced.items() if c is claim})
            if not specs:
                fallen.append(left)
                why = reasons[claim.specs[0].point]
                refusal = Rejection(claim.owner, claim.rule, claim.nodes, why)
                self.result.rejections.append(refusal)
        if fallen:
            self._release(fallen)

    def _release(self, fallen: Sequence[Claim]) -> None:
        """Take their places from claims, and decide again about those that lost these."""
        free = {name for claim in fallen for name in claim.territory}
        self.result.chosen = [claim for claim in self.result.chosen if claim not in fallen]
        for places in (self.taken, self.replaced):
            for name in [name for name, claim in places.items() if claim in fallen]:
                del places[name]
        owners = {claim.owner for claim in fallen}
        self.result.conflicts = [
            c for c in self.result.conflicts if c.winner not in owners or free.isdisjoint(c.nodes)
        ]
        again = self._again(lambda claim: not free.isdisjoint(claim.nodes), self._decide)
        self._again(lambda c: c.owner in again and c.nodes[0] in self.values, self._decide_idle)
        self.lost += fallen
        for claim in fallen:
            self._turn_to(self.apart.get(claim.owner))
            for winner in {id(winner): winner for winner in self._winners(claim)}.values():
                self._record_loss(winner, claim)

    def _again(
        self, concerned: Callable[[Claim], bool], decide: Callable[[Claim], None]
    ) -> set[str]:
        """Decide again about some claims that lost, and return their owners.

        Changes were made where claims stood on them: for what stands on another one it is too late.
        """
        self.lost, earlier = [], self.lost
        owners = set()
        for claim in earlier:
            if claim.instead_of or claim.needs_quantized or not concerned(claim):
                self.lost.append(claim)
                continue
            of_claim = claim.owner, claim.rule, claim.nodes
            self.result.rejections = [
                r for r in self.result.rejections if (r.owner, r.rule, r.nodes) != of_claim
            ]
            self.result.conflicts = [
                c
                for c in self.result.conflicts
                if (c.loser, c.loser_rule) != of_claim[:2] or claim.territory.isdisjoint(c.nodes)
            ]
            self._turn_to(self.apart.get(claim.owner))
            decide(claim)
            owners.add(claim.owner)
        return owners


def _positions(model: GraphModule) -> dict[str, int]:
    return {node.name: i for i, node in enumerate(model.graph.nodes)}


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
        return integer_range_key(given.spec) == integer_range_key(wanted.spec)

    def _end(self, point: Point, at: Callable[[Point], PointSpec | None]) -> PointSpec | None:
        """Follow shared specifications to one that is not, None where there is none."""
        visited: set[Point] = set()
        spec = at(point)
        while spec is not None and spec.shared:
            visited.add(point)
            point = spec.references[0]
            spec = None if point in visited else at(point)
        return spec
