# SPDX-License-Identifier: Apache-2.0
"""Annotate: a program and a quantizer in; claims out, and the program with the rewrites that they cover."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from qompose.algorithms import algorithms_of
from qompose.errors import MemberError, UserError, blaming, first_of, locating, warn_user
from qompose.plan.float_operators import reasons_of
from qompose.plan.operator_ids import QUANTIZED_BEFORE, earlier_regions
from qompose.plan.plan import Rewrite
from qompose.program.aten_operators import macs
from qompose.program.changes import (
    KeptNames,
    SignatureError,
    Values,
    calls_of,
    changes,
    misplaced,
)
from qompose.program.control_flow import body_labels, graphs_in, name_apart, nodes_in
from qompose.program.graph import copy_graph_module, refresh, replace_nested
from qompose.program.rewrites import (
    ADD_BIAS,
    FOLD_BATCH_NORM,
    REPLACING,
    Candidate,
    apply_rewrites,
    unfoldable_norms,
)
from qompose.quantizer.arbitration import (
    Attempt,
    Propose,
    check_contests,
    compose_claims,
    covered_rewrites,
    wanted_rewrites,
)
from qompose.quantizer.base import Quantizer
from qompose.quantizer.composition import ComposableQuantizer
from qompose.quantizer.interop.hook_guard import HookGuard, checksums
from qompose.quantizer.tied_weights import unify_specs
from qompose.spec.algorithm_choice import not_in_training
from qompose.spec.claim import (
    PRIORITY,
    Claim,
    Composition,
    Proposal,
    Rejection,
    clear_annotations,
)
from qompose.spec.qdq import is_dequantize, is_of_quantization, is_quantize
from qompose.training.qat_conv_bn import Unfolded

TRANSFORM = "transform_for_annotation"


@dataclass(frozen=True)
class Annotated:
    """A program with its rewrites, the claims on it, and what the rewrites were.

    `members` are the quantizers that were asked, by their labels, bound to the program.
    """

    program: GraphModule
    composition: Composition
    rewrites: tuple[Rewrite, ...]
    members: Mapping[str, Quantizer]


def annotate(
    exported: GraphModule,
    quantizer: Quantizer,
    *,
    trains: bool = False,
    fold_batch_norms: bool = False,
) -> Annotated:
    """Propose and compose on a copy with all rewrites, then with those that turned out to be covered.

    Args:
        quantizer: bound to the program (`Quantizer.bound`).
        trains: the program is to be trained, and is not repaired.
        fold_batch_norms: fold those too that no claim covers.
    """
    members = dict(quantizer.labelled_members)
    before = frozenset(name for claim, _ in quantized_before(exported) for name in claim.nodes)
    found = [
        candidate
        for candidate in wanted_rewrites(exported, members.values())
        if before.isdisjoint(candidate.nodes)
    ]
    if trains:
        found = [_in_training(candidate) for candidate in found if candidate.rewrite != ADD_BIAS]
    folds = [c for c in found if c.rewrite == FOLD_BATCH_NORM and c.obstacle is None]
    tried: list[tuple[Sequence[Candidate], Attempt]] = []

    def attempt(candidates: Sequence[Candidate]) -> Attempt:
        unfolded = [candidate for candidate in folds if candidate not in candidates]
        made = _attempt(exported, quantizer, members, candidates, unfolded, before, trains=trains)
        tried.append((candidates, made))
        return tried[-1][1]

    regardless = (FOLD_BATCH_NORM,) if fold_batch_norms else ()
    unfoldable = unfoldable_norms(exported, found) if fold_batch_norms else []
    made, candidates, refused = covered_rewrites(
        exported, found, attempt, quantizer.objection_to_rewrite, regardless
    )
    claimed = {name for claim in made.composition.chosen for name in claim.nodes}
    refused += [candidate for candidate in unfoldable if claimed.isdisjoint(candidate.nodes)]
    composition, working = made.composition, made.working
    check_contests(composition.conflicts, quantizer.on_conflict)
    composition.obstacles = {(c.rewrite, c.nodes): c.obstacle or "" for c in refused}
    composition.blocked = _blocked_by_rewrite(composition, tried, candidates, refused)
    said = _refusals(refused, composition.chosen if trains else ())
    composition.notes += [line for lines in said.values() for line in lines]
    if fold_batch_norms and FOLD_BATCH_NORM in said:
        listed = "\n  - ".join(said[FOLD_BATCH_NORM])
        warn_user(f"fold_batch_norms=True does not fold all batch norms:\n  - {listed}")
    composition.chosen, tied = unify_specs(working, composition.chosen, quantizer.objection_to_spec)
    composition.notes += tied
    if before:
        composition.chosen += [claim for claim, _ in quantized_before(working)]
    if trains:
        composition.notes += not_in_training(composition.chosen)
        return Annotated(working, composition, made.rewrites, members)
    rewritten = algorithms_of(composition.chosen).rewrite(working, composition.chosen)
    composition.notes += rewritten.refused
    return Annotated(working, composition, (*made.rewrites, *rewritten.made), members)


def _in_training(candidate: Candidate) -> Candidate:
    """Refuse a rewrite that puts another parameter in the place of one that is trained."""
    return replace(candidate, obstacle=_TRAINED) if candidate.rewrite in REPLACING else candidate


_TRAINED = (
    "it would replace parameters that are being trained; train the model in float, and quantize it "
    "with prepare_pt2e"
)


def _refusals(refused: Sequence[Candidate], taken: Iterable[Claim]) -> dict[str, list[str]]:
    """Return, by rewrite, a line for each reason why it was not made; not of operators claimed without it."""
    claimed = {name for claim in taken for name in claim.nodes}
    places: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for candidate in refused:
        if claimed.isdisjoint(candidate.nodes):
            places[candidate.rewrite, candidate.obstacle] += candidate.nodes
    found: dict[str, list[str]] = defaultdict(list)
    for (rewrite, why), names in places.items():
        named = first_of(list(dict.fromkeys(names)), 8)
        found[rewrite].append(f"{rewrite} was not applied to {named}: {why}")
    return found


def _attempt(
    exported: GraphModule,
    quantizer: Quantizer,
    members: Mapping[str, Quantizer],
    candidates: Sequence[Candidate],
    unfolded: Sequence[Candidate],
    before: frozenset[str],
    *,
    trains: bool,
) -> Attempt:
    for member in members.values():
        member.start()
    working = copy_graph_module(exported)
    clear_annotations(working)
    pieces = apply_rewrites(working, candidates)
    if candidates:
        working = refresh(working)
    working, own, notes = transformed(working, quantizer, members)
    standing = {node.name for node in nodes_in(working)}  # a member may have folded one itself
    apart = {name for c in unfolded if c.nodes[-1] in standing for name in c.nodes}
    folded = [c.nodes for c in candidates if trains and c.rewrite == FOLD_BATCH_NORM]
    folds = {names[0]: names[-1] for names in folded}
    norms = Unfolded({node.name: node for node in nodes_in(exported)}, folds)
    composition = _composed(working, members, quantizer.on_conflict, apart, norms, before)
    composition.notes += notes
    named = zip(candidates, pieces, strict=True)
    engines = tuple(Rewrite(c.rewrite, c.nodes, p) for c, p in named)
    covering = [_standing(made, own) for made in pieces]
    return Attempt(working, composition, covering, (*engines, *own))


def _standing(pieces: tuple[str, ...], own: Iterable[Rewrite]) -> tuple[str, ...]:
    """Return pieces of a rewrite with what members put in their place."""
    for rewrite in own:
        if not set(pieces).isdisjoint(rewrite.nodes):
            pieces = (*pieces, *rewrite.pieces)
    return pieces


def _blocked_by_rewrite(
    composition: Composition,
    tried: Sequence[tuple[Sequence[Candidate], Attempt]],
    made: Sequence[Candidate],
    refused: Sequence[Candidate],
) -> dict[str, str]:
    """Return by operators that rewrites would have brought to a rule what came between.

    In the program as it is in the end no rule may have anything to say of them, or sees a number where a
    rewrite would have put a tensor: what the rules said with all rewrites made is the reason then.
    """
    known, found = reasons_of(composition), dict[str, str]()
    for candidates, attempt in tried:
        said = reasons_of(attempt.composition)
        for name, reason in said.items():
            if name not in known:
                found.setdefault(name, reason)
        products = {node.name for node in nodes_in(attempt.working) if macs(node)}
        for candidate, pieces in zip(candidates, attempt.pieces, strict=True):
            # What multiplies is what matters of the pieces, not what is computed for it.
            names = (*candidate.nodes, *sorted(pieces, key=lambda name: name not in products))
            told = next((said[name] for name in names if name in said), None)
            if told is not None and candidate not in (*made, *refused):
                found.update(dict.fromkeys(candidate.nodes, told))
    for candidate in refused:
        why = f"{candidate.rewrite} was not applied: {candidate.obstacle}"
        found.update({name: why for name in candidate.nodes if name not in known})
    return found


def _composed(
    model: GraphModule,
    members: Mapping[str, Quantizer],
    on_conflict: str,
    unfolded: Collection[str],
    norms: Unfolded,
    before: Collection[str],
) -> Composition:
    """Compose a program and each of its bodies.

    Args:
        unfolded: operators into which nothing was folded, because nobody wanted it.
        norms: shows what was folded for training, and is not folded yet where other engines ask.
        before: operators that were quantized before the program was exported.
    """
    labels = body_labels(model)
    asked: list[tuple[str, Propose]] = []
    for label, member in members.items():
        refused = dict.fromkeys(unfolded, _UNFOLDED) if member.expects_folded else {}
        propose = _without(member.propose, refused | dict.fromkeys(before, QUANTIZED_BEFORE))
        asked.append((label, _shown_norms(member, propose, norms)))
    bodies = {part: labels.get(part.graph, "") for part in graphs_in(model) if part is not model}
    return compose_claims(model, asked, on_conflict, bodies)


_UNFOLDED = "it does not claim it with the batch norm folded"


def _without(proposes: Propose, reasons: Mapping[str, str]) -> Propose:
    """Return a member's `propose` without claims on operators that it cannot have, for these reasons."""
    if not reasons:
        return proposes

    def propose(
        model: GraphModule, taken: Sequence[Claim], on_conflict: str = PRIORITY
    ) -> Proposal:
        proposal = proposes(model, taken, on_conflict)
        kept, refused = list[Claim](), list[Rejection]()
        for claim in proposal.claims:
            reason = next((reasons[name] for name in claim.nodes if name in reasons), None)
            if reason is None:
                kept.append(claim)
            else:
                refused.append(Rejection(claim.owner, claim.rule, claim.nodes, reason))
        return replace(proposal, claims=kept, rejections=[*proposal.rejections, *refused])

    return propose


