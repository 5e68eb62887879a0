# SPDX-License-Identifier: Apache-2.0
"""Reads off a partitioned edge program what XNNPACK takes, what it leaves and why, and what goes astray.

The program is still flat then: what is going to be one delegate bears one tag.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from qompose.backend import claim_of, operator_of
from torch.fx import Graph, GraphModule, Node

from qompose_xnnpack.delegation import Delegation, Operator, Stray

QUANTIZE = "quantized_decomposed.quantize_"
DEQUANTIZE = "quantized_decomposed.dequantize_"
CHOOSE = "quantized_decomposed.choose_qparams"
TAG = "delegation_tag"
_PAD = "aten.constant_pad_nd.default"
INT8 = (torch.int8, torch.uint8)

# what the partitioner of executorch 1.5.1 says, and what that means to who reads it
WORDS: Mapping[str, str] = {
    "Expected output node to have a dequantized node": "its result is not quantized, its input is",
    "Expected quantized node to have a single output": "several operators read its result before it is "
    "quantized",
    "Expected act input to be dequant node": "its weight is quantized, its input is not",
    "Expected weight to be a static param": "its weight is computed, not a parameter",
    "Expected bias to be a static param": "its bias is computed, not a parameter",
    "invalid dtype": "XNNPACK takes it on float tensors only, and none that are empty",
}
NO_CONFIG = "XNNPACK has no such operator"
IN_BODY = "XNNPACK's partitioner does not look into conditions and loops"
SILENT = "XNNPACK's partitioner knows the operator, left this one, and gave no reason"


class Listener:
    """Stands for the logger of the partitioner's ``why`` objects, hears what they say, and passes it on."""

    def __init__(self, logger: Any, heard: dict[str, list[str]]) -> None:
        self._logger, self._heard = logger, heard

    def debug(self, said: Any) -> None:
        """Note a node and the reason why it is left; then do what the logger does with it."""
        reasons = self._heard.setdefault(said.node.name, [])
        if said.reason not in reasons:
            reasons.append(said.reason)
        self._logger.debug(said)


class Reader:
    """Reads one partitioned program.

    ``heard``: the partitioner's reasons by node; ``knows``: whether it has a rule for a node's operator;
    ``is_implicit``: whether XNNPACK folds a quantize or dequantize node into a kernel.
    """

    def __init__(
        self,
        heard: Mapping[str, Sequence[str]],
        knows: Callable[[Node], bool],
        is_implicit: Callable[[Node], bool],
    ) -> None:
        self._heard, self._knows, self._is_implicit = heard, knows, is_implicit

    def read(self, module: GraphModule) -> Delegation:
        """Return what becomes of the operators of a program, those in the bodies of conditions included."""
        delegates: dict[str, list[Operator]] = {}
        portable = []
        for node in module.graph.nodes:
            tag = node.meta.get(TAG)
            if tag is not None and node.op == "call_function":
                delegates.setdefault(tag, [])
            if not computes(node):
                continue
            if tag is not None:
                delegates[tag].append(self._operator(node, self._is_int8(node), ""))
            else:
                portable.append(self._operator(node, is_on_integers(node), self._reason(node)))
        for body in bodies(module):
            nodes = filter(computes, body.graph.nodes)
            portable += [self._operator(node, is_on_integers(node), IN_BODY) for node in nodes]
        return Delegation(
            delegates=tuple(map(tuple, delegates.values())),
            portable=tuple(portable),
            strays=tuple(self._strays(module.graph, {t for t, ops in delegates.items() if ops})),
        )

    def _operator(self, node: Node, int8: bool, reason: str) -> Operator:
        return Operator(
            name=name_of(node),
            claim=claim_of(node),
            int8=int8,
            module=module_of(node),
            source=operator_of(node) or "",
            reason=reason,
        )

    def _reason(self, node: Node) -> str:
        """Return why a node was left; the words of the first reason, which most others follow from."""
        if not self._knows(node):
            return NO_CONFIG
        heard = self._heard.get(node.name)
        if heard and heard[0] == "invalid dtype" and _is_given_sizes(node):
            return "a size that it is given is known only at run time"
        return WORDS.get(heard[0], heard[0]) if heard else SILENT

    def _is_int8(self, node: Node) -> bool:
        """Whether XNNPACK folds the dequantizing of the inputs into an int8 kernel.

        Its partitioner marks the dequantize nodes that it folds. Biases are placeholders, and stay in
        float until they are packed. A fused activation has its producer in place of a dequantize node,
        and a convolution may have its padding there.
        """
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        inputs = [n for n in tensors if n.op != "placeholder"]
        if len(inputs) == 1 and computes(inputs[0]):
            same = inputs[0].meta.get(TAG) == node.meta.get(TAG)
            folded = all(self._is_implicit(user) for user in node.users)
            return same and folded and self._is_int8(inputs[0])
        return bool(inputs) and all(
            self._is_implicit(n) or (_pads(n) and self._is_int8(n)) for n in inputs
        )

    def _strays(self, graph: Graph, delegates: set[str]) -> Iterator[Stray]:
        """Yield the strays, by the definition of `Stray`; ``delegates`` are tags with an operator."""
        for node in graph.nodes:
            if not converts(node) or node.meta.get(TAG) in delegates:
                continue
            source, readers = _source(node, delegates), list(_readers(node, delegates))
            if not _is_boundary(node, source, readers, delegates):
                yield Stray(
                    name=name_of(node),
                    module=module_of(node),
                    reads=source.name,
                    readers=tuple(dict.fromkeys(reader.name for reader in readers)),
                    reason=next(iter(self._heard.get(node.name, ())), ""),
                )


