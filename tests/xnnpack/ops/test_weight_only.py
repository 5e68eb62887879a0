# SPDX-License-Identifier: Apache-2.0
"""Products of float inputs with int8 weights, and how much of the weight is float at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from qompose_xnnpack.ops import weight_only
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.xnnpack.ops.arithmetic import KERNELS, examples, normal, seeds, weights


@examples
@given(seeds, st.sampled_from([None, 1, 3, 6]), st.booleans(), st.booleans(), st.booleans())
def test_is_the_product_with_the_dequantized_weight(
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
def test_the_output_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
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
    whole = weight_only.linear(x, weight, w_scale, bias)
    monkeypatch.setattr(weight_only, "BLOCK", 300)
    with LargestFloat() as largest:
        actual = weight_only.linear(x, weight, w_scale, bias)
    largest_value = float(whole.abs().max())  # float sums are added in another order
    torch.testing.assert_close(actual, whole, rtol=0, atol=1e-5 * largest_value)
    assert 0 < largest.size <= 300 < weight.numel()


def test_a_row_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only, "BLOCK", 3)
    x, weight, w_scale = normal(0, 2, 40), weights(0, 4, 40), torch.ones(4)
    expected = functional.linear(x, weight.float())
    torch.testing.assert_close(weight_only.linear(x, weight, w_scale, None), expected)


def test_an_empty_batch() -> None:
    actual = KERNELS.linear_weight_only(torch.zeros(0, 4), weights(0, 2, 4), torch.ones(2), None)
    assert actual.shape == (0, 2)


def test_wrong_inputs_are_named() -> None:
    x, weight = normal(0, 2, 8), weights(0, 5, 8)
    with pytest.raises(TypeError, match=r"::linear_weight_only takes float32 or .* for `x`"):
        KERNELS.linear_weight_only(x.int(), weight, torch.ones(5), None)
    with pytest.raises(TypeError, match="takes int8 for `weight`"):
        KERNELS.linear_weight_only(x, weight.short(), torch.ones(5), None)
    with pytest.raises(
        ValueError, match=r"::linear_weight_only: weight \(5, 8\) and w_scale \(5, 3\)"
    ):
        KERNELS.linear_weight_only(x, weight, torch.ones(5, 3), None)
