# SPDX-License-Identifier: Apache-2.0
"""Rules of the kit, run by the integer reference: products with what stands around them, moves, sums."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose import RuleQuantizer
from qompose.backend import Kernel, NotLowerable, Region, Rule, kit
from qompose.errors import ConfigError, QomposeWarning
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import Model, operators, randn, sqnr, toy

aten = torch.ops.aten
MAKE = kit.ConfigFactory(group_sizes=(32,))
STATIC = MAKE(algorithms=(), balance=False, range="minmax")
DYNAMIC, BY_TOKEN = MAKE(is_dynamic=True), MAKE(is_dynamic=True, per_token=True)
ACCEPTS = kit.accepts(STATIC)
IMAGE, ROWS = randn(2, 4, 9, 8), randn(3, 5, 8)


def made(
    *rules: Rule, function: Callable[..., Any], x: Tensor, config: Any = STATIC, **parts: Any
) -> tuple[Any, Any, Any]:
    """The model, the Q/DQ model and the lowered one."""
    torch.manual_seed(0)
    model = Model(function, **parts).eval()
    quantizer = RuleQuantizer(toy(*rules, config=None).backend).set_global(config)
    result = qompose.quantize(model, (x,), backends=quantizer, calibration=[(x,)], progress=False)
    return model, result.converted, result.model


def assert_right(found: tuple[Any, Any, Any], x: Tensor, kernel: str = "integer reference") -> None:
    """All is lowered to the kernel, to one step of the Q/DQ model's output, and 30 dB from the float one."""
    model, converted, lowered = found
    qompose.assert_lowered(lowered)
    kernels = {row.kernel.partition(": ")[2] or row.kernel for row in qompose.report(lowered).rows}
    assert kernels == {kernel}
    with torch.no_grad():
        expected, real, integers = converted(x), model(x), lowered(x)
    step = float(expected.max() - expected.min()) / 254
    assert float((integers - expected).abs().max()) <= 1.01 * step
    assert sqnr(real, integers) > 30


