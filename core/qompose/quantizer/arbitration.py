# SPDX-License-Identifier: Apache-2.0
"""Which of several competing claims stand, and with them which tentative rewrites.

A claim loses as a whole when one of its nodes is taken; a shorter rule then wins what remains. The order is
(member, rule), so order is priority. Claims that apply only behind quantized tensors are decided after the
others of their member, in graph order, and again once the later members have been heard. Of chosen claims
that refer to claims which lost, what they shared they inherit, and what they derived falls.

An island is a set of claims, joined by integers, on operators that multiply nothing, with float all around
it: quantized, it would be slower and less exact. It stays in float, unless a selector asked for one of them
by more than `set_global`, or no rule speaks of any product, so that such operators are all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import getitem
from types import MappingProxyType
from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from qompose.errors import AnnotationConflictError, ContestedRegionError, locating
from qompose.program.aliasing import DisjointSets
from qompose.program.aten_operators import macs
from qompose.program.control_flow import nodes_in
from qompose.program.meta import mark
from qompose.program.rewrites import ADD_BIAS, FOLD_BATCH_NORM, Candidate, find_rewrites, splits
from qompose.spec.algorithm_choice import wants_bias
from qompose.spec.claim import (
    ERROR,
    PRIORITY,
    Claim,
    Composition,
    Conflict,
    Kind,
    Point,
    PointSpec,
    Proposal,
    Rejection,
    reasons_of_dependents,
)
from qompose.spec.qdq import is_of_quantization
from qompose.spec.quantization_spec import integer_range_key

Propose = Callable[[GraphModule, Sequence[Claim], str], Proposal]
_UNREAD = "it only passes values on, and no quantized operator reads them"
_ROUNDED = "only floats read it, so int8 would only add rounding"
_WAITED = "its input is not quantized"
_ISLAND = (
    "its inputs and readers are in float, so int8 would only add rounding; a selector of its own"
    "{example} quantizes it anyway"
)
_FLOATS = ("dynamic", "weight-only")  # modes in which kernels take and give floats


def compose_claims(
    program: GraphModule,
    members: Sequence[tuple[str, Propose]],
    on_conflict: str = PRIORITY,
    bodies: Mapping[GraphModule, str] = MappingProxyType({}),
) -> Composition:
    """Ask each (label, propose) in order of priority and decide; mark operators of chosen claims, in place.

    Args:
        bodies: those of the program that are asked about with it, and what errors call them.

    Raises:
        AnnotationConflictError: a member that annotates changed what an earlier one had annotated.
    """
    arbiters, result = [_heard(program, members, on_conflict)], Composition()
    for body, place in bodies.items():
        with locating(place):
            arbiters.append(_heard(body, members, on_conflict))
    multiplies = any(arbiter.speaks_of_products() for arbiter in arbiters)
    for arbiter in arbiters:
        while multiplies and (islands := arbiter.islands()):
            arbiter.leave_in_float(islands)
        result.chosen += arbiter.result.chosen
        result.conflicts += arbiter.result.conflicts
        result.rejections += arbiter.result.rejections
        result.notes += [note for note in arbiter.result.notes if note not in result.notes]
    return result


def _heard(
    model: GraphModule, members: Iterable[tuple[str, Propose]], on_conflict: str
) -> _Arbiter:
    """Return what members want of one graph, decided but for islands."""
    arbiter = _Arbiter(model)
    for label, propose in members:
        arbiter.heard.append(label)
        proposal = _asked(label, propose, model, arbiter.result.chosen, on_conflict)
        arbiter.hear([replace(claim, owner=label) for claim in proposal.claims])
        arbiter.withdrawn += [replace(claim, owner=label) for claim in proposal.withdrawn]
        arbiter.mark(label, proposal)
        arbiter.result.rejections += [replace(r, owner=label) for r in proposal.rejections]
        arbiter.result.notes += proposal.notes
    arbiter.refuse_what_waits()
    arbiter.refuse_what_nobody_reads()
    arbiter.settle_references()
    return arbiter


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
        self.nodes = {node.name: node for node in model.graph.nodes}
        self.position = {name: i for i, name in enumerate(self.nodes)}
        self.values = {k: n for k, n in self.nodes.items() if n.op != "call_function"}
        self.result = Composition()
        self.taken: dict[str, Claim] = {}
        self.quantized: dict[str, set[str]] = {}  # value name -> owners for whom it is quantized
        self.waiting: list[Claim] = []
        self.lost: list[Claim] = []
        self.withdrawn: list[Claim] = []  # not decided about, or not again
        self.heard: list[str] = []  # members so far, in order of priority

    @property
    def fallen(self) -> list[Claim]:
        """Return the claims that others may refer to in vain."""
        return [*self.lost, *self.withdrawn]

    def hear(self, claims: Sequence[Claim]) -> None:
        """Decide on one member's claims, which come in the order of its rules."""
        idle = []
        for claim in claims:
            if claim.nodes[0] in self.values:
                idle.append(claim)
            elif not claim.needs_quantized:
                self._decide(claim)
        for claim in idle:
            self._decide_idle(claim)
        self.waiting += [claim for claim in claims if claim.needs_quantized]
        self._decide_waiting()

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

    def mark(self, label: str, proposal: Proposal) -> None:
        """Put what a member wrote for later tools on the operators of its claims, and their parameters."""
        if not proposal.marks:
            return
        held = {n for claim in self.result.chosen if claim.owner == label for n in claim.nodes}
        for node in self.model.graph.nodes:
            readers = {user.name for user in node.users} if node.op == "get_attr" else set()
            if node.name in held or not readers.isdisjoint(held):
                mark(node, proposal.marks.get(node.name, {}))

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
        """Tell whether the claim's own member took its nodes by a better rule, which is not a conflict."""
        owners = {self.taken[node].owner for node in claim.nodes if node in self.taken}
        return owners == {claim.owner}

    def _stands_on_quantized(self, claim: Claim) -> bool:
        checks = [self._is_quantized(name, claim.owner) for name in claim.needs_quantized]
        return all(checks) if claim.needs_all else any(checks)

    def _is_quantized(self, value: str, owner: str) -> bool:
        owners = self.quantized.get(value, set())
        return "" in owners or owner in owners

    def _decide(self, claim: Claim) -> None:
        winners = self._winners(claim)
        if not winners:
            self._choose(claim)
            return
        self.lost.append(claim)
        for winner in winners:
            if winner.owner != claim.owner:
                self._record_loss(winner, claim)

    def _winners(self, claim: Claim) -> list[Claim]:
        """Return the claims that hold its nodes."""
        holders = (self.taken[name] for name in claim.nodes if name in self.taken)
        return list({id(holder): holder for holder in holders}.values())

    def _choose(self, claim: Claim) -> None:
        self.result.chosen.append(claim)
        self.taken.update(dict.fromkeys(claim.nodes, claim))
        if claim.mode == "static":
            self.quantized.setdefault(claim.output, set()).add(claim.owner)
        for spec in claim.specs:
            if spec.point.user is None:
                self.quantized.setdefault(spec.point.source, set()).add("")

    def _record_loss(self, winner: Claim, loser: Claim, around: tuple[str, ...] = ()) -> None:
        """List a loss of nodes in common; of a claim without an operator, those around its value."""
        shared = tuple(n for n in loser.nodes if self.taken.get(n) is winner) or around
        why = self._why_earlier_lost(winner, loser)
        self.result.conflicts.append(
            Conflict(winner.owner, winner.rule, loser.owner, loser.rule, shared, why)
        )
        reason = f"its rule {loser.rule} lost {', '.join(shared)} to {winner.owner}"
        self._reject(loser, reason, Kind.LOST)

    def _why_earlier_lost(self, winner: Claim, loser: Claim) -> str:
        """Say why a claim of an earlier member lost to a later one; nothing where the order explains it."""
        if self.heard.index(winner.owner) < self.heard.index(loser.owner):
            return ""
        needs = loser.needs_quantized
        owners = dict.fromkeys(
            c.owner for c in self.result.chosen if not given(c).isdisjoint(needs)
        )
        return (
            f"{loser.owner} has priority, but rule {loser.rule} requires {', '.join(needs)} "
            f"to be quantized, which {' and '.join(owners)} did only later"
        )

    def _reject(self, claim: Claim, reason: str, kind: Kind = Kind.REFUSED) -> None:
        self.result.rejections.append(
            Rejection(claim.owner, claim.rule, claim.nodes, reason, kind=kind)
        )

    def refuse_what_waits(self) -> None:
        """List the conditional claims whose condition never came true.

        Where a later member took the operators, that is no conflict: inside its fusion nothing is quantized.
        """
        for claim in self.waiting:
            if all(winner.owner != claim.owner for winner in self._winners(claim)):
                self._reject(claim, _WAITED, Kind.WAITED)

    def refuse_what_nobody_reads(self) -> None:
        """Let claims fall that need a reader of integers and have none, and decide again about the losers."""
        while (claim := self._last_unread()) is not None:
            self._reject(claim, _UNREAD if _moves(claim) else _ROUNDED)
            self._release([claim])
            self.withdrawn.append(claim)

    def _last_unread(self) -> Claim | None:
        """Return a claim without the reader that it needs: of a chain the last, which others depend on."""
        read = {s.point.source for c in self.result.chosen for s in c.specs if s.point.user}
        unread = (c for c in self.result.chosen if c.needs_reader and c.output not in read)
        return max(unread, key=lambda claim: self.position[claim.nodes[0]], default=None)

    def speaks_of_products(self) -> bool:
        """Tell whether a rule, or another quantizer, has anything to say of an operator that multiplies."""
        products = {node.name for node in self.model.graph.nodes if macs(node)}
        regions = [claim.nodes for claim in self.result.chosen]
        regions += [rejection.nodes for rejection in self.result.rejections if rejection.rule]
        return not all(map(products.isdisjoint, regions))

    def islands(self) -> list[Claim]:
        """Return the claims beside which nobody gives or takes integers but others of the kind."""
        joined, chosen = self._joined(), self.result.chosen
        kept = {
            joined.find(number)
            for number, claim in enumerate(chosen)
            if not claim.needs_neighbor or self._meets_integers(claim)
        }
        return [claim for number, claim in enumerate(chosen) if joined.find(number) not in kept]

    def _joined(self) -> DisjointSets[int]:
        """Return the chosen claims, by number, in sets between which no integers go."""
        chosen = self.result.chosen
        inside = {n: i for i, c in enumerate(chosen) if c.mode not in _FLOATS for n in c.nodes}
        points = {spec.point: i for i, claim in enumerate(chosen) for spec in claim.specs}
        joined = DisjointSets(range(len(chosen)))
        for name, number in inside.items():
            for source in map(_computed_by, self.nodes[name].all_input_nodes):
                joined.join(number, inside.get(source.name, number))
        for number, claim in enumerate(chosen):
            for reference in (r for spec in claim.specs for r in spec.references):
                joined.join(number, points.get(reference, number))
        return joined

    def _meets_integers(self, claim: Claim) -> bool:
        """Tell whether what stands next to a claim was quantized before the program was exported."""
        nodes = [self.nodes[name] for name in claim.nodes]
        around = chain.from_iterable((*node.all_input_nodes, *node.users) for node in nodes)
        return any(map(is_of_quantization, around))

    def leave_in_float(self, islands: Sequence[Claim]) -> None:
        """Let claims fall that are of no use, and decide again about those that lost to them."""
        for claim in islands:
            target = self.nodes[claim.anchor].target
            known = isinstance(target, OpOverload)
            example = f", such as set_operator_type(torch.ops.{target}, config)," if known else ""
            self._reject(claim, _ISLAND.format(example=example), Kind.WAITED)
        self._release(islands)
        self.withdrawn += islands
        self.settle_references()

    def settle_references(self) -> None:
        """Let what refers to claims that lost inherit or fall."""
        self.drop_orphans()
        self.result.chosen = inherit_specs(self.result.chosen, self.fallen)
        self.taken = {name: claim for claim in self.result.chosen for name in claim.nodes}
        self.drop_orphans()  # what was inherited may be derived, too

    def drop_orphans(self) -> None:
        """Drop what is derived from specifications of claims that lost.

        A claim that has nothing left falls, and those that lost to it are decided about again.
        """
        reasons = unresolved(self.result.chosen, self.fallen)
        fallen = []
        for number, claim in enumerate(self.result.chosen if reasons else ()):
            specs = tuple(spec for spec in claim.specs if spec.point not in reasons)
            if len(specs) == len(claim.specs):
                continue
            self.result.notes += [
                f"ignored the annotation of {spec.point} by {claim.owner}: {reasons[spec.point]}"
                for spec in claim.specs
                if spec.point in reasons
            ]
            left = self.result.chosen[number] = replace(claim, specs=specs)
            self.taken.update({name: left for name, c in self.taken.items() if c is claim})
            if not specs:
                fallen.append(left)
                self._reject(claim, reasons[claim.specs[0].point])
        if fallen:
            self._release(fallen)
            self.lost += fallen
            for claim in fallen:
                for winner in self._winners(claim):
                    self._record_loss(winner, claim)

    def _release(self, fallen: Sequence[Claim]) -> None:
        """Take their places from claims, and decide again about those that lost these."""
        free = {name for claim in fallen for name in claim.nodes}
        self.result.chosen = [claim for claim in self.result.chosen if claim not in fallen]
        self.taken = {name: claim for name, claim in self.taken.items() if claim not in fallen}
        owners = {claim.owner for claim in fallen}
        self.result.conflicts = [
            c for c in self.result.conflicts if c.winner not in owners or free.isdisjoint(c.nodes)
        ]
        again = self._again(lambda claim: not free.isdisjoint(claim.nodes), self._decide)
        self._again(lambda c: c.owner in again and c.nodes[0] in self.values, self._decide_idle)

    def _again(
        self, concerned: Callable[[Claim], bool], decide: Callable[[Claim], None]
    ) -> set[str]:
        """Decide again about some claims that lost, and return their owners."""
        self.lost, earlier = [], self.lost
        owners = set()
        for claim in earlier:
            if claim.needs_quantized or not concerned(claim):
                self.lost.append(claim)
                continue
            of_claim = claim.owner, claim.rule, claim.nodes
            self.result.rejections = [
                r for r in self.result.rejections if (r.owner, r.rule, r.nodes) != of_claim
            ]
            self.result.conflicts = [
                c
                for c in self.result.conflicts
                if (c.loser, c.loser_rule) != of_claim[:2] or not {*claim.nodes} & {*c.nodes}
            ]
            decide(claim)
            owners.add(claim.owner)
        return owners


