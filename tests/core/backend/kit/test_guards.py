# SPDX-License-Identifier: Apache-2.0
"""Guards refuse with a reason that names what they saw, and let everything else through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qompose.backend import Guard, kit
from torch import Tensor, nn

from tests.core.backend.kit.matches import matches
from tests.core.toy import randn

aten = torch.ops.aten
X, IMAGE = randn(3, 4), randn(2, 4, 6, 6)


def reason(
    guard: Guard, patterns: Any, function: Callable[[Any, Tensor], Tensor], x: Tensor, **parts: Any
) -> str:
    (match,) = matches(patterns, function, x, **parts)
    return guard(match) or ""


def of_layer(guard: Guard, product: str, layer: nn.Module, x: Tensor) -> str:
    return reason(guard, kit.fused("op", product), lambda m, x: m.layer(x), x, layer=layer)


def test_types() -> None:
    layer, half = nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16)
    assert of_layer(kit.float32, "linear", layer, X) == ""
    assert "bfloat16" in of_layer(kit.float32, "linear", half, X.to(torch.bfloat16))
    both = kit.float_types(torch.float32, torch.float16)
    assert of_layer(both, "linear", layer, X) == ""
    assert "does not support torch.bfloat16" in of_layer(both, "linear", half, X.to(torch.bfloat16))


def test_ranks() -> None:
    layer = nn.Conv2d(4, 2, 1)
    assert of_layer(kit.rank("input", 3, 4), "conv2d", layer, IMAGE) == ""
    said = of_layer(kit.rank("input", 4), "conv2d", layer, IMAGE[0])
    assert said == "input has 3 dimensions, but the kernel requires 4"


@pytest.mark.parametrize(
    ("product", "layer", "x", "products"),
    [
        ("linear", nn.Linear(4, 2), X, 4),
        ("conv2d", nn.Conv2d(4, 6, (3, 2)), IMAGE, 24),
        ("conv2d", nn.Conv2d(4, 6, 3, groups=2), IMAGE, 18),
        ("conv_transpose2d", nn.ConvTranspose2d(4, 6, (3, 2)), IMAGE, 24),
        ("conv_transpose2d", nn.ConvTranspose2d(4, 6, 3, groups=2), IMAGE, 18),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, int)) else "",
)
def test_depths_of_sums(product: str, layer: nn.Module, x: Tensor, products: int) -> None:
    assert of_layer(kit.depth(products), product, layer, x) == ""
    assert f"a sum of {products} products" in of_layer(kit.depth(products - 1), product, layer, x)


def test_the_deepest_sum_fits_into_int32() -> None:
    """Of integers whose zero point is at one end, by weights at one end."""
    assert kit.MAX_DEPTH * 255 * 128 < 2**31 <= (kit.MAX_DEPTH + 1) * 255 * 128


def test_groups() -> None:
    plain, grouped = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2)
    assert of_layer(kit.one_group(), "conv2d", plain, IMAGE) == ""
    assert "2 groups" in of_layer(kit.one_group(), "conv2d", grouped, IMAGE)
    assert of_layer(kit.several_groups(), "conv2d", grouped, IMAGE) == ""
    assert "one group" in of_layer(kit.several_groups(), "conv2d", plain, IMAGE)


SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "plain": (lambda y, x: y + x.cos(), ""),
    "scaled": (lambda y, x: torch.add(y, x, alpha=2), "alpha=2"),
    "broadcast": (lambda y, x: y + x[:1], "broadcast"),
    "double": (lambda y, x: y + x.double(), "not float32"),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_behind_a_product(name: str) -> None:
    function, expected = SUMS[name]
    patterns = kit.fused("op", "linear", after=(kit.ADD_FLOAT,))
    layer = nn.Linear(4, 4)
    said = reason(kit.plain_sum(), patterns, lambda m, x: function(m.layer(x), x), X, layer=layer)
    assert expected in said and bool(said) == bool(expected)


def test_a_summand_that_the_product_reads() -> None:
    patterns, layer = kit.fused("op", "linear", after=(kit.ADD_FLOAT,)), nn.Linear(4, 4)
    same = reason(kit.separate_inputs, patterns, lambda m, x: m.layer(x) + x, X, layer=layer)
    assert "stays in float" in same
    other = lambda m, x: m.layer(x) + x.cos()  # noqa: E731
    assert reason(kit.separate_inputs, patterns, other, X, layer=layer) == ""


def test_alpha_of_sums_of_two() -> None:
    guard, patterns = kit.without_alpha(), kit.binary("sub")
    assert reason(guard, patterns, lambda m, x: x - x.cos(), X) == ""
    assert "alpha" in reason(guard, patterns, lambda m, x: torch.sub(x, x.cos(), alpha=2), X)


def test_factors_that_are_parameters() -> None:
    guard, patterns = kit.computed_factors, kit.binary("mul")
    assert reason(guard, patterns, lambda m, x: x * x.cos(), X) == ""
    assert "parameter" in reason(
        guard, patterns, lambda m, x: x * m.factor, X, factor=nn.Parameter(torch.ones(4))
    )


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, x: x.mean(1), ""),
        (lambda m, x: x.mean(1, dtype=torch.float64), "dtype"),
        (lambda m, x: aten.mean.dim(x, []), "over all elements"),
    ],
)
def test_means(function: Callable[[Any, Tensor], Tensor], expected: str) -> None:
    said = reason(kit.over_dimensions, (kit.one(aten.mean.dim, [1]),), function, X)
    assert expected in said and bool(said) == bool(expected)


def test_dropout_in_training() -> None:
    patterns = kit.MOVES["dropout"].patterns
    assert reason(kit.not_training(), patterns, lambda m, x: F.dropout(x, 0.5, False), X) == ""
    assert "training" in reason(kit.not_training(), patterns, lambda m, x: F.dropout(x, 0.5), X)


@pytest.mark.parametrize(
    ("pad", "expected"),
    [
        (lambda x: F.pad(x, (1, 1, 2, 0)), ""),
        (lambda x: F.pad(x, (1, 1, 2, 0), value=1.0), "zero padding"),
        (lambda x: F.pad(x, (1, 1, 2, 0), mode="replicate"), "zero padding"),
        (lambda x: F.pad(x, (1, 1, 2, -1)), "crops"),
    ],
)
def test_padding(pad: Callable[[Tensor], Tensor], expected: str) -> None:
    patterns, layer = kit.fused("op", "conv2d", before=(kit.PAD,)), nn.Conv2d(4, 2, 1)
    said = reason(
        kit.spatial_zero_padding, patterns, lambda m, x: m.layer(pad(x)), IMAGE, layer=layer
    )
    assert expected in said and bool(said) == bool(expected)


def test_the_first_reason_counts() -> None:
    first = kit.first_of(lambda m: None, lambda m: "second", lambda m: "third")
    assert of_layer(first, "linear", nn.Linear(4, 4), X) == "second"
    assert kit.first_of()(None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "count", "found"), [(2, 2, [2, 2]), ([3], 3, [3, 3, 3]), ((1, 2), 2, [1, 2])]
)
def test_sizes(given: Any, count: int, found: list[int]) -> None:
    assert kit.sizes(given, count) == found
