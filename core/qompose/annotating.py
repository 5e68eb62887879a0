# SPDX-License-Identifier: Apache-2.0
"""Annotate: a program and a quantizer in; claims out, and the program with the rewrites that claims cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from qompose.apart import Apart
from qompose.arbitration import compose_claims
from qompose.claims import Composition
from qompose.covering import covered_rewrites, wanted_rewrites
from qompose.errors import locating
from qompose.graph import copy_graph_module, refresh
from qompose.nested import body_labels, graphs_in
from qompose.plan import TRANSFORM, Rewrite
from qompose.quantizer import Quantizer, labelled
from qompose.repairs.equalization import equalize
from qompose.repairs.words import not_in_training
from qompose.rewrites import FOLD_BATCH_NORM, FOR_EVALUATION, Candidate, apply_rewrites, splits
from qompose.survey import reasons_of
from qompose.transforming import transformed
from qompose.tying import one_table_each


def annotate_program(
    exported: GraphModule, quantizer: Quantizer, *, trains: bool = False
) -> tuple[GraphModule, Composition, tuple[Rewrite, ...]]:
    """Propose and compose on a copy with all rewrites, then with those that turned out to be covered.

    Args:
        quantizer: bound to the program (`Quantizer.bound`).
        trains: the program is to be trained, and is not repaired.
    """
    found = wanted_rewrites(exported, quantizer)
    if trains:
        found = [candidate for candidate in found if candidate.rewrite not in FOR_EVALUATION]
    folds = [c for c in found if c.rewrite == FOLD_BATCH_NORM and c.obstacle is None]
    folded, _ = _rewritten(exported, folds)
    tried: list[tuple[Sequence[Candidate], _Attempt]] = []

    def attempt(candidates: Sequence[Candidate]) -> _Attempt:
        working, pieces = _rewritten(exported, candidates)
        working, own, notes = transformed(working, quantizer)
        called = _called(folds, candidates, pieces)
        composition = _composed(working, quantizer, folded, called)
        composition.notes += notes
        tried.append(
            (candidates, _Attempt(working, composition, pieces, (*own, *_made(composition))))
        )
        return tried[-1][1]

    made, candidates, refused = covered_rewrites(
        exported, found, attempt, quantizer.objection_to_rewrite
    )
    composition = made.composition
    composition.obstacles = {(c.rewrite, c.nodes): c.obstacle or "" for c in refused}
    composition.hindered = _hindered(composition, tried, candidates, refused)
    composition.notes += [_obstacle(candidate) for candidate in refused]
    composition.chosen, tied = one_table_each(
        made.working, composition.chosen, quantizer.objection_to_spec
    )
    composition.notes += tied
    named = zip(candidates, made.pieces, strict=True)
    covering = [Rewrite(c.rewrite, c.nodes, p) for c, p in named]
    if trains:
        composition.notes += not_in_training(composition.chosen)
        return made.working, composition, (*covering, *made.own)
    equalized, impossible = equalize(made.working, composition.chosen)
    composition.notes += impossible
    return made.working, composition, (*covering, *made.own, *equalized)


@dataclass(frozen=True)
class _Attempt:
    """A program with rewrites, the claims on it, the pieces of each rewrite, and the members' own ones."""

    working: GraphModule
    composition: Composition
    pieces: list[tuple[str, ...]]
    own: tuple[Rewrite, ...]


def _hindered(
    composition: Composition,
    tried: Sequence[tuple[Sequence[Candidate], _Attempt]],
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
        for candidate, pieces in zip(candidates, attempt.pieces, strict=True):
            told = next((said[name] for name in (*candidate.nodes, *pieces) if name in said), None)
            if told is not None and candidate not in (*made, *refused):
                found.update(dict.fromkeys(candidate.nodes, told))
    for candidate in refused:
        why = f"{candidate.rewrite} was not made: {candidate.obstacle}"
        found.update({name: why for name in candidate.nodes if name not in known})
    return found


def _rewritten(
    exported: GraphModule, candidates: Sequence[Candidate]
) -> tuple[GraphModule, list[tuple[str, ...]]]:
    copied = copy_graph_module(exported)
    pieces = apply_rewrites(copied, candidates)
    return (refresh(copied) if candidates else copied), pieces


def _called(
    folds: Sequence[Candidate], made: Sequence[Candidate], pieces: Sequence[tuple[str, ...]]
) -> dict[str, str]:
    """Return how the program with some rewrites calls values of the one with all batch norms folded."""
    unfolded = {c.nodes[0]: c.nodes[-1] for c in folds if c not in made}
    taken_apart = {
        c.nodes[0]: names[-1] for c, names in zip(made, pieces, strict=True) if splits(c) and names
    }
    return {**unfolded, **taken_apart}


def _made(composition: Composition) -> tuple[Rewrite, ...]:
    """Return the changes that claims stand on as rewrites of the quantizers that wanted them."""
    return tuple(
        Rewrite(f"{label}{TRANSFORM}", c.nodes, c.pieces) for label, c in composition.changes
    )


def _composed(
    model: GraphModule, quantizer: Quantizer, folded: GraphModule, called: Mapping[str, str]
) -> Composition:
    """Compose a program and each of its bodies."""
    result = Composition()
    bodies = body_labels(model)
    # All are listed first: members' changes, which are made on the way, may put calls in another order.
    for part, shown in list(zip(graphs_in(model), graphs_in(folded), strict=True)):
        with locating(bodies.get(part.graph, "")):
            composition = compose_claims(
                part, labelled(quantizer), quantizer.on_conflict, Apart(shown, called)
            )
        result.chosen += composition.chosen
        result.conflicts += composition.conflicts
        result.rejections += composition.rejections
        result.changes += composition.changes
        result.notes += [note for note in composition.notes if note not in result.notes]
    return result


def _obstacle(candidate: Candidate) -> str:
    return f"{candidate.rewrite} of {', '.join(candidate.nodes)} was not made: {candidate.obstacle}"
