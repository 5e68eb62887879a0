# SPDX-License-Identifier: Apache-2.0
"""The runtime operators against integer arithmetic, over random shapes, qparams and extremes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from qompose_x86_inductor.onednn import exactness
from qompose_x86_inductor.operators import SCHEMAS, linear
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.x86_inductor.integers import (
    CONV_POST_OPS,
    DTYPES,
    LINEAR_POST_OPS,
    MODEST,
    OPS,
    QUANTIZED,
    Case,
    activate,
    assert_one_step,
    bounds,
    cases,
    geometries,
    integer_conv,
    integer_linear,
    real,
)


@MODEST
@given(
    cases(),
    st.lists(st.integers(0, 4), max_size=3),
    st.tuples(st.integers(1, 140), st.integers(1, 40)),
    st.sampled_from(LINEAR_POST_OPS),
)
def test_linear(case: Case, leading: list[int], features: tuple[int, int], post_op: Any) -> None:
    x, weight, w_scale, bias = case.tensors([*leading, features[0]], [features[1], features[0]])
    got = OPS.linear(x, 0.02, case.x_zp, weight, w_scale, bias, *case.out, *post_op)
    expected = real(integer_linear(x, case.x_zp, weight), 0.02, w_scale, bias, 0)
    assert_one_step(got, activate(expected, post_op), case.out)
    assert got.is_contiguous()


@MODEST
@given(
    cases(),
    st.lists(st.integers(0, 4), max_size=3),
    st.tuples(st.integers(1, 140), st.integers(1, 40)),
    st.sampled_from(["none", "relu"]),
    st.booleans(),
)
def test_linear_add(
    case: Case, leading: list[int], features: tuple[int, int], post_op: str, transposed: bool
) -> None:
    x, weight, w_scale, bias = case.tensors([*leading, features[0]], [features[1], features[0]])
    shape = [*leading, features[1]]
    other = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    other = other if transposed else other.contiguous()
    before = other.clone()
    arguments = (x, 0.02, case.x_zp, weight, w_scale, bias, other, *case.out, post_op)
    expected = real(integer_linear(x, case.x_zp, weight), 0.02, w_scale, bias, 0) + other.double()
    results = [OPS.linear_add(*arguments)]
    if exactness.admits(weight) and x.numel() > 0:
        zeros = torch.zeros(features[1], dtype=torch.int32)
        results.append(linear.linear_add_in_graph(*arguments, zero_points=zeros))
    for got in results:
        assert_one_step(got, activate(expected, (post_op, [], "none")), case.out)
    assert torch.equal(other, before)


@MODEST
@given(cases(), geometries(), st.sampled_from(CONV_POST_OPS), st.booleans())
def test_conv2d(case: Case, geometry: Any, post_op: Any, channels_last: bool) -> None:
    x, weight, w_scale, bias = case.tensors(*geometry[:2])
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    got = OPS.conv2d(x, 0.02, case.x_zp, weight, w_scale, bias, *geometry[2], *case.out, *post_op)
    sums = integer_conv(x, case.x_zp, weight, geometry[2])
    assert_one_step(got, activate(real(sums, 0.02, w_scale, bias, 2), post_op), case.out)
    assert got.is_contiguous(memory_format=torch.channels_last)


@MODEST
@given(
    cases(), geometries(), st.sampled_from(DTYPES), st.sampled_from(["none", "relu"]), st.booleans()
)
def test_conv2d_add(
    case: Case, geometry: Any, other_dtype: torch.dtype, post_op: str, channels_last: bool
) -> None:
    x, weight, w_scale, bias = case.tensors(*geometry[:2])
    sums = integer_conv(x, case.x_zp, weight, geometry[2])
    if other_dtype == torch.float32:
        other, scale, zero_point = torch.randn(sums.shape), 1.0, 0
    else:
        low, high = bounds(other_dtype)
        other = torch.randint(low, high + 1, sums.shape, dtype=other_dtype)
        scale, zero_point = 0.05, 11
    other = other.contiguous(memory_format=torch.channels_last) if channels_last else other
    before = other.clone()
    summand = (other, scale, zero_point)
    got = OPS.conv2d_add(
        x, 0.02, case.x_zp, weight, w_scale, bias, *geometry[2], *summand, *case.out, post_op
    )
    expected = real(sums, 0.02, w_scale, bias, 2) + (other.double() - zero_point) * scale
    assert_one_step(got, activate(expected, (post_op, [], "none")), case.out)
    assert torch.equal(other, before)
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("x_dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("value", [127, -128])
def test_the_largest_possible_sums_are_exact(x_dtype: torch.dtype, value: int) -> None:
    x = torch.full((5, 4096), bounds(x_dtype)[1], dtype=x_dtype)
    weight = torch.full((7, 4096), value, dtype=torch.int8)
    sums = integer_linear(x, 0, weight).float()
    ones = torch.ones(7)
    assert torch.equal(OPS.linear(x, 1.0, 0, weight, ones, None), sums)
    image, kernel = x.reshape(5, 4096, 1, 1), weight.reshape(7, 4096, 1, 1)
    geometry = ([1, 1], [0, 0], [1, 1], 1)
    got = OPS.conv2d(image, 1.0, 0, kernel, ones, None, *geometry)
    assert torch.equal(got.flatten(1), sums)


def _calls() -> dict[str, tuple[Any, ...]]:
    x, weight = torch.randint(0, 256, (2, 4, 6, 5), dtype=torch.uint8), torch.ones(3, 4, 1, 1)
    product = (x, 0.1, 3, weight.to(torch.int8), torch.ones(3), None)
    geometry = ([2, 1], [1, 1], [1, 1], 1)
    other = torch.randn(2, 3, 4, 7)
    flat = (torch.ones(2, 3, 8, dtype=torch.int8), 0.1, 3, torch.ones(5, 8, dtype=torch.int8))
    biased = (*flat, torch.ones(5), torch.ones(5))
    return {
        "linear": (*biased, 0.2, 1, torch.uint8, "relu"),
        "linear_add": (*biased, torch.randn(2, 3, 5), 0.2, 1, torch.uint8, "relu"),
        "conv2d": (*product, *geometry, 0.2, 1, torch.int8, "gelu", [], "tanh"),
        "conv2d_add": (*product, *geometry, other, 1.0, 0, 0.2, 1, torch.int8, "relu"),
        "max_pool2d": (x, [3, 2], [2, 2], [1, 1]),
        "avg_pool2d": (x, 0.1, 3, [3, 2], [2, 2], [1, 1], False, True, None, 0.2, 1, torch.int8),
        "adaptive_avg_pool2d": (x, 0.1, 3, [3, 2], 0.2, 1, torch.uint8),
        "mean": (x, 0.1, 3, [1, 2], True, 0.2, 1, torch.uint8),
        "attention": (
            *(each for _ in range(3) for each in (x, 0.1, 3)),
            None,
            0.5,
            False,
            True,
            0.2,
            1,
            torch.uint8,
        ),
        "mul": (x, 0.1, 3, x[:, :1, :, :1], 0.2, 7, 0.2, 1, torch.uint8),
    }


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_operators_keep_the_rules_of_torch_library(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, _calls()[name])


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_gaps_between_numbers_do_not_matter_and_nothing_is_written_to(name: str) -> None:
    call = _calls()[name]
    spread = [
        a.repeat_interleave(2, -1)[..., ::2] if isinstance(a, Tensor) and a.dim() > 1 else a
        for a in call
    ]
    before = [a.clone() if isinstance(a, Tensor) else a for a in spread]
    assert torch.equal(getattr(OPS, name)(*spread), getattr(OPS, name)(*call))
    for now, then in zip(spread, before, strict=True):
        assert not isinstance(now, Tensor) or torch.equal(now, then)


@pytest.mark.parametrize(
    ("name", "position", "value", "found"),
    [
        ("linear", 0, torch.ones(2, 8), "float32"), ("linear", 4, torch.ones(4), r"\(4,\)"),
        ("linear", 8, torch.float32, "out_scale"), ("linear", 8, torch.int32, "int32"),
        ("linear_add", 6, torch.ones(5), r"\[5\]"),
        ("linear_add", 6, torch.ones(2, 3, 5, dtype=torch.int8), "int8"),
        ("linear_add", 10, "gelu", "'gelu'"), ("conv2d", 13, "tanh", "'tanh'"),
        ("mean", 0, torch.ones(2, 4), "float32"), ("mul", 0, torch.ones(2, 1), "float32"),
        ("mul", 3, torch.ones(2, 1), "float32"),
        ("avg_pool2d", 0, torch.ones(4, 6, 5, dtype=torch.uint8), "avg_pool2d"),
        ("linear", 9, "sigmoid", "'sigmoid'"), ("linear", 9, "hardtanh", "hardtanh"),
        ("conv2d", 0, torch.ones(4, 6, 5, dtype=torch.uint8), "conv2d"), ("conv2d_add", 11, 0.5, r"0\.5"),
        ("max_pool2d", 0, torch.ones(4, 6, 5, dtype=torch.uint8), "max_pool2d"),
        ("adaptive_avg_pool2d", 0, torch.ones(4, 6, 5, dtype=torch.uint8), "adaptive_avg_pool2d"),
    ],
)  # fmt: skip
def test_what_an_operator_does_not_take(name: str, position: int, value: Any, found: str) -> None:
    call = [*_calls()[name]]
    call[position] = value
    with pytest.raises(ValueError, match=found):
        getattr(OPS, name)(*call)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=found):
        getattr(OPS, name)(*_as_fakes(tuple(call), mode))


def _image_call(
    name: str, size: tuple[int, ...], weight: tuple[int, ...], *geometry: Any
) -> tuple[Any, ...]:
    product = (torch.ones(size, dtype=torch.uint8), 0.1, 3, torch.ones(weight, dtype=torch.int8))
    other = (torch.ones(1), 1.0, 0) if name == "conv2d_add" else ()
    return (*product, torch.ones(weight[0]), None, *geometry, *other)


def _as_fakes(call: tuple[Any, ...], mode: FakeTensorMode) -> list[Any]:
    return [mode.from_tensor(a, static_shapes=True) if isinstance(a, Tensor) else a for a in call]


SMALLER = [
    ((2, 5), (3, 3), [0, 0], [1, 1]), ((5, 1), (3, 3), [0, 0], [1, 1]), ((4, 4), (3, 3), [0, 0], [1, 2]),
    ((1, 9), (1, 5), [0, 0], [1, 3]), ((1, 2), (5, 2), [1, 0], [1, 1]),
]  # fmt: skip
"""Images smaller than the kernel, where torch says that it can't be greater; one pixel less gave zeros."""
CHANNELS = [(3, (4, 2, 3, 3), 1), (2, (4, 2, 3, 3), 2), (4, (5, 2, 3, 3), 2), (4, (4, 2, 3, 3), 0)]
UNFIT: list[tuple[str, tuple[Any, ...], str]] = [
    *(
        (
            name,
            _image_call(name, (batch, 2, *size), (4, 2, *kernel), [2, 1], padding, dilation, 1),
            rf"\({batch}, 2, {size[0]}, {size[1]}\)",
        )
        for name in ("conv2d", "conv2d_add")
        for size, kernel, padding, dilation in SMALLER
        for batch in (0, 1)
    ),
    *(
        (
            name,
            _image_call(name, (1, channels, 5, 5), weight, [1, 1], [0, 0], [1, 1], groups),
            rf"\(1, {channels}, .*\({weight[0]}, 2, ",
        )
        for name in ("conv2d", "conv2d_add")
        for channels, weight, groups in CHANNELS
    ),
    *(
        (name, (torch.ones(shape, dtype=torch.int8), *_calls()[name][1:]), re.escape(str(shape)))
        for name in ("linear", "linear_add")
        for shape in ((2, 3, 7), (9,), (), (0, 7))
    ),
]


@pytest.mark.parametrize(("name", "call", "shown"), UNFIT)
def test_sizes_that_do_not_fit_are_named(name: str, call: tuple[Any, ...], shown: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: .*{shown}"):
        getattr(OPS, name)(*call)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=f"{name}: .*{shown}"):
        getattr(OPS, name)(*_as_fakes(call, mode))


def test_an_image_as_large_as_the_kernel_has_one_pixel() -> None:
    for size, padding in (((5, 3), [0, 0]), ((3, 1), [1, 1])):
        for batch in (0, 1):
            call = _image_call(
                "conv2d", (batch, 2, *size), (4, 2, 3, 3), [2, 1], padding, [2, 1], 1
            )
            assert OPS.conv2d(*call).shape == (batch, 4, 1, 1)


@pytest.mark.parametrize("name", ["linear", "conv2d", "conv2d_add"])
def test_sizes_that_are_symbols_get_no_conditions(name: str) -> None:
    product = _calls()[name]
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        symbolic = mode.from_tensor(product[0])
        assert all(isinstance(size, torch.SymInt) for size in symbolic.shape)
        getattr(OPS, name)(symbolic, *_as_fakes(product[1:], mode))
    assert not env.guards
