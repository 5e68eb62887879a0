# SPDX-License-Identifier: Apache-2.0
"""qompose's quantizers in torchao's prepare_pt2e, or another engine that works like it.

Such a host calls `transform_for_annotation` and `annotate` in turn, on a program in which other quantizers
may have annotated already, and then reads annotations, in graph order, and nothing else. So rewrites are
made in the first call, as far as claims cover them; specifications come before those that refer to them;
and what only qompose's own engine does is an error, or a warning that names it.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from qompose.errors import ConfigError, QomposeWarning, SharingError
from qompose.observers.min_max import Observer
from qompose.program.control_flow import bodies_of, name_apart
from qompose.program.graph import copy_graph_module, module_path, refresh
from qompose.program.rewrites import Candidate, apply_rewrites
from qompose.quantizer.annotations import write_annotations
from qompose.quantizer.arbitration import (
    Attempt,
    check_contests,
    compose_claims,
    covered_rewrites,
    wanted_rewrites,
)
from qompose.quantizer.tied_weights import unify_specs
from qompose.spec.algorithm_choice import by_owner
from qompose.spec.claim import (
    Claim,
    Composition,
    Point,
    PointSpec,
    Proposal,
    is_loss,
    most_telling,
    node_annotation,
)
from qompose.spec.quantization_spec import (
    EdgeOrNode,
    QuantizationSpecBase,
    describe_spec,
    register_virtual_subclasses,
)

_ASKED = "qompose_asked"
"""Key in a program's meta of what is known between a host's calls: {id of a quantizer: _Asked}."""
_REPEATED = (torch.ops.higher_order.scan, torch.ops.higher_order.while_loop)
"""Calls about whose last body hosts ask, as about a program of its own, after the program itself."""
_LOGGER = logging.getLogger("qompose")
_EARLIER = "(annotated before)"
_MOST = 3


@dataclass(frozen=True)
class _Asked:
    """A quantizer, and the same bound to a program before its rewrites, or to the one it is a body of."""

    quantizer: Any
    bound: Any
    about_body: bool = False


def transform_for_torchao(model: GraphModule, quantizer: Any) -> GraphModule:
    """Return a program with the rewrites that a quantizer's claims cover, or `model` itself."""
    register_virtual_subclasses()
    found = wanted_rewrites(model, quantizer.members)
    if all(candidate.obstacle for candidate in found):
        return model
    bound = _asked(model, quantizer).bound
    attempt = _attempting(model, bound)
    _, covered, _ = covered_rewrites(model, found, attempt, bound.objection_to_rewrite)
    if not covered:
        return model
    working = copy_graph_module(model)
    del model.meta[_ASKED]  # the host adds what is there to its result
    apply_rewrites(working, covered)
    return refresh(working)


def _asked(model: GraphModule, quantizer: Any) -> _Asked:
    """Return what is known of a quantizer and a program, finding it out where the host asks first."""
    known = model.meta.get(_ASKED, {})
    if id(quantizer) not in known:
        name_apart(model)
        known = {**known, id(quantizer): _Asked(quantizer, quantizer.bound(model))}
        model.meta[_ASKED] = known
    asked: _Asked = known[id(quantizer)]
    return asked


def _hand_on(model: GraphModule, asked: _Asked) -> None:
    """Forget about a program, and remember about those of its bodies that the host asks about next."""
    known = model.meta.pop(_ASKED)
    others = {key: value for key, value in known.items() if value is not asked}
    if others:
        model.meta[_ASKED] = others
    for call in model.graph.nodes:
        if call.target in _REPEATED:
            meta = bodies_of(call)[-1].meta
            inner = replace(asked, about_body=True)
            meta[_ASKED] = {**meta.get(_ASKED, {}), id(asked.quantizer): inner}


def _attempting(model: GraphModule, bound: Any) -> Callable[[Sequence[Candidate]], Attempt]:
    def attempt(candidates: Sequence[Candidate]) -> Attempt:
        working = copy_graph_module(model)
        pieces = apply_rewrites(working, candidates)
        working = refresh(working) if candidates else working
        composition = _composed(working, bound)
        composition.chosen = _own(composition)
        return Attempt(working, composition, pieces)

    return attempt


