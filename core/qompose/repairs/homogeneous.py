# SPDX-License-Identifier: Apache-2.0
"""Which products read a product's channels, behind operators that a positive factor passes through.

`f(s x) = s f(x)` for every s > 0 holds for relu and leaky relu, for pools and means, for what moves values
and for padding by zeros. It does not hold for relu6 and hardtanh, which cut off at a number, nor for smooth
activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from qompose.graph import arguments_of, describe, value_of
from qompose.rewrites import FOLDABLE

aten = torch.ops.aten


LEAVES = "its value leaves the program or the body that it is in"


class NotEqualizable(Exception):  # noqa: N818 - it says what the pair is
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
        raise NotEqualizable("nothing reads its value")
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
    if user.args[0] is not value or value in user.args[1:]:
        raise NotEqualizable(f"{describe(user)} has its value for a parameter")
    weight = user.args[1]
    assert isinstance(weight, Node)
    rank = value_of(value).dim()
    features = user.target is aten.linear.default
    if dim != (rank - 1 if features else rank - (value_of(weight).dim() - 1)):
        raise NotEqualizable(f"{describe(user)} has its channels in another dimension")
    return Reader(user, inner)


def _why_not(user: Node) -> str:
    if user.target in _CUT_OFF:
        return f"{describe(user)} behind it cuts values off at a number, which no factor passes through"
    return f"{describe(user)} reads it, which no factor of a channel passes through"


Passed = tuple[int, int]


def _elementwise(user: Node, value: Node, dim: int, inner: int) -> Passed:
    return dim, inner


def _pool(user: Node, value: Node, dim: int, inner: int) -> Passed:
    spatial = 3 if "3d" in str(user.target) else 2 if "2d" in str(user.target) else 1
    if dim >= value_of(value).dim() - spatial:
        raise NotEqualizable(f"{describe(user)} puts channels together")
    return dim, inner


def _mean(user: Node, value: Node, dim: int, inner: int) -> Passed:
    given = arguments_of(user)
    rank = value_of(value).dim()
    reduced = [d % rank for d in given["dim"] or range(rank)]
    if dim in reduced:
        raise NotEqualizable(f"{describe(user)} puts channels together")
    return dim if given["keepdim"] else dim - sum(d < dim for d in reduced), inner


def _pad(user: Node, value: Node, dim: int, inner: int) -> Passed:
    given = arguments_of(user)
    zeros = given.get("mode", "constant") == "constant" and not given["value"]
    if not zeros or dim >= value_of(value).dim() - len(given["pad"]) // 2:
        raise NotEqualizable(f"{describe(user)} reads it, and pads by something else than zeros")
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
        raise NotEqualizable(f"{describe(user)} takes channels apart or puts them together")
    return dim, inner * math.prod(behind)


_PASSES: dict[Any, Callable[[Node, Node, int, int], Passed]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    aten.dropout.default: _elementwise,
    **dict.fromkeys(_POOLS, _pool),
    aten.mean.dim: _mean,
    **dict.fromkeys((aten.constant_pad_nd.default, aten.pad.default), _pad),
    **dict.fromkeys(_RESHAPES, _reshape),
}
