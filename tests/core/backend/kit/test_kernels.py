# SPDX-License-Identifier: Apache-2.0
"""What emitters share: bounds as integers, windows, and the geometry of convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from qompose import RuleQuantizer
from qompose.backend import Kernel, NotLowerable, Region, Rule, kit
from qompose.errors import QomposeWarning
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import Model, randn, toy

aten = torch.ops.aten
STATIC = kit.ConfigFactory()(algorithms=(), balance=False, range="minmax")
ACCEPTS, X = kit.accepts(STATIC), randn(2, 4, 9, 8)


def seen(
    look: Callable[[Region], Any],
    make: Callable[[dict[str, Kernel]], Rule],
    function: Callable[..., Any],
    x: Tensor = X,
    **parts: Any,
) -> Any:
    """What a function sees in the one region of a rule, which it leaves unlowered."""
    found = []

    def emit(region: Region) -> Node:
        found.append(look(region))
        raise NotLowerable("seen")

    rule = make({"torch": Kernel("look", emit)})
    quantizer = RuleQuantizer(toy(rule, config=None).backend).set_global(STATIC)
    model = Model(function, **parts).eval()
    with pytest.warns(QomposeWarning):
        qompose.quantize(model, (x,), backends=quantizer, calibration=[(x,)], progress=False)
    return found[0]


def of_activation(step: kit.Step, function: Callable[[Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    return seen(
        lambda r: (kit.float_bounds(r, "act"), kit.integer_bounds(r, "act"), r.quantized("output")),
        lambda kernels: kit.product_rule("linear", after=(step,), accepts=ACCEPTS, kernels=kernels),
        lambda m, x: function(m.layer(x)),
        randn(3, 8),
        layer=nn.Linear(8, 8),
    )


BOUNDS: dict[str, tuple[kit.Step, Callable[[Tensor], Tensor], tuple[float, float]]] = {
    "relu": (kit.RELU, F.relu, (0.0, math.inf)), "relu6": (kit.RELU6, F.relu6, (0.0, 6.0)),
    "hardtanh": (kit.HARDTANH, lambda x: F.hardtanh(x, -0.2, 0.3), (-0.2, 0.3)),
    "clip": (kit.CLAMP, lambda x: x.clip_(-0.2, 0.3), (-0.2, 0.3)),
    "above": (kit.CLAMP, lambda x: x.clamp(min=-0.2), (-0.2, math.inf)),
    "far": (kit.CLAMP, lambda x: x.clamp(-1e30, 0.3), (-1e30, 0.3)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_an_activation(name: str) -> None:
    step, function, wanted = BOUNDS[name]
    bounds, (low, high), output = of_activation(step, function)
    assert bounds == pytest.approx(wanted)
    for integer, bound, side in ((low, wanted[0], output.low), (high, wanted[1], output.high)):
        assert output.low <= integer <= output.high
        value = (integer - output.zero_point) * output.scale
        assert integer == side or abs(value - bound) <= 0.5001 * output.scale  # half a step


def test_what_has_no_bounds() -> None:
    def look(region: Region) -> str:
        with pytest.raises(NotLowerable, match="gelu"):
            kit.float_bounds(region, "act")
        return "refused"

    rule = lambda kernels: kit.product_rule(  # noqa: E731
        "linear", after=(kit.GELU,), accepts=ACCEPTS, kernels=kernels
    )
    layer = nn.Linear(8, 8)
    assert seen(look, rule, lambda m, x: F.gelu(m.layer(x)), randn(3, 8), layer=layer) == "refused"


@given(st.floats(-1e30, 1e30), st.floats(1e-6, 1e3), st.integers(-128, 127))
def test_the_nearest_integer_of_a_value(value: float, scale: float, zero_point: int) -> None:
    found = kit.nearest_integer(value, scale, zero_point)
    if abs(value / scale) < 2**53:
        assert abs((found - zero_point) - value / scale) <= 0.5
    assert kit.nearest_integer(math.inf, scale, 0) > 2**61
    assert kit.nearest_integer(-math.inf, scale, 0) < -(2**61)


CONVOLUTIONS: dict[str, tuple[dict[str, Any], list[Any], list[int]]] = {
    "plain": ({"kernel_size": 3, "stride": 2, "padding": 1}, [[2, 2], [1, 1], [1, 1], 1], [0] * 4),
    "same": ({"kernel_size": 3, "padding": "same"}, [[1, 1], [1, 1], [1, 1], 1], [0] * 4),
    "same, even": ({"kernel_size": (2, 3), "padding": "same"}, [[1, 1], [0, 0], [1, 1], 1], [1, 1, 0, 1]),
    "same, dilated": ({"kernel_size": 3, "padding": "same", "dilation": (2, 1)},
                      [[1, 1], [2, 1], [2, 1], 1], [0] * 4),
    "valid": ({"kernel_size": 2, "padding": "valid", "groups": 2}, [[1, 1], [0, 0], [1, 1], 2], [0] * 4),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("pads", [False, True])
def test_geometry_of_a_convolution(name: str, pads: bool) -> None:
    """With it torch's own operator gives the same, after zeros where they are asked for."""
    options, arguments, zeros = CONVOLUTIONS[name]
    layer = nn.Conv2d(4, 4, **options)
    before = (kit.PAD,) if pads else ()
    geometry = seen(
        kit.geometry_of,
        lambda kernels: kit.product_rule("conv2d", before=before, accepts=ACCEPTS, kernels=kernels),
        lambda m, x: m.layer(F.pad(x, (1, 0, 0, 2)) if pads else x),
        layer=layer,
    )
    around = [a + b for a, b in zip(zeros, (1, 0, 0, 2), strict=True)] if pads else zeros
    assert (geometry.arguments, geometry.zeros) == (arguments, around)
    found = F.conv2d(F.pad(X, geometry.zeros), layer.weight, layer.bias, *geometry.arguments)
    torch.testing.assert_close(found, layer(F.pad(X, (1, 0, 0, 2)) if pads else X))


