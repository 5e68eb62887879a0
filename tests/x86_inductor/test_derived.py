# SPDX-License-Identifier: Apache-2.0
"""What is kept beside a tensor: made once, made anew after a write, gone with the tensor."""

from __future__ import annotations

import pytest
import torch
from qompose_x86_inductor.derived import derived, owners
from torch import Tensor

from tests.collecting import kept


class Counted:
    """Doubles a tensor, and counts."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.calls = tensor, 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return self.tensor * 2

    def ask(self, form: object = "doubled") -> Tensor:
        return derived(self.tensor, form, self)  # type: ignore[arg-type]


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
    assert derived(counted.tensor, "outer", lambda: counted.ask() is None) is False
    assert derived(counted.tensor, "nothing", lambda: None) is None
    assert derived(counted.tensor, "nothing", lambda: 1) is None


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
        derived(tensor, "form", fail)
    assert derived(tensor, "form", lambda: 5) == 5