def _computed_by(value: Node) -> Node:
    """Return the operator that computes a value, for one of several results the one that has them all."""
    return value.args[0] if value.target is getitem else value  # type: ignore[return-value]


def _moves(claim: Claim) -> bool:
    """Tell whether the output has the scale of what the operator reads, since it only moves values."""
    outputs = [s for s in claim.specs if s.point.user is None and s.point.source == claim.output]
    return any(spec.references for spec in outputs)


def given(claim: Claim) -> set[str]:
    """Return the values that a claim quantizes for whoever reads them, and those its static kernel gives."""
    values = {spec.point.source for spec in claim.specs if spec.point.user is None}
    return values | ({claim.output} if claim.mode == "static" else set())


def check_contests(conflicts: Sequence[Conflict], on_conflict: str) -> None:
    """Raise ContestedRegionError where members may not want the same operators, and do."""
    if on_conflict == ERROR and conflicts:
        raise ContestedRegionError(
            [(c.winner, c.winner_rule, c.loser, c.loser_rule, c.nodes) for c in conflicts]
        )


def unresolved(chosen: Sequence[Claim], lost: Sequence[Claim]) -> dict[Point, str]:
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
        claim.owner for claim in chosen if not {*claim.nodes}.isdisjoint(loser.nodes)
    )
    if not winners:
        return f"whose annotation by {loser.owner} was rejected"
    lost = f"{', '.join(loser.nodes)} to {', '.join(winners)}"
    return f"which only {loser.owner} annotates, and its claim lost {lost}"