def _shown_norms(member: Quantizer, propose: Propose, norms: Unfolded) -> Propose:
    """Return a `propose` that shows batch norms which are folded for training to a member that needs them.

    Quantizers of other engines always see them, as there. One that annotates by qompose's own class sees
    both forms. What it says of the one with batch norms counts if it claims one and says nothing of the
    tensor before that, or if it fails on the folded form or finds nothing in it.
    """
    inner = getattr(member, "member", member)
    if not (member.expects_folded or type(inner).propose is Quantizer.propose):
        return propose

    def proposed(
        model: GraphModule, taken: Sequence[Claim], on_conflict: str = PRIORITY
    ) -> Proposal:
        view = norms.view(model)
        if view is None:
            return propose(model, taken, on_conflict)
        shown = _answer(propose, view, taken, on_conflict)
        folded = shown
        if not (member.expects_folded or norms.joined_by(shown)):
            folded = _answer(propose, model, taken, on_conflict)
            if isinstance(folded, Proposal) and folded.claims:
                return folded
        if isinstance(shown, Proposal):
            return norms.proposal(shown, model)
        raise folded if isinstance(folded, MemberError) else shown

    return proposed


def _answer(
    propose: Propose, model: GraphModule, taken: Sequence[Claim], on_conflict: str
) -> Proposal | MemberError:
    """Return what a member proposes of a program, or the error that it raises on it."""
    try:
        return propose(model, taken, on_conflict)
    except MemberError as error:
        return error


