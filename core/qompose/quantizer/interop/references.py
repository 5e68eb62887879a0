# SPDX-License-Identifier: Apache-2.0
"""What foreign specifications refer to, after operators were made to read a constant by another node."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch.fx import Graph, Node

from qompose.program.meta import ANNOTATION_KEY
from qompose.spec.quantization_spec import EdgeOrNode

Redirected: TypeAlias = "dict[EdgeOrNode, EdgeOrNode]"
"""Edges and nodes, by those in whose place they are."""


def follow_references(graph: Graph, redirected: Mapping[EdgeOrNode, EdgeOrNode]) -> None:
    """Let the annotations of a graph, in place, refer to what is read now.

    Specifications are not edited, since others may hold them: an annotation gets copies.
    """
    for node in graph.nodes if redirected else ():
        annotation = node.meta.get(ANNOTATION_KEY)
        edges = getattr(annotation, "input_qspec_map", None)
        if not isinstance(edges, dict):
            continue  # reading it as an annotation says so
        for source, spec in edges.items():
            edges[source] = _following(spec, redirected)
        output = getattr(annotation, "output_qspec", None)
        following = _following(output, redirected)
        if following is not output:
            annotation.output_qspec = following


def _following(spec: Any, redirected: Mapping[EdgeOrNode, EdgeOrNode]) -> Any:
    """Return a specification, or a copy of it that refers to something else."""
    if hasattr(spec, "edge_or_node"):
        target = _redirected(spec.edge_or_node, redirected)
        return spec if target is spec.edge_or_node else _with(spec, "edge_or_node", target)
    sources = getattr(spec, "derived_from", None)
    if not isinstance(sources, (list, tuple)):
        return spec
    targets = [_redirected(source, redirected) for source in sources]
    if all(target is source for target, source in zip(targets, sources, strict=True)):
        return spec
    return _with(spec, "derived_from", type(sources)(targets))


def _redirected(place: Any, redirected: Mapping[EdgeOrNode, EdgeOrNode]) -> Any:
    if isinstance(place, Node):
        return redirected.get(place, place)
    match place:
        case (Node() as source, Node() as user):
            return redirected.get((source, user), place)
    return place  # reading it as a reference says that it is none


def _with(spec: Any, name: str, value: Any) -> Any:
    copied = copy.copy(spec)
    object.__setattr__(copied, name, value)  # specifications are frozen
    return copied