def inherit_specs(chosen: Sequence[Claim], lost: Sequence[Claim]) -> list[Claim]:
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


Objection = Callable[[Claim, Sequence[Node]], "str | None"]
"""Why operators of the exported program must not be merged for a claim, None where they may be."""


@dataclass(frozen=True)
class Attempt:
    """A program with some rewrites made, the names of each one's pieces, and the claims on it.

    `rewrites` are all that were made, as plans list them; hosts of other engines need none.
    """

    working: GraphModule
    composition: Composition
    pieces: Sequence[tuple[str, ...]]
    rewrites: tuple[Any, ...] = ()


def wanted_rewrites(exported: GraphModule, members: Iterable[Any]) -> list[Candidate]:
    """Return where the rewrites apply that quantizers ask for, and batch norm folding."""
    wanted = {FOLD_BATCH_NORM}.union(*(member.rewrites for member in members))
    return find_rewrites(exported, wanted)


def covered_rewrites(
    exported: GraphModule,
    found: Sequence[Candidate],
    attempt: Callable[[Sequence[Candidate]], Attempt],
    objection: Objection,
    regardless: Container[str] = (),
) -> tuple[Attempt, list[Candidate], list[Candidate]]:
    """Attempt all rewrites, then those that turned out to be covered, until all of them are.

    Their number only shrinks. An operator that a claim takes whole is not taken apart.

    Args:
        found: candidates in `exported`; those with an obstacle are not attempted.
        regardless: rewrites that need no claim.

    Returns:
        the last attempt, the rewrites that it made, and those that were refused, each with its obstacle.
    """
    nodes = {node.name: node for node in nodes_in(exported)}
    candidates = [candidate for candidate in found if candidate.obstacle is None]
    refused = [candidate for candidate in found if candidate.obstacle is not None]
    merging = [candidate for candidate in candidates if not splits(candidate)]
    if merging != candidates:
        chosen = attempt(merging).composition.chosen
        whole = {name for claim in chosen for name in claim.nodes}
        candidates = [c for c in candidates if not (splits(c) and c.nodes[0] in whole)]
    while True:
        made = attempt(candidates)
        covered = [
            _with_objection(candidate, claims, nodes, objection)
            for candidate, pieces in zip(candidates, made.pieces, strict=True)
            if (claims := _claims_using(made.composition, candidate, pieces))
            or candidate.rewrite in regardless
        ]
        covered = _whole_groups(candidates, covered)
        if covered == candidates:
            return made, candidates, refused
        refused += [candidate for candidate in covered if candidate.obstacle is not None]
        candidates = [candidate for candidate in covered if candidate.obstacle is None]


def _whole_groups(attempted: Iterable[Candidate], covered: Sequence[Candidate]) -> list[Candidate]:
    """Refuse those that share a parameter with a rewrite which is not going to be made."""
    kept = {candidate.nodes for candidate in covered if candidate.obstacle is None}
    lost = {c.group: c.nodes for c in attempted if c.group and c.nodes not in kept}
    return [
        replace(candidate, obstacle=f"{_SHARES} {', '.join(lost[candidate.group])}")
        if candidate.obstacle is None and candidate.group in lost
        else candidate
        for candidate in covered
    ]


_SHARES = "it shares parameters with the same rewrite, which no claim covers, of"


def _claims_using(
    composition: Composition, candidate: Candidate, pieces: Sequence[str]
) -> list[Claim]:
    """Return the claims that hold a piece of a rewrite; of one for an algorithm, those that want that."""
    return [
        claim
        for claim in composition.chosen
        if not {*claim.nodes}.isdisjoint(pieces)
        and (candidate.rewrite != ADD_BIAS or wants_bias(claim))
    ]


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
