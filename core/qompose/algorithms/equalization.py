# SPDX-License-Identifier: Apache-2.0
"""Cross-layer equalization: the channels between two products get weights of one size on both sides.

With a positively homogeneous f between them and positive factors s, one for each channel::

    W2 f(W1 x + b1) = (W2 diag(s)) f((diag(1/s) W1) x + b1 / s)

in exact arithmetic. `s = sqrt(r1 r2) / r2`, where r1 and r2 are the largest weights of a channel in W1 and
W2, gives both the size `sqrt(r1 r2)` (Nagel et al., "Data-Free Quantization Through Weight Equalization
and Bias Correction", 2019). A chain of products is gone through until nothing moves any more.

It is done before there is data, which thus does not judge it: channels that were even already may lose.

A channel of tiny weights and a large bias is left a little smaller than that: no bias may grow beyond the
largest that the product had, or it alone would make up the range of what is between them.

`f(s x) = s f(x)` for every s > 0 holds for relu and leaky relu, for pools and means, for what moves values
and for padding by zeros. It does not hold for relu6 and hardtanh, which cut off at a number, nor for smooth
activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.algorithms.interface import Algorithm, Rewritten
from qompose.algorithms.products import Product, product_node, product_of, times
from qompose.plan.plan import Rewrite
from qompose.program.aliasing import written_buffers
from qompose.program.batch_norm_folding import FOLDABLE
from qompose.program.control_flow import count_readers, nodes_in
from qompose.program.graph import (
    arguments_of,
    constant_of,
    describe,
    module_path,
    owner_of,
    set_attribute,
    value_of,
)
from qompose.spec.algorithm_choice import EQUALIZATION
from qompose.spec.claim import Claim

_SWEEPS = 100
_STILL = 1e-3
"""Below such a change of the logarithm of any factor, nothing moves any more."""
_EVEN = 0.02


@dataclass(frozen=True, eq=False)
class _Side:
    """A product, the largest weight of each pair of channels, and the factors that it is to take up."""

    product: Product
    sizes: Tensor  # (groups, outputs of each, inputs of each)
    bias: Tensor  # (outputs,)
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, product: Product) -> _Side:
        weight = constant_of(product.weight)
        assert weight is not None
        sizes = product.taps(weight.detach().double()).abs().amax(3)
        groups, outputs, inputs = sizes.shape
        rows = torch.ones(groups * outputs, dtype=torch.float64)
        columns = torch.ones(groups * inputs, dtype=torch.float64)
        given = None if product.bias is None else constant_of(product.bias)
        bias = torch.zeros_like(rows) if given is None else given.detach().double().abs()
        return cls(product, sizes.cpu(), bias.cpu(), rows, columns)

    def _now(self) -> Tensor:
        groups = self.product.groups
        return self.sizes * self.rows.view(groups, -1, 1) * self.columns.view(groups, 1, -1)

    def outputs(self) -> Tensor:
        """Return the largest weight of each output channel."""
        return self._now().amax(2).flatten()

    def inputs(self) -> Tensor:
        """Return the largest weight of each input channel."""
        return self._now().amax(1).flatten()


@dataclass(frozen=True, eq=False)
class _Link:
    """A product and those that read its channels, each with how many of its inputs a channel has."""

    first: _Side
    others: tuple[tuple[_Side, int], ...]

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Return the largest weights of each channel: of the first, and of all that read it."""
        seen = [side.inputs().view(-1, inner).amax(1) for side, inner in self.others]
        return self.first.outputs(), torch.stack(seen).amax(0)

    def step(self) -> float:
        """Move factors; return the largest change of a logarithm."""
        one, other = self.ranges()
        usable = torch.minimum(one, other) > 0
        ratio = one.clamp(min=1e-300) / other.clamp(min=1e-300)
        factors = torch.where(usable, ratio, 1.0).sqrt()
        bias = self.first.bias
        if float(bias.amax()) > 0:
            grown = bias * self.first.rows / bias.amax()
            factors = torch.where(usable, torch.maximum(factors, grown), factors)
        self.first.rows.div_(factors)
        for side, inner in self.others:
            side.columns.mul_(factors.repeat_interleave(inner))
        return float(factors.log().abs().amax())

    @property
    def spread(self) -> float:
        """Return how many times as large the largest channel is as the smallest, on the worse side."""
        parts = [side[side > 0] for side in self.ranges()]
        return max(
            (float(part.amax() / part.amin()) for part in parts if part.numel()), default=1.0
        )

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.first.product.node, *(side.product.node for side, _ in self.others))


