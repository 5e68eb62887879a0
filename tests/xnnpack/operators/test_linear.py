# SPDX-License-Identifier: Apache-2.0
"""Linears with int8 weights, static, dynamic and weight-only, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from qompose_xnnpack.operators import linear
from qompose_xnnpack.operators.dynamic_quantization import quantize_rows
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.xnnpack.operators.arithmetic import (
    FULL,
    KERNELS,
    UNBOUNDED,
    Out,
    assert_close,
    assert_step,
    examples,
    extreme_scales,
    float_inputs,
    grid,
    int8,
    linear_dynamic,
    normal,
    outputs,
    real,
    sample,
    scales,
    seeds,
    weights,
    zero_points,
)


class TestStatic:
    @examples
    @given(seeds, scales, zero_points, outputs(), st.booleans(), st.booleans(), st.booleans())
    def test_linear(
        self,
        seed: int,
        x_scale: float,
        x_zp: int,
        out: Out,
        extreme: bool,
        with_bias: bool,
        per_channel: bool,
    ) -> None:
        x, weight = int8(seed, 2, 3, 70, extreme=extreme), weights(seed, 6, 70, extreme=extreme)
        w_scale = torch.rand(6 if per_channel else 1) * 0.02 + 1e-4
        unit = x_scale * w_scale.double()
        bias = (torch.randn(6) * 1e3 * unit).float() if with_bias else None
        exact = functional.linear(real(x, x_scale, x_zp), weight.double() * w_scale[:, None])
        exact = exact if bias is None else exact + (bias / unit).round() * unit
        assert_step(KERNELS.linear(x, x_scale, x_zp, weight, w_scale, bias, *out), grid(exact, out))

    def test_a_huge_bias_saturates_instead_of_wrapping(self) -> None:
        x, weight = (
            torch.full((1, 8), 127, dtype=torch.int8),
            torch.full((2, 8), 127).to(torch.int8),
        )
        bias = torch.tensor([1e30, -1e30])
        actual = KERNELS.linear(x, 1e-3, 0, weight, torch.ones(1), bias, 1.0, 0, *FULL)
        assert actual.tolist() == [[127, -128]]

    @examples
    @given(seeds, extreme_scales, extreme_scales, extreme_scales, zero_points)
    def test_scales_at_the_ends_of_float32(
        self, seed: int, x_scale: float, w_scale: float, out_scale: float, x_zp: int
    ) -> None:
        x, weight = int8(seed, 3, 20), weights(seed, 4, 20)
        exact = (x.long() - x_zp) @ weight.long().t()
        steps = exact.double() * (x_scale * w_scale / out_scale)
        out = (out_scale, 5, *FULL)
        actual = KERNELS.linear(x, x_scale, x_zp, weight, torch.tensor([w_scale]), None, *out)
        # A product of scales below the range of float32 counts as zero, one above it saturates.
        if 1e-37 < x_scale * w_scale < 1e30 and steps.abs().max() < 1e30:
            assert_step(actual, (steps.round() + 5).clamp(*FULL))
        else:
            assert actual.dtype == torch.int8


@examples
@given(float_inputs(), st.booleans())
def test_one_dynamic_range_for_the_whole_tensor(
    case: tuple[int, float, float], with_bias: bool
) -> None:
    """As if the tensor were one row, whatever its rows are."""
    x, weight = sample(case, 2, 3, 16), weights(case[0], 5, 16)
    w_scale = normal(case[0], 5).abs() * 0.02 + 1e-5
    bias = normal(case[0] + 3, 5) * case[1] if with_bias else None
    quantized, scale, zp = quantize_rows(x.reshape(1, -1))
    shifted = (quantized.double() - zp).view(2, 3, 16)
    exact = shifted @ weight.double().T * (w_scale.double() * float(scale))
    size = exact.abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    actual = linear_dynamic(x, weight, w_scale, bias, *UNBOUNDED, per_tensor=True)
    assert_close(actual, exact, size)
    empty = linear_dynamic(x[:0], weight, w_scale, bias, *UNBOUNDED, per_tensor=True)
    assert empty.shape == (0, 3, 5)


class TestDynamic:
    @examples
    @given(
        float_inputs(), st.sampled_from([(1, 1), (70, 1), (64, 2), (96, 3), (64, 64)]), st.booleans(),
        st.booleans(), st.booleans(), st.sampled_from([UNBOUNDED, (0.0, math.inf), (-0.5, 1.5)]),
    )  # fmt: skip
    def test_is_the_scaled_integer_sum(
        self,
        case: tuple[int, float, float],
        grouping: tuple[int, int],
        extreme: bool,
        with_bias: bool,
        shared: bool,
        clamp: tuple[float, float],
    ) -> None:
        depth, groups = grouping
        seed = case[0]
        x, weight = sample(case, 2, 3, depth), weights(seed, 5, depth, extreme=extreme)
        w_scale = normal(seed, 1 if shared else 5, groups).abs() * 0.02 + 1e-5
        w_scale = w_scale.expand(5, groups).contiguous() if groups > 1 else w_scale[:, 0]
        bias = normal(seed + 3, 5) * case[1] if with_bias else None
        quantized, scale, zp = quantize_rows(x.view(6, depth))
        terms = (quantized.long() - zp).double()[:, None, :] * weight.double()
        sums = terms.view(6, 5, groups, -1).sum(-1) * w_scale.double().view(-1, groups)
        exact = sums.sum(-1) * scale.double() + (0 if bias is None else bias.double())
        size = sums.abs().sum(-1) * scale.double() + (0 if bias is None else bias.double().abs())
        actual = linear_dynamic(x, weight, w_scale, bias, *clamp)
        assert_close(actual, exact.clamp(*clamp).view(2, 3, 5), size.view(2, 3, 5))

    def test_rows_do_not_depend_on_each_other(self) -> None:
        x, weight, w_scale = normal(0, 4, 40), weights(0, 6, 40), torch.full((6,), 0.01)
        x = x * torch.tensor([[1.0], [1e-20], [1e20], [0.0]])
        whole = linear_dynamic(x, weight, w_scale, None, *UNBOUNDED)
        rows = [linear_dynamic(row, weight, w_scale, None, *UNBOUNDED) for row in x]
        assert torch.equal(whole, torch.stack(rows))

    def test_what_is_not_finite_shows_in_its_row_only(self) -> None:
        x = normal(0, 3, 8)
        x[0, 1], x[1, 2] = math.nan, math.inf
        actual = linear_dynamic(x, weights(0, 4, 8), torch.ones(4), None, *UNBOUNDED)
        assert actual.isfinite().all(1).tolist() == [False, False, True]


@examples
@given(seeds, st.sampled_from([None, 1, 3, 6]), st.booleans(), st.booleans(), st.booleans())
def test_weight_only_is_the_product_with_the_dequantized_weight(
    seed: int, groups: int | None, shared: bool, with_bias: bool, extreme: bool
) -> None:
    x, weight = normal(seed, 2, 3, 48), weights(seed, 5, 48, extreme=extreme)
    shape = (5, groups) if groups else (1 if shared else 5,)
    w_scale = normal(seed + 2, *shape).abs() * 0.1 + 1e-4
    bias = normal(seed + 3, 5) if with_bias else None
    each = w_scale.repeat_interleave(48 // groups, 1) if groups else w_scale[:, None]
    real = weight.double() * each.double()
    exact = functional.linear(x.double(), real, None if bias is None else bias.double())
    size = functional.linear(x.double().abs(), real.abs()) + 3
    actual = KERNELS.linear_weight_only(x, weight, w_scale, bias)
    assert (actual.dtype, actual.shape) == (torch.float32, (2, 3, 5))
    assert ((actual - exact).abs() <= size * 2.0**-21).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_output_of_weight_only_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    x, weight, w_scale = normal(0, 4, 16).to(dtype), weights(0, 3, 16), torch.full((3,), 0.01)
    actual = KERNELS.linear_weight_only(x, weight, w_scale, None)
    expected = functional.linear(x, (weight.float() * 0.01).to(dtype))
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


class LargestFloat(TorchDispatchMode):
    """Notes the size of the largest floating-point result."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.size = max(self.size, result.numel())
        return result


