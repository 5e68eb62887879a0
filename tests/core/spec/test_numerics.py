# SPDX-License-Identifier: Apache-2.0
"""Quantization parameters, bit for bit those of torch's own observers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from qompose.errors import ConfigError
from qompose.spec.qparams import (
    FLOAT_ZERO_POINT,
    PER_CHANNEL,
    choose_qparams,
    decibels,
    quantized_range,
    stored_in,
)
from torch import Tensor
from torch.ao.quantization import observer as peer

CHANNEL_PARTNERS = {
    torch.per_tensor_affine: torch.per_channel_affine,
    torch.per_tensor_symmetric: torch.per_channel_symmetric,
}
SCHEMES = [
    pytest.param(torch.per_tensor_affine, id="affine"),
    pytest.param(torch.per_tensor_symmetric, id="symmetric"),
]
RANGES = [
    pytest.param(torch.int8, None, None, id="int8"), pytest.param(torch.int8, -128, 127, id="int8 given"),
    pytest.param(torch.int8, -127, 127, id="int8 narrow"), pytest.param(torch.int8, -64, 63, id="7 bits"),
    pytest.param(torch.int8, -8, 7, id="4 bits in int8"), pytest.param(torch.uint8, None, None, id="uint8"),
    pytest.param(torch.uint8, 0, 255, id="uint8 given"),
    pytest.param(torch.uint8, 0, 127, id="uint8 reduced"), pytest.param(torch.int16, None, None, id="int16"),
    pytest.param(torch.int16, -32767, 32767, id="int16 narrow"),
    pytest.param(torch.uint16, None, None, id="uint16"),
    pytest.param(torch.int32, -(2**30), 2**30 - 1, id="31 bits in int32"),
]  # fmt: skip
EPS = [2.0**-12, 2.0**-23]

finite = st.floats(-(2.0**100), 2.0**100, width=32)
intervals = st.tuples(finite, finite).map(sorted)
examples = settings(max_examples=30, deadline=None)


def by_torch(low: Tensor, high: Tensor, qscheme: Any, eps: float, **bounds: Any) -> Any:
    """What torch's observer computes from a minimum and a maximum."""
    kind = peer.PerChannelMinMaxObserver if qscheme in PER_CHANNEL else peer.MinMaxObserver
    return kind(qscheme=qscheme, eps=eps, **bounds)._calculate_qparams(low, high)


def assert_as_torch(low: Tensor, high: Tensor, qscheme: Any, eps: float, **bounds: Any) -> None:
    scale, zero_point = choose_qparams(low, high, qscheme=qscheme, eps=eps, **bounds)
    expected_scale, expected_zero_point = by_torch(low, high, qscheme, eps, **bounds)
    assert scale.dtype is torch.float32
    assert scale.shape == zero_point.shape == low.shape
    assert torch.equal(scale, expected_scale.reshape(low.shape))
    assert torch.equal(zero_point, expected_zero_point.reshape(low.shape).to(zero_point.dtype))


@pytest.mark.parametrize("qscheme", SCHEMES)
@pytest.mark.parametrize(("dtype", "low", "high"), RANGES)
@examples
@given(interval=intervals, eps=st.sampled_from(EPS))
@example(interval=[0.0, 0.0], eps=EPS[0])
@example(interval=[-0.0, 1.0], eps=EPS[0])
@example(interval=[3.0, 4.0], eps=EPS[0])
@example(interval=[-4.0, -3.0], eps=EPS[0])
@example(interval=[-1.0, 1.0], eps=EPS[1])
def test_per_tensor(
    dtype: torch.dtype, low: int | None, high: int | None, qscheme: Any, interval: Any, eps: float
) -> None:
    ends = [torch.tensor(end) for end in interval]
    assert_as_torch(*ends, qscheme, eps, dtype=dtype, quant_min=low, quant_max=high)


@pytest.mark.parametrize("qscheme", SCHEMES)
@pytest.mark.parametrize(("dtype", "low", "high"), RANGES)
@examples
@given(channels=st.lists(intervals, min_size=1, max_size=6), eps=st.sampled_from(EPS))
def test_per_channel(
    dtype: torch.dtype, low: int | None, high: int | None, qscheme: Any, channels: Any, eps: float
) -> None:
    ends = [torch.tensor(end) for end in zip(*channels, strict=True)]
    scheme = CHANNEL_PARTNERS[qscheme]
    assert_as_torch(*ends, scheme, eps, dtype=dtype, quant_min=low, quant_max=high)


