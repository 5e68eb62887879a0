# SPDX-License-Identifier: Apache-2.0
"""Packed weights in their cache: made once, made anew after a write, gone with the tensor."""

from __future__ import annotations

import pytest
import torch
from qompose_x86_inductor.onednn.packed_weights import cached, owners
from torch import Tensor

from tests.collecting import kept
from tests.x86_inductor.integers import OPS, integer_conv


class Counted:
    """Doubles a tensor, and counts."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.calls = tensor, 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return self.tensor * 2

    def ask(self, form: object = "doubled") -> Tensor:
        return cached(self.tensor, form, self)  # type: ignore[arg-type]


def test_a_form_is_made_once() -> None:
    counted = Counted(torch.arange(3))
    assert counted.ask() is counted.ask()
    assert counted.calls == 1
    assert counted.ask("other") is not counted.ask()
    assert counted.calls == 2


@pytest.mark.parametrize("inference", [False, True])
def test_a_write_is_seen(inference: bool) -> None:
    with torch.inference_mode(inference):
        counted = Counted(torch.arange(3))
        assert counted.ask().tolist() == [0, 2, 4]
        counted.tensor[1:].fill_(7)
        assert counted.ask().tolist() == [0, 14, 14]
        assert counted.ask().tolist() == [0, 14, 14]
        assert counted.calls == 2


def test_a_tensor_elsewhere_is_another() -> None:
    counted = Counted(torch.arange(3))
    assert counted.ask().tolist() == [0, 2, 4]
    counted.tensor.data = torch.arange(3, 6)
    assert counted.ask().tolist() == [6, 8, 10]


def test_a_form_may_be_nothing_and_may_ask_for_others() -> None:
    counted = Counted(torch.arange(3))
    assert cached(counted.tensor, "outer", lambda: counted.ask() is None) is False
    assert cached(counted.tensor, "nothing", lambda: None) is None
    assert cached(counted.tensor, "nothing", lambda: 1) is None


def test_it_goes_with_the_tensor() -> None:
    before = owners()
    counted = Counted(torch.arange(3))
    counted.ask()
    assert len(owners() - before) == 1
    del counted
    assert not kept(owners, before)


def test_what_fails_is_asked_for_again() -> None:
    tensor = torch.arange(3)

    def fail() -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached(tensor, "form", fail)
    assert cached(tensor, "form", lambda: 5) == 5


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
