# SPDX-License-Identifier: Apache-2.0
"""Operators that quantize their input at run time, against float64 and torch's own formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from hypothesis import given, strategies as st
from qompose_xnnpack.ops import dynamic
from torch import Tensor
from torch.nn import functional

from tests.xnnpack.ops.arithmetic import KERNELS, examples, int8, normal, seeds, weights

QD = torch.ops.quantized_decomposed
FREE = (-math.inf, math.inf)
# Relative to the sum of magnitudes: float32 rounds each of a few additions and products.
ROUNDING = 2.0**-21

magnitudes = st.sampled_from([1e-30, 1e-12, 1e-3, 1.0, 1e4, 1e12, 1e30])


@st.composite
def inputs(draw: st.DrawFn) -> tuple[int, float, float]:
    """Seed, magnitude and offset (in magnitudes) of a float input."""
    return draw(seeds), draw(magnitudes), draw(st.sampled_from([0.0, 0.5, 3.0, -100.0]))


def sample(case: tuple[int, float, float], *shape: int) -> Tensor:
    seed, magnitude, offset = case
    return (normal(seed, *shape) + offset) * magnitude


def assert_close(actual: Tensor, exact: Tensor, size: Tensor) -> None:
    """``size``: the sum of magnitudes whose rounding is allowed for."""
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= size * ROUNDING + 1e-37).all()


@examples
@given(inputs(), st.booleans())
def test_one_range_for_the_whole_tensor(case: tuple[int, float, float], with_bias: bool) -> None:
    """As if the tensor were one row, whatever its rows are."""
    x, weight = sample(case, 2, 3, 16), weights(case[0], 5, 16)
    w_scale = normal(case[0], 5).abs() * 0.02 + 1e-5
    bias = normal(case[0] + 3, 5) * case[1] if with_bias else None
    quantized, scale, zp = dynamic.quantize_rows(x.reshape(1, -1))
    shifted = (quantized.double() - zp).view(2, 3, 16)
    exact = shifted @ weight.double().T * (w_scale.double() * float(scale))
    size = exact.abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    actual = KERNELS.linear_dynamic_per_tensor(x, weight, w_scale, bias, *FREE)
    assert_close(actual, exact, size)
    empty = KERNELS.linear_dynamic_per_tensor(x[:0], weight, w_scale, bias, *FREE)
    assert empty.shape == (0, 3, 5)


class TestQuantizeRows:
    @examples
    @given(inputs())
    def test_errs_by_half_a_step_over_a_range_with_zero(
        self, case: tuple[int, float, float]
    ) -> None:
        x = sample(case, 9, 33)
        quantized, scale, zp = dynamic.quantize_rows(x)
        assert (quantized.dtype, scale.dtype, zp.dtype) == (torch.int8, torch.float32, torch.int32)
        assert (scale.shape, zp.shape) == ((9, 1), (9, 1))
        assert ((zp >= -128) & (zp <= 127)).all()
        back = (quantized.double() - zp) * scale
        # Half a step for the value, half a step for the zero point at the ends of the range.
        assert ((back - x).abs() <= scale.double() * 1.001).all()
        inside = (quantized > -128) & (quantized < 127)
        assert ((back - x).abs() <= scale.double() * 0.501)[inside].all()

    @examples
    @given(inputs())
    def test_agrees_with_torch_to_a_step(self, case: tuple[int, float, float]) -> None:
        x = sample(case, 9, 33)
        quantized, scale, zp = dynamic.quantize_rows(x)
        scales, points = QD.choose_qparams_per_token_asymmetric.default(x, torch.int8)
        wide = (scales > torch.finfo(torch.float32).eps).flatten()
        torch.testing.assert_close(scale[wide].double(), scales[wide], rtol=1e-6, atol=0)
        assert ((zp - points)[wide].abs() <= 1).all()
        args = (scales, points, -128, 127, torch.int8)
        theirs = QD.quantize_per_token.default(x, *args)
        assert ((quantized.int() - theirs.int())[wide].abs() <= 1).all()

    def test_integers_over_the_whole_range_stay_themselves(self) -> None:
        x = torch.arange(-128.0, 128.0).repeat(2, 1) * torch.tensor([[1.0], [0.25]])
        quantized, scale, zp = dynamic.quantize_rows(x)
        assert torch.equal(quantized[0], torch.arange(-128, 128).to(torch.int8))
        assert torch.equal(quantized[1], quantized[0])
        assert (scale.tolist(), zp.tolist()) == ([[1.0], [0.25]], [[0], [0]])

    @pytest.mark.parametrize("value", [0.0, 1e-42, -1e-42, 1e-38])
    def test_rows_of_almost_nothing_are_zero(self, value: float) -> None:
        quantized, scale, zp = dynamic.quantize_rows(torch.full((1, 5), value))
        assert ((quantized.double() - zp) * scale == 0).all()

    def test_one_sided_rows_reach_their_ends(self) -> None:
        x = torch.tensor([[0.5, 1.0, 2.0], [-0.5, -1.0, -2.0]])
        quantized, _, zp = dynamic.quantize_rows(x)
        assert zp.flatten().tolist() == [-128, 127]
        assert quantized[:, 2].tolist() == [127, -128]


class TestLinear:
    @examples
    @given(
        inputs(), st.sampled_from([(1, 1), (70, 1), (64, 2), (96, 3), (64, 64)]), st.booleans(),
        st.booleans(), st.booleans(), st.sampled_from([FREE, (0.0, math.inf), (-0.5, 1.5)]),
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
        quantized, scale, zp = dynamic.quantize_rows(x.view(6, depth))
        terms = (quantized.long() - zp).double()[:, None, :] * weight.double()
        sums = terms.view(6, 5, groups, -1).sum(-1) * w_scale.double().view(-1, groups)
        exact = sums.sum(-1) * scale.double() + (0 if bias is None else bias.double())
        size = sums.abs().sum(-1) * scale.double() + (0 if bias is None else bias.double().abs())
        actual = KERNELS.linear_dynamic(x, weight, w_scale, bias, *clamp)
        assert_close(actual, exact.clamp(*clamp).view(2, 3, 5), size.view(2, 3, 5))

    def test_int4_values_in_groups_are_near_the_float_product(self) -> None:
        x, weight = normal(0, 7, 256), int8(1, 12, 256).bitwise_right_shift(4)
        w_scale = normal(2, 12, 8).abs() * 0.1 + 0.01
        real = (weight.view(12, 8, 32) * w_scale[..., None]).view(12, 256)
        actual = KERNELS.linear_dynamic(x, weight, w_scale, None, *FREE)
        exact = functional.linear(x, real)
        assert (actual - exact).norm() < 0.01 * exact.norm()

    def test_rows_do_not_depend_on_each_other(self) -> None:
        x, weight, w_scale = normal(0, 4, 40), weights(0, 6, 40), torch.full((6,), 0.01)
        x = x * torch.tensor([[1.0], [1e-20], [1e20], [0.0]])
        whole = KERNELS.linear_dynamic(x, weight, w_scale, None, *FREE)
        rows = [KERNELS.linear_dynamic(row, weight, w_scale, None, *FREE) for row in x]
        assert torch.equal(whole, torch.stack(rows))

    def test_what_is_not_finite_shows_in_its_row_only(self) -> None:
        x = normal(0, 3, 8)
        x[0, 1], x[1, 2] = math.nan, math.inf
        actual = KERNELS.linear_dynamic(x, weights(0, 4, 8), torch.ones(4), None, *FREE)
        assert actual.isfinite().all(1).tolist() == [False, False, True]

    def test_an_empty_batch(self) -> None:
        actual = KERNELS.linear_dynamic(
            torch.zeros(0, 3, 4), weights(0, 2, 4), torch.ones(2), torch.ones(2), *FREE
        )
        assert actual.shape == (0, 3, 2)

    @pytest.mark.parametrize("w_scale", [(4,), (5, 3), (4, 2), (1, 2), (5, 1, 1)])
    def test_scales_that_do_not_fit_are_named(self, w_scale: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"::linear_dynamic: weight \(5, 8\) and w_scale"):
            KERNELS.linear_dynamic(
                normal(0, 2, 8), weights(0, 5, 8), torch.ones(w_scale), None, *FREE
            )

    def test_other_inputs_are_named(self) -> None:
        args = (weights(0, 5, 8), torch.ones(5), None, *FREE)
        with pytest.raises(
            TypeError, match=r"::linear_dynamic takes float32 for `x`, not.*float16"
        ):
            KERNELS.linear_dynamic(normal(0, 2, 8).half(), *args)
        with pytest.raises(ValueError, match=r"input \(2, 7\) and weight \(5, 8\) do not fit"):
            KERNELS.linear_dynamic(normal(0, 2, 7), *args)


def by_image(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers less their zero point, and scales ``(N, 1, 1, 1)``."""
    quantized, scale, zp = dynamic.quantize_rows(x.flatten(1))
    return (quantized.double() - zp).view(x.shape), scale.double().view(-1, 1, 1, 1)


