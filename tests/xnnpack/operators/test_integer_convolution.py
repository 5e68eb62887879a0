# SPDX-License-Identifier: Apache-2.0
"""Exact integer convolutions, plain and transposed, against float64 and against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from qompose_xnnpack.operators import integer_convolution, integer_matmul
from torch import Tensor
from torch.nn import functional

from tests.collecting import kept
from tests.xnnpack.operators.arithmetic import (
    examples,
    geometries,
    int8,
    seeds,
    weights,
    zero_points,
)


def exact(
    x: Tensor, zero_point: Any, weight: Tensor, *geometry: Any, transposed: bool = False
) -> Tensor:
    function = functional.conv_transpose2d if transposed else functional.conv2d
    return function(x.double() - zero_point, weight.double(), None, *geometry)


class TestPlain:
    @pytest.mark.parametrize(
        ("groups", "channels", "kernel"), [(1, 6, 3), (6, 6, 3), (2, 8, 3), (2, 600, 1), (1, 4, 1)]
    )
    def test_is_exact(self, groups: int, channels: int, kernel: int) -> None:
        x = int8(0, 2, channels, 9, 8, extreme=True)
        weight = weights(0, 6, channels // groups, kernel, kernel, extreme=True)
        args = ([2, 1], [1, 0], [1, 2], groups)
        actual = integer_convolution.conv2d(x, -77, weight, *args)
        assert torch.equal(actual.double(), exact(x, -77, weight, *args))

    def test_deep_groups_do_not_go_through_float(self) -> None:
        """All products of one sign: their sum is far beyond what float32 counts in ones."""
        x, weight = int8(0, 1, 600, 4, 4).clamp(max=-100), weights(0, 6, 300, 2, 2).clamp(min=100)
        args = ([1, 1], [0, 0], [1, 1], 2)
        actual = integer_convolution.conv2d(x, 127, weight, *args)
        assert torch.equal(actual.double(), exact(x, 127, weight, *args))

    @pytest.mark.parametrize("groups", [1, 2, 6])
    @pytest.mark.parametrize("padding", [0, 2])
    def test_each_image_may_have_its_own_zero_point(self, groups: int, padding: int) -> None:
        x, weight = int8(0, 3, 6, 7, 5), weights(0, 6, 6 // groups, 3, 2)
        points = torch.tensor([-128, 0, 127], dtype=torch.int32).view(3, 1, 1, 1)
        geometry = ([1, 2], [padding, padding], [1, 1], groups)
        actual = integer_convolution.conv2d(x, points, weight, *geometry)
        assert torch.equal(actual.double(), exact(x, points, weight, *geometry))

    def test_autocast_and_lower_precision_change_nothing(self) -> None:
        x, weight = int8(0, 7, 1500, extreme=True), weights(0, 9, 1500, extreme=True)
        image, kernel = int8(1, 1, 4, 6, 6), weights(1, 4, 1, 3, 3)
        args = ([1, 1], [1, 1], [1, 1], 4)
        spread_args = ([1, 1], [0, 0], [0, 0], 4, [1, 1])
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                product = integer_matmul._matmul_float(x, weight)
                total = integer_convolution.conv2d(image, 9, kernel, *args)
                spread = integer_convolution.conv_transpose2d(image, 9, kernel, *spread_args)
        finally:
            torch.set_float32_matmul_precision(before)
        assert torch.equal(product.long(), x.long() @ weight.long().t())
        assert torch.equal(total.double(), exact(image, 9, kernel, *args))
        wanted = exact(image, 9, kernel, *spread_args, transposed=True)
        assert torch.equal(spread.double(), wanted)


@pytest.mark.parametrize(
    ("convolve", "geometry"),
    [
        (integer_convolution.conv2d, ([1, 1], [1, 1], [1, 1], 1)),
        (integer_convolution.conv_transpose2d, ([2, 2], [1, 1], [1, 1], 1, [1, 1])),
    ],
)
def test_a_batch_is_split_when_what_it_needs_is_large(
    convolve: Any, geometry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = int8(0, 5, 3, 8, 8), weights(0, 3, 3, 3, 3)
    points = torch.arange(5, dtype=torch.int32).view(5, 1, 1, 1)
    whole = [convolve(x, point, weight, *geometry) for point in (3, points)]
    monkeypatch.setattr(integer_convolution, "_BLOCK_BYTES", 1)
    split = [convolve(x, point, weight, *geometry) for point in (3, points)]
    assert all(map(torch.equal, split, whole))


class TestTransposed:
    @examples
    @given(seeds, zero_points, st.booleans(), geometries((2,), transposed=True), st.booleans())
    def test_is_exact(self, seed: int, point: int, each: bool, case: Any, extreme: bool) -> None:
        geometry, shape = case
        points = torch.tensor([point, -1 - point], dtype=torch.int32).view(2, 1, 1, 1)
        zp = points if each else point
        x = int8(seed, 2, 4, 6, 5, extreme=extreme)
        weight = weights(seed, *shape, extreme=extreme)
        actual = integer_convolution.conv_transpose2d(x, zp, weight, *geometry)
        assert actual.dtype == torch.int32
        assert torch.equal(actual.double(), exact(x, zp, weight, *geometry, transposed=True))

    def test_depth_beyond_int32_is_refused(self) -> None:
        weight = torch.zeros((integer_matmul.MAX_DEPTH // 4 + 1, 1, 2, 2), dtype=torch.int8)
        x = torch.zeros((1, weight.shape[0], 1, 1), dtype=torch.int8)
        with pytest.raises(ValueError, match="int32"):
            integer_convolution.conv_transpose2d(x, 0, weight, [1, 1], [0, 0], [0, 0], 1, [1, 1])

    def test_what_is_kept_of_a_weight_goes_with_it(self) -> None:
        before = integer_matmul.WEIGHTS.owners()
        weight = weights(0, 3, 4, 2, 2)
        x, args = int8(0, 1, 3, 4, 4), ([1, 1], [0, 0], [0, 0], 1, [1, 1])
        first = integer_convolution.conv_transpose2d(x, 3, weight, *args)
        weight.neg_()
        assert torch.equal(integer_convolution.conv_transpose2d(x, 3, weight, *args), -first)
        assert len(integer_matmul.WEIGHTS.owners() - before) == 1
        del weight
        assert not kept(integer_matmul.WEIGHTS.owners, before)
