# SPDX-License-Identifier: Apache-2.0
"""A program with its rewrites, and the claims that stand on it.

Annotate: a program and a quantizer in; claims out, and the program with the rewrites that claims cover.

Run every member's `transform_for_annotation`, and tell from the program what each did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qompose.algorithms.equalization import equalize
from qompose.errors import UserError, blaming, locating
from qompose.plan.float_operators import reasons_of
from qompose.plan.plan import TRANSFORM, Rewrite
from qompose.program.control_flow import body_labels, graphs_in, name_apart, nodes_in
from qompose.program.graph import copy_graph_module, refresh, replace_nested
from qompose.program.rewrites import (
    FOLD_BATCH_NORM,
    FOR_EVALUATION,
    Candidate,
    apply_rewrites,
    splits,
)
from qompose.quantizer.arbitration import compose_claims
from qompose.quantizer.base import Quantizer, labelled
from qompose.quantizer.composition import ComposableQuantizer
from qompose.quantizer.interop.isolated_view import Apart
from qompose.quantizer.kept_rewrites import covered_rewrites, wanted_rewrites
from qompose.quantizer.tied_weights import one_table_each
from qompose.spec.claim import Composition
from qompose.spec.quantization_spec import not_in_training


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


def transformed(
    model: GraphModule, quantizer: Quantizer
) -> tuple[GraphModule, tuple[Rewrite, ...], tuple[str, ...]]:
    """Let every member in turn rewrite a program and its bodies, in place or as new modules.

    Returns:
        the program; of each member that changed operators a `Rewrite` with those that it removed or
        changed, and those that it made; and a note of each member that changed anything.

    Raises:
        MemberError: a transform raised; the message names the member.
        UserError: a transform returned no program.
    """
    rewrites, notes = [], []
    name_apart(model)
    for label, member in _steps(quantizer):
        if type(member).transform_for_annotation is Quantizer.transform_for_annotation:
            continue
        before = _calls(model)
        model = _run(label, member, model)
        name_apart(model)
        after = _calls(model)
        if _alike(before, after):
            continue
        notes.append(f"{label}: transform_for_annotation rewrote the program")
        changed, made = _differences(before, after)
        if changed or made:
            rewrites.append(Rewrite(f"{label}{TRANSFORM}", changed, made))
    return model, tuple(rewrites), tuple(notes)


def _steps(quantizer: Quantizer) -> Iterator[tuple[str, Quantizer]]:
    """Yield (label, member); a kind of composition that has a transform of its own is one step."""
    labels = iter([label for label, _ in labelled(quantizer)])

    def walk(part: Quantizer) -> Iterator[tuple[str, Quantizer]]:
        if isinstance(part, ComposableQuantizer) and _forwards(part):
            for member in part.quantizers:
                yield from walk(member)
        else:
            yield "+".join(next(labels) for _ in part.members), part

    yield from walk(quantizer)


def _forwards(composition: ComposableQuantizer) -> bool:
    own = type(composition).transform_for_annotation
    return own is ComposableQuantizer.transform_for_annotation


def _run(label: str, member: Quantizer, model: GraphModule) -> GraphModule:
    """Let one member rewrite a program, bodies first."""

    def transform(part: GraphModule) -> GraphModule:
        with blaming(f"{label}: transform_for_annotation"):
            result = member.transform_for_annotation(part)
        if not isinstance(result, GraphModule):
            raise UserError(
                f"{label}: transform_for_annotation returned {result!r}, not a GraphModule"
            )
        return result

    for part in graphs_in(model):
        replace_nested(part, transform)
    return transform(model)


@dataclass(frozen=True)
class _Reference:
    """An argument that is a node, by its name."""

    name: str


@dataclass(frozen=True)
class _Call:
    """What a node does, as values that compare across graphs."""

    op: str
    target: object
    arguments: Any


def _calls(model: GraphModule) -> dict[str, _Call]:
    return {node.name: _Call(node.op, node.target, _arguments(node)) for node in nodes_in(model)}


def _arguments(node: Node) -> Any:
    return map_arg((node.args, dict(node.kwargs)), lambda argument: _Reference(argument.name))  # type: ignore[arg-type, return-value]


def _differences(
    before: Mapping[str, _Call], after: Mapping[str, _Call]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the operators that are gone or differ, and those that are new or differ, in graph order.

    An operator that reads something else where it read one that is gone does not differ by that.
    """
    gone = before.keys() - after.keys()
    differing = {
        name
        for name, call in before.items()
        if name in after and not _same_call(call, after[name], gone)
    }
    changed = [n for n, c in before.items() if n in gone | differing and c.op == "call_function"]
    new = (after.keys() - before.keys()) | differing
    made = [n for n, c in after.items() if n in new and c.op == "call_function"]
    return tuple(changed), tuple(made)


def _alike(before: Mapping[str, _Call], after: Mapping[str, _Call]) -> bool:
    same_names = before.keys() == after.keys()
    return same_names and all(_same_call(c, after[n], set()) for n, c in before.items())


def _same_call(before: _Call, after: _Call, gone: set[str]) -> bool:
    same = (before.op, before.target) == (after.op, after.target)
    return same and _same(before.arguments, after.arguments, gone)


def _same(before: Any, after: Any, gone: set[str]) -> bool:
    if isinstance(before, _Reference):
        return before.name in gone or before == after
    if isinstance(before, (tuple, list)):
        alike = isinstance(after, (tuple, list)) and len(before) == len(after)
        return alike and all(_same(b, a, gone) for b, a in zip(before, after, strict=True))
    if isinstance(before, Mapping):
        alike = isinstance(after, Mapping) and before.keys() == after.keys()
        return alike and all(_same(before[key], after[key], gone) for key in before)
    return repr(before) == repr(after)
