# SPDX-License-Identifier: Apache-2.0
"""Packed weights follow what is written to the plain ones, and serve any layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.x86_inductor.integers import OPS, integer_conv


class TestPackedWeights:
    """The weights of operators."""

    @staticmethod
    def run(weight: Tensor) -> Tensor:
        x = torch.ones(1, weight.shape[1], dtype=torch.uint8)
        result: Tensor = OPS.linear(x, 1.0, 0, weight, torch.ones(weight.shape[0]), None)
        return result

    @pytest.mark.parametrize("inference", [False, True], ids=["ordinary", "inference"])
    def test_follow_a_write(self, inference: bool) -> None:
        with torch.inference_mode(inference):
            weight = torch.ones(4, 8, dtype=torch.int8)
            assert self.run(weight).unique().tolist() == [8.0]
            weight[:2].fill_(3)
            assert self.run(weight)[0].tolist() == [24.0, 24.0, 8.0, 8.0]
            weight.data = torch.full((4, 8), 2, dtype=torch.int8)
            assert self.run(weight).unique().tolist() == [16.0]

    def test_serve_any_layout_of_the_weight_and_any_size_of_the_image(self) -> None:
        weight = torch.randint(-128, 128, (8, 4), dtype=torch.int8).t()
        assert torch.equal(self.run(weight)[0], weight.sum(1).float())
        kernel = torch.randint(-128, 128, (16, 8, 3, 3), dtype=torch.int8)
        geometry = ([1, 1], [1, 1], [1, 1], 1)
        for layout in (torch.contiguous_format, torch.channels_last):
            same = kernel.contiguous(memory_format=layout)
            for size in (3, 33, 1, 14):
                x = torch.randint(0, 256, (size % 3, 8, size, size + 1), dtype=torch.uint8)
                got = OPS.conv2d(x, 1.0, 7, same, torch.ones(16), None, *geometry)
                assert torch.equal(got, integer_conv(x, 7, kernel, geometry).float())
