# SPDX-License-Identifier: Apache-2.0
"""Whether the operators of a place compute what those did in whose place they stand: both are run.

Inputs are random, of the kinds that export recorded; parameters are the programs' own, and are not written
to. Two outputs are equal within `TOLERANCE` of their norm: that is a hundred times what rounding leaves in
float32 where operators are taken apart, enough for the approximations that such transforms make (tanh for
erf), a tenth of what int8 costs, and a thousandth of what a wrong pair of values gives.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qompose.program.graph import value_of
from qompose.quantizer.interop.comparing import is_call
from qompose.quantizer.interop.correspondence import Correspondence
from qompose.quantizer.interop.execution import SEED, random_like, run
from qompose.quantizer.interop.regions import Pair, Region

aten = torch.ops.aten
TOLERANCE = 1e-3
"""Relative error that is rounding; a dtype whose own steps are larger gets four of them."""


def unequal(region: Region, found: Correspondence) -> list[Pair]:
    """Return the pairs of values in a region that differ whenever both of its sides are run.

    Where some do, what is read from outside may have been random where it is not: an input may be computed
    from another one, and a mask that leaves nothing of a row gives NaN in one form of an operator and zero
    in the other. So other inputs are tried.

    Raises:
        NotRunnable: a side cannot be run.
    """
    inputs = _inputs(region, found)
    fixed, between = _fixed(inputs, found), _between(inputs, found)
    has_masks = any(_is_mask(value_of(node)) for node in inputs)
    wrong, laid_out = list(region.pairs), list(region.pairs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of runs that nobody asked for
        shares = _SHARES if has_masks else _SHARES[:1]
        for share, computed in product(shares, [[], between] if between else [[]]):
            drawn = _drawn(inputs, tuple(dict.fromkeys([*fixed, *computed])), share)
            values = _both(region, found, drawn)
            wrong = [pair for pair in wrong if not _equal(*values[pair])]
            laid_out = [pair for pair in laid_out if not _same_layout(*values[pair])]
            if not wrong:
                break
    return [
        pair
        for pair in region.pairs
        if pair in wrong or (pair in laid_out and any(map(_layout_matters, pair)))
    ]


_SHARES = (0.5, 0.9, 0.1, 1.0, 0.0)
"""How many elements of a mask are true."""


def _is_mask(example: Any) -> bool:
    return isinstance(example, Tensor) and example.dtype == torch.bool


def _inputs(region: Region, found: Correspondence) -> list[Node]:
    """Return what is read from outside, by the nodes of the first program."""
    read = [n for node in region.before for n in node.all_input_nodes]
    read += [found.before_of.get(n, n) for node in region.after for n in node.all_input_nodes]
    made = {*region.before, *region.after}
    return [n for n in dict.fromkeys(read) if n not in made and n.op != "get_attr"]


def _fixed(inputs: list[Node], found: Correspondence) -> list[Node]:
    """Return the operators that compute inputs from nothing that varies: masks, tables of positions."""
    order, behind = list(found.before.graph.nodes), {*inputs}
    varying: set[Node] = set()
    for node in order:
        if node.op == "placeholder" or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    for node in reversed(order):
        if node in behind and node not in varying:
            behind.update(node.all_input_nodes)
    return [node for node in order if is_call(node) and node in behind and node not in varying]


def _between(inputs: list[Node], found: Correspondence) -> list[Node]:
    """Return the operators that compute inputs from other ones."""
    order, ahead, behind = list(found.before.graph.nodes), {*inputs}, {*inputs}
    for node in order:
        if not ahead.isdisjoint(node.all_input_nodes):
            ahead.add(node)
    for node in reversed(order):
        if node in behind:
            behind.update(node.all_input_nodes)
    middle = {node for node in order if node in ahead and node in behind}
    return [
        node for node in order if node in middle and not middle.isdisjoint(node.all_input_nodes)
    ]


def _drawn(inputs: list[Node], computed: tuple[Node, ...], share: float) -> dict[Node, Any]:
    """Return random values of inputs, of which some are computed from others."""
    read = [n for node in computed for n in node.all_input_nodes if n.op != "get_attr"]
    generator = torch.Generator().manual_seed(SEED)
    values = {
        node: random_like(value_of(node), generator, share)
        for node in dict.fromkeys([*read, *inputs])
        if node not in computed
    }
    values.update(run(computed, values, [node for node in inputs if node in computed]))
    return {node: values[node] for node in inputs}


def _both(
    region: Region, found: Correspondence, inputs: Mapping[Node, Any]
) -> dict[Pair, tuple[Any, Any]]:
    """Return the values that stand for each other, of both sides."""
    ones = run(region.before, inputs, [one for one, _ in region.pairs])
    inputs = {found.after_of.get(node, node): value for node, value in inputs.items()}
    others = run(region.after, inputs, [other for _, other in region.pairs])
    return {pair: (ones[pair[0]], others[pair[1]]) for pair in region.pairs}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        same_length = isinstance(other, (tuple, list)) and len(one) == len(other)
        return same_length and all(map(_equal, one, other))
    if not isinstance(one, Tensor):
        return type(one) is type(other) and bool(one == other)
    same_kind = isinstance(other, Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_kind and close(one, other)


def close(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one dtype and shape are equal up to rounding.

    Their distance is at most `TOLERANCE` of the first one's norm, and no element is off by more than ten
    times that share of the largest one: an error in few of many elements counts too. Elements that are
    equal, infinite ones and pairs of NaN among them, have no distance.
    """
    tolerance = TOLERANCE
    if one.is_floating_point() or one.is_complex():
        tolerance = max(TOLERANCE, 4 * torch.finfo(one.dtype).eps)
    error, size, largest_error, largest = 0.0, 0.0, 0.0, 0.0
    parts = zip(*(torch.split(x.reshape(-1), _PART) for x in (one, other)), strict=True)
    for first, second in (part for part in parts if part[0].numel()):
        distance, length = _distances(first, second)
        error += distance.square().sum().item()
        size += length.square().sum().item()
        largest_error = max(largest_error, distance.max().item())
        largest = max(largest, length.max().item())
    if not math.isfinite(error):
        return False
    return error <= tolerance**2 * size and largest_error <= 10 * tolerance * largest


_PART = 2**20
"""Elements that are compared at once, in float64."""


def _distances(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return by element how far two tensors are apart, and how large the first one is where it is finite."""
    kind = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(kind), other.to(kind)
    same = (one == other) | (one.isnan() & other.isnan())
    distance = torch.where(same, 0, one - other).abs()
    return distance, torch.where(one.isfinite(), one, 0).abs()


def _same_layout(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return all(map(_same_layout, one, other))
    if not isinstance(one, Tensor):
        return True
    strides = zip(one.stride(), other.stride(), one.shape, strict=False)
    return all(a == b or size <= 1 for a, b, size in strides)


_BY_LAYOUT = {
    aten.view.default,
    aten.view.dtype,
    aten.as_strided.default,
    aten.view_as_complex.default,
}
_DENSE = {
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.layer_norm.default,
    aten.embedding.default,
    aten.contiguous.default,
}
"""Operators whose result is laid out the same, whatever they read is."""


def _layout_matters(node: Node) -> bool:
    """Tell whether an operator that refuses some strides may read what comes of a value's strides."""
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.target in _BY_LAYOUT:
                return True
            if user not in seen and user.target not in _DENSE:
                seen.add(user)
                waiting.append(user)
    return False
