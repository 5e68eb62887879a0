# SPDX-License-Identifier: Apache-2.0
"""Annotate: a program and a quantizer in; claims out, and the program with the rewrites that claims cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from qompose.arbitration import compose_claims
from qompose.claims import Claim, Composition
from qompose.graph import copy_graph_module, refresh
from qompose.nested import graphs_in, nodes_in
from qompose.plan import Rewrite
from qompose.quantizer import Quantizer, labelled
from qompose.rewrites import (
    FOLD_BATCH_NORM,
    Candidate,
    apply_rewrites,
    find_rewrites,
    splits,
)
from qompose.transforming import transformed
from qompose.tying import one_table_each


def annotate_program(
    exported: GraphModule, quantizer: Quantizer
) -> tuple[GraphModule, Composition, tuple[Rewrite, ...]]:
    """Propose and compose on a copy with all rewrites, then with those that turned out to be covered.

    `quantizer` is bound to the program (`Quantizer.bound`).

    Rewrites that no claim covers are left out of the next round; their number only shrinks.
    """
    wanted = {FOLD_BATCH_NORM}.union(*(member.rewrites for member in quantizer.members))
    nodes = {node.name: node for node in nodes_in(exported)}
    found = find_rewrites(exported, wanted)
    candidates = [candidate for candidate in found if candidate.obstacle is None]
    refused = [candidate for candidate in found if candidate.obstacle is not None]
    merging = [candidate for candidate in candidates if not splits(candidate)]
    if merging != candidates:  # an operator that a claim takes whole is not taken apart
        _, composition, *_ = _attempt(exported, quantizer, merging)
        whole = _claimed(composition)
        candidates = [c for c in candidates if not (splits(c) and c.nodes[0] in whole)]
    while True:
        working, composition, pieces, own = _attempt(exported, quantizer, candidates)
        covered = [
            _with_objection(candidate, claims, nodes, quantizer)
            for candidate, made in zip(candidates, pieces, strict=True)
            if (claims := [c for c in composition.chosen if not set(made).isdisjoint(c.nodes)])
        ]
        if covered == candidates:
            break
        refused += [candidate for candidate in covered if candidate.obstacle is not None]
        candidates = [candidate for candidate in covered if candidate.obstacle is None]
    composition.obstacles = {(c.rewrite, c.nodes): c.obstacle or "" for c in refused}
    composition.notes += [_obstacle(candidate) for candidate in refused]
    composition.chosen, tied = one_table_each(
        working, composition.chosen, quantizer.objection_to_spec
    )
    composition.notes += tied
    made = zip(candidates, pieces, strict=True)
    covering = [Rewrite(c.rewrite, c.nodes, p) for c, p in made]
    return working, composition, (*covering, *own)


def _attempt(
    exported: GraphModule, quantizer: Quantizer, candidates: Sequence[Candidate]
) -> tuple[GraphModule, Composition, list[tuple[str, ...]], tuple[Rewrite, ...]]:
    """Make rewrites on a copy and compose it; return also the pieces of each, and the members' own."""
    working = copy_graph_module(exported)
    pieces = apply_rewrites(working, candidates)
    working = refresh(working) if candidates else working
    working, own, notes = transformed(working, quantizer)
    composition = _composed(working, quantizer)
    composition.notes += notes
    return working, composition, pieces, own


def _claimed(composition: Composition) -> frozenset[str]:
    return frozenset(name for claim in composition.chosen for name in claim.nodes)


def _composed(model: GraphModule, quantizer: Quantizer) -> Composition:
    """Compose a program and each of its bodies."""
    result = Composition()
    for part in graphs_in(model):
        composition = compose_claims(part, labelled(quantizer), quantizer.on_conflict)
        result.chosen += composition.chosen
        result.conflicts += composition.conflicts
        result.rejections += composition.rejections
        result.notes += [note for note in composition.notes if note not in result.notes]
    return result


def _with_objection(
    candidate: Candidate,
    claims: Sequence[Claim],
    nodes: Mapping[str, Node],
    quantizer: Quantizer,
) -> Candidate:
    """Refuse a rewrite that joins operators which the selectors of who claims them treat differently."""
    places = [nodes[name] for name in candidate.nodes]
    objections = (quantizer.objection_to_rewrite(claim, places) for claim in claims)
    return replace(candidate, obstacle=next(filter(None, objections), None))


def _obstacle(candidate: Candidate) -> str:
    return f"{candidate.rewrite} of {', '.join(candidate.nodes)} was not made: {candidate.obstacle}"
