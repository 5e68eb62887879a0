# SPDX-License-Identifier: Apache-2.0
"""The int8 kernels against the real ExecuTorch runtime, many operators per program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose_xnnpack.operators import quantized_bound
from torch import Tensor
from torch.nn import functional

pytest.importorskip("executorch")

from tests.xnnpack.executorch_target.runtime import (
    FULL,
    Case,
    Constants,
    QParams,
    compare,
    lower,
    per_channel,
    quantize,
    steps_apart,
    through,
    weight_constants,
)
from tests.xnnpack.operators.arithmetic import KERNELS, normal

IN: QParams = (0.021, -7)
OUT: QParams = (0.05, 5)
IMAGE = (2, 6, 5, 4)
LINE = (2, 6, 9)


def transposed(shape: tuple[int, ...], *numbers: int, relu: bool = False) -> Case:
    """Per output channel with one group, else per tensor, as XNNPACK takes it.

    `numbers`: stride, padding, output_padding, groups, dilation.
    """
    stride, padding, extra, groups, dilation = numbers
    rank = len(shape) - 2
    kernel = getattr(KERNELS, f"conv_transpose{rank}d")
    function = getattr(functional, f"conv_transpose{rank}d")
    constants = weight_constants(sum(shape), *shape, axis=1)
    if groups > 1:
        constants["scale"] = constants["scale"][:1]
    bias = normal(1, shape[1] * groups)

    def graph(c: Constants, x: Tensor) -> Tensor:
        weight = per_channel(c, 1) if groups == 1 else through_weight(c["weight"])
        result = function(through(x, IN), weight, c["bias"], *numbers)
        return quantize(torch.relu(result) if relu else result, OUT)

    def here(c: Constants, x: Tensor) -> Tensor:
        scale = c["scale"] if groups == 1 else torch.tensor([0.004])
        geometry = ([stride], [padding], [extra], groups, [dilation])
        limits = (OUT[1] if relu else -128, 127)
        args = (c["weight"], scale, c["bias"], *geometry, *OUT, *limits)
        return kernel(quantize(x, IN), *IN, *args)

    shapes = (IMAGE if rank == 2 else LINE,)
    return Case(graph, here, shapes, {**constants, "bias": bias})


def through_weight(weight: Tensor) -> Tensor:
    dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    return dequantize(weight, 0.004, 0, -127, 127, torch.int8)


TRANSPOSED = {
    "stride and padding": transposed((6, 4, 3, 3), 2, 1, 1, 1, 1, relu=True),
    "even kernel": transposed((6, 5, 2, 2), 2, 0, 0, 1, 1),
    "dilated": transposed((6, 4, 3, 2), 1, 2, 0, 1, 2),
    "gaps without input": transposed((6, 4, 2, 2), 3, 1, 2, 1, 1),
    "grouped": transposed((6, 4, 3, 3), 2, 1, 0, 2, 1),
    "depthwise": transposed((6, 1, 3, 3), 2, 1, 1, 6, 1),
    "line": transposed((6, 4, 3), 2, 1, 1, 1, 1, relu=True),
}


def check(
    cases: dict[str, Case],
    most: int = 1,
    magnitude: float = 2.0,
    bounds: dict[str, tuple[int, int]] | None = None,
) -> None:
    """Run all cases as one program on several inputs that fill the int8 range and leave it.

    ``most``: steps that they may be apart; ``bounds``: what several values must be clamped to, exactly.
    """
    program = lower(list(cases.values()))
    shapes = [shape for case in cases.values() for shape in case.shapes]

    @settings(max_examples=6, deadline=None)
    @given(st.integers(0, 2**16))
    def run(seed: int) -> None:
        inputs = [normal(seed + index, *shape) * magnitude for index, shape in enumerate(shapes)]
        pairs = compare(list(cases.values()), program, inputs)
        apart = {name: steps_apart(pair) for name, pair in zip(cases, pairs, strict=True)}
        assert apart == {name: min(most, steps) for name, steps in apart.items()}
        for name, ends in (bounds or {}).items():
            assert_clamped(name, ends, *pairs[list(cases).index(name)])

    run()


def assert_clamped(name: str, ends: tuple[int, int], there: Tensor, here: Tensor) -> None:
    """Where several values of ``here`` are at an end, that is the end of ``there`` too."""
    for end, actual in zip(ends, (there.min(), there.max()), strict=True):
        if (here == end).sum() >= 5:
            assert actual == end, name


@pytest.mark.full
def test_transposed_convolutions() -> None:
    check(TRANSPOSED)


def pair(name: str, a: QParams, b: QParams, out: QParams) -> Case:
    """All pairs of int8 values."""
    function, kernel = getattr(torch, name), getattr(KERNELS, name)
    everything = torch.arange(-128, 128)
    left, right = everything.repeat_interleave(256), everything.repeat(256)
    constants = {"a": (left - a[1]) * a[0], "b": (right - b[1]) * b[0]}

    def graph(c: Constants, x: Tensor, y: Tensor) -> Tensor:
        return quantize(function(through(x, a), through(y, b)), out)

    def here(c: Constants, x: Tensor, y: Tensor) -> Tensor:
        return kernel(quantize(x, a), *a, quantize(y, b), *b, *out, *FULL)

    return Case(graph, here, ((256 * 256,),) * 2, constants)


qparams = st.tuples(
    st.floats(0.01, 1.0).map(lambda scale: torch.tensor(scale).item()), st.integers(*FULL)
)


@settings(max_examples=1, deadline=None)
@given(qparams, qparams, qparams)
def test_sums_differences_and_products_of_all_pairs(a: QParams, b: QParams, out: QParams) -> None:
    cases = [pair(name, a, b, out) for name in ("add", "sub", "mul")]
    for case in cases:
        inputs = (case.constants.pop("a"), case.constants.pop("b"))
    add, sub, mul = compare(cases, lower(cases), inputs * 3)
    assert torch.equal(*add)
    assert torch.equal(*sub)
    assert steps_apart(mul) <= 1


# Real bounds and the scale they meet: ties at odd and even zero points, quotients whose product with
# 1 / scale is below the tie, bounds beyond the range of the output, one bound, none.
BOUNDS: dict[str, tuple[float, float, QParams]] = {
    "odd ties": (-0.05, 0.35, (0.1, 3)), "even ties": (-0.05, 0.35, (0.1, 4)),
    "odd halves": (-0.25, 2.25, (0.5, 3)),
    "quotient": (-0.13210609555244446, 0.13210609555244446, (0.011487486772239208, 0)),
    "another quotient": (-3.024672746658325, 3.024672746658325, (0.05873151123523712, 0)),
    "relu6": (0.0, 6.0, (0.037, -100)), "beyond": (-1e30, 1e9, (0.05, 5)), "unit": (-1.0, 1.0, (0.05, 100)),
}  # fmt: skip


def limits(low: float, high: float, out: QParams) -> tuple[int, int]:
    return quantized_bound(low, *out), quantized_bound(high, *out)


def behind(name: str, low: float, high: float, out: QParams) -> Case:
    """A hardtanh behind an operator, into which XNNPACK fuses it."""
    shape = {"linear": (8, 16), "conv2d": (8, 6, 3, 3), "conv_transpose2d": (6, 8, 3, 3)}.get(name)
    bounds = limits(low, high, out)
    if shape is None:
        constants: Constants = {}
    else:
        constants = weight_constants(3, *shape, axis=1 if "transpose" in name else 0)
    function: Any = getattr(functional, name, getattr(torch, name, None))

    def graph(c: Constants, *inputs: Tensor) -> Tensor:
        real = [through(x, IN) for x in inputs]
        if c:
            real += [per_channel(c, 1 if "transpose" in name else 0), c["bias"]]
        return quantize(functional.hardtanh(function(*real), low, high), out)

    def here(c: Constants, *inputs: Tensor) -> Tensor:
        args: list[Any] = [part for x in inputs for part in (quantize(x, IN), *IN)]
        geometry = {"conv2d": ([1], [0], [1], 1), "conv_transpose2d": ([1], [0], [0], 1, [1])}
        if c:
            args += [c["weight"], c["scale"], c["bias"], *geometry.get(name, ())]
        return getattr(KERNELS, name)(*args, *out, *bounds)

    inputs = {"linear": ((300, 16),)}.get(name, (IMAGE,) if shape else (IMAGE, IMAGE))
    return Case(graph, here, inputs, constants)


# Lowering costs per operator, so only one of them meets all bounds.
TELLING = ("odd ties", "beyond")
MANY = {"linear": tuple(BOUNDS), "conv2d": TELLING, "conv_transpose2d": TELLING}


@pytest.mark.full
def test_bounds_of_a_fused_hardtanh() -> None:
    keys = {f"{name}, {key}": (name, *BOUNDS[key]) for name in MANY for key in MANY[name]}
    cases = {case: behind(*args) for case, args in keys.items()}
    check(cases, bounds={case: limits(*args) for case, (_, *args) in keys.items()})


@pytest.mark.full
def test_behind_a_pair_a_hardtanh_is_not_fused() -> None:
    """ExecuTorch leaves both in float inside the delegate; the kernels are a step away at most."""
    cases = {name: behind(name, *BOUNDS["odd ties"]) for name in ("add", "sub", "mul")}
    (operators,) = lower(list(cases.values())).delegation.delegates
    assert not any(operator.int8 for operator in operators)
    check(cases)