def scaled(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    geometry: Sequence[Any],
) -> tuple[Tensor, Tensor]:
    """What ``function`` makes of images that are quantized one by one, and the sum of magnitudes."""
    shifted, scale = by_image(x)
    unit = scale * w_scale.double().view(-1, 1, 1)
    exact = function(shifted, weight.double(), None, *geometry) * unit
    added = torch.zeros(1, 1, 1) if bias is None else bias.double().view(-1, 1, 1)
    return exact + added, exact.abs() + added.abs()


# Images of different ranges have different scales and zero points.
RANGES = torch.tensor([1.0, 0.01, -30.0]).view(3, 1, 1, 1)


class TestConvolution:
    @examples
    @given(
        inputs(), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2),
        st.sampled_from([(1, 4), (4, 4), (2, 6)]), st.sampled_from([1, 3]), st.booleans(),
        st.booleans(), st.sampled_from([FREE, (0.0, 6.0)]),
    )  # fmt: skip
    def test_is_the_scaled_integer_sum(
        self,
        case: tuple[int, float, float],
        stride: int,
        padding: int,
        dilation: int,
        grouping: tuple[int, int],
        kernel: int,
        with_bias: bool,
        shared: bool,
        clamp: tuple[float, float],
    ) -> None:
        groups, channels = grouping
        x, seed = sample(case, 3, 4, 7, 8) * RANGES, case[0]
        weight = weights(seed, channels, 4 // groups, kernel, kernel)
        w_scale = normal(seed, 1 if shared else channels).abs() * 0.02 + 1e-5
        bias = normal(seed + 3, channels) * case[1] if with_bias else None
        geometry = (stride, padding, dilation, groups)
        exact, size = scaled(functional.conv2d, x, weight, w_scale, bias, geometry)
        lists = ([stride], [padding], [dilation], groups)
        actual = KERNELS.conv2d_dynamic(x, weight, w_scale, bias, *lists, *clamp)
        assert_close(actual, exact.clamp(*clamp), size)
        channels_last = x.to(memory_format=torch.channels_last)
        again = KERNELS.conv2d_dynamic(channels_last, weight, w_scale, bias, *lists, *clamp)
        assert torch.equal(again, actual)

    def test_an_empty_batch(self) -> None:
        args = ([1], [1], [1], 1, *FREE)
        x, weight = torch.zeros(0, 4, 5, 5), weights(0, 2, 4, 3, 3)
        actual = KERNELS.conv2d_dynamic(x, weight, torch.ones(2), torch.ones(2), *args)
        assert actual.shape == (0, 2, 5, 5)

    def test_what_does_not_fit_is_named(self) -> None:
        args = ([1], [1], [1], 1, *FREE)
        x, weight = normal(0, 1, 4, 5, 5), weights(0, 2, 4, 3, 3)
        with pytest.raises(ValueError, match=r"::conv2d_dynamic: weight .* the scales are \(1,\)"):
            KERNELS.conv2d_dynamic(x, weight, torch.ones(2, 1), None, *args)
        with pytest.raises(ValueError, match=r"input \(1, 3, 5, 5\) .* 4 channels in 1 groups"):
            KERNELS.conv2d_dynamic(x[:, :3], weight, torch.ones(2), None, *args)
        with pytest.raises(ValueError, match="no batch of images"):
            KERNELS.conv2d_dynamic(x[0], weight, torch.ones(2), None, *args)
        with pytest.raises(TypeError, match="takes int8 for `weight`"):
            KERNELS.conv2d_dynamic(x, weight.float(), torch.ones(2), None, *args)


class TestTransposed:
    @examples
    @given(
        inputs(), st.tuples(*[st.integers(1, 3)] * 2), st.tuples(*[st.integers(0, 1)] * 2),
        st.tuples(*[st.integers(1, 2)] * 2), st.sampled_from([(1, 3), (4, 4), (2, 6)]),
        st.tuples(*[st.integers(1, 3)] * 2), st.booleans(), st.booleans(),
        st.sampled_from([FREE, (0.0, 6.0)]),
    )  # fmt: skip
    def test_is_the_scaled_integer_sum(
        self,
        case: tuple[int, float, float],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        grouping: tuple[int, int],
        kernel: tuple[int, int],
        with_bias: bool,
        shared: bool,
        clamp: tuple[float, float],
    ) -> None:
        groups, channels = grouping
        x, seed = sample(case, 3, 4, 5, 4) * RANGES, case[0]
        weight = weights(seed, 4, channels // groups, *kernel)
        w_scale = normal(seed, 1 if shared or groups > 1 else channels).abs() * 0.02 + 1e-5
        bias = normal(seed + 3, channels) * case[1] if with_bias else None
        extra = [step - 1 for step in stride]
        geometry = (list(stride), list(padding), extra, groups, list(dilation))
        transposed = functional.conv_transpose2d
        exact, size = scaled(transposed, x, weight, w_scale, bias, geometry)
        actual = KERNELS.conv_transpose2d_dynamic(x, weight, w_scale, bias, *geometry, *clamp)
        assert_close(actual, exact.clamp(*clamp), size)
        channels_last = x.to(memory_format=torch.channels_last)
        args = (weight, w_scale, bias, *geometry, *clamp)
        assert torch.equal(KERNELS.conv_transpose2d_dynamic(channels_last, *args), actual)

    def test_one_number_stands_for_both_axes(self) -> None:
        x, weight = normal(0, 2, 4, 5, 3), weights(0, 4, 3, 3, 3)
        args = (x, weight, torch.full((3,), 0.01), None)
        short = KERNELS.conv_transpose2d_dynamic(*args, [3], [1], [2], 1, [2], *FREE)
        both = ([3, 3], [1, 1], [2, 2], 1, [2, 2])
        assert torch.equal(short, KERNELS.conv_transpose2d_dynamic(*args, *both, *FREE))

    def test_an_empty_batch(self) -> None:
        x, weight = torch.zeros(0, 4, 5, 5), weights(0, 4, 2, 3, 3)
        args = (weight, torch.ones(2), torch.ones(2), [2], [1], [1], 1, [1], *FREE)
        assert KERNELS.conv_transpose2d_dynamic(x, *args).shape == (0, 2, 10, 10)

    def test_what_does_not_fit_is_named(self) -> None:
        run, args = KERNELS.conv_transpose2d_dynamic, ([1], [1], [0], 1, [1], *FREE)
        x, weight = normal(0, 1, 4, 5, 5), weights(0, 4, 2, 3, 3)
        with pytest.raises(ValueError, match=r"2d_dynamic: weight .* scales are \(1,\) or \(2,\)"):
            run(x, weight, torch.ones(4), None, *args)
        with pytest.raises(ValueError, match=r"input \(1, 3, 5, 5\) .* for 4 channels"):
            run(x[:, :3], weight, torch.ones(2), None, *args)
        with pytest.raises(ValueError, match="no batch of images"):
            run(x[0], weight, torch.ones(2), None, *args)
        with pytest.raises(ValueError, match=r"output_padding .* is not below stride"):
            run(x, weight, torch.ones(2), None, [1], [1], [1], 1, [1], *FREE)
        with pytest.raises(ValueError, match="nothing is left"):
            run(x, weight, torch.ones(2), None, [1], [4], [0], 1, [1], *FREE)
        with pytest.raises(ValueError, match="with groups, all channels share one scale"):
            run(x, weight, torch.ones(4), None, [1], [1], [0], 2, [1], *FREE)
        with pytest.raises(TypeError, match="takes int8 for `weight`"):
            run(x, weight.float(), torch.ones(2), None, *args)


class TestNarrowRows:
    """Rows whose range is below 255 steps of torch's least scale, 2**-23."""

    def test_keep_their_precision_where_the_operators_of_the_graph_lose_it(self) -> None:
        x = normal(0, 2, 64) * torch.tensor([[1e-8], [1e-4]])
        quantized, scale, zp = dynamic.quantize_rows(x)
        ours = (quantized.double() - zp) * scale
        scales, points = QD.choose_qparams_per_token_asymmetric.default(x, torch.int8)
        args = (scales, points, -128, 127, torch.int8)
        integers = QD.quantize_per_token.default(x, *args)
        theirs = QD.dequantize_per_token.default(integers, *args, torch.float32)
        assert scales.flatten()[0] == 2.0**-23 > 100 * scale.flatten()[0]
        assert (ours - x).norm(dim=1).less(0.01 * x.norm(dim=1)).all()
        assert (theirs - x).norm(dim=1).less(0.01 * x.norm(dim=1)).tolist() == [False, True]
