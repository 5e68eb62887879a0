# SPDX-License-Identifier: Apache-2.0
"""Averages and maxima of int8 images, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional

from tests.xnnpack.operators.arithmetic import (
    FULL,
    KERNELS,
    Out,
    assert_step,
    examples,
    grid,
    int8,
    outputs,
    real,
    scales,
    seeds,
    zero_points,
)

POOLS: dict[str, tuple[str, tuple[Any, ...], Callable[[Tensor], Tensor]]] = {
    "avg": ("avg_pool2d", ([3], [2], [0], False, True, None),
            lambda x: functional.avg_pool2d(x, 3, 2)),
    "avg, default stride": ("avg_pool2d", ([2, 3], [], [0], False, True, None),
                            lambda x: functional.avg_pool2d(x, (2, 3))),
    "avg, padding not counted": ("avg_pool2d", ([3], [2], [1], True, False, None),
                                 lambda x: functional.avg_pool2d(x, 3, 2, 1, True, False)),
    "avg, divisor": ("avg_pool2d", ([3, 3], [1, 1], [1, 1], False, True, 5),
                     lambda x: functional.avg_pool2d(x, 3, 1, 1, divisor_override=5)),
    "adaptive": ("adaptive_avg_pool2d", ([3, 2],),
                 lambda x: functional.adaptive_avg_pool2d(x, (3, 2))),
    "mean": ("mean", ([2, 3], False), lambda x: x.mean([2, 3])),
    "mean, kept": ("mean", ([-1], True), lambda x: x.mean(-1, keepdim=True)),
    "mean of all": ("mean", (None, False), lambda x: x.mean()),
}  # fmt: skip


@pytest.mark.parametrize("case", POOLS)
def test_averages(case: str) -> None:
    name, args, function = POOLS[case]

    @examples
    @given(seeds, scales, zero_points, outputs(), st.booleans())
    def check(seed: int, scale: float, zp: int, out: Out, extreme: bool) -> None:
        x = int8(seed, 2, 3, 9, 8, extreme=extreme)
        actual = getattr(KERNELS, name)(x, scale, zp, *args, *out)
        assert_step(actual, grid(function(real(x, scale, zp)), out))

    check()


def test_max_is_exact() -> None:
    x = int8(0, 2, 3, 9, 8)
    actual = KERNELS.max_pool2d(x, [3], [2], [1], [1], True, -20, 100)
    exact = functional.max_pool2d(x.double(), 3, 2, 1, ceil_mode=True).clamp(-20, 100)
    assert_step(actual, exact, steps=0)


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"::mean: .*\(0, 3\)"):
        KERNELS.mean(int8(0, 0, 3), 0.1, 2, [0], True, 0.1, 2, *FULL)