def quantized_before(program: GraphModule) -> list[tuple[Claim, str]]:
    """Return claims on what was quantized before the program was exported, with the names of their backends.

    Of a program that another engine quantized, those are the operators that read a parameter as integers,
    with what follows them up to a quantize, and those that have integers on all sides.
    """
    known = earlier_regions(program)
    if known:
        return known
    return [
        (
            Claim(
                owner=QUANTIZED_BEFORE,
                rule=QUANTIZED_BEFORE,
                anchor=region[0].name,
                nodes=tuple(node.name for node in region),
                output=region[-1].name,
                specs=(),
            ),
            "",
        )
        for region in (
            _up_to_quantize(node)
            for node in nodes_in(program)
            if node.op == "call_function" and not is_of_quantization(node) and _is_quantized(node)
        )
    ]


def _up_to_quantize(node: Node) -> list[Node]:
    """Return an operator with those that alone read it, one behind the other, if they lead to a quantize."""
    region = [node]
    while not all(map(is_quantize, region[-1].users)):
        reader, *others = region[-1].users
        inputs = {*reader.all_input_nodes} - {region[-1]}
        if others or reader.op != "call_function" or not all(map(is_dequantize, inputs)):
            return [node]
        if _is_quantized(reader):  # a region of its own
            return [node]
        region.append(reader)
    return region