class Equalization(Algorithm):
    """Rescales the parameters of products whose claims ask for it."""

    word = EQUALIZATION

    def rewrite(self, model: GraphModule, claims: Sequence[Claim]) -> Rewritten:
        nodes = {node.name: node for node in nodes_in(model)}
        asking = [*filter(self.is_asked, claims)]
        if not asking:
            return Rewritten()
        products, reasons = _products(model, asking, nodes)
        sides = {node: _Side.of(product) for node, product in products.items()}
        links: list[_Link] = []
        for node, side in sides.items():
            try:
                readers = tuple(readers_of(node, side.product.channel_dim))
                links.append(
                    _Link(side, tuple(_read(reader, sides, reasons) for reader in readers))
                )
            except NotEqualizable as reason:
                reasons[node] = str(reason)
        made = _moved(links, reasons)
        for side in sides.values():
            _store(side)
        paired = {node for link, _ in made for node in link.nodes}
        notes = tuple(_note(n, reason, n in paired) for n, reason in reasons.items())
        rewrites = tuple(_rewrite(link, before) for link, before in made)
        return Rewritten(rewrites, tuple(filter(None, notes)))


def _note(node: Node, reason: str, paired: bool) -> str:
    """Say why a product is not equalized with what reads it; "" of one that ends a chain."""
    if paired and reason == LEAVES:
        return ""
    with_readers = " and its readers" if paired else ""
    return f"{EQUALIZATION} was not applied to {describe(node)}{with_readers}: {reason}"


def _products(
    model: GraphModule, claims: Sequence[Claim], nodes: Mapping[str, Node]
) -> tuple[dict[Node, Product], dict[Node, str]]:
    """Return the products of claims whose parameters may be changed, and why others' must not be."""
    readers = count_readers(model)
    written = written_buffers(model.graph)
    products: dict[Node, Product] = {}
    reasons: dict[Node, str] = {}
    for claim in claims:
        node = product_node(claim, nodes)
        if node is None:
            reasons[nodes[claim.anchor]] = "it is not a linear or convolution"
            continue
        found = product_of(node, readers, written)
        if isinstance(found, str):
            reasons[node] = found
        else:
            products[node] = found
    return products, reasons


def _read(
    reader: Reader, sides: Mapping[Node, _Side], reasons: Mapping[Node, str]
) -> tuple[_Side, int]:
    """Return the side of a reader.

    Raises:
        NotEqualizable: its parameters must not be changed.
    """
    other = sides.get(reader.node)
    if other is None:
        why = reasons.get(reader.node, f"{EQUALIZATION} is not enabled for it")
        raise NotEqualizable(f"its reader {describe(reader.node)} cannot be changed: {why}")
    return other, reader.inner


def _moved(links: Sequence[_Link], reasons: dict[Node, str]) -> list[tuple[_Link, float]]:
    """Move factors until they are still; return the links that they changed, with the spread before.

    A link whose factors are all next to one is left as it is, and the others start anew without it.
    """
    before, left = {id(link): link.spread for link in links}, [*links]
    while left:
        for _ in range(_SWEEPS):
            if max(link.step() for link in left) < _STILL:
                break
        even = [link for link in left if float(link.first.rows.log().abs().amax()) < _EVEN]
        if not even:
            break
        for link in left:
            for side in (link.first, *(side for side, _ in link.others)):
                side.rows.fill_(1.0)
                side.columns.fill_(1.0)
        for link in even:
            reasons[link.first.product.node] = (
                "its channels are already even, or its biases prevent equalization"
            )
        left = [link for link in left if link not in even]
    return [(link, before[id(link)]) for link in left]


def _store(side: _Side) -> None:
    """Write the parameters with their factors."""
    product = side.product
    if bool((side.rows != 1).any() | (side.columns != 1).any()):
        weight = constant_of(product.weight)
        assert weight is not None
        rows, columns = (v.to(weight.device) for v in (side.rows, side.columns))
        _write(product.weight, product.scaled(weight, rows, columns))
    bias = None if product.bias is None else constant_of(product.bias)
    if product.bias is not None and bias is not None and bool((side.rows != 1).any()):
        _write(product.bias, times(bias, side.rows.to(bias.device)))


def _write(node: Node, value: Tensor) -> None:
    old = constant_of(node)
    new = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    set_attribute(owner_of(node), str(node.target), new)


def _rewrite(link: _Link, before: float) -> Rewrite:
    where = ", ".join(module_path(node) or "the program" for node in link.nodes)
    effect = (
        "the effect on outputs was not measured; ratio of largest to smallest weight channel "
        f"{before:.3g} before, {link.spread:.3g} after"
    )
    return Rewrite(EQUALIZATION, tuple(n.name for n in link.nodes), (), f"in {where}; {effect}")


aten = torch.ops.aten
LEAVES = "its output leaves the program or its subgraph"