def annotate_for_torchao(model: GraphModule, quantizer: Any) -> GraphModule:
    """Annotate a program, without its bodies, in place and return it; what is annotated already stands.

    What the host is not going to do of what was asked is said in a QomposeWarning; notes are logged.

    Raises:
        SelectorError: a setting names something exactly that is not in the program.
        ConfigError: a configuration asks for what no other engine has operators for.
        SharingError: a specification is shared with a tensor that nobody annotates.
    """
    asked = _asked(model, quantizer)
    standing = frozenset(node.name for node in model.graph.nodes if _is_taken(node))
    composition = _composed(model, asked.bound)
    claims, _ = unify_specs(model, _own(composition), asked.bound.objection_to_spec)
    _check_operators(claims)
    write_annotations(model, in_order_of_reading(model, claims, standing))
    undone = [*_undone(claims)]
    if not asked.about_body:
        undone += [*_unclaimed(composition, claims), *asked.bound.check_program(model)]
    _hand_on(model, asked)
    for note in composition.notes:
        _LOGGER.info("%s", note)
    if undone:
        listed = "\n".join(f"  - {note}" for note in undone)
        warnings.warn(
            f"{quantizer.name} annotates for an engine other than qompose's. That engine does not "
            "support everything that was requested:\n"
            f"{listed}",
            QomposeWarning,
            stacklevel=3,
        )
    return model


def _composed(model: GraphModule, bound: Any) -> Composition:
    members = [(label, member.propose) for label, member in bound.labelled_members]
    composition = compose_claims(model, [(_EARLIER, _standing), *members], bound.on_conflict)
    own = [conflict for conflict in composition.conflicts if conflict.winner != _EARLIER]
    check_contests(own, bound.on_conflict)
    return composition


def _own(composition: Composition) -> list[Claim]:
    return [claim for claim in composition.chosen if claim.owner != _EARLIER]


def _is_taken(node: Node) -> bool:
    """Tell whether a node has a mark or a specification; some quantizers write only one of them."""
    annotation = node_annotation(node)
    if annotation is None:
        return False
    specs = [annotation.output_qspec, *annotation.input_qspec_map.values()]
    return bool(annotation._annotated) or any(spec is not None for spec in specs)


def _standing(model: GraphModule, taken: Sequence[Claim], on_conflict: str) -> Proposal:
    """Return what other quantizers of the host annotated as claims that come before all others."""
    return Proposal([_claim(node) for node in model.graph.nodes if _is_taken(node)])


def _claim(node: Node) -> Claim:
    output = node_annotation(node).output_qspec
    specs = () if output is None else (PointSpec(Point(node.name), QuantizationSpecBase()),)
    name = node.name
    return Claim(
        owner=_EARLIER, rule="", anchor=name, nodes=(name,), output=name, specs=specs, mode=""
    )


def _check_operators(claims: Sequence[Claim]) -> None:
    """Refuse specifications for which hosts have no operators."""
    for claim in claims:
        for spec in claim.specs:
            kind: Any = spec.spec
            blocks = getattr(kind, "block_size", None) is not None
            if blocks or getattr(kind, "dtype", None) is torch.bfloat16:
                remedy = "block_size (group_size, per_token)" if blocks else "bfloat16"
                raise ConfigError(
                    f"{spec.point} ({claim.owner}, rule {claim.rule}) is "
                    f"{describe_spec(kind)}, which only qompose's own engine supports. Call "
                    f"qompose.prepare_pt2e, or use a configuration without {remedy}"
                )


def _undone(claims: Sequence[Claim]) -> Iterator[str]:
    """Say which parts of claims no host follows."""
    for phrase in by_owner(claims):
        yield f"{phrase} is not applied; use a configuration without algorithms to silence this"
    balanced = Counter(c.owner for c in claims if c.product is not None and c.product.balanced)
    for owner, number in balanced.items():
        yield (
            f"{owner}: the channels of {number} layer{'s' * (number != 1)} are not balanced; "
            "use a configuration with balance=False to silence this"
        )
    for claim in claims:
        points = [str(spec.point) for spec in claim.specs if spec.bounds is not None]
        if points:
            yield (
                f"{claim.owner}, rule {claim.rule}: the scale and zero point of "
                f"{', '.join(points)} are not checked against the constraints of its kernel"
            )


