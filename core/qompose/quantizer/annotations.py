# SPDX-License-Identifier: Apache-2.0
"""Annotations in `node.meta` turned into claims, and claims written as annotations.

Quantizers of this field annotate: they write to `node.meta`. Here they do so on a snapshot; what they
wrote is compared by content with what was there, grouped into fused regions, and becomes claims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.errors import AnnotationConflictError, ConfigError, UserError
from qompose.program.aliasing import unsafe_values
from qompose.program.aten_operators import with_sources
from qompose.program.control_flow import nodes_in
from qompose.program.graph import constant_of, copy_graph_module, dtype_of, is_quantizable
from qompose.program.meta import ANNOTATION_KEY, CUSTOM_KEY, PROVENANCE
from qompose.quantizer.interop.hook_guard import HookGuard, checksums, own_buffers
from qompose.spec.claim import (
    ANNOTATION_FACTS,
    FIRST,
    PRIORITY,
    Claim,
    Operand,
    Point,
    PointSpec,
    Proposal,
    Rejection,
    annotation_facts,
    clear_annotations,
    node_annotation,
    reasons_of_dependents,
    shared_with,
)
from qompose.spec.quantization_spec import (
    DerivedQuantizationSpec,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

RULE = "annotation"
"""The rule name of claims that come from a quantizer that annotates."""


def propose_annotations(
    owner: str,
    annotate: Callable[[GraphModule], Any],
    model: GraphModule,
    taken: Sequence[Claim],
    on_conflict: str = PRIORITY,
    *,
    validate: Callable[[GraphModule], None] | None = None,
) -> Proposal:
    """Let a quantizer annotate a snapshot that shows what earlier members took, and return its claims.

    Args:
        validate: is shown the annotated snapshot.

    Raises:
        AnnotationConflictError: it changed an earlier member's annotation, and on_conflict is not "first".
        ConfigError: an annotation is not made of specifications.
        UserError: it changed the program, or wrote to its tensors.
    """
    snapshot = copy_graph_module(model)
    clear_annotations(snapshot)
    with_sources(snapshot)
    write_annotations(snapshot, taken)
    before = {
        node.name: point_specs(node) for node in snapshot.graph.nodes if node_annotation(node)
    }
    owners = {node: claim.owner for claim in taken for node in _touched(claim)}
    own_buffers(snapshot)
    buffers = dict(snapshot.named_buffers(remove_duplicate=False))
    guard = HookGuard(owner, snapshot, buffers=False, state=checksums)
    proposal = Proposal()
    for hook, call in {"annotate": annotate, "validate": validate}.items():
        if call is None:
            continue
        numbers = checksums(buffers)
        with guard.forbid_changes(hook):
            returned = call(snapshot)
        if returned is not None and returned is not snapshot:
            raise UserError(
                f"{owner}: {hook} must return the given program or None, but it returned "
                f"another object of type {type(returned).__name__}"
            )
        after = checksums(buffers)
        if written := [name for name in numbers if after[name] != numbers[name]]:
            proposal.notes.append(
                f"{owner}: {hook} wrote to copies of the buffers {', '.join(written)}; the "
                "writes were discarded"
            )
    annotated = []
    for node in snapshot.graph.nodes:
        if node_annotation(node) is None and node.name not in before:
            continue
        if node.name not in before:
            annotated.append(node)
        elif point_specs(node) != before[node.name]:
            _changed(proposal, owners[node.name], owner, node, on_conflict)
    proposal.claims = claims_of(owner, annotated, proposal)
    proposal.marks = _marks_between(model, snapshot)
    return proposal


def _touched(claim: Claim) -> Iterable[str]:
    yield from claim.nodes
    yield from (spec.point.holder for spec in claim.specs)


def _changed(proposal: Proposal, earlier: str, later: str, node: Node, on_conflict: str) -> None:
    change = "removed" if node_annotation(node) is None else "changed"
    if on_conflict != FIRST:
        raise AnnotationConflictError(earlier, later, node.name, change)
    done = f"{change} the annotation of {earlier}; the change was undone"
    proposal.notes.append(f"{node.name}: {later} {done}")
    proposal.rejections.append(Rejection(later, RULE, (node.name,), f"it {done}"))


def _edges(node: Node) -> Mapping[Node, Any]:
    """Return the specifications of an annotated node's inputs.

    Raises:
        ConfigError: the annotation is none.
    """
    annotation = node_annotation(node)
    edges = getattr(annotation, "input_qspec_map", None)
    if not isinstance(edges, Mapping) or not all(isinstance(key, Node) for key in edges):
        raise ConfigError(
            f"the annotation of {node.name} must be a QuantizationAnnotation whose "
            f"input_qspec_map maps nodes to specifications, got {annotation!r}"
        )
    return edges


def point_specs(node: Node) -> list[PointSpec]:
    """Return what a node's annotation says, as values that compare by content."""
    annotation = node_annotation(node)
    if annotation is None:
        return []
    edges = _edges(node)
    implicit = bool(getattr(annotation, "allow_implicit_sharing", True))
    places = [(Point(source.name, node.name), spec) for source, spec in edges.items()]
    places.append((Point(node.name), getattr(annotation, "output_qspec", None)))
    return [_point_spec(point, spec, implicit) for point, spec in places if not _leaves_float(spec)]


