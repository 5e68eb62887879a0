# SPDX-License-Identifier: Apache-2.0
"""Patterns of products are found in the programs that users write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qompose.backend import Pattern, kit
from qompose.errors import ConfigError
from torch import Tensor, nn

from tests.core.backend.kit.matches import matches
from tests.core.toy import randn

SIZES = {"1d": (2, 4, 9), "2d": (2, 4, 9, 8), "3d": (1, 4, 5, 6, 5)}


def layer(product: str, **options: Any) -> tuple[nn.Module, Tensor]:
    """A module for a product, and an input."""
    if product == "linear":
        return nn.Linear(4, 4, **options), randn(3, 4)
    name = "".join(part.capitalize() for part in product.split("_"))
    return getattr(nn, name)(4, 4, 3, **options), randn(*SIZES[product[-2:]])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("product", kit.PRODUCTS)
def test_products_with_a_bias_and_without(product: str, bias: bool) -> None:
    module, x = layer(product, bias=bias)
    (match,) = matches(kit.fused("op", product), lambda m, x: m.layer(x), layer=module, x=x)
    assert (match.node("bias") is not None) == bias
    assert match.node("op") is match.output


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("product", ["conv1d", "conv2d", "conv3d"])
def test_padding_in_words(product: str, padding: str) -> None:
    module, x = layer(product, padding=padding)
    (match,) = matches(kit.fused("op", product), lambda m, x: m.layer(x), layer=module, x=x)
    assert match.argument("op", "padding") == padding


WRITTEN: dict[str, tuple[kit.Step, Callable[[Tensor], Tensor]]] = {
    "relu": (kit.RELU, F.relu), "method": (kit.RELU, lambda x: x.relu_()),
    "in place": (kit.RELU, lambda x: F.relu(x, inplace=True)),
    "relu6": (kit.RELU6, F.relu6), "relu6 in place": (kit.RELU6, lambda x: F.relu6(x, inplace=True)),
    "hardtanh": (kit.HARDTANH, lambda x: F.hardtanh(x, -0.1, 0.2, inplace=True)),
    "clamp": (kit.CLAMP, lambda x: x.clamp(-0.1, 0.2)), "clamp_": (kit.CLAMP, lambda x: x.clamp_(-0.1, 0.2)),
    "one side": (kit.CLAMP, lambda x: x.clamp(max=0.2)), "clip": (kit.CLAMP, lambda x: x.clip(-0.1, 0.2)),
    "clip_": (kit.CLAMP, lambda x: x.clip_(min=0.1)), "hardswish": (kit.HARDSWISH, F.hardswish),
    "hardsigmoid": (kit.HARDSIGMOID, F.hardsigmoid), "silu": (kit.SILU, lambda x: F.silu(x, inplace=True)),
    "leaky": (kit.LEAKY_RELU, lambda x: F.leaky_relu(x, 0.3)), "elu": (kit.ELU, F.elu),
    "tanh": (kit.TANH, torch.tanh), "tanh_": (kit.TANH, torch.tanh_), "sigmoid": (kit.SIGMOID, torch.sigmoid),
    "gelu": (kit.GELU, lambda x: F.gelu(x, approximate="tanh")),
}  # fmt: skip


@pytest.mark.parametrize(("step", "function"), WRITTEN.values(), ids=WRITTEN)
def test_functions_of_one_tensor_as_users_write_them(
    step: kit.Step, function: Callable[[Tensor], Tensor]
) -> None:
    module, x = layer("linear")
    patterns = kit.fused("op", F.linear, after=(step,))
    (match,) = matches(patterns, lambda m, x: function(m.layer(x)), layer=module, x=x)
    assert match.node("act") is match.output


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "right": lambda y, x: y + x, "left": lambda y, x: x + y, "in place": lambda y, x: y.add_(x),
    "into the other": lambda y, x: x.clone().add_(y),
}  # fmt: skip


@pytest.mark.parametrize("product", ["conv2d", "linear"])
@pytest.mark.parametrize("way", SUMS)
def test_sums_in_either_order(product: str, way: str) -> None:
    module, x = layer(product, **({} if product == "linear" else {"padding": 1}))
    step = kit.ADD_FLOAT if product == "linear" else kit.ADD
    patterns = kit.fused("op", product, after=(kit.DROPOUT, step, kit.RELU))

    def function(m: Any, x: Tensor) -> Tensor:
        return SUMS[way](F.dropout(m.layer(x.cos()), 0.5, m.training), x).relu()

    found = matches(patterns, function, layer=module, x=x)
    # What writes to the other tensor would write to an input, where that stays in float.
    assert len(found) == (0 if (product, way) == ("linear", "into the other") else 1)
    for match in found:
        assert match.node("drop") is not None and match.node("act") is match.output
        assert match.node("other") is not None


@pytest.mark.parametrize(
    "pad", [lambda x: F.pad(x, (1, 2, 0, 1)), lambda x: nn.ConstantPad2d(1, 0.0)(x)]
)
def test_padding_before_a_convolution(pad: Callable[[Tensor], Tensor]) -> None:
    module, x = layer("conv2d")
    patterns = kit.fused("op", "conv2d", before=(kit.PAD,))
    (match,) = matches(patterns, lambda m, x: m.layer(pad(x)), layer=module, x=x)
    assert match.node("pad") is not None and kit.spatial_zero_padding(match) is None


def test_a_product_of_ones_own_and_examples_of_other_sizes() -> None:
    mine = kit.Product(((F.linear, torch.ops.aten.linear.default),), ((3, 8), (5, 8), (5,)))
    for patterns in (
        kit.fused("mine", mine),
        kit.fused("mine", "linear", shapes=((3, 8), (5, 8), (5,))),
    ):
        without, with_bias = patterns
        assert isinstance(without, Pattern) and without.shapes == ((3, 8), (5, 8))
        assert with_bias.names == {"input", "weight", "bias", "mine", "output"}


@pytest.mark.parametrize("after", [False, True])
def test_functions_of_two_tensors(after: bool) -> None:
    patterns = kit.binary("sub", after=(kit.RELU,) if after else ())
    (match,) = matches(
        patterns, lambda m, x: (x - x.cos()).relu() if after else x - x.cos(), x=randn(2, 3)
    )
    assert match.node("other") is not match.node("self")
    assert (match.node("op") is match.output) != after if after else match.node("op") is None


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"'conv2'.*'conv2d'"):
        kit.fused("op", "conv2")
    with pytest.raises(ConfigError, match="act"):
        kit.fused("op", "linear", after=(kit.RELU, kit.SILU))
    with pytest.raises(ConfigError, match="div"):
        kit.binary("div")