def _unclaimed(composition: Composition, claims: Sequence[Claim]) -> Iterator[str]:
    """Say why nothing was claimed, unless others had taken it; the commonest reasons first."""
    if not claims and not any(is_loss(rejection) for rejection in composition.rejections):
        reasons = Counter(r.reason for r in most_telling(composition.rejections))
        for reason, number in reasons.most_common(_MOST):
            yield f"no operator is annotated; {number} region{'s' * (number != 1)}: {reason}"


def name_observers(places: Mapping[EdgeOrNode, nn.Module]) -> None:
    """Tell observers of qompose what they observe, for messages."""
    for place, observer in places.items():
        if isinstance(observer, Observer) and observer.subject == Observer.subject:
            source, user = (place, None) if isinstance(place, Node) else place
            path = module_path(user or source)
            point = Point(source.name, None if user is None else user.name)
            observer.subject = f"{point} in {path}" if path else str(point)


def in_order_of_reading(
    model: GraphModule, claims: Sequence[Claim], standing: frozenset[str]
) -> list[Claim]:
    """Return claims in the order in which hosts read, what others share before those, without standing nodes.

    Hosts make observers as they come by: the edges of a node in the order of its annotation, then its
    output, in graph order. What is shared or derived has to refer to what was made before.

    Args:
        standing: the names of nodes whose annotations are those of others, and stay as they are.

    Raises:
        SharingError: a specification refers to a tensor that nobody annotates, or is derived from one that
            hosts come by later.
    """
    position = {node.name: number for number, node in enumerate(model.graph.nodes)}

    def place(spec: PointSpec) -> tuple[int, bool, bool]:
        point = spec.point
        return position[point.holder], point.user is None, spec.derived

    ordered = [
        replace(
            claim,
            specs=tuple(
                sorted((s for s in claim.specs if s.point.holder not in standing), key=place)
            ),
        )
        for claim in claims
    ]
    specs = sorted((spec for claim in ordered for spec in claim.specs), key=place)
    anchored = _anchored(specs, standing)
    return [replace(c, specs=tuple(anchored[s.point] for s in c.specs)) for c in ordered]


def _anchored(specs: Sequence[PointSpec], standing: frozenset[str]) -> dict[Point, PointSpec]:
    """Give what a group of points shares to the first of them; the others share with that one."""
    known: dict[Point, PointSpec] = {}
    for spec in specs:
        known.setdefault(spec.point, spec)
    groups: dict[Point, list[PointSpec]] = defaultdict(list)
    for spec in known.values():
        groups[_root(spec, known, standing)].append(spec)
    result = dict(known)
    for root, members in groups.items():
        first = members[0]
        if root in known and first.point != root:
            result[first.point] = replace(known[root], point=first.point)
            shared = replace(first, references=(first.point,))
            result.update({s.point: replace(shared, point=s.point) for s in members[1:]})
    _check_derived(result.values(), standing)
    return result


def _check_derived(specs: Iterable[PointSpec], standing: frozenset[str]) -> None:
    """Refuse what is derived from what hosts come by later, or never."""
    made: set[Point] = set()
    for spec in specs:
        for source in spec.references if spec.derived else ():
            if source not in made and source.holder not in standing:
                raise SharingError(
                    f"{spec.point} is derived from {source}, which this engine processes "
                    "later or not at all; qompose.prepare_pt2e accepts specifications in any "
                    "order"
                )
        made.add(spec.point)


def _root(spec: PointSpec, known: Mapping[Point, PointSpec], standing: frozenset[str]) -> Point:
    """Return the point whose specification is not shared, at the end of the references from one."""
    visited = {spec.point}
    start = spec
    while spec.shared:
        (target,) = spec.references
        if target not in known and target.holder in standing:
            return target
        if target not in known or target in visited:
            raise SharingError(
                f"{start.point} shares quantization parameters that nothing defines: {spec.point} "
                f"refers to {target}, which has none. Give {target} its own specification."
            )
        visited.add(target)
        spec = known[target]
    return spec.point
