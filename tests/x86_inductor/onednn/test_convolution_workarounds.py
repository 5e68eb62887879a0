# SPDX-License-Identifier: Apache-2.0
"""Convolutions that oneDNN gets wrong, on some processor or other, are right all the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from qompose_x86_inductor.onednn.arguments import Geometry, Product
from qompose_x86_inductor.onednn.convolution_workarounds import safe_form
from torch import Tensor

from tests.x86_inductor.integers import MODEST, OPS, integer_conv

# image, weight, (stride, padding, dilation, groups)
WRONG: dict[str, tuple[list[int], list[int], tuple[Any, ...]]] = {
    "one column": ([1, 8, 6, 3], [1, 8, 2, 3], ([1, 2], [0, 0], [1, 1], 1)),
    "one column of a wider image": ([1, 12, 26, 4], [32, 12, 7, 3], ([1, 2], [3, 0], [1, 1], 1)),
    "one column, beside it zeros": ([2, 9, 10, 1], [17, 9, 3, 5], ([2, 3], [2, 3], [1, 1], 1)),
    "one row and column": ([2, 40, 3, 1], [6, 20, 3, 1], ([2, 3], [0, 1], [1, 1], 2)),
    "groups": ([1, 9, 11, 9], [144, 3, 3, 3], ([1, 1], [1, 1], [1, 1], 3)),
    "groups without padding": ([1, 28, 27, 18], [192, 7, 3, 7], ([3, 1], [0, 0], [2, 1], 4)),
    "a dilated point": ([1, 9, 34, 1], [16, 9, 7, 1], ([2, 2], [0, 1], [1, 2], 1)),
    "windows of zeros": ([1, 5, 5, 1], [16, 5, 5, 2], ([2, 1], [1, 1], [1, 2], 1)),
}


def _integers(image: list[int], kernel: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randint(0, 256, image, dtype=torch.uint8)
    return x, torch.randint(-128, 128, kernel, dtype=torch.int8)


@pytest.mark.parametrize("zero_point", [0, 3, 255])
@pytest.mark.parametrize("name", WRONG)
def test_is_right(name: str, zero_point: int) -> None:
    image, kernel, geometry = WRONG[name]
    x, weight = _integers(image, kernel)
    got = OPS.conv2d(x, 1.0, zero_point, weight, torch.ones(kernel[0]), None, *geometry)
    expected = integer_conv(x, zero_point, weight, geometry).double()
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=2.0)


@MODEST
@given(st.sampled_from(sorted(WRONG)), st.integers(0, 255), st.booleans())
def test_the_form_computes_the_same_and_is_its_own(
    name: str, zero_point: int, biased: bool
) -> None:
    image, kernel, geometry = WRONG[name]
    x, weight = _integers(image, kernel)
    bias = torch.randn(kernel[0]) if biased else None
    product = Product(x, 0.5, zero_point, weight, torch.rand(kernel[0]) + 0.5, bias)
    form, placing = safe_form(product, Geometry(*geometry))
    results = [
        each.real(F.conv2d(*each.centred(), None, *how), 2)
        for each, how in ((product, Geometry(*geometry)), (form, placing))
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=2.0)
    assert all(
        step == 1 or taps > 1 for step, taps in zip(placing.dilation, kernel[2:], strict=True)
    )
    assert results[1].shape[3] > 1 or placing.stride[1] == 1
    again, unchanged = safe_form(form, placing)
    assert again.x is form.x and unchanged == placing


def test_geometries_have_a_key_each() -> None:
    pairs = itertools.product([[1, 1], [1, 2], [2, 1]], repeat=3)
    assert len({Geometry(*pair, groups).key() for pair in pairs for groups in (1, 2)}) == 54


def test_what_onednn_computes_right_stays() -> None:
    x, weight = _integers([1, 64, 8, 8], [64, 64, 3, 3])
    product = Product(x, 0.5, 7, weight, torch.ones(64), None)
    geometry = Geometry([2, 2], [1, 1], [1, 1], 1)
    assert safe_form(product, geometry) == (product, geometry)
