# SPDX-License-Identifier: Apache-2.0
"""Survey: every float operator of an exported program, its size, and what the composition made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from qompose.claims import Claim, Composition
from qompose.graph import (
    address_of,
    constant_of,
    get_attribute,
    module_path,
    operator_name,
    value_of,
)
from qompose.nested import is_nested_call, nodes_in
from qompose.plan import Operator, Rewrite

aten = torch.ops.aten


def survey(
    exported: GraphModule,
    working: GraphModule,
    composition: Composition,
    rewrites: Sequence[Rewrite],
) -> tuple[Operator, ...]:
    """Return the operators of the program as it was exported.

    An operator that was taken apart is not listed, but its pieces in `working`, after its name.
    """
    claim_of = {name: i for i, claim in enumerate(composition.chosen) for name in claim.nodes}
    split, produced = {}, {node.name: node for node in nodes_in(working)}
    for rewrite in rewrites:
        if set(rewrite.pieces) <= set(rewrite.nodes):  # merged: its operators have one claim
            claim = claim_of[rewrite.pieces[0]]
            claim_of.update(dict.fromkeys(rewrite.nodes, claim))
        else:
            pieces = [produced[name] for name in rewrite.pieces if name in produced]
            split[rewrite.nodes[0]] = pieces
    reasons = _reasons(composition)
    return tuple(
        Operator(
            name=name,
            operator=operator_name(node.target),
            module=module_path(node),
            macs=macs(node),
            claim=claim_of.get(node.name),
            reason="" if node.name in claim_of else reasons.get(node.name, _why_not(node)),
        )
        for name, node in _listed(exported, split, claim_of)
        if node.op == "call_function" and not is_nested_call(node) and _computes_floats(node)
    )


def claims_elsewhere(claims: Sequence[Claim], operators: Sequence[Operator]) -> list[str]:
    """Describe the claims on no float operator: on inputs, parameters or outputs of the program."""
    listed = {operator.claim for operator in operators}
    return [
        f"{claim.owner} quantizes {', '.join(str(s.point) for s in claim.specs)}, at no float operator"
        for number, claim in enumerate(claims)
        if number not in listed
    ]


def _listed(
    exported: GraphModule, split: Mapping[str, Sequence[Node]], claimed: Container[str]
) -> Iterator[tuple[str, Node]]:
    """Yield the program's nodes with their names, the pieces of one in its place.

    Taking one of several results computes nothing; it is listed only where a claim covers it.
    """
    for node in nodes_in(exported):
        if node.name in split:
            for piece in split[node.name]:
                yield f"{node.name}/{piece.name.removeprefix(f'{node.name}_')}", piece
        elif node.target is not getitem or node.name in claimed:
            yield node.name, node


def _why_not(node: Node) -> str:
    return "what is inside it is not visited" if _nested(node) else "no rule claims it"


def _computes_floats(node: Node) -> bool:
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and v.dtype.is_floating_point for v in values)


def _reasons(composition: Composition) -> dict[str, str]:
    """Return the first reason that was given for each operator, in order of priority."""
    reasons: dict[str, str] = {}
    for rejection in composition.rejections:
        for node in rejection.nodes:
            reasons.setdefault(node, f"{rejection.owner}: {rejection.reason}")
    return reasons


def macs(node: Node) -> int:
    """Return the multiply-accumulates of one call: products, convolutions, attention, recurrence; else 0.

    A control-flow operator counts what is inside it, every branch.
    """
    count = _MACS.get(node.target)
    if count is None:
        return sum(macs(inner) for graph in _nested(node) for inner in graph.nodes)
    return int(count(node))


def _nested(node: Node) -> list[Graph]:
    """Return the graphs that a control-flow operator calls."""
    module = node.graph.owning_module
    targets = [str(a.target) for a in node.all_input_nodes if a.op == "get_attr"]
    found = [get_attribute(module, target) for target in targets] if module is not None else []
    return [value.graph for value in found if isinstance(value, GraphModule)]


def _shape(node: Any) -> list[int]:
    value = value_of(node)
    value = constant_of(node) if value is None else value
    sizes: list[Any] = list(getattr(value, "shape", ()))
    # A size that depends on data, as of nonzero, has no example: it counts as one.
    return [(s.node.hint or 1) if isinstance(s, torch.SymInt) else int(s) for s in sizes]


def _linear(node: Node) -> int:
    return math.prod(_shape(node)) * _shape(node.args[1])[1]


def _convolution(node: Node) -> int:
    return math.prod(_shape(node)) * math.prod(_shape(node.args[1])[1:])


def _transposed(node: Node) -> int:
    return math.prod(_shape(node.args[0])) * math.prod(_shape(node.args[1])[1:])


def _product(node: Node) -> int:
    return math.prod(_shape(node)) * _shape(node.args[0])[-1]


def _addmm(node: Node) -> int:
    return math.prod(_shape(node)) * _shape(node.args[1])[-1]


def _attention(node: Node) -> int:
    *batch, queries, values = _shape(node)
    keys, width = _shape(node.args[1])[-2:]
    return math.prod(batch) * queries * keys * (width + values)


def _recurrent(node: Node) -> int:
    """Every step of every sequence multiplies by each matrix once."""
    listed = node.args[2]  # those of a cell are arguments of their own
    sizes = [_shape(p) for p in (listed if isinstance(listed, (tuple, list)) else node.args[2:4])]
    positions = math.prod(_shape(node.args[0])[:-1])
    return positions * sum(math.prod(size) for size in sizes if len(size) == 2)


_MACS: dict[Any, Callable[[Node], int]] = {
    aten.linear.default: _linear,
    **dict.fromkeys(
        [
            getattr(packet, overload)
            for packet in (aten.conv1d, aten.conv2d, aten.conv3d)
            for overload in ("default", "padding")
        ],
        _convolution,
    ),
    aten.conv_transpose1d.default: _transposed,
    aten.conv_transpose2d.input: _transposed,
    aten.conv_transpose3d.input: _transposed,
    aten.matmul.default: _product,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _addmm,
    aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys(
        [
            operator
            for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
            for operator in (getattr(aten, kind).input, getattr(aten, f"{kind}_cell").default)
        ],
        _recurrent,
    ),
}


def state_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, tied ones counted once."""
    seen: dict[tuple[int, int], int] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        seen[(address_of(tensor), int(tensor.storage_offset()))] = (
            tensor.numel() * tensor.element_size()
        )
    return sum(seen.values())