def name_of(node: Node) -> str:
    """Return an operator's name: ``aten.linear.default``."""
    schema = node.target._schema  # type: ignore[union-attr]
    return f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"


def module_of(node: Node) -> str:
    """Return the path of the module that an operator comes from; nothing where that is not known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("L['self'].").removeprefix("L['self']") if stack else ""


def converts(node: Node) -> bool:
    """Whether a node quantizes or dequantizes."""
    return hasattr(node.target, "_schema") and name_of(node).startswith((QUANTIZE, DEQUANTIZE))


def computes(node: Node) -> bool:
    """Whether a node is an operator on tensors, rather than a boundary or bookkeeping."""
    return (
        node.op == "call_function"
        and hasattr(node.target, "_schema")
        and not name_of(node).startswith((QUANTIZE, DEQUANTIZE, CHOOSE))
        and isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    )


def _pads(node: Node) -> bool:
    return computes(node) and name_of(node) == _PAD


def is_on_integers(node: Node) -> bool:
    """Whether a portable operator computes on int8 tensors.

    The portable library has kernels of quantized_decomposed for packed tables, and those that move
    values move integers too.
    """
    value = node.meta.get("val")
    moved = isinstance(value, torch.Tensor) and value.dtype in INT8
    return moved or name_of(node).startswith("quantized_decomposed.")


def bodies(module: GraphModule) -> list[GraphModule]:
    """Return the graphs inside a program, which conditions and loops call."""
    return [m for m in module.modules() if isinstance(m, GraphModule) and m is not module]


def _source(node: Node, delegates: set[str]) -> Node:
    """Return what a conversion reads, looking through other conversions outside and through getitem."""
    source = node.all_input_nodes[0]
    while source.target is operator.getitem or (
        converts(source) and source.meta.get(TAG) not in delegates
    ):
        source = source.all_input_nodes[0]
    return source


def _readers(node: Node, delegates: set[str]) -> Iterator[Node]:
    """Yield what reads a conversion, looking through other conversions outside."""
    for user in node.users:
        if converts(user) and user.meta.get(TAG) not in delegates:
            yield from _readers(user, delegates)
        else:
            yield user


def _is_boundary(node: Node, source: Node, readers: Sequence[Node], delegates: set[str]) -> bool:
    """Whether a conversion is where the int8 part meets the rest; see the table of `Stray`."""

    def is_outside(other: Node) -> bool:
        return other.meta.get(TAG) not in delegates

    def only_rounds(other: Node) -> bool:
        users = list(other.users)
        return is_outside(other) and all(converts(user) and is_outside(user) for user in users)

    quantize = node.all_input_nodes[0] if name_of(node).startswith(DEQUANTIZE) else node
    if converts(quantize) and name_of(quantize).startswith(QUANTIZE) and only_rounds(quantize):
        return False
    ends = (source, *readers)
    return any(end.op in ("placeholder", "output") or is_outside(end) for end in ends)


def _is_given_sizes(node: Node) -> bool:
    """Whether a node reads numbers that are computed, which the partitioner takes for a type it lacks."""
    return any(isinstance(n.meta.get("val"), torch.SymInt) for n in node.all_input_nodes)