def _leaves_float(spec: Any) -> bool:
    """Tell whether a specification asks for nothing: torchao's for biases has the type that they have."""
    return spec is None or getattr(spec, "dtype", None) is torch.float32


def _point_spec(point: Point, spec: Any, implicit: bool) -> PointSpec:
    """Return a specification as a value: what it refers to are points, not nodes of some graph."""
    try:
        native, references = native_spec(spec), _references(spec)
    except ConfigError as error:
        raise ConfigError(f"the specification of {point}: {error}") from error
    if isinstance(native, SharedQuantizationSpec):
        return shared_with(point, references[0], implicit=implicit)
    if isinstance(native, DerivedQuantizationSpec):
        native = replace(native, derived_from=list(references))  # type: ignore[arg-type]
    return PointSpec(point, native, references, implicit)


def native_spec(spec: Any) -> QuantizationSpecBase:
    """Return a specification as one of core's own, recognised by its attributes.

    Raises:
        ConfigError: it is not one of the four kinds.
    """
    if isinstance(spec, QuantizationSpecBase):
        return spec
    if hasattr(spec, "edge_or_node"):
        return SharedQuantizationSpec(spec.edge_or_node)
    common: dict[str, Any] = {
        name: getattr(spec, name, None) for name in ("dtype", "quant_min", "quant_max", "qscheme")
    }
    dynamic = bool(getattr(spec, "is_dynamic", False))
    if hasattr(spec, "derived_from"):
        return DerivedQuantizationSpec(
            list(spec.derived_from),
            spec.derive_qparams_fn,
            ch_axis=getattr(spec, "ch_axis", None),
            is_dynamic=dynamic,
            **common,
        )
    if hasattr(spec, "observer_or_fake_quant_ctr"):
        return QuantizationSpec(
            observer_or_fake_quant_ctr=spec.observer_or_fake_quant_ctr,
            ch_axis=getattr(spec, "ch_axis", None),
            is_dynamic=dynamic,
            **common,
        )
    if hasattr(spec, "scale") and hasattr(spec, "zero_point"):
        return FixedQParamsQuantizationSpec(
            scale=spec.scale, zero_point=spec.zero_point, is_dynamic=dynamic, **common
        )
    raise ConfigError(f"expected a quantization specification, got {spec!r}")


def _references(spec: Any) -> tuple[Point, ...]:
    if hasattr(spec, "edge_or_node"):
        return (_as_point(spec.edge_or_node),)
    return tuple(_as_point(item) for item in getattr(spec, "derived_from", ()))


def _as_point(edge_or_node: EdgeOrNode) -> Point:
    if isinstance(edge_or_node, Node):
        return Point(edge_or_node.name)
    match edge_or_node:
        case (Node() as source, Node() as user):
            return Point(source.name, user.name)
    raise ConfigError(f"expected a node or an edge (producer, consumer), got {edge_or_node!r}")


def claims_of(owner: str, nodes: Sequence[Node], proposal: Proposal) -> list[Claim]:
    """Group annotated nodes into fused regions, a claim each.

    Specifications on integers, and on values that are written in place under another name, are refused.

    Raises:
        ConfigError: an edge is annotated on a node that does not read its tensor.
    """
    regions = [(region, list(_region_specs(owner, region))) for region in _regions(nodes)]
    reasons = _objections(owner, regions)
    claims = []
    for region, specs in regions:
        followed = [spec for spec in specs if spec.point not in reasons]
        dropped = [(spec.point, reasons[spec.point]) for spec in specs if spec.point in reasons]
        if followed:
            claims.append(_claim(owner, region, followed))
        _say_dropped(owner, region, dropped, proposal, claimed=bool(followed))
    return claims


