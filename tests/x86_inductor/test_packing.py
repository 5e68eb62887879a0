# SPDX-License-Identifier: Apache-2.0
"""The table beside the weights: packed once, found again, gone with the weight."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from qompose_x86_inductor.derived import owners
from torch import Tensor

from tests.collecting import kept

OPS = torch.ops.qompose_x86


class TestPackedWeights:
    """The table beside the weights."""

    @staticmethod
    def run(weight: Tensor) -> Tensor:
        x = torch.ones(1, weight.shape[1], dtype=torch.uint8)
        result: Tensor = OPS.linear(x, 1.0, 0, weight, torch.ones(weight.shape[0]), None)
        return result

    def test_go_with_their_weight(self) -> None:
        before = owners()
        weight = torch.ones(4, 8, dtype=torch.int8)
        self.run(weight)
        self.run(weight)
        assert len(owners() - before) == 1
        del weight
        assert not kept(owners, before)

    @pytest.mark.parametrize("inference", [False, True], ids=["ordinary", "inference"])
    def test_follow_a_write(self, inference: bool) -> None:
        with torch.inference_mode(inference):
            weight = torch.ones(4, 8, dtype=torch.int8)
            assert self.run(weight).unique().tolist() == [8.0]
            weight[:2].fill_(3)
            assert self.run(weight)[0].tolist() == [24.0, 24.0, 8.0, 8.0]
            weight.data = torch.full((4, 8), 2, dtype=torch.int8)
            assert self.run(weight).unique().tolist() == [16.0]

    def test_are_not_copied(self) -> None:
        weight = torch.ones(4, 8, dtype=torch.int8)
        self.run(weight)
        twin = copy.deepcopy(weight)
        twin.fill_(5)
        assert self.run(twin).unique().tolist() == [40.0]
        assert self.run(weight).unique().tolist() == [8.0]

    def test_serve_any_layout_of_the_weight(self) -> None:
        weight = torch.randint(-128, 128, (8, 4), dtype=torch.int8).t()
        assert torch.equal(self.run(weight)[0], weight.sum(1).float())
        kernel = torch.randint(-128, 128, (4, 3, 2, 2), dtype=torch.int8)
        geometry = ([1, 1], [0, 0], [1, 1], 1)
        x = torch.randint(0, 256, (1, 3, 5, 5), dtype=torch.uint8)
        for layout in (torch.contiguous_format, torch.channels_last):
            w = kernel.contiguous(memory_format=layout)
            got = OPS.conv2d(x, 1.0, 7, w, torch.ones(4), None, *geometry)
            assert torch.equal(
                got, F.conv2d(x.double() - 7, kernel.double(), None, *geometry).float()
            )

    def test_serve_other_image_sizes_than_the_first(self) -> None:
        kernel = torch.randint(-128, 128, (16, 8, 3, 3), dtype=torch.int8)
        geometry = ([1, 1], [1, 1], [1, 1], 1)
        for size in (3, 33, 1, 14):
            x = torch.randint(0, 256, (size % 3, 8, size, size + 1), dtype=torch.uint8)
            got = OPS.conv2d(x, 1.0, 7, kernel, torch.ones(16), None, *geometry)
            assert torch.equal(
                got, F.conv2d(x.double() - 7, kernel.double(), None, *geometry).float()
            )