@examples
@given(channels=st.lists(intervals, min_size=1, max_size=6), eps=st.sampled_from(EPS))
@example(channels=[[2.0, 2.0], [-3.0, -1.0], [1.0, 5.0], [0.0, 0.0]], eps=EPS[0])
def test_float_zero_points(channels: Any, eps: float) -> None:
    """The range is not widened to contain zero; constant rows have scale 1, and narrow ones stay rows."""
    low, high = (torch.tensor(end) for end in zip(*channels, strict=True))
    (scheme,) = FLOAT_ZERO_POINT
    bounds = {"dtype": torch.uint8, "quant_min": 0, "quant_max": 255}
    scale, zero_point = choose_qparams(low, high, qscheme=scheme, eps=eps, **bounds)
    exact = (high - low) / 255
    narrow = (exact > 0) & (exact <= eps)
    assert bool((scale[narrow] == torch.tensor(eps)).all())
    if not bool(narrow.all()):
        assert_as_torch(low[~narrow], high[~narrow], scheme, eps, **bounds)
    assert zero_point.dtype is torch.float32
    restored = -zero_point * scale  # the integer 0 stands for the row's minimum
    assert bool(((restored - low).abs() <= 1e-5 * low.abs() + 1e-6 * scale).all())


@pytest.mark.parametrize("low", [-8, -15, 0])
def test_float_zero_points_count_from_the_least_integer(low: int) -> None:
    (scheme,) = FLOAT_ZERO_POINT
    minimum, maximum = torch.tensor([2.0, -3.0]), torch.tensor([4.0, 1.0])
    scale, zero_point = choose_qparams(
        minimum, maximum, dtype=torch.int8, quant_min=low, quant_max=low + 15, qscheme=scheme
    )
    torch.testing.assert_close((low - zero_point) * scale, minimum)
    torch.testing.assert_close((low + 15 - zero_point) * scale, maximum)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "named"),
    [
        pytest.param(torch.int8, 5, -5, "quant_min=5", id="reversed"),
        pytest.param(torch.int8, 1, 127, "", id="no zero, above"),
        pytest.param(torch.int8, -128, -1, "", id="no zero, below"),
        pytest.param(torch.float16, None, None, "float16", id="float"),
        pytest.param(torch.bool, None, None, "bool", id="bool"),
        pytest.param(torch.int8, "a", 127, "int8", id="a letter"),
        pytest.param(torch.int8, -127.0, 127, "int8", id="a float"),
        pytest.param(torch.int8, None, 126.5, "int8", id="a fraction"),
    ],
)
def test_impossible_ranges_are_refused(dtype: Any, low: Any, high: Any, named: str) -> None:
    """Beside those of `test_specs.py`; one bound may be left out."""
    assert quantized_range(torch.int8, None, 0) == (-128, 0)
    with pytest.raises(ConfigError, match=named or None):
        quantized_range(dtype, low, high)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@given(st.floats(1e-9, 1e3), st.floats(-100, 100).filter(lambda x: not 0 < abs(x) < 1e-30))
def test_parameters_in_a_smaller_float_type(dtype: torch.dtype, scale: float, least: float) -> None:
    """The scale, and where values begin, are numbers of the type, and the nearest there are."""
    exact = torch.tensor([scale])
    narrow, zero_point = stored_in(dtype, exact, -torch.tensor([least]) / exact)
    assert torch.equal(narrow.to(dtype).float(), narrow) and float(narrow) > 0
    offset = -zero_point * narrow
    assert torch.allclose(offset.to(dtype).float(), offset, rtol=2**-21, atol=0)
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    assert abs(float(narrow) - scale) <= max(info.eps * scale, smallest)
    assert abs(float(offset) - least) <= max(1.01 * info.eps * abs(least), smallest)


def test_integer_zero_points_stay_as_they_are() -> None:
    zeros = torch.tensor([3, -7])
    narrow, same = stored_in(torch.float16, torch.tensor([0.1, 0.2]), zeros)
    assert same is zeros and torch.equal(narrow, narrow.half().float())


@pytest.mark.parametrize(
    ("signal", "noise", "found"),
    [
        (100.0, 1.0, 20.0), (1.0, 0.0, math.inf), (0.0, 0.0, math.inf), (0.0, 1.0, -math.inf),
        (1.0, math.inf, -math.inf), (1.0, math.nan, -math.inf),
    ],
)  # fmt: skip
def test_decibels(signal: float, noise: float, found: float) -> None:
    assert decibels(signal, noise) == found
