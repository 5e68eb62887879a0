# SPDX-License-Identifier: Apache-2.0
"""The linears and convolutions of a program as algorithms see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from qompose.algorithms.calibrated import Calibrated
from qompose.program.batch_norm_folding import FOLDABLE, TRANSPOSED
from qompose.program.graph import address_of, behind_modules, constant_of, describe, value_of
from qompose.spec.claim import Claim
from qompose.spec.qparams import along

_LINEAR = torch.ops.aten.linear.default
_GROUPS = "groups"


@dataclass(frozen=True)
class Product:
    """A linear or a convolution of constants, whose parameters nothing else reads.

    Attributes:
        node: the operator.
        weight, bias: the nodes that read its parameters; a bias there need not be.
        groups: of a convolution.
    """

    node: Node
    weight: Node
    bias: Node | None
    groups: int

    @property
    def source(self) -> Node:
        """Return the value that is multiplied."""
        source = self.node.args[0]
        assert isinstance(source, Node)
        return source

    def taps(self, weight: Tensor) -> Tensor:
        """Return a view of a weight as `(groups, outputs of each, inputs of each, taps)`."""
        return taps_of(weight, self.groups, self.node.target in TRANSPOSED)

    def scaled(self, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return a weight whose output and input channels are multiplied by a number each, in its type."""
        result = weight.detach().double().clone(memory_format=torch.contiguous_format)
        taps = self.taps(result)
        taps *= rows.view(self.groups, -1, 1, 1) * columns.view(self.groups, 1, -1, 1)
        return result.to(weight.dtype)

    @property
    def channel_dim(self) -> int:
        """Return the dimension that has the channels of its output, and of its input."""
        return channel_dim(self.node, self.weight)


@dataclass(frozen=True)
class Operands:
    """What a linear or a convolution of a prepared program reads, behind the observers."""

    node: Node
    source: Node
    weight: Node
    bias: Node | None

    @classmethod
    def of(cls, node: Node) -> Operands:
        """Return those of a product."""
        bias = node.args[2] if len(node.args) > 2 else None
        return cls(
            node,
            behind_modules(node.args[0]),
            behind_modules(node.args[1]),
            None if bias is None else behind_modules(bias),
        )


class NotChanged(Exception):  # noqa: N818 - a state, not a mistake
    """Raised with the reason why a product stays as it is."""


class NotKnown(NotChanged):
    """Raised where statistics do not have what it takes."""


def is_wanted(claim: Claim, word: str) -> bool:
    """Tell whether a claim asks for an algorithm by its word, or leaves it to the engine."""
    return claim.repairs_itself or word in claim.repairs


def change_products(found: Calibrated, word: str, change: Callable[[Node], str]) -> None:
    """Let an algorithm change each product that it is wanted for, and note what it did, or why not.

    Where nobody asked by word, only missing statistics are worth a line.

    Args:
        change: changes one product and says what that does, or raises `NotChanged`.
    """
    unknown = list[str]()
    for number, claim in enumerate(found.plan.claims):
        if not is_wanted(claim, word):
            continue
        node = product_node(claim, found.nodes)
        try:
            if node is None:
                raise NotChanged("it is neither a linear nor a convolution")
            if number in found.dropped:
                raise NotChanged(f"it stays in float, since {found.dropped[number]}")
            effect = change(node)
        except NotChanged as reason:
            if not claim.repairs_itself:
                where = describe(found.nodes[claim.anchor] if node is None else node)
                found.refused.append(f"{word} of {where} was not made: {reason}")
            elif isinstance(reason, NotKnown):
                unknown.append(str(reason))
        else:
            found.made.append(f"{word} of {describe(node)}: {effect}")
    if unknown:
        products = f"{len(unknown)} product{'s' * (len(unknown) > 1)}"
        found.refused.append(f"{word} of {products} was not made: {unknown[0]}")


def taps_of(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """Return a view of a weight as `(groups, outputs of each, inputs of each, taps)`."""
    flat = weight.flatten(2) if weight.dim() > 2 else weight.unsqueeze(2)
    grouped = flat.view(groups, -1, *flat.shape[1:])
    return grouped.transpose(1, 2) if transposed else grouped


def channel_dim(product: Node, weight: Node) -> int:
    """Return the dimension that has the channels of a product's output, and of its input."""
    rank, constant = value_of(product).dim(), constant_of(weight)
    assert constant is not None
    return int(rank - 1 if product.target is _LINEAR else rank - (constant.dim() - 1))


def product_node(claim: Claim, nodes: Mapping[str, Node]) -> Node | None:
    """Return the one linear or convolution of a claim, None where it has none or several."""
    found = [nodes[name] for name in claim.nodes if nodes[name].target in FOLDABLE]
    return found[0] if len(found) == 1 else None


def product_of(node: Node, readers: Mapping[int, int], written: Iterable[str]) -> Product | str:
    """Return a product whose parameters may be changed, or the reason why they must not be.

    Args:
        readers: of each parameter, by address (`count_readers`).
        written: paths of the buffers that the program writes to.
    """
    weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
    if not isinstance(weight, Node) or constant_of(weight) is None:
        return f"the weight of {describe(node)} is computed"
    for parameter in filter(None, (weight, bias)):
        assert isinstance(parameter, Node)
        constant = constant_of(parameter)
        if constant is None:
            return f"{describe(parameter)}, which {node.name} adds, is computed"
        if readers.get(address_of(constant), 0) > 1:
            return f"{parameter.target} is read by other operators too"
        if str(parameter.target) in written:
            return f"the program writes to {parameter.target}"
    return Product(node, weight, bias if isinstance(bias, Node) else None, groups_of(node))


def groups_of(node: Node) -> int:
    """Return the groups of a convolution; a linear is one."""
    if node.target is _LINEAR:
        return 1
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index(_GROUPS)
    given = node.args[place] if len(node.args) > place else node.kwargs.get(_GROUPS, 1)
    assert isinstance(given, int)
    return given


def times(value: Tensor, vector: Tensor) -> Tensor:
    """Return a parameter whose first dimension is multiplied by a number for each index, in its type."""
    return (value.detach().double() * along(vector, 0, value.dim())).to(value.dtype)
