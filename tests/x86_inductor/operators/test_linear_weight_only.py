# SPDX-License-Identifier: Apache-2.0
"""Linears of floats by weights of fewer bits, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.backend import kit
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
# Odd ones too, where the kernel for bfloat16 would read past the end of rows.
depths = st.sampled_from([1, 7, 32, 70, 257, 0])


def int8_in_graph(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
    """What the decomposition puts in the place of the operator on this machine."""
    if not linear_weight_only.multiplies_integers(weight):
        return linear_weight_only.int8_weight_in_float(x, weight, *rest)  # type: ignore[arg-type]
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    return linear_weight_only.int8_weight_in_graph(x, weight, *rest, zero_points=zeros)  # type: ignore[arg-type]


OPERATORS: dict[str, tuple[Any, Any]] = {
    "int8": (OPS.linear_int8_weight, int8_in_graph),
    "int4": (OPS.linear_int4_weight, linear_weight_only.int4_weight_in_graph),
    "float16": (OPS.linear_float16_weight, linear_weight_only.float16_weight_in_graph),
}
every_kind = pytest.mark.parametrize("kind", OPERATORS)


def operands(
    kind: str, rows: tuple[int, ...] = (3,), depth: int = 96, out: int = 6, group: int = 32
) -> tuple[Tensor, ...]:
    """Floats, a weight, its scales if it has any, and a bias."""
    x, bias = torch.randn(*rows, depth), torch.randn(out)
    if kind == "float16":
        return x, torch.randn(out, depth).half(), bias
    most = 128 if kind == "int8" else 8
    weight = torch.randint(-most, most, (out, depth), dtype=torch.int8)
    if kind == "int8":
        return x, weight, torch.rand(out) * 0.02 + 1e-4, bias
    return x, weight, torch.rand(out, depth // group) * 0.2 + 1e-3, bias


def assert_exact(actual: Tensor, x: Tensor, weight: Tensor, *others: Tensor | None) -> None:
    """Against float64; scales, if there are any, are of rows or of groups in them."""
    *scales, bias = others
    weight = weight.double()
    for scale in scales:
        assert scale is not None
        groups = scale.double().reshape(len(weight), -1)
        weight = weight * groups.repeat_interleave(weight.shape[1] // groups.shape[1], dim=1)
    added = torch.zeros(1).double() if bias is None else bias.double()
    exact = x.double() @ weight.T + added
    size = x.double().abs() @ weight.T.abs() + added.abs()
    assert actual.dtype == x.dtype
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= size * ROUNDING[x.dtype]).all()


@every_kind
@MODEST
@given(st.data())
def test_is_the_float_product(kind: str, data: st.DataObject) -> None:
    """Any number of output channels, where the kernel of four bits knows multiples of 16."""
    torch.manual_seed(data.draw(seeds))
    group = data.draw(st.sampled_from(GROUPS))
    depth = group * data.draw(st.integers(1, 3)) if kind == "int4" else data.draw(depths)
    x, *weight, bias = operands(kind, data.draw(rows), depth, data.draw(channels), group)
    dtype = torch.float32 if kind == "float16" else data.draw(st.sampled_from(list(ROUNDING)))
    given = x.to(dtype), *weight, bias.to(dtype) if data.draw(st.booleans()) else None
    assert_exact(OPERATORS[kind][0](*given), *given)


@MODEST
@given(seeds, st.sampled_from(GROUPS))
def test_zero_points_of_groups(seed: int, group: int) -> None:
    """With scales whose products with integers are exact, they are those of float64 to the last bit."""
    torch.manual_seed(seed)
    x, weight, scale, bias = operands("int4", depth=2 * group, group=group)
    scale = scale.bfloat16().float()
    zero = torch.randint(-8, 8, scale.shape, dtype=torch.int8)
    both = torch.stack([scale, -zero * scale], -1)
    exact = (weight.view(6, 2, group).double() - zero[..., None]) * scale[..., None].double()
    for operator in OPERATORS["int4"]:
        assert_exact(operator(x, weight, both, bias), x, exact.reshape(6, -1), bias)


class TestFixedPoint:
    @MODEST
    @given(seeds, st.sampled_from([1e-20, 1.0, 1e20]), st.booleans())
    def test_digits_are_the_row(self, seed: int, size: float, outlier: bool) -> None:
        """To 24 bits of each number, and 32 of the largest."""
        torch.manual_seed(seed)
        rows = torch.randn(4, 9) * size
        rows[:, 3] *= 1e4 if outlier else 1.0
        digits, scale = linear_weight_only._planes(rows)
        places = 256.0 ** torch.arange(3, -1, -1).double()
        whole = ((digits.double() - 128).view(4, 4, 9) * places[:, None, None]).sum(0)
        error = (whole * scale.double() - rows.double()).abs()
        largest = rows.abs().amax(1, keepdim=True)
        assert (error <= rows.abs() * 2.0**-22 + largest * 2.0**-31).all()

    @pytest.mark.parametrize("value", [1e3, 1e5, 1e6])
    def test_small_inputs_beside_a_large_one_that_no_weight_reads(self, value: float) -> None:
        x, weight, scales, bias = operands("int8")
        weight[:, 0], small = 0, x.clone()
        x[:, 0] = value
        found, exact = (OPS.linear_int8_weight(each, weight, scales, bias) for each in (x, small))
        assert 20 * torch.log10(exact.norm() / (found - exact).norm()) > 70

    @pytest.mark.parametrize("value", [0.0, 1e-38, 1e30])
    def test_extreme_rows(self, value: float) -> None:
        x, weight, scales, _ = operands("int8")
        x[1] = value
        exact = x.double() @ (weight.double() * scales.double()[:, None]).T
        found = OPS.linear_int8_weight(x, weight, scales, None).double()
        assert ((found - exact).abs() <= exact.abs() * 2.0**-16 + 1e-30).all()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_not_finite_shows_in_its_row_only(self, value: float) -> None:
        x, weight, scales, bias = operands("int8")
        x[1, 2] = value
        found = OPS.linear_int8_weight(x, weight, scales, bias)
        assert found.isfinite().all(1).tolist() == [True, False, True]

    def test_sums_that_would_leave_int32_are_of_floats(self) -> None:
        depth = kit.MAX_DEPTH + 1
        x, weight = torch.ones(1, depth), torch.full((16, depth), 127, dtype=torch.int8)
        found = OPS.linear_int8_weight(x, weight, torch.ones(16), None)
        assert torch.allclose(found, torch.tensor(127.0 * depth), rtol=1e-5)
        assert not linear_weight_only.multiplies_integers(weight)


@pytest.mark.parametrize("kind", ["int8", "int4", "float16"])
def test_writes_to_weight_and_scales_are_seen(kind: str) -> None:
    operator, given = OPERATORS[kind][0], operands(kind)
    operator(*given)
    given[1][0] = 7
    assert_exact(operator(*given), *given)
    given[-2][1] = 5.0
    assert_exact(operator(*given), *given)


def test_values_beyond_four_bits_are_refused() -> None:
    x, weight, scales, _ = operands("int4")
    for beyond in (8, -9):
        wrong = weight.clone()
        wrong[2, 3] = beyond
        with pytest.raises(ValueError, match=str(beyond)):
            OPS.linear_int4_weight(x, wrong, scales, None)


@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 6), (5, 3), (6, 0), (6, 3, 1)])
def test_other_scales_are_named(shape: tuple[int, ...]) -> None:
    x, weight, *_ = operands("int4")
    with pytest.raises(ValueError, match="linear_int4_weight: w_scale"):
        OPS.linear_int4_weight(x, weight, torch.ones(shape), None)
    x, weight, *_ = operands("int8")
    with pytest.raises(ValueError, match="linear_int8_weight: w_scale"):
        OPS.linear_int8_weight(x, weight, torch.ones(shape)[1:], None)


@every_kind
def test_layouts_and_modes_change_nothing_nor_does_a_graph(kind: str) -> None:
    operator, in_graph = OPERATORS[kind]
    x, weight, *rest = operands(kind, (2, 5))
    whole = operator(x, weight, *rest)
    gaps = torch.zeros(5, 2, 2 * x.shape[-1])[..., ::2].transpose(0, 1).copy_(x)
    assert not gaps.is_contiguous()
    assert torch.equal(operator(gaps, weight.t().contiguous().t(), *rest), whole)
    assert torch.equal(in_graph(x, weight, *rest), whole)
    with torch.inference_mode():
        assert torch.equal(operator(*(t.clone() for t in (x, weight, *rest))), whole)


@every_kind
def test_torch_knows_it(kind: str) -> None:
    torch.library.opcheck(OPERATORS[kind][0].default, operands(kind, (2, 5)))


@every_kind
def test_other_inputs_are_named(kind: str) -> None:
    operator, (x, weight, *rest) = OPERATORS[kind][0], operands(kind)
    with pytest.raises(ValueError, match=r"linear_\w+_weight.*float64"):
        operator(x.double(), weight, *rest)
    with pytest.raises(ValueError, match="int32"):
        operator(x, weight.int(), *rest)
    with pytest.raises(ValueError, match=r"linear_\w+_weight"):
        operator(x[:, :7], weight, *rest)
