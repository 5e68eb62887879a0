# SPDX-License-Identifier: Apache-2.0
"""The reader of a partitioned edge program, which finds what XNNPACK takes and why it leaves the rest.

The program is still flat: the operators of a future delegate have one tag in common.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from qompose.backend import claim_of, graphs_in, operator_of
from torch.fx import Graph, GraphModule, Node

from qompose_xnnpack.executorch_target.delegation import Delegation, Operator, Stray
from qompose_xnnpack.executorch_target.nodes import (
    DEQUANTIZE,
    QUANTIZE,
    is_computation,
    is_conversion,
    module_path,
    operator_name,
)

DELEGATION_TAG = "delegation_tag"
_PAD = "aten.constant_pad_nd.default"
_INTEGERS = (torch.int8, torch.uint8)

# the reasons of the partitioner of executorch 1.5.1, and what they mean to a user
_MEANINGS: Mapping[str, str] = {
    "Expected output node to have a dequantized node": "its output is not quantized, but its input is",
    "Expected quantized node to have a single output": "its output has several readers before quantization",
    "Expected act input to be dequant node": "its weight is quantized, but its input is not",
    "Expected weight to be a static param": "its weight is not a parameter",
    "Expected bias to be a static param": "its bias is not a parameter",
    "invalid dtype": "XNNPACK supports it only for float tensors that are not empty",
}
NO_CONFIG = "XNNPACK has no such operator"
IN_BODY = "XNNPACK's partitioner ignores conditions and loops"
SILENT = "XNNPACK's partitioner supports the operator but did not select it, and gave no reason"


class DelegationReader:
    """Reads one partitioned program.

    ``reasons``: the partitioner's, by node; ``has_config``: whether it has a rule for a node's operator;
    ``is_implicit``: whether XNNPACK folds a quantize or dequantize node into a kernel.
    """

    def __init__(
        self,
        reasons: Mapping[str, Sequence[str]],
        has_config: Callable[[Node], bool],
        is_implicit: Callable[[Node], bool],
    ) -> None:
        self._reasons, self._has_config, self._is_implicit = reasons, has_config, is_implicit

    def read(self, module: GraphModule) -> Delegation:
        """Return what becomes of the operators of a program, including those in bodies of conditions."""
        delegates: dict[str, list[Operator]] = {}
        portable = []
        for node in module.graph.nodes:
            tag = node.meta.get(DELEGATION_TAG)
            if tag is not None and node.op == "call_function":
                delegates.setdefault(tag, [])
            if not is_computation(node):
                continue
            if tag is not None:
                delegates[tag].append(self._operator(node, self._is_int8(node), ""))
            else:
                portable.append(self._operator(node, _is_on_integers(node), self._reason(node)))
        _, *bodies = graphs_in(module)
        for body in bodies:
            nodes = filter(is_computation, body.graph.nodes)
            portable += [self._operator(node, _is_on_integers(node), IN_BODY) for node in nodes]
        return Delegation(
            delegates=tuple(map(tuple, delegates.values())),
            portable=tuple(portable),
            strays=tuple(self._strays(module.graph, {t for t, ops in delegates.items() if ops})),
        )

    def _operator(self, node: Node, int8: bool, reason: str) -> Operator:
        return Operator(
            name=operator_name(node),
            claim=claim_of(node),
            int8=int8,
            module=module_path(node),
            source=operator_of(node) or "",
            reason=reason,
        )

    def _reason(self, node: Node) -> str:
        """Return why a node was left: the first reason, from which most others follow."""
        if not self._has_config(node):
            return NO_CONFIG
        given = self._reasons.get(node.name)
        if given and given[0] == "invalid dtype" and _is_given_sizes(node):
            return "one of its size arguments is known only at run time"
        return _MEANINGS.get(given[0], given[0]) if given else SILENT

    def _is_int8(self, node: Node) -> bool:
        """Whether XNNPACK folds the dequantizing of the inputs into an int8 kernel.

        Its partitioner marks the dequantize nodes that it folds. Biases are placeholders, and stay in
        float until they are packed. A fused activation has its producer in place of a dequantize node,
        and a convolution may have its padding there.
        """
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        inputs = [n for n in tensors if n.op != "placeholder"]
        if len(inputs) == 1 and is_computation(inputs[0]):
            same = inputs[0].meta.get(DELEGATION_TAG) == node.meta.get(DELEGATION_TAG)
            folded = all(self._is_implicit(user) for user in node.users)
            return same and folded and self._is_int8(inputs[0])
        return bool(inputs) and all(
            self._is_implicit(n) or (_pads(n) and self._is_int8(n)) for n in inputs
        )

    def _strays(self, graph: Graph, delegates: set[str]) -> Iterator[Stray]:
        """Yield the strays, by the definition of `Stray`; ``delegates`` are tags with an operator."""
        for node in graph.nodes:
            if not is_conversion(node) or node.meta.get(DELEGATION_TAG) in delegates:
                continue
            source, readers = _source(node, delegates), list(_readers(node, delegates))
            if not _is_boundary(node, source, readers, delegates):
                yield Stray(
                    name=operator_name(node),
                    module=module_path(node),
                    reads=source.name,
                    readers=tuple(dict.fromkeys(reader.name for reader in readers)),
                    reason=next(iter(self._reasons.get(node.name, ())), ""),
                )


def _pads(node: Node) -> bool:
    return is_computation(node) and operator_name(node) == _PAD


def _is_on_integers(node: Node) -> bool:
    """Whether a portable operator computes on int8 tensors.

    The portable library has kernels of quantized_decomposed for packed tables, and those that move
    values move integers too.
    """
    value = node.meta.get("val")
    moved = isinstance(value, torch.Tensor) and value.dtype in _INTEGERS
    return moved or operator_name(node).startswith("quantized_decomposed.")


def _source(node: Node, delegates: set[str]) -> Node:
    """Return what a conversion reads, looking through other conversions outside and through getitem."""
    source = node.all_input_nodes[0]
    while source.target is operator.getitem or (
        is_conversion(source) and source.meta.get(DELEGATION_TAG) not in delegates
    ):
        source = source.all_input_nodes[0]
    return source


def _readers(node: Node, delegates: set[str]) -> Iterator[Node]:
    """Yield the readers of a conversion, looking through other conversions outside."""
    for user in node.users:
        if is_conversion(user) and user.meta.get(DELEGATION_TAG) not in delegates:
            yield from _readers(user, delegates)
        else:
            yield user


def _is_boundary(node: Node, source: Node, readers: Sequence[Node], delegates: set[str]) -> bool:
    """Whether a conversion is where the int8 part meets the rest; see the table of `Stray`."""

    def is_outside(other: Node) -> bool:
        return other.meta.get(DELEGATION_TAG) not in delegates

    def only_rounds(other: Node) -> bool:
        users = list(other.users)
        return is_outside(other) and all(is_conversion(user) and is_outside(user) for user in users)

    quantize = node.all_input_nodes[0] if operator_name(node).startswith(DEQUANTIZE) else node
    if (
        is_conversion(quantize)
        and operator_name(quantize).startswith(QUANTIZE)
        and only_rounds(quantize)
    ):
        return False
    ends = (source, *readers)
    return any(end.op in ("placeholder", "output") or is_outside(end) for end in ends)


def _is_given_sizes(node: Node) -> bool:
    """Whether a node reads numbers that are computed, which the partitioner takes for a type it lacks."""
    return any(isinstance(n.meta.get("val"), torch.SymInt) for n in node.all_input_nodes)