def _is_quantized(node: Node) -> bool:
    read = [source for source in node.all_input_nodes if is_dequantize(source)]
    if any(source.all_input_nodes[0].op == "get_attr" for source in read):
        return True
    return (
        bool(read) and len(read) == len(node.all_input_nodes) and all(map(is_quantize, node.users))
    )


def transformed(
    model: GraphModule, quantizer: Quantizer, labels: Iterable[str]
) -> tuple[GraphModule, tuple[Rewrite, ...], tuple[str, ...]]:
    """Let every member in turn rewrite a program and its bodies, in place or as new modules.

    Returns:
        the program; of each member that changed operators a `Rewrite` with those that it removed or
        changed, and those that it made; and a note of each member that changed anything.

    Raises:
        MemberError: a transform raised, or left a node in front of what it reads; the message names both.
        UserError: a transform returned no program, or one of other inputs or outputs, or wrote to tensors.
    """
    rewrites, notes = [], []
    name_apart(model)
    known = {node.name for node in nodes_in(model)}
    for label, member in _steps(quantizer, iter(labels)):
        if type(member).transform_for_annotation is Quantizer.transform_for_annotation:
            continue
        before, values = calls_of(model), Values(model)
        with HookGuard(label, model, state=checksums).forbid_writes(TRANSFORM):
            model = _run(label, member, model, known)
        name_apart(model)
        with _keeping_signature(label):
            kept = values.update(model)
        if kept:
            notes.append(
                f"{label}: {TRANSFORM} would have changed the dtype of {', '.join(kept)}; the "
                "change was undone"
            )
        known.update(node.name for node in nodes_in(model))
        found = changes(before, calls_of(model))
        if not found:
            continue
        notes.append(f"{label}: {TRANSFORM} rewrote the program")
        if found.removed or found.made:
            name = f"{label}: {TRANSFORM}"
            rewrites.append(Rewrite(name, found.removed, found.made, member=label))
    return model, tuple(rewrites), tuple(notes)


def _steps(part: Quantizer, labels: Iterator[str]) -> Iterator[tuple[str, Quantizer]]:
    """Yield (label, member); a kind of composition that has a transform of its own is one step."""
    own = type(part).transform_for_annotation
    forwards = own is ComposableQuantizer.transform_for_annotation
    if isinstance(part, ComposableQuantizer) and forwards:
        for member in part.quantizers:
            yield from _steps(member, labels)
    else:
        yield "+".join(next(labels) for _ in part.members), part


@contextmanager
def _keeping_signature(label: str) -> Iterator[None]:
    """Name the member whose transform changed what the program takes, holds or returns."""
    try:
        yield
    except SignatureError as error:
        raise UserError(
            f"{label}: {TRANSFORM} changed the inputs, state or outputs of the program: "
            f"{error}. {TRANSFORM} may only rewrite operators between inputs and outputs."
        ) from error


def _run(label: str, member: Quantizer, model: GraphModule, known: set[str]) -> GraphModule:
    """Let one member rewrite a program, bodies first."""
    bodies = body_labels(model)

    def transform(part: GraphModule) -> GraphModule:
        names = KeptNames(part)
        with locating(bodies.get(part.graph, "")):
            with blaming(f"{label}: {TRANSFORM}"):
                result = member.transform_for_annotation(part)
            if not isinstance(result, GraphModule):
                raise UserError(f"{label}: {TRANSFORM} returned {result!r}, not a GraphModule")
            if (pair := misplaced(result)) is not None:
                raise MemberError(
                    f"{label}: {TRANSFORM} placed {pair[0]} before its input {pair[1]}. "
                    "Insert each node after all of its inputs, with "
                    "graph.inserting_after(...)."
                )
            with _keeping_signature(label):
                return names.restored(result, known)

    for part in graphs_in(model):
        replace_nested(part, transform)
    return transform(model)