@pytest.mark.parametrize("scales", [(1,), (64,), (64, 4)])
def test_the_weight_is_never_float_as_a_whole(
    scales: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, w_scale = normal(0, 2, 40), weights(0, 64, 40), normal(1, *scales).abs()
    bias = normal(2, 64)
    whole = linear.linear_weight_only(x, weight, w_scale, bias)
    monkeypatch.setattr(linear, "BLOCK", 300)
    with LargestFloat() as largest:
        actual = linear.linear_weight_only(x, weight, w_scale, bias)
    largest_value = float(whole.abs().max())  # float sums are added in another order
    torch.testing.assert_close(actual, whole, rtol=0, atol=1e-5 * largest_value)
    assert 0 < largest.size <= 300 < weight.numel()


FLOATS, WEIGHT, ONES = normal(0, 2, 8), weights(0, 5, 8), torch.ones(5)
ROWS = quantize_rows(FLOATS)


@pytest.mark.parametrize(
    ("name", "args", "error", "found"),
    [
        *(
            ("linear_dynamic", (*ROWS, WEIGHT, torch.ones(shape)), ValueError, ": .*w_scale")
            for shape in ((4,), (5, 3), (4, 2), (1, 2), (5, 1, 1))
        ),
        ("linear_dynamic", (FLOATS, *ROWS[1:], WEIGHT, ONES), TypeError, ".*`x`.*float32"),
        ("linear_dynamic", (int8(0, 2, 7), *ROWS[1:], WEIGHT, ONES), ValueError, r".*\(2, 7\)"),
        ("linear_weight_only", (FLOATS.int(), WEIGHT, ONES), TypeError, ".*`x`"),
        ("linear_weight_only", (FLOATS, WEIGHT.short(), ONES), TypeError, ".*`weight`"),
        ("linear_weight_only", (FLOATS, WEIGHT, torch.ones(5, 3)), ValueError, r".*w_scale \(5, 3\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(name: str, args: Any, error: Any, found: str) -> None:
    with pytest.raises(error, match=f"::{name}{found}"):
        getattr(KERNELS, name)(*args, None, *(UNBOUNDED if name == "linear_dynamic" else ()))


def test_only_float32_is_quantized_at_run_time() -> None:
    with pytest.raises(TypeError, match=r"::quantize_dynamic.*`x`.*float16"):
        KERNELS.quantize_dynamic(FLOATS.half(), False)
