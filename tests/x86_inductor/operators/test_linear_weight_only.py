# SPDX-License-Identifier: Apache-2.0
"""Linears of floats by weights of fewer bits, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.operators import linear_weight_only
from torch import Tensor

OPS = torch.ops.qompose_x86
MODEST = settings(max_examples=40, deadline=None)
# Of the sum of magnitudes; 2**-8 and 2**-11 are half a unit in the last place of the result.
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GROUPS = linear_weight_only.GROUP_SIZES

seeds = st.integers(0, 2**16)
channels = st.sampled_from([1, 6, 16, 21, 64])
rows = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (40,)])
dtypes = st.sampled_from(list(ROUNDING))


def int8_operands(
    seed: int, rows: tuple[int, ...] = (3,), depth: int = 24, out: int = 6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Floats, a weight, scales and a bias."""
    torch.manual_seed(seed)
    weight = torch.randint(-128, 128, (out, depth), dtype=torch.int8)
    return torch.randn(*rows, depth), weight, torch.rand(out) * 0.02 + 1e-4, torch.randn(out)


def int4_operands(
    seed: int, rows: tuple[int, ...] = (3,), depth: int = 96, out: int = 6, group: int = 32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    weight = torch.randint(-8, 8, (out, depth), dtype=torch.int8)
    scales = torch.rand(out, depth // group) * 0.2 + 1e-3
    return torch.randn(*rows, depth), weight, scales, torch.randn(out)


def float16_operands(seed: int, rows: tuple[int, ...] = (3,)) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(*rows, 24), torch.randn(6, 24).half(), torch.randn(6)


def assert_exact(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """``weight`` in real values, float64."""
    added = torch.zeros(1).double() if bias is None else bias.double()
    exact = x.double() @ weight.T + added
    size = x.double().abs() @ weight.T.abs() + added.abs()
    assert actual.dtype == x.dtype
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= size * ROUNDING[x.dtype]).all()


def spread(weight: Tensor, scales: Tensor) -> Tensor:
    """The real values of a weight in groups."""
    groups = weight.double().view(*scales.shape, -1) * scales.double()[..., None]
    return groups.flatten(1)


class TestInt8:
    @MODEST
    @given(
        seeds, rows, st.sampled_from([1, 7, 32, 70, 257, 0]), channels, dtypes, st.booleans()
    )  # fmt: skip
    def test_is_the_float_product(
        self,
        seed: int,
        rows: tuple[int, ...],
        depth: int,
        out: int,
        dtype: torch.dtype,
        with_bias: bool,
    ) -> None:
        """Odd depths too, where the kernel for bfloat16 would read past the end of rows."""
        x, weight, scales, bias = int8_operands(seed, rows, depth, out)
        x, given_bias = x.to(dtype), bias.to(dtype) if with_bias else None
        actual = OPS.linear_int8_weight(x, weight, scales, given_bias)
        assert_exact(actual, x, weight.double() * scales.double()[:, None], given_bias)


class TestInt4:
    @MODEST
    @given(seeds, rows, st.sampled_from(GROUPS), st.integers(1, 3), channels, dtypes, st.booleans())
    def test_is_the_float_product(
        self,
        seed: int,
        rows: tuple[int, ...],
        group: int,
        count: int,
        out: int,
        dtype: torch.dtype,
        with_bias: bool,
    ) -> None:
        """Any number of output channels, where the kernel knows multiples of 16."""
        x, weight, scales, bias = int4_operands(seed, rows, group * count, out, group)
        x, given_bias = x.to(dtype), bias.to(dtype) if with_bias else None
        actual = OPS.linear_int4_weight(x, weight, scales, given_bias)
        assert_exact(actual, x, spread(weight, scales), given_bias)

    def test_writes_to_weight_and_scales_are_seen(self) -> None:
        x, weight, scales, bias = int4_operands(0)
        OPS.linear_int4_weight(x, weight, scales, bias)
        weight[0], scales[1] = 7, 5.0
        actual = OPS.linear_int4_weight(x, weight, scales, bias)
        assert_exact(actual, x, spread(weight, scales), bias)

    def test_values_beyond_four_bits_are_refused(self) -> None:
        x, weight, scales, _ = int4_operands(0)
        for beyond in (8, -9):
            wrong = weight.clone()
            wrong[2, 3] = beyond
            with pytest.raises(ValueError, match=str(beyond)):
                OPS.linear_int4_weight(x, wrong, scales, None)

    @pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 6), (5, 3), (6, 0), (6, 3, 1)])
    def test_other_scales_are_named(self, shape: tuple[int, ...]) -> None:
        x, weight, _, _ = int4_operands(0)
        with pytest.raises(ValueError, match="linear_int4_weight: w_scale"):
            OPS.linear_int4_weight(x, weight, torch.ones(shape), None)


class TestFloat16:
    @MODEST
    @given(seeds, rows, st.booleans())
    def test_is_the_float_product(self, seed: int, rows: tuple[int, ...], with_bias: bool) -> None:
        x, weight, bias = float16_operands(seed, rows)
        given_bias = bias if with_bias else None
        actual = OPS.linear_float16_weight(x, weight, given_bias)
        assert_exact(actual, x, weight.double(), given_bias)

    def test_a_write_is_seen(self) -> None:
        x, weight, bias = float16_operands(0)
        OPS.linear_float16_weight(x, weight, bias)
        weight[0] = 7
        assert_exact(OPS.linear_float16_weight(x, weight, bias), x, weight.double(), bias)


CASES: list[Any] = [
    (OPS.linear_int8_weight, int8_operands, linear_weight_only.int8_weight_in_graph),
    (OPS.linear_int4_weight, int4_operands, linear_weight_only.int4_weight_in_graph),
    (OPS.linear_float16_weight, float16_operands, linear_weight_only.float16_weight_in_graph),
]


@pytest.mark.parametrize(("operator", "operands", "in_graph"), CASES)
class TestAll:
    def test_layouts_and_modes_change_nothing(
        self, operator: Any, operands: Callable[..., Any], in_graph: Callable[..., Tensor]
    ) -> None:
        x, *rest = operands(0, (2, 5))
        whole = operator(x, *rest)
        gaps = torch.zeros(5, 2, 2 * x.shape[-1])[..., ::2].transpose(0, 1).copy_(x)
        assert not gaps.is_contiguous()
        turned = rest[0].t().contiguous().t()
        assert torch.equal(operator(gaps, turned, *rest[1:]), whole)
        with torch.inference_mode():
            assert torch.equal(operator(x.clone(), *(t.clone() for t in rest)), whole)

    def test_in_a_graph_it_is_the_same(
        self, operator: Any, operands: Callable[..., Any], in_graph: Callable[..., Tensor]
    ) -> None:
        given = operands(0, (2, 5))
        assert torch.equal(in_graph(*given), operator(*given))

    def test_torch_knows_it(
        self, operator: Any, operands: Callable[..., Any], in_graph: Callable[..., Tensor]
    ) -> None:
        torch.library.opcheck(operator.default, operands(0, (2, 5)))

    def test_other_inputs_are_named(
        self, operator: Any, operands: Callable[..., Any], in_graph: Callable[..., Tensor]
    ) -> None:
        x, weight, *rest = operands(0)
        with pytest.raises(ValueError, match=r"linear_\w+_weight.*float64"):
            operator(x.double(), weight, *rest)
        with pytest.raises(ValueError, match="int32"):
            operator(x, weight.int(), *rest)
        with pytest.raises(ValueError, match=r"linear_\w+_weight"):
            operator(x[:, :7], weight, *rest)