class NotEqualizable(Exception):  # noqa: N818 - a state, not a mistake
    """Raised with the reason why the channels of a product cannot be given factors."""


@dataclass(frozen=True)
class Reader:
    """A product that reads channels: `inner` of its inputs, one behind the other, come from each."""

    node: Node
    inner: int


_ELEMENTWISE = {
    aten.relu.default, aten.relu_.default, aten.leaky_relu.default, aten.leaky_relu_.default,
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default,
}  # fmt: skip
_POOLS = {
    aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default,
    aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
}  # fmt: skip
_RESHAPES = {aten.flatten.using_ints, aten.view.default, aten.reshape.default}
_CUT_OFF = {aten.hardtanh.default, aten.hardtanh_.default, aten.relu6.default, aten.clamp.default}


def readers_of(value: Node, dim: int, inner: int = 1) -> Iterator[Reader]:
    """Yield every product that reads a value's channels, directly or behind homogeneous operators.

    Args:
        dim: the dimension of the channels.
        inner: how many indices there each channel has.

    Raises:
        NotEqualizable: something reads it that factors would not pass through.
    """
    if not value.users:
        raise NotEqualizable("nothing reads its output")
    for user in value.users:
        if user.op == "output":
            raise NotEqualizable(LEAVES)
        if user.target in FOLDABLE:
            yield _reader(user, value, dim, inner)
            continue
        passes = _PASSES.get(user.target) if user.op == "call_function" else None
        if passes is None:
            raise NotEqualizable(_why_not(user))
        yield from readers_of(user, *passes(user, value, dim, inner))


def _reader(user: Node, value: Node, dim: int, inner: int) -> Reader:
    weight = user.args[1]
    assert isinstance(weight, Node)
    rank = value_of(value).dim()
    features = user.target is aten.linear.default
    if dim != (rank - 1 if features else rank - (value_of(weight).dim() - 1)):
        raise NotEqualizable(f"{describe(user)} has its channels in a different dimension")
    return Reader(user, inner)


def _why_not(user: Node) -> str:
    if user.target in _CUT_OFF:
        return (
            f"{describe(user)}, which follows it, clips at a constant, so channels cannot be scaled "
            "through it"
        )
    return f"{describe(user)} reads it, and channels cannot be scaled through that operator"


Passed = tuple[int, int]


def _elementwise(user: Node, value: Node, dim: int, inner: int) -> Passed:
    return dim, inner


def _pool(user: Node, value: Node, dim: int, inner: int) -> Passed:
    spatial = 3 if "3d" in str(user.target) else 2 if "2d" in str(user.target) else 1
    if dim >= value_of(value).dim() - spatial:
        raise NotEqualizable(f"{describe(user)} combines channels")
    return dim, inner


def _mean(user: Node, value: Node, dim: int, inner: int) -> Passed:
    given = arguments_of(user)
    rank = value_of(value).dim()
    reduced = {d % rank for d in given["dim"] or range(rank)}
    left = [d for d in range(rank) if d not in reduced]
    if dim not in left:
        raise NotEqualizable(f"{describe(user)} combines channels")
    return dim if given["keepdim"] else left.index(dim), inner


def _pad(user: Node, value: Node, dim: int, inner: int) -> Passed:
    given = arguments_of(user)
    zeros = given.get("mode", "constant") == "constant" and not given["value"]
    if not zeros or dim >= value_of(value).dim() - len(given["pad"]) // 2:
        raise NotEqualizable(f"{describe(user)} pads channels or does not pad with zeros")
    return dim, inner


def _reshape(user: Node, value: Node, dim: int, inner: int) -> Passed:
    """Follow what makes one dimension of the channels and all behind them, as in front of a classifier."""
    before, after = tuple(value_of(value).shape), tuple(value_of(user).shape)
    behind = before[dim + 1 :]
    fixed = all(isinstance(size, int) for size in (*behind, before[dim], after[-1]))
    kept = len(after) == dim + 1 and all(
        not isinstance(a, int) or a == b for a, b in zip(before[:dim], after[:dim], strict=True)
    )
    if before == after:
        return dim, inner
    if not fixed or not kept or after[-1] != before[dim] * math.prod(behind):
        raise NotEqualizable(f"{describe(user)} does not flatten fixed-size channels")
    return dim, inner * math.prod(behind)


_PASSES: dict[Any, Callable[[Node, Node, int, int], Passed]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    aten.dropout.default: _elementwise,
    **dict.fromkeys(_POOLS, _pool),
    aten.mean.dim: _mean,
    **dict.fromkeys((aten.constant_pad_nd.default, aten.pad.default), _pad),
    **dict.fromkeys(_RESHAPES, _reshape),
}