def test_geometry_of_a_transposed_convolution() -> None:
    layer = nn.ConvTranspose1d(4, 6, 3, stride=3, output_padding=2, groups=2)
    x = randn(2, 4, 7)
    geometry = seen(
        kit.geometry_of,
        lambda kernels: kit.product_rule("conv_transpose1d", accepts=ACCEPTS, kernels=kernels, groups=2),
        lambda m, x: m.layer(x), x, layer=layer,
    )  # fmt: skip
    found = F.conv_transpose1d(x, layer.weight, layer.bias, *geometry.arguments)
    torch.testing.assert_close(found, layer(x))


def test_a_window_without_a_stride() -> None:
    names = ("kernel_size", "stride", "padding")
    for pool, stride in (
        (lambda x: F.max_pool2d(x, 2), [2, 2]),
        (lambda x: F.max_pool2d(x, 2, 3), [3, 3]),
    ):
        window = seen(
            lambda r: kit.window(r, *names),
            lambda kernels: kit.unary_rule(
                "pool", kit.one(aten.max_pool2d.default, [2, 2]), accepts=ACCEPTS, kernels=kernels,
                condition=None,
            ),
            lambda m, x, pool=pool: pool(x),
        )  # fmt: skip
        assert [*map(list, window)] == [[2, 2], stride, [0, 0]]


def test_qparams_of_roles_are_arguments_of_a_call() -> None:
    def look(region: Region) -> Any:
        assert [node.name for node in region.nodes] == ["linear", "relu"]
        weight = region.quantized("weight")
        scales = kit.channel_scales(region, weight)
        return region.qparams("input"), region.qparams("output"), scales.meta["val"].shape

    rule = lambda kernels: kit.product_rule(  # noqa: E731
        "linear", after=(kit.RELU,), accepts=ACCEPTS, kernels=kernels
    )
    layer = nn.Linear(8, 5)
    read, output, shape = seen(look, rule, lambda m, x: m.layer(x).relu(), randn(3, 8), layer=layer)
    assert [type(value) for value in read] == [float, int]
    assert output[2:] == (-128, 127) and len(output) == 4
    assert shape == (5,)