def layer(product: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    if product == "linear":
        return nn.Linear(8, 8), ROWS
    dims = int(product[-2])
    cls: Any = getattr(nn, "".join(part.capitalize() for part in product.split("_")))
    return cls(4, 4, 3, padding=1), {1: randn(2, 4, 9), 2: IMAGE, 3: randn(1, 4, 5, 6, 5)}[dims]


@pytest.mark.parametrize("product", kit.PRODUCTS)
def test_products_alone(product: str) -> None:
    module, x = layer(product)
    rule = kit.product_rule(product, accepts=ACCEPTS)
    assert_right(made(rule, function=lambda m, x: m.layer(x), x=x, layer=module), x)


BEHIND: dict[str, tuple[tuple[kit.Step, ...], Callable[[Tensor], Tensor]]] = {
    "relu": ((kit.RELU,), F.relu), "clip": ((kit.CLAMP,), lambda x: x.clip_(-0.2, 0.3)),
    "gelu": ((kit.GELU,), F.gelu), "silu_": ((kit.SILU,), lambda x: F.silu(x, inplace=True)),
    "dropout": ((kit.DROPOUT, kit.RELU), lambda x: F.dropout(x, 0.5, False).relu()),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND)
def test_functions_behind_a_product(name: str) -> None:
    steps, function = BEHIND[name]
    module, x = layer("conv2d")
    rule = kit.product_rule("conv2d", after=steps, accepts=ACCEPTS)
    found = made(rule, function=lambda m, x: function(m.layer(x)), x=x, layer=module)
    assert_right(found, x)
    assert rule.drawing == f"conv2d -> {steps[-1].name}" and rule.name == f"conv2d_{steps[-1].name}"
    if name in ("relu", "clip", "dropout"):  # integers from one end to the other
        assert not {"relu", "clip", "dropout"} & set(operators(found[2]))


@pytest.mark.parametrize("quantized", [False, True])
def test_sums_with_another_tensor(quantized: bool) -> None:
    module, x = layer("conv2d" if quantized else "linear")
    add = kit.ADD if quantized else kit.ADD_FLOAT
    rule = kit.product_rule(
        "conv2d" if quantized else "linear", after=(add, kit.RELU), accepts=ACCEPTS
    )
    assert rule.activations == (("input", "other") if quantized else ("input",))
    assert rule.drawing.endswith(" + x -> relu")

    def function(m: Any, x: Tensor) -> Tensor:
        return (m.layer(x) + (x if quantized else x.cos())).relu()

    _, converted, lowered = made(rule, function=function, x=x, layer=module)
    assert [row.rule for row in qompose.report(lowered).rows if row.macs] == [rule.name]
    expected = converted(x)
    assert (lowered(x) - expected).abs().max() <= 1.01 * float(expected.max() / 254)


def test_padding_becomes_part_of_a_convolution() -> None:
    module, x = layer("conv2d")
    x = x.abs()  # whose zero is not the integer 0
    rule = kit.product_rule("conv2d", before=(kit.PAD,), accepts=ACCEPTS)
    padded = made(rule, function=lambda m, x: m.layer(F.pad(x, (1, 0, 0, 2))), x=x, layer=module)
    assert_right(padded, x)
    assert {row.rule for row in qompose.report(padded[2]).rows} == {"pad_conv2d"}
    with pytest.warns(QomposeWarning):
        _, _, other = made(
            rule,
            function=lambda m, x: m.layer(F.pad(x, (1, 0, 0, 2), value=2.0)),
            x=x,
            layer=module,
        )
    assert "only zero padding" in str(qompose.report(other))


@pytest.mark.parametrize("config", [DYNAMIC, BY_TOKEN], ids=["one scale", "by token"])
@pytest.mark.parametrize("product", ["linear", "conv2d"])
def test_scales_at_run_time(product: str, config: Any) -> None:
    module, x = layer(product)
    rule = kit.product_rule(
        product, mode="dynamic", after=(kit.CLAMP,), accepts=kit.accepts(config)
    )
    assert rule.name == f"{product}_dynamic_clamp"
    refused = product == "conv2d" and config is BY_TOKEN
    # A scale for each row of pixels is no scale of a sum.
    with pytest.warns(QomposeWarning, match="more than one scale") if refused else nullcontext():
        found = made(
            rule,
            function=lambda m, x: m.layer(x).clip_(-0.2, 0.3),
            x=x,
            config=config,
            layer=module,
        )
    if not refused:
        assert_right(found, x)


def test_moves_run_on_integers_and_sums_on_theirs() -> None:
    module, x = layer("conv2d")
    rules = (
        kit.product_rule("conv2d", accepts=ACCEPTS),
        kit.binary_rule("add", accepts=ACCEPTS, after=(kit.RELU,)),
        kit.binary_rule("add", accepts=ACCEPTS),
        kit.pool_rule("max_pool2d", accepts=ACCEPTS),
        *kit.move_rules(ACCEPTS),
    )  # fmt: skip

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        y = (y + m.layer(x).clip_(-0.5, 0.5)).relu()
        y = F.max_pool2d(y, 2)
        return m.layer(torch.cat([y.transpose(2, 3), y.transpose(2, 3).clamp_min(0.1)], 2))

    _, converted, lowered = made(*rules, function=function, x=x, layer=module)
    assert {row.state for row in qompose.report(lowered).rows} == {"int8 kernel"}
    expected = converted(x)
    step = float(expected.max() - expected.min()) / 254
    assert (lowered(x) - expected).abs().max() <= 3 * step  # of three sums in a row
    assert not [name for name in operators(lowered) if "clip" in name]


POOLED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "max": ("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1)),
    "average": ("avg_pool2d", lambda x: F.avg_pool2d(x, (3, 2), padding=1)),
    "divisor": ("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=4)),
    "adaptive": ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1)),
    "mean": ("mean", lambda x: x.mean((2, 3))), "channels": ("mean", lambda x: x.mean(1, keepdim=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLED)
def test_pools_of_integers(name: str) -> None:
    pool, function = POOLED[name]
    rules = (kit.product_rule("conv2d", accepts=ACCEPTS), kit.pool_rule(pool, accepts=ACCEPTS))
    module, x = layer("conv2d")
    found = made(*rules, function=lambda m, x: function(m.layer(x)), x=x, layer=module)
    assert_right(found, x)
    assert {row.rule for row in qompose.report(found[2]).rows} == {"conv2d", pool}


def test_pools_without_one_divisor_have_no_reference() -> None:
    rules = (
        kit.product_rule("conv2d", accepts=ACCEPTS),
        kit.pool_rule("avg_pool2d", accepts=ACCEPTS),
    )
    module, x = layer("conv2d")
    with pytest.warns(QomposeWarning, match="different divisors"):
        made(
            *rules,
            function=lambda m, x: F.avg_pool2d(m.layer(x), 3, padding=1, count_include_pad=False),
            x=x,
            layer=module,
        )
    with pytest.raises(ConfigError, match="'mean'"):
        kit.pool_rule("means", accepts=ACCEPTS)


def test_only_some_moves() -> None:
    rules = kit.move_rules(ACCEPTS, only=("cat", "copy"), carries=("copy",))
    assert [(rule.name, rule.carries) for rule in rules] == [("cat", False), ("copy", True)]


def test_a_chain_may_end_in_it() -> None:
    def refuse(region: Region) -> Node:
        raise NotLowerable("the unit is busy")

    module, x = layer("linear")
    chain = Kernel("fast", refuse, otherwise=kit.INTEGER_REFERENCE)
    rule = kit.product_rule("linear", accepts=ACCEPTS, kernels={"torch": chain})
    assert_right(made(rule, function=lambda m, x: m.layer(x), x=x, layer=module), x)


def test_what_has_no_reference_says_so() -> None:
    module, x = layer("conv2d")
    rules = (
        kit.product_rule("conv2d", accepts=ACCEPTS),
        kit.unary_rule("sum", kit.one(aten.sum.dim_IntList, [2, 3]), accepts=ACCEPTS),
    )
    with pytest.warns(QomposeWarning, match=r"aten.sum.dim_IntList has no integer reference"):
        made(*rules, function=lambda m, x: m.layer(x).sum((2, 3)), x=x, layer=module)
    weights = MAKE(weight_only=True)
    alone = kit.product_rule("linear", mode="weight-only", accepts=kit.accepts(weights))
    assert alone.kernels == {}
    module, x = layer("linear")
    alone = kit.product_rule(
        "linear",
        mode="weight-only",
        accepts=kit.accepts(weights),
        kernels={"torch": kit.reference_kernel(float_output=True)},
    )
    with pytest.warns(QomposeWarning, match="its activation is float"):
        made(alone, function=lambda m, x: m.layer(x), x=x, config=weights, layer=module)