def _objections(
    owner: str, regions: Sequence[tuple[list[Node], list[PointSpec]]]
) -> dict[Point, str]:
    """Return why points cannot be quantized; some take their parameters from others that cannot."""
    unsafe = unsafe_values(regions[0][0][0].graph) if regions else frozenset()
    reasons: dict[Point, str] = {}
    for region, specs in regions:
        known = {n.name: n for node in region for n in (node, *node.all_input_nodes)}
        edges = {(n.name, node.name) for node in region for n in node.all_input_nodes}
        for point in (spec.point for spec in specs):
            if point.user is not None and (point.source, point.user) not in edges:
                raise ConfigError(
                    f"{owner} annotates {point}, which is not an edge of the program: the keys of "
                    f"input_qspec_map must be inputs of {point.user}"
                )
            if (reason := _objection(point, known[point.source], unsafe)) is not None:
                reasons[point] = reason
    return reasons_of_dependents([spec for _, specs in regions for spec in specs], reasons)


def _region_specs(owner: str, region: Sequence[Node]) -> Iterator[PointSpec]:
    for node in region:
        try:
            yield from point_specs(node)
        except ConfigError as error:
            raise ConfigError(f"{owner}: {error}") from error


def _say_dropped(
    owner: str,
    region: Sequence[Node],
    dropped: Sequence[tuple[Point, str]],
    proposal: Proposal,
    *,
    claimed: bool,
) -> None:
    """List what cannot be followed: at the operator if nobody claims it and reports list it, or in notes."""
    listed = region[-1].op == "call_function" and region[-1].target is not getitem
    for point, reason in dropped:
        if listed and not claimed:
            proposal.rejections.append(Rejection(owner, RULE, (region[-1].name,), reason))
        else:
            idle = region[-1].op != "call_function" and point.user is None
            what = point.source if idle else point
            proposal.notes.append(f"ignored the annotation of {what} by {owner}: {reason}")


def _objection(point: Point, source: Node, unsafe: Collection[str]) -> str | None:
    """Return why a tensor cannot be quantized, None where it can."""
    if source.op == "output":
        return (
            "it is the output node of the program; annotate the operator that is returned, "
            "or its edge to the output node"
        )
    if source.name in unsafe:
        return f"{source.name} is written in place and also read under another name"
    return None if is_quantizable(source) else f"{point} is {dtype_of(source) or 'not a tensor'}"


def _claim(owner: str, region: list[Node], specs: list[PointSpec]) -> Claim:
    operators = [node for node in region if node.op == "call_function"] or region
    anchor = next(
        (n for n in operators if any(constant_of(i) is not None for i in n.all_input_nodes)),
        operators[0],
    )
    plain = next((s.spec for s in specs if hasattr(s.spec, "is_dynamic")), None)
    edges = [spec.point for spec in specs if spec.point.user is not None]
    static = any(not getattr(spec.spec, "is_dynamic", False) for spec in specs)
    return Claim(
        owner=owner,
        rule=RULE,
        anchor=anchor.name,
        nodes=tuple(node.name for node in operators),
        output=operators[-1].name,
        specs=tuple(specs),
        operands=tuple(Operand(edge.source, str(edge.user), ()) for edge in edges),
        config="annotation" if plain is None else str(getattr(plain, "dtype", "")),
        mode="static" if static else "dynamic",
    )


def _regions(nodes: Sequence[Node]) -> list[list[Node]]:
    """Join a producer with its only consumer where neither says anything of the tensor between them.

    Two operators that both have weights are never one region.
    """
    region_of: dict[Node, list[Node]] = {}
    for node in nodes:  # in graph order
        region = [node]
        for source in node.all_input_nodes:
            earlier = region_of.get(source)
            if earlier is not None and _fused(source, node) and not _two_weights(earlier, region):
                region = earlier if region == [node] else region
                if region is earlier:
                    region.append(node)
        region_of[node] = region
    unique: dict[int, list[Node]] = defaultdict(list)
    for region in region_of.values():
        unique[id(region)] = region
    return list(unique.values())


