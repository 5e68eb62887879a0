# SPDX-License-Identifier: Apache-2.0
"""Bodies of control flow in a transformed program: what a transform did inside them from outside is undone.

A quantizer is asked about every body as a program of its own, and what it wants there stands on that. So what
its transform of the program around them did inside them is not followed, and their calls stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node

from qompose.errors import UserError
from qompose.program.control_flow import body_of, is_nested_call, nodes_in, references_of
from qompose.program.graph import copy_graph_module, free_attribute, set_attribute, value_of
from qompose.program.meta import tag_of
from qompose.quantizer.interop.comparing import difference, same_body
from qompose.quantizer.interop.correspondence import STAMP, Correspondence, returned
from qompose.quantizer.interop.regions import Region


def restore_bodies(before: GraphModule, after: GraphModule) -> None:
    """Put a program's bodies back, in place, where a transform of a stamped copy changed what is inside."""
    calls = {node.name: node for node in before.graph.nodes if is_nested_call(node)}
    for other in [node for node in after.graph.nodes if is_nested_call(node)]:
        one = calls.get(tag_of(other, STAMP))
        if one is None or one.target is not other.target:
            continue
        for old, new in zip(references_of(one), references_of(other), strict=True):
            body, changed = body_of(old), body_of(new)
            if not same_body(body, changed) and _came_of(changed, body, before):
                _read_instead(other, new, body)


def _came_of(changed: GraphModule, body: GraphModule, program: GraphModule) -> bool:
    """Tell whether a body was made of another one, as far as stamps and the values at its borders tell."""
    names = {node.name for node in nodes_in(body)}
    others = {node.name for node in nodes_in(program)} - names
    marks = {tag_of(node, STAMP) for node in nodes_in(changed) if node.op == "call_function"}
    if marks & others:
        return False
    borders = zip(_border(body), _border(changed), strict=True)
    return all(difference(ones, twins) is None for ones, twins in borders)


def _border(body: GraphModule) -> tuple[list[Any], list[Any]]:
    """Return example values of what a body is given, and of what it returns."""
    inputs = [value_of(node) for node in body.graph.nodes if node.op == "placeholder"]
    return inputs, [value_of(n) if isinstance(n, Node) else n for n in returned(body)]


def _read_instead(call: Node, reference: Node, body: GraphModule) -> None:
    owner = call.graph.owning_module
    assert owner is not None
    path = free_attribute(owner, str(reference.target))
    set_attribute(owner, path, copy_graph_module(body))
    with call.graph.inserting_before(call):
        read = call.graph.get_attr(path)
    read.meta = dict(reference.meta)
    call.replace_input_with(reference, read)
    if not reference.users:
        call.graph.erase_node(reference)


def check_bodies(found: Correspondence, regions: Iterable[Region]) -> None:
    """Check that places where two programs differ have the same bodies.

    Raises:
        UserError: an operator with bodies is gone, is new, or calls others.
    """
    for region in regions:
        ones, others = _read_bodies(region.before), _read_bodies(region.after)
        if len(ones) != len(others) or not all(map(found.same, ones, others)):
            callers = dict.fromkeys(call.name for read in ones or others for call in read.users)
            raise UserError(
                f"it changed {', '.join(callers)} by more than what is in the graphs that it calls. A "
                "quantizer is asked about those graphs on their own; a transform for annotation keeps what "
                "calls them."
            )


def _read_bodies(nodes: Iterable[Node]) -> list[Node]:
    return [read for node in nodes for read in references_of(node)]
