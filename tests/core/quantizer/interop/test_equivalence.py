# SPDX-License-Identifier: Apache-2.0
"""Whether two sides of a place compute the same, up to rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from qompose.program.graph import copy_graph_module
from qompose.quantizer.interop.correspondence import stamp
from qompose.quantizer.interop.equivalence import close, unequal
from qompose.quantizer.interop.pairing import correspond
from qompose.quantizer.interop.regions import regions_of
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.core.quantizer.interop.aligning import X, exported_function
from tests.core.quantizer.interop.transforms import (
    Transform,
    aten,
    constant,
    insert,
    replace,
    sites,
)

NAN, INF = float("nan"), float("inf")
LINE = torch.linspace(-1, 1, 1001)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (LINE, LINE * 1.0005, True),
        (LINE, LINE * 1.002, False),
        (LINE, LINE.index_fill(0, torch.tensor(500), 0.015), False),
        (LINE, LINE.index_fill(0, torch.tensor(500), 0.005), True),
        (LINE.bfloat16(), (LINE * 1.01).bfloat16(), True),
        (LINE.bfloat16(), (LINE * 1.1).bfloat16(), False),
        (torch.zeros(3), torch.full((3,), 1e-9), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.tensor([1.0, -INF, NAN]), torch.tensor([1.0, -INF, NAN]), True),
        (torch.tensor([1.0, -INF]), torch.tensor([1.0, -255.0]), False),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, NAN]), False),
        (torch.arange(9), torch.arange(9), True),
        (torch.arange(9), torch.arange(9).flip(0), False),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (LINE + 1j, LINE + 1.01j, False),
    ],
    ids=[
        "rounding",
        "two in a thousand",
        "one element",
        "one element, little",
        "bfloat16",
        "bfloat16, a tenth",
        "zero is exact",
        "nothing",
        "infinite and nan",
        "large for infinite",
        "nan for a number",
        "indices",
        "other indices",
        "masks",
        "complex",
    ],
)
def test_close(one: Tensor, other: Tensor, expected: bool) -> None:
    assert close(one, other) is expected


def test_parts_count_together() -> None:
    """Large tensors are compared part by part."""
    one = torch.ones(2**20 + 5)
    other = one.clone()
    other[-1] = 1.5
    assert close(one, one.clone()) and not close(one, other)


def differing(program: GraphModule, transform: Transform) -> list[list[str]]:
    """Return, for each place, the values that differ."""
    before, own = copy_graph_module(program), copy_graph_module(program)
    stamp(own)
    found = correspond(before, transform(own))
    return [[one.name for one, _ in unequal(region, found)] for region in regions_of(found)]


def swapped(old: object, new: object) -> Transform:
    def transform(own: GraphModule) -> GraphModule:
        for site in sites(own, old):
            replace(site, insert(site, new, *site.args))
        return own

    return transform


@pytest.mark.parametrize(
    ("new", "expected"), [(aten.leaky_relu.default, ["elu"]), (aten.celu.default, [])], ids=str
)
def test_places_that_differ(new: object, expected: list[str]) -> None:
    program = exported_function(lambda m, x: F.elu(x.sin()).exp())
    assert differing(program, swapped(aten.elu.default, new)) == [expected]


def attend(safe: bool) -> Callable[[GraphModule], GraphModule]:
    """Attention as a softmax, which gives NaN for rows that a mask leaves nothing of."""

    def transform(own: GraphModule) -> GraphModule:
        for site in sites(own, aten.scaled_dot_product_attention.default):
            query, key, value, mask = site.args
            turned = insert(site, aten.transpose.int, key, 1, 2)
            scores = insert(site, aten.matmul.default, query, turned)
            scaled = insert(site, aten.mul.Tensor, scores, WIDE**-0.5 if safe else 1.0)
            low = insert(site, aten.logical_not.default, mask)
            masked = insert(site, aten.masked_fill.Scalar, scaled, low, -INF)
            weights = insert(site, aten.softmax.int, masked, -1)
            replace(site, insert(site, aten.matmul.default, weights, value))
        return own

    return transform


WIDE = 6


def test_masks_that_leave_nothing_are_no_difference() -> None:
    """With two keys, one row in four has none; torch gives zero for it and the pieces give NaN."""
    shape = torch.randn(4, 16, WIDE), torch.randn(4, 2, WIDE), torch.randn(4, 2, WIDE)
    mask = torch.ones(4, 16, 2, dtype=torch.bool)
    program = exported_function(
        lambda m, q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask.clone()),
        *shape,
        mask,
    )
    assert differing(program, attend(True)) == [[]]
    assert differing(program, attend(False)) == [["scaled_dot_product_attention"]]


def test_masks_of_one_element_a_row() -> None:
    """Only if all are true, no row is without a key."""
    shape = torch.randn(4, 64, WIDE), torch.randn(4, 2, WIDE), torch.randn(4, 2, WIDE)
    mask = torch.ones(4, 64, 1, dtype=torch.bool)
    program = exported_function(
        lambda m, q, k, v, mask: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.expand(-1, -1, 2)
        ),
        *shape,
        mask,
    )
    assert differing(program, attend(True)) == [[]]


def test_inputs_that_do_not_vary() -> None:
    """What is computed from constants has the values that it always has: passes compute with them."""

    def transform(own: GraphModule) -> GraphModule:
        (site,) = sites(own, aten.sqrt.default)
        replace(site, constant(own, site, torch.full((WIDE,), 2.0)))
        return own

    program = exported_function(lambda m, x: x / torch.full((WIDE,), 4.0).sqrt())
    assert differing(program, transform) == [[]]


def test_inputs_that_depend_on_each_other() -> None:
    """What reads both a value and what is computed from it may do with either."""

    def transform(own: GraphModule) -> GraphModule:
        (site,), (neg,) = sites(own, aten.add.Tensor), sites(own, aten.neg.default)
        replace(site, insert(site, aten.sub.Tensor, site.args[0], neg))
        return own

    program = exported_function(lambda m, x: [y := x.sin(), n := y.neg(), y + y, n.cos()][2:])
    assert differing(program, transform) == [[]]


@pytest.mark.parametrize(
    ("follow", "expected"),
    [
        (lambda x: x.exp().view(2, 12), ["sin"]),
        (lambda x: x.exp().reshape(2, 12), []),
        (lambda x: F.linear(x, X).view(2, 8), []),
    ],
    ids=["a view", "no view", "a view of a new tensor"],
)
def test_strides(follow: Callable[[Tensor], Tensor], expected: list[str]) -> None:
    def transform(own: GraphModule) -> GraphModule:
        (site,) = sites(own, aten.sin.default)
        turned = insert(site, aten.permute.default, site.args[0], [1, 0])
        sin = insert(site, aten.sin.default, insert(site, aten.contiguous.default, turned))
        replace(site, insert(site, aten.permute.default, sin, [1, 0]))
        return own

    program = exported_function(lambda m, x: follow(x.sin()))
    assert differing(program, transform) == [expected]