def _fused(source: Node, user: Node) -> bool:
    output, edges = getattr(node_annotation(source), "output_qspec", None), _edges(user)
    says_nothing = output is None and edges.get(source) is None
    operators = source.op == user.op == "call_function"
    return says_nothing and operators and len(source.users) == 1


def _two_weights(region: Sequence[Node], other: Sequence[Node]) -> bool:
    return all(
        any(constant_of(argument) is not None for node in part for argument in node.all_input_nodes)
        for part in (region, other)
    )


def write_annotations(
    model: GraphModule, claims: Iterable[Claim], behind: Mapping[Node, Node] | None = None
) -> None:
    """Write claims to `node.meta`, as annotations that other tools of this field read.

    Args:
        behind: products whose batch norms are taken apart for training, each with the one that gives its
            value now, and reads what the product no longer does: the bias.
    """
    nodes = {node.name: node for node in nodes_in(model)}
    behind = behind or {}
    for claim in claims:
        for name in claim.nodes:
            for node in (nodes[name], *_following(nodes[name], behind)):
                _annotation(node)._annotated = True
                vars(_annotation(node)).update(node.meta.get(ANNOTATION_FACTS, {}))
        for spec in claim.specs:
            place = _place(spec.point, nodes, behind)
            written = _with_nodes(spec, nodes, behind)
            holder = _annotation(place[1] if isinstance(place, tuple) else place)
            holder.allow_implicit_sharing = spec.allow_implicit_sharing
            if isinstance(place, tuple):
                holder.input_qspec_map[place[0]] = written
            else:
                holder.output_qspec = written


def _annotation(node: Node) -> Any:
    """Return a node's annotation, one of another engine's too, making one where there is none."""
    return node.meta.setdefault(ANNOTATION_KEY, QuantizationAnnotation())


def _following(node: Node, behind: Mapping[Node, Node]) -> list[Node]:
    return [behind[node]] if node in behind else []


def _place(point: Point, nodes: Mapping[str, Node], behind: Mapping[Node, Node]) -> EdgeOrNode:
    """Return the node, or the edge, of a point; `behind` as in `write_annotations`."""
    source = nodes[point.source]
    if point.user is None:
        return behind.get(source, source)
    user = nodes[point.user]
    read = {node for given in user.all_input_nodes for node in (given, *given.all_input_nodes)}
    if user in behind and source not in read:
        user = behind[user]
    return behind.get(source, source), user


def _with_nodes(
    spec: PointSpec, nodes: Mapping[str, Node], behind: Mapping[Node, Node]
) -> QuantizationSpecBase:
    """Return a specification whose references are nodes of this graph."""
    places = [_place(point, nodes, behind) for point in spec.references]
    if isinstance(spec.spec, SharedQuantizationSpec):
        return SharedQuantizationSpec(places[0])
    if isinstance(spec.spec, DerivedQuantizationSpec):
        facts = {k: v for k, v in spec.spec.__dict__.items() if k != "derived_from"}
        return DerivedQuantizationSpec(derived_from=places, **facts)
    return spec.spec


_OURS = {*PROVENANCE, ANNOTATION_KEY, "val", "tensor_meta"}


def _marks_between(before: GraphModule, after: GraphModule) -> dict[str, dict[str, Any]]:
    """Return the entries that nodes of `after` have beyond those of the same name in `before`.

    Entries under "custom" are compared one by one. Those that hold nodes or graphs are left out: they
    would keep a copy of the program alive, and mean nothing in another one.
    """
    known = {node.name: node.meta for node in before.graph.nodes}
    pairs = ((node, known[node.name]) for node in after.graph.nodes if node.name in known)
    found = {node.name: dict(_entries(node.meta, meta)) for node, meta in pairs}
    return {name: entries for name, entries in found.items() if entries}


def _entries(meta: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in meta.items():
        if key not in earlier and key not in _OURS and _is_plain(value):
            yield key, value
    if facts := annotation_facts(meta.get(ANNOTATION_KEY)):
        yield ANNOTATION_FACTS, facts
    had = earlier.get("custom") or {}
    custom = {
        key: value
        for key, value in (meta.get("custom") or {}).items()
        if key not in had and key != CUSTOM_KEY and _is_plain(value)
    }
    if custom:
        yield "custom", custom


def _is_plain(value: object) -> bool:
    parts = [*pytree.tree_leaves(value), *getattr(value, "__dict__", {}).values()]
    return not any(isinstance(part, (Node, Graph, GraphModule)) for part in parts)
