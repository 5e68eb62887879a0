# SPDX-License-Identifier: Apache-2.0
"""Exact products of int8 matrices, against int64."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, strategies as st
from qompose_xnnpack.operators import integer_matmul
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.collecting import kept
from tests.xnnpack.operators.arithmetic import examples, int8, seeds, weights


class TestProducts:
    @examples
    @given(st.integers(1, 40), st.sampled_from([1, 3, 64, 1023, 1025, 3000]), seeds, st.booleans())
    def test_matmul_is_exact(self, rows: int, depth: int, seed: int, extreme: bool) -> None:
        x = int8(seed, rows, depth, extreme=extreme)
        weight = weights(seed, 5, depth, extreme=extreme)
        expected = x.long() @ weight.long().t()
        assert torch.equal(integer_matmul.matmul(x, weight).long(), expected)
        assert torch.equal(integer_matmul._matmul_float(x, weight).long(), expected)

    @pytest.mark.parametrize("rows", [1, 5])
    @pytest.mark.parametrize("depth", [1, 2, 70])
    @pytest.mark.parametrize("columns", [1, 6])
    def test_strides_of_single_axes_mean_nothing(self, rows: int, depth: int, columns: int) -> None:
        def odd(tensor: Tensor) -> Tensor:
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            return tensor.as_strided(tensor.shape, [0 if n == 1 else step for n, step in pairs])

        x, weight = int8(0, rows, depth), weights(0, columns, depth)
        expected = x.long() @ weight.long().t()
        assert torch.equal(integer_matmul.matmul(odd(x), odd(weight)).long(), expected)

    @pytest.mark.parametrize(
        "mode", [torch.device("meta"), FakeTensorMode()], ids=["device", "fake"]
    )
    def test_the_processor_is_probed_with_real_tensors(self, mode: Any) -> None:
        """Whatever is going on when it is asked for the first time."""
        probe = integer_matmul.int_mm_is_exact.__wrapped__
        with mode:
            found = probe()
        assert found == probe()

    def test_matmul_of_all_extremes(self) -> None:
        x = torch.full((2, 4096), -128, dtype=torch.int8)
        assert (integer_matmul.matmul(x, x) == 4096 * 128 * 128).all()
        assert (integer_matmul._matmul_float(x, x) == 4096 * 128 * 128).all()

    def test_depth_beyond_int32_is_refused(self) -> None:
        x = torch.zeros((1, integer_matmul.MAX_DEPTH + 1), dtype=torch.int8)
        with pytest.raises(ValueError, match="int32"):
            integer_matmul.matmul(x, x)

    @pytest.mark.filterwarnings("ignore:Nothing was quantized")
    @pytest.mark.parametrize(("beyond", "state"), [(0, "int8 kernel"), (1, "float")])
    def test_a_linear_of_such_a_depth_stays_in_float(self, beyond: int, state: str) -> None:
        depth = integer_matmul.MAX_DEPTH + beyond
        x, model = torch.randn(1, depth), torch.nn.Linear(depth, 2).eval()
        made = qompose.quantize(
            model, (x,), backends="xnnpack", calibration=[(x,)], progress=False
        ).model
        assert [row.state for row in qompose.report(made).rows] == [state]
        assert made(x).shape == (1, 2)

    def test_cached_sums_follow_the_weight(self) -> None:
        before = integer_matmul.WEIGHTS.owners()
        weight = weights(0, 3, 4)
        first = integer_matmul.row_sums(weight).clone()
        assert integer_matmul.row_sums(weight) is integer_matmul.row_sums(weight)
        weight.neg_()
        assert torch.equal(integer_matmul.row_sums(weight), -first)
        assert len(integer_matmul.WEIGHTS.owners() - before) == 1
        del weight
        assert not kept(integer_matmul.WEIGHTS.owners, before)

    @pytest.mark.parametrize("zero_point", [0, -3])
    def test_an_inference_weight_that_was_written_to(self, zero_point: int) -> None:
        """torch counts no writes to inference tensors; the sums were stale."""
        with torch.inference_mode():
            weight, x = weights(0, 3, 4), weights(1, 2, 4)
            for _ in range(2):
                expected = (x.long() - zero_point) @ weight.long().t()
                found = integer_matmul.shifted_matmul(x, zero_point, weight)
                assert torch.equal(found.long(), expected)
                weight[1:].fill_(7)

    def test_sums_of_groups_follow_the_weight(self) -> None:
        weight = weights(0, 3, 8)
        sums = integer_matmul.group_sums(4)(weight)
        assert torch.equal(sums.t().long(), weight.long().view(3, 2, 4).sum(2))
        weight.neg_()
        assert torch.equal(integer_matmul.group_sums(4)(weight), -sums)


class TestGroups:
    @examples
    @given(
        st.integers(0, 9),
        st.sampled_from([(1, 5), (32, 4), (64, 3), (7, 1), (600, 2)]),
        seeds,
        st.booleans(),
    )
    def test_each_group_is_exact(
        self, rows: int, grouping: tuple[int, int], seed: int, extreme: bool
    ) -> None:
        size, count = grouping
        x = int8(seed, rows, size * count, extreme=extreme)
        weight = weights(seed, 5, size * count, extreme=extreme)
        points = int8(seed + 2, rows, 1).int()
        exact = torch.einsum(
            "mgk,ngk->gmn",
            (x.long() - points).view(rows, count, size),
            weight.long().view(5, count, size),
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            parts = list(integer_matmul.shifted_groups(x, points, weight, size))
        assert torch.equal(torch.stack(parts), exact.float())

    def test_a_group_beyond_int32_is_refused(self) -> None:
        x = torch.zeros((1, integer_matmul.MAX_DEPTH + 1), dtype=torch.int8)
        points = torch.zeros((1, 1), dtype=torch.int32)
        with pytest.raises(ValueError, match="int32"):
            list(integer_matmul.shifted_groups(x, points, x, x.shape[1]))
