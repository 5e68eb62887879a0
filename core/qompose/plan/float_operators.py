# SPDX-License-Identifier: Apache-2.0
"""Every float operator of a program: what reads it, its multiply-accumulates, and why it stays in float.

Readers are followed past nodes that only hand values on, and into and out of the bodies of control flow, but
not from one iteration of a loop to the next: an operator would read its own result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from qompose.plan.plan import Operator, Rewrite
from qompose.program.aten_operators import graphs_inside, macs, steps_of
from qompose.program.control_flow import (
    LAYOUTS,
    bodies_of,
    graphs_in,
    is_nested_call,
    nodes_in,
    operands_of,
)
from qompose.program.disk import stored_size
from qompose.program.graph import (
    address_of,
    module_path,
    operator_name,
    value_of,
)
from qompose.spec.claim import Claim, Composition, most_telling
from qompose.spec.qdq import is_of_quantization

aten = torch.ops.aten
FOLDED = "it depends only on parameters and is computed once, at conversion"


def survey(
    exported: GraphModule,
    working: GraphModule,
    composition: Composition,
    rewrites: Sequence[Rewrite],
) -> tuple[Operator, ...]:
    """Return the operators of the program as it was exported.

    An operator that was taken apart is not listed, but its pieces in `working`, after its name; nor is one
    that a quantizer's own transform removed or changed, but what that made, under names of its own. One
    that was folded into a weight has no multiply-accumulates left.
    """
    claim_of = {name: i for i, claim in enumerate(composition.chosen) for name in claim.nodes}
    split, produced = {}, {node.name: node for node in nodes_in(working)}
    own = [rewrite for rewrite in rewrites if rewrite.member]
    gone = {name for rewrite in own for name in rewrite.nodes}
    engines = (r for r in rewrites if r.pieces and not r.member)  # some change parameters alone
    for rewrite in engines:
        if rewrite.merges:  # its operators have one claim
            if (claim := claim_of.get(rewrite.pieces[0])) is not None:
                claim_of.update(dict.fromkeys(rewrite.nodes, claim))
            elif not gone.isdisjoint(rewrite.pieces):  # a quantizer rewrote what they became
                gone.update(rewrite.nodes)
        else:
            pieces = [produced[name] for name in rewrite.pieces if name in produced]
            split[rewrite.nodes[0]] = pieces
    reasons = {**reasons_of(composition), **composition.blocked}
    made = {name for rewrite in own for name in rewrite.pieces}
    passes = {**_passes(exported), **_passes(working)}
    listed = [
        (name, node)
        for name, node in _with_own(_listed(exported, split, claim_of), working, own, gone)
        if node.op == "call_function"
        and not is_nested_call(node)
        and not is_of_quantization(node)
        and _computes_floats(node, made)
    ]
    folded = {node.name for _, node in listed} - claim_of.keys() - produced.keys()
    reasons |= dict.fromkeys(folded, FOLDED) | _merged(rewrites)
    read = _reads(exported, working, {node.name: name for name, node in listed}, rewrites)
    return tuple(
        Operator(
            name=name,
            operator=operator_name(node.target),
            module=module_path(node),
            macs=0 if node.name in folded else macs(node) * passes[node.graph],
            claim=claim_of.get(node.name),
            reason="" if node.name in claim_of else reasons.get(node.name, _why_not(node)),
            inputs=read[name],
        )
        for name, node in listed
    )


def _merged(rewrites: Iterable[Rewrite]) -> dict[str, str]:
    """Return by operators that a rewrite merged into another where they are, if no claim has both."""
    return {
        name: f"it is folded into {rewrite.pieces[0]}"
        for rewrite in rewrites
        if rewrite.pieces and not rewrite.member and rewrite.merges
        for name in rewrite.nodes
        if name not in rewrite.pieces
    }


def _reads(
    exported: GraphModule,
    working: GraphModule,
    listed: Mapping[str, str],
    rewrites: Sequence[Rewrite],
) -> dict[str, tuple[str, ...]]:
    """Return, by the name of each operator in the list, the names of those whose results it reads.

    The program as it was rewritten says so, but for operators that it lacks because they were merged into
    others. What stands there for several has the value of the last of them.

    Args:
        exported, working: the program as it was exported, and with its rewrites.
        listed: by the names of nodes, what the list calls them.
        rewrites: how one became the other.
    """
    last = {
        rewrite.pieces[-1]: rewrite.nodes[-1]
        for rewrite in rewrites
        if rewrite.pieces and not rewrite.member and rewrite.merges
    }
    now, before = ({n.name: n for n in nodes_in(program)} for program in (working, exported))
    flow_now, flow_before = Flow(working), Flow(exported)

    def is_listed(node: Node) -> bool:
        return node.name in listed

    def read_by(name: str) -> list[str]:
        if name not in now:
            return [listed[n.name] for n in flow_before.producers(before[name], is_listed)]
        found = [node.name for node in flow_now.producers(now[name], is_listed)]
        return [listed[last[n] if last.get(n) in listed else n] for n in found]

    return {row: tuple(dict.fromkeys(read_by(name))) for name, row in listed.items()}


def _with_own(
    listed: Iterable[tuple[str, Node]],
    working: GraphModule,
    rewrites: Sequence[Rewrite],
    gone: Container[str],
) -> Iterator[tuple[str, Node]]:
    """Yield what is listed but for what quantizers rewrote themselves; what they made, where it stands."""
    made = {name for rewrite in rewrites for name in rewrite.pieces}
    standing = {node.name: node for node in nodes_in(working)} if rewrites else {}
    rows = list(listed)
    known, behind, last = {node.name for _, node in rows}, defaultdict(list), ""
    for name, node in standing.items():
        if name in known:
            last = name
        elif name in made:
            behind[last].append((name, node))
    yield from behind[""]
    for name, node in rows:
        if node.name not in gone:
            yield name, node
        elif node.name in made and node.name in standing:  # it does something else now
            yield node.name, standing[node.name]
        yield from behind[node.name]


def claims_elsewhere(claims: Sequence[Claim], operators: Sequence[Operator]) -> list[str]:
    """Describe the claims on no float operator: on inputs, parameters or outputs of the program."""
    listed = {operator.claim for operator in operators}
    return [
        (
            f"{claim.owner} quantizes {', '.join(str(s.point) for s in claim.specs)}, but no "
            "float operator there"
        )
        for number, claim in enumerate(claims)
        if number not in listed
    ]


def _listed(
    exported: GraphModule, split: Mapping[str, Sequence[Node]], claim_of: Mapping[str, int]
) -> Iterator[tuple[str, Node]]:
    """Yield the program's nodes with their names, the pieces of one in its place.

    Taking one of several results computes nothing; it is listed only where a claim covers it alone.
    """
    for node in nodes_in(exported):
        if node.name in split:
            for piece in split[node.name]:
                yield f"{node.name}/{piece.name.removeprefix(f'{node.name}_')}", piece
        elif node.target is not getitem or _claimed_alone(node, claim_of):
            yield node.name, node


def _claimed_alone(taken: Node, claim_of: Mapping[str, int]) -> bool:
    """Tell whether a claim covers the taking of a result, and not the operator that it is a result of."""
    claim, source = claim_of.get(taken.name), cast(Node, taken.args[0])
    return claim is not None and claim != claim_of.get(source.name)


NOBODY = "no rule claims it"


def _why_not(node: Node) -> str:
    return "the operators inside it are not visited" if graphs_inside(node) else NOBODY


def _computes_floats(node: Node, made: Container[str]) -> bool:
    if node.name in made and "val" not in node.meta:  # its maker did not say what it computes
        return True
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and v.dtype.is_floating_point for v in values)


def reasons_of(composition: Composition) -> dict[str, str]:
    """Return the first telling reason that was given for each operator, in order of priority."""
    reasons: dict[str, str] = {}
    for rejection in most_telling(composition.rejections):
        for node in rejection.nodes:
            reasons.setdefault(node, f"{rejection.owner}: {rejection.reason}")
    return reasons


def _passes(program: GraphModule) -> dict[Graph, int]:
    """Return how often one call of a program runs each of its graphs."""
    passes = {program.graph: 1}
    for part in graphs_in(program):
        for node in filter(is_nested_call, part.graph.nodes):
            for body in bodies_of(node):
                passes[body.graph] = passes[part.graph] * steps_of(node)
    return passes


def state_bytes(module: nn.Module, *, in_file: bool = False) -> int:
    """Return the bytes of all parameters and buffers, in memory or in a file, tied ones counted once."""
    size = stored_size if in_file else lambda tensor: tensor.numel() * tensor.element_size()
    seen: dict[tuple[int, int], int] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        seen[(address_of(tensor), int(tensor.storage_offset()))] = size(tensor)
    return sum(seen.values())


_SIZES = {
    aten.sym_size.int,
    aten.sym_stride.int,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
}
"""What reads the shape of a value, and none of its numbers."""


class Flow:
    """The values that the nodes of one program read."""

    def __init__(self, program: GraphModule) -> None:
        self._callers = {
            body.graph: call
            for call in nodes_in(program)
            if is_nested_call(call)
            for body in bodies_of(call)
        }

    def producers(self, reader: Node, ends: Callable[[Node], bool]) -> list[Node]:
        """Return the nodes nearest behind a reader for which `ends` holds, in the order of its arguments."""
        found: dict[Node, None] = {}
        seen: set[Node] = set()
        waiting = self._sources(reader)[::-1]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if ends(node):
                found[node] = None
            else:
                waiting += reversed(self._sources(node))
        return list(found)

    def _sources(self, node: Node) -> list[Node]:
        """Return the nodes whose values a node takes its own from."""
        if node.op == "placeholder":
            return self._operand(node)
        if is_nested_call(node):
            return _results(node, slice(None))
        source = node.args[0] if node.target is getitem else None
        if isinstance(source, Node) and is_nested_call(source):
            index: Any = node.args[1]
            return _results(source, slice(index, index + 1))
        return [] if node.target in _SIZES else node.all_input_nodes

    def _operand(self, placeholder: Node) -> list[Node]:
        """Return what the caller of a body passes for one of its placeholders."""
        call = self._callers.get(placeholder.graph)
        if call is None:
            return []
        operands = operands_of(call)
        flat = [*operands["carried"], *operands["slices"], *operands["whole"]]
        names = [node for node in placeholder.graph.nodes if node.op == "placeholder"]
        operand = flat[names.index(placeholder)]
        return [operand] if isinstance(operand, Node) else []


def _results(call: Node, which: slice) -> list[Node]:
    """Return what the bodies of a call, any of which may run, give for some of its results."""
    bodies = bodies_of(call)
    found: dict[Node, None] = {}
    for number in LAYOUTS[call.target].results:
        (outputs,) = bodies[number].graph.output_node().args
        listed = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        found.update((node, None) for node in listed[which] if isinstance(node, Node))
    return list(found)
