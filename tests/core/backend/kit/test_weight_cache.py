# SPDX-License-Identifier: Apache-2.0
"""Forms of weights in their cache: made once, made anew after a write, gone with the tensor."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from qompose.backend import kit
from torch import Tensor, nn

from tests.collecting import kept

CACHE = kit.WeightCache()


class Counted:
    """Doubles a tensor, and counts."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.calls = tensor, 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return self.tensor * 2

    def ask(self, form: object = "doubled") -> Tensor:
        return CACHE.get(self.tensor, form, self)  # type: ignore[arg-type]


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
    assert CACHE.get(counted.tensor, "outer", lambda: counted.ask() is None) is False
    assert CACHE.get(counted.tensor, "nothing", lambda: None) is None
    assert CACHE.get(counted.tensor, "nothing", lambda: 1) is None


def test_it_goes_with_the_tensor() -> None:
    before = CACHE.owners()
    counted = Counted(torch.arange(3))
    counted.ask()
    assert len(CACHE.owners() - before) == 1
    del counted
    assert not kept(CACHE.owners, before)


def test_what_fails_is_asked_for_again() -> None:
    tensor = torch.arange(3)

    def fail() -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CACHE.get(tensor, "form", fail)
    assert CACHE.get(tensor, "form", lambda: 5) == 5


@pytest.mark.parametrize("inference", [False, True], ids=["ordinary", "inference"])
def test_a_function_of_a_weight_follows_it(inference: bool) -> None:
    sums, doubles = CACHE.form(lambda w: w.sum(1)), CACHE.form(lambda w: w * 2)
    with torch.inference_mode(inference):
        weight = torch.ones(2, 3)
        assert sums(weight) is sums(weight) and sums(weight).tolist() == [3, 3]
        weight[0].neg_()  # by a view
        assert sums(weight).tolist() == [-3, 3]
        assert doubles(weight).tolist() == [[-2] * 3, [2] * 3]


def test_modules_stay_what_they_are() -> None:
    """Nothing is kept inside: a copy has a form of its own."""
    layer = nn.Linear(3, 2)
    sums = CACHE.form(lambda w: w.detach().sum(1))
    first = sums(layer.weight)
    again = copy.deepcopy(layer)
    assert [*vars(layer.weight)] == []
    assert torch.equal(sums(again.weight), first) and sums(again.weight) is not first


def test_caches_do_not_share_names() -> None:
    weight, other = torch.ones(2), kit.WeightCache()
    assert CACHE.get(weight, "packed", lambda: 1) == 1
    assert other.get(weight, "packed", lambda: 2) == 2


def test_several_threads_make_a_form_once() -> None:
    weight, made, start = torch.ones(4), [], threading.Barrier(4)

    def ask() -> None:
        start.wait()
        CACHE.get(weight, "slow", lambda: made.append(1) or len(made))  # type: ignore[func-returns-value]

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
