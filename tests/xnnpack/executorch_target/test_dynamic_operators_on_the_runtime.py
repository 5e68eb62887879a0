# SPDX-License-Identifier: Apache-2.0
"""The kernels that quantize at run time against the real ExecuTorch runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from torch.nn import functional

pytest.importorskip("executorch")

from qompose.backend import Match
from qompose_xnnpack import ExecutorchProgram
from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from qompose_xnnpack.rules import guards

from tests.sampling import at_once
from tests.xnnpack.executorch_target.runtime import (
    QD,
    Case,
    Constants,
    Together,
    at_run_time,
    compare,
    lower,
    per_channel,
    per_token,
    weight_constants,
)
from tests.xnnpack.operators.arithmetic import KERNELS, UNBOUNDED, linear_dynamic, normal

# Relative to the largest value of the same case and row: both add a few float32 terms, in any order.
ROUNDING = 2.0**-18
ACTIVATIONS = {"": UNBOUNDED, "relu": (0.0, math.inf), "hardtanh": (-0.75, 1.25)}
Shape = tuple[int, ...]


def activate(x: Tensor, activation: str) -> Tensor:
    if activation == "hardtanh":
        return functional.hardtanh(x, *ACTIVATIONS[activation])
    return torch.relu(x) if activation else x


def dynamic(
    name: str,
    shape: Shape,
    constants: Constants,
    then: str,
    geometry: Sequence[Any] = (),
    real: Callable[[Tensor], Tensor] = at_run_time,
    weight: Callable[[Constants], Tensor] = per_channel,
    scale: Callable[[Tensor], Tensor] = lambda scale: scale,
) -> Case:
    """An operator of torch whose input is quantized at run time; `geometry` is what follows the bias."""
    lists = [[*value] if isinstance(value, tuple) else value for value in geometry]

    def graph(c: Constants, x: Tensor) -> Tensor:
        args = (real(x), weight(c), c.get("bias"), *geometry)
        return activate(getattr(functional, name)(*args), then)

    def here(c: Constants, x: Tensor) -> Tensor:
        args = (x, c["weight"], scale(c["scale"]), c.get("bias"), *lists, *ACTIVATIONS[then])
        apply = linear_dynamic if name == "linear" else getattr(KERNELS, f"{name}_dynamic")
        return apply(*args)

    return Case(graph, here, (shape,), constants)


def linear(
    shape: Shape, outputs: int, *, bias: bool = True, per_row: bool = True, then: str = ""
) -> Case:
    """Weights with a scale per output."""
    constants = weight_constants(1, outputs, shape[-1], bias=bias)
    return dynamic("linear", shape, constants, then, real=per_token if per_row else at_run_time)


def grouped(shape: Shape, outputs: int, group: int, *, bias: bool = True, then: str = "") -> Case:
    """Int4 weights with a scale per ``group`` inputs. XNNPACK keeps the scales in bfloat16."""
    generator = torch.Generator().manual_seed(2)
    size = (outputs, shape[-1] // group)
    constants = {
        "weight": torch.randint(-8, 8, (outputs, shape[-1]), generator=generator, dtype=torch.int8),
        "scale": (torch.rand(size, generator=generator) * 0.1 + 0.01),
        "zero": torch.zeros(size, dtype=torch.int64),
    }
    if bias:
        constants["bias"] = normal(3, outputs)

    def weight(c: Constants) -> Tensor:
        args = (c["weight"], c["scale"], c["zero"], -8, 7, torch.int8, group, torch.float32)
        return QD.dequantize_per_channel_group.default(*args)

    return dynamic(
        "linear", shape, constants, then, real=per_token, weight=weight,
        scale=lambda scale: scale.bfloat16().float(),
    )  # fmt: skip


def conv(shape: Shape, weight: Shape, *geometry: Any, bias: bool = True, then: str = "") -> Case:
    """``geometry``: stride, padding, dilation, for both axes or for each; groups."""
    *spatial, groups = geometry
    pairs = [value if isinstance(value, tuple) else (value,) * 2 for value in spatial]
    return dynamic("conv2d", shape, weight_constants(4, *weight, bias=bias), then, (*pairs, groups))


def transposed(
    shape: Shape, weight: Shape, *geometry: Shape, bias: bool = True, then: str = ""
) -> Case:
    """``geometry``: stride, padding, output_padding, dilation."""
    constants = weight_constants(6, *weight, axis=1, bias=bias)
    args = (*geometry[:3], 1, geometry[3])
    return dynamic(
        "conv_transpose2d", shape, constants, then, args, weight=lambda c: per_channel(c, 1)
    )


CASES: dict[str, Case] = {
    "linear": linear((5, 40), 24),
    "linear of a sequence, relu": linear((2, 3, 40), 7, bias=False, then="relu"),
    "linear, one range in the graph": linear((5, 33), 24, per_row=False, then="hardtanh"),
    "groups of 32": grouped((5, 128), 16, 32),
    "groups of 64, sequence": grouped((2, 3, 128), 9, 64, bias=False),
    "conv of one image": conv((1, 4, 9, 8), (8, 4, 3, 3), 1, 1, 1, 1),
    "conv of three, stride, relu": conv((3, 4, 9, 8), (8, 4, 3, 3), 2, 1, 1, 1, then="relu"),
    "grouped conv, dilated": conv((2, 8, 9, 8), (6, 4, 3, 3), 1, 2, 2, 2, bias=False),
    "pointwise conv with stride": conv((2, 8, 5, 5), (6, 8, 1, 1), 2, 0, 1, 1),
    "pointwise conv of a pixel": conv((2, 8, 1, 1), (6, 8, 1, 1), 1, 0, 1, 1, then="hardtanh"),
    "transposed, relu": transposed(
        (3, 4, 5, 4), (4, 6, 3, 3), (2, 2), (1, 1), (1, 1), (1, 1), then="relu"
    ),
    "transposed, each axis its own": transposed(
        (2, 4, 5, 4), (4, 6, 3, 2), (1, 2), (1, 0), (0, 1), (2, 1), bias=False, then="hardtanh"
    ),
}


AT_ONCE = (
    *("linear", "linear, one range in the graph", "groups of 32", "conv of three, stride, relu"),
    *("grouped conv, dilated", "transposed, each axis its own"),
)
Lowered = tuple[dict[str, Case], ExecutorchProgram]


@pytest.fixture(
    scope="module", params=at_once([(AT_ONCE,), (tuple(CASES),)], (AT_ONCE,)), ids=["some", "all"]
)
def lowered(request: pytest.FixtureRequest) -> Lowered:
    """Cases, and the program that has them all."""
    cases = {name: CASES[name] for name in request.param}
    return cases, lower(list(cases.values()))


def inputs(
    cases: dict[str, Case], seed: int, magnitude: float = 1.0, offset: float = 0.0
) -> list[Tensor]:
    """Rows and images of different ranges: each has a range of its own."""
    result = []
    for index, case in enumerate(cases.values()):
        for shape in case.shapes:
            spread = torch.logspace(0, 2, shape[0]).view(-1, *(1,) * (len(shape) - 1))
            result.append((normal(seed + index, *shape) + offset) * magnitude * spread)
    return result


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**16),
    st.sampled_from([1e-20, 1e-8, 1e-2, 1.0, 1e3, 1e15]),
    st.sampled_from([0.0, 2.0, -50.0]),
)
@example(0, 0.0, 0.0)
def test_as_on_the_runtime(lowered: Lowered, seed: int, magnitude: float, offset: float) -> None:
    cases, program = lowered
    pairs = compare(list(cases.values()), program, inputs(cases, seed, magnitude, offset))
    apart = {name: worst(*pair) for name, pair in zip(cases, pairs, strict=True)}
    assert max(apart.values()) <= ROUNDING, apart


def worst(there: Tensor, here: Tensor) -> float:
    """Largest difference, relative to the largest value of the same image or row."""
    size = there.abs().flatten(1).amax(1).clamp(min=1e-30)
    return float(((there - here).abs().flatten(1).amax(1) / size).max())


def test_scales_of_groups_are_rounded_to_bfloat16_by_the_runtime(lowered: Lowered) -> None:
    """Else the comparison above would prove nothing: with the scales as given, they differ."""
    cases, program = lowered
    index = list(cases).index("groups of 32")
    values = inputs(cases, 0)
    there = program.run(*values)[index]
    c = CASES["groups of 32"].constants
    free = ACTIVATIONS[""]
    rounded = c["scale"].bfloat16().float()
    assert not torch.equal(rounded, c["scale"])
    as_given = linear_dynamic(values[index], c["weight"], c["scale"], c["bias"], *free)
    nearest = linear_dynamic(values[index], c["weight"], rounded, c["bias"], *free)
    assert worst(there, nearest) <= ROUNDING
    assert worst(there, as_given) > 100 * ROUNDING


def matched(case: Case) -> Match:
    """What the rule of a convolution sees of one."""
    inputs = tuple(torch.ones(shape) for shape in case.shapes)
    graph: Any = torch.export.export(Together([case]), inputs).graph
    (node,) = (node for node in graph.nodes if "conv" in str(node.target))
    captures = {"op": node, "input": node.args[0], "weight": node.args[1]}
    return Match((node,), node, captures)


ONE = (6, 8, 1, 1)
POINTWISE: dict[str, tuple[Case, bool]] = {
    "dilated": (conv((2, 8, 5, 4), ONE, 1, 0, 2, 1), True),
    "a row": (conv((2, 8, 1, 4), ONE, 1, 0, 1, 1), True),
    "a pixel": (conv((2, 8, 1, 1), ONE, 1, 0, 1, 1), False),
    "stride of one axis": (conv((2, 8, 5, 4), ONE, (1, 2), 0, 1, 1), False),
    "padding of one axis": (conv((2, 8, 5, 4), ONE, 1, (0, 1), 1, 1), False),
    "groups": (conv((2, 8, 5, 4), (6, 4, 1, 1), 1, 0, 1, 2), False),
    "kernel of a row": (conv((2, 8, 5, 4), (6, 8, 1, 3), 1, 0, 1, 1), False),
    "kernel of the image": (conv((2, 8, 5, 4), (6, 8, 5, 4), 1, 0, 1, 1), False),
}


PER_PIXEL = [differs for _, differs in POINTWISE.values()]


def test_what_is_quantized_per_pixel_is_refused() -> None:
    found = [guards.not_pointwise(matched(case)) for case, _ in POINTWISE.values()]
    assert [reason is not None for reason in found] == PER_PIXEL


@pytest.mark.full
def test_what_the_runtime_quantizes_per_pixel() -> None:
    cases = [case for case, _ in POINTWISE.values()]
    program = lower(cases)
    # Pixels of an image have different ranges.
    values = [
        normal(9, *case.shapes[0]) * torch.logspace(0, 2, case.shapes[0][-1]) for case in cases
    ]
    apart = [worst(*pair) > 100 * ROUNDING for pair in compare(cases, program, values)]
    assert apart == PER_PIXEL


ONE_CHANNEL: dict[str, Case] = {
    "in one group": conv((2, 1, 5, 4), (6, 1, 3, 3), 1, 0, 1, 1),
    "in each group": conv((2, 4, 5, 4), (4, 1, 3, 3), 1, 0, 1, 4),
    "transposed": transposed((2, 1, 5, 4), (1, 6, 3, 3), (1, 1), (0, 0), (0, 0), (1, 1)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ONE_CHANNEL)
def test_one_channel_of_input_is_not_delegated_and_refused(name: str) -> None:
    case = ONE_CHANNEL[name]
    inputs = tuple(torch.ones(shape) for shape in case.shapes)
    graph = torch.export.export(Together([case]), inputs).module()
    assert lower_to_executorch(graph, inputs).delegation.portable != ()
    assert guards.not_depthwise(matched(case)) is not None


@pytest.mark.parametrize("extra", at_once((1, 2), 2))
def test_output_padding_of_a_stride_fails_on_the_runtime_and_is_refused(extra: int) -> None:
    """Torch takes it below the dilation too."""
    sizes = ((2, 4, 5, 4), (4, 6, 3, 3))
    case = transposed(*sizes, (2, 2), (0, 0), (extra, extra), (3, 3))
    program, reason = lower([case]), guards.output_padding_below_stride(matched(case))
    if extra < 2:
        (pair,) = compare([case], program, [normal(0, *sizes[0])])
        assert worst(*pair) <= ROUNDING
        assert reason is None
    else:
        with pytest.raises(ExecutorchTargetError):
            program.run(normal(0, *sizes[0]))
        assert "[2, 2]" in (reason or "")
