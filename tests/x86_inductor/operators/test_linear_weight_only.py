# SPDX-License-Identifier: Apache-2.0
"""Linears of floats by float16 weights, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.operators.linear_weight_only import float16_weight_in_graph
from torch import Tensor

OPERATOR = torch.ops.qompose_x86.linear_float16_weight.default
MODEST = settings(max_examples=40, deadline=None)
ROUNDING = 2.0**-20  # of the sum of magnitudes


def operands(rows: tuple[int, ...] = (3,), depth: int = 96, out: int = 6) -> tuple[Tensor, ...]:
    """Floats, a weight and a bias."""
    return torch.randn(*rows, depth), torch.randn(out, depth).half(), torch.randn(out)


def assert_exact(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    added = torch.zeros(1).double() if bias is None else bias.double()
    exact = x.double() @ weight.double().T + added
    size = x.double().abs() @ weight.double().abs().T + added.abs()
    assert actual.is_contiguous()
    assert (actual.dtype, actual.shape) == (torch.float32, exact.shape)
    assert ((actual.double() - exact).abs() <= size * ROUNDING).all()


@MODEST
@given(
    st.integers(0, 2**16), st.sampled_from([(), (1,), (0,), (5,), (2, 3), (40,)]),
    st.sampled_from([1, 7, 32, 70, 257, 0]), st.sampled_from([1, 6, 16, 21]), st.booleans(),
)  # fmt: skip
def test_is_the_float_product(
    seed: int, rows: tuple[int, ...], depth: int, out: int, with_bias: bool
) -> None:
    torch.manual_seed(seed)
    x, weight, bias = operands(rows, depth, out)
    given = x, weight, bias if with_bias else None
    assert_exact(OPERATOR(*given), *given)


def test_writes_to_the_weight_are_seen() -> None:
    given = operands()
    OPERATOR(*given)
    given[1][0] = 7
    assert_exact(OPERATOR(*given), *given)


def test_layouts_and_modes_change_nothing_nor_does_a_graph() -> None:
    x, weight, bias = operands((2, 5))
    whole = OPERATOR(x, weight, bias)
    gaps = torch.zeros(5, 2, 2 * x.shape[-1])[..., ::2].transpose(0, 1).copy_(x)
    assert not gaps.is_contiguous()
    assert torch.equal(OPERATOR(gaps, weight.t().contiguous().t(), bias), whole)
    assert torch.equal(float16_weight_in_graph(x, weight, bias), whole)
    with torch.inference_mode():
        assert torch.equal(OPERATOR(*(t.clone() for t in (x, weight, bias))), whole)


def test_torch_knows_it() -> None:
    torch.library.opcheck(OPERATOR, operands((2, 5)))


def test_other_inputs_are_named() -> None:
    x, weight, bias = operands()
    for wrong in ((x.double(), weight), (x, weight.int()), (x[:, :7], weight)):
        with pytest.raises(ValueError, match="linear_float16_weight"):
            OPERATOR(*wrong, bias)
