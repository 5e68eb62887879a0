# SPDX-License-Identifier: Apache-2.0
"""Count what quantization put into a graph: observers, quantize operators and their kin, kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from qompose import decomposed
from qompose.graph import tag_of
from qompose.nested import nodes_in
from qompose.observing import OBSERVER_PREFIX

CAST_TAG, KERNELS_TAG = "cast", "kernels"
"""Facts of nodes: one converts a float type for a specification; one stands for these claims' regions."""


@dataclass(frozen=True)
class Counts:
    """How many of each stand in a graph and in the bodies inside it.

    `cast` are conversions between float types that a specification asked for; `kernels` counts the regions
    that a kernel replaced, not the operators it consists of.
    """

    observers: int = 0
    quantize: int = 0
    dequantize: int = 0
    choose_qparams: int = 0
    cast: int = 0
    kernels: int = 0

    def __str__(self) -> str:
        """Return the counts that are not zero in one line, "nothing" where all are."""
        return ", ".join(f"{n} {name}" for name, n in self.__dict__.items() if n) or "nothing"


def count_nodes(model: GraphModule) -> Counts:
    """Count the nodes of a graph module of any stage, those in bodies included."""
    nodes = list(nodes_in(model))
    return Counts(
        observers=sum(map(_is_observer, nodes)),
        quantize=sum(map(decomposed.is_quantize, nodes)),
        dequantize=sum(map(decomposed.is_dequantize, nodes)),
        choose_qparams=sum(
            node.op == "call_function" and node.target in decomposed.CHOOSE for node in nodes
        ),
        cast=sum(bool(tag_of(node, CAST_TAG)) for node in nodes),
        kernels=len(set(_replaced_claims(nodes))),
    )


def _is_observer(node: Node) -> bool:
    return node.op == "call_module" and str(node.target).startswith(OBSERVER_PREFIX)


def _replaced_claims(nodes: list[Node]) -> Iterator[int]:
    for node in nodes:
        yield from tag_of(node, KERNELS_TAG) or ()
