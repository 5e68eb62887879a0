# SPDX-License-Identifier: Apache-2.0
"""Calls of compiled code: which inputs become what it was compiled for, and which it must never see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose.errors import InputError
from qompose.lowering.compiled_call import called_as_exported, contiguous
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.core.called_net import X
from tests.core.toy import Model, export

OVERLAPPED = torch.ones(13)


def called(run: Any) -> Any:
    """What calls compiled code of a program with one input."""
    graph = export(Model(lambda m, x: x * 2), X).module()
    return called_as_exported(run, graph, None)


@pytest.mark.parametrize(
    "x", [X.to("meta"), FakeTensorMode().from_tensor(X)], ids=["device", "fake"]
)
def test_inputs_without_memory_here_are_refused(x: Tensor) -> None:
    """Compiled code would read at whatever address they have."""
    with pytest.raises(InputError) as caught:
        called(lambda x: pytest.fail("it ran"))(x)
    assert caught.value.name == "x"


def test_compiled_code_is_not_transformed() -> None:
    with pytest.raises(InputError):
        torch.vmap(called(lambda x: pytest.fail("it ran")))(X.expand(2, 6, 3))


def test_autocast_is_off_while_compiled_code_runs() -> None:
    call = called(lambda x: x @ x.t())
    with torch.autocast("cpu", torch.bfloat16):
        assert call(X).dtype is torch.float32
        assert (X @ X.t()).dtype is torch.bfloat16, "on again"


def test_views_that_note_a_sign_are_written_out() -> None:
    """Their memory holds the values without it."""
    call = called(lambda x: torch.from_numpy(x.detach().numpy()))
    assert torch.equal(call(torch._neg_view(X)), -X)
    assert torch.equal(call(torch.complex(X, X).conj().imag), -X)
    written = export(Model(lambda m, x, y: x.mul_(2) + y), X.clone(), X).module()
    memory = X.clone()
    with pytest.raises(InputError):
        called_as_exported(written_and_read, written, None)(memory, torch._neg_view(memory))


def written_and_read(x: Tensor, y: Tensor) -> Tensor:
    """Stands for code that was compiled of `x.mul_(2) + y`."""
    return x.mul_(2) + y


@pytest.mark.parametrize(
    ("x", "y"),
    [
        pytest.param(OVERLAPPED[:12].view(6, 2), OVERLAPPED[1:].view(6, 2), id="overlapping"),
        pytest.param(OVERLAPPED[:6].expand(2, 6).t(), X[:, :2], id="expanded"),
        pytest.param(OVERLAPPED.as_strided((6, 2), (1, 1)), X[:, :2], id="strides that meet"),
        pytest.param(OVERLAPPED[:12].view(6, 2), OVERLAPPED[:12].view(6, 2), id="the same"),
    ],
)
def test_inputs_in_the_memory_of_one_that_is_written_are_refused(x: Tensor, y: Tensor) -> None:
    graph = export(Model(lambda m, x, y: x.mul_(2) + y), torch.ones(6, 2), X[:, :2]).module()
    call = called_as_exported(written_and_read, graph, None, twice=False)
    with pytest.raises(InputError) as caught:
        call(x, y)
    assert caught.value.name == "x"
    assert torch.equal(OVERLAPPED, torch.ones(13)), "before anything is written"


def test_inputs_may_lie_between_each_other() -> None:
    graph = export(Model(lambda m, x, y: x.mul_(2) + y), torch.ones(6, 2), X[:, :2]).module()
    call, memory = called_as_exported(written_and_read, graph, None, twice=False), torch.ones(6, 4)
    assert torch.equal(call(memory[:, ::2], memory[:, 1::2]), torch.full((6, 2), 3.0))
    assert torch.equal(memory, torch.tensor([2.0, 1.0, 2.0, 1.0]).expand(6, 4))
    assert torch.equal(call(memory[:, :2], y=memory[:, 2:]).sum(0), torch.tensor([36.0, 18.0]))


def test_layouts_of_inputs() -> None:
    image = torch.randn(2, 1, 4, 5).contiguous(memory_format=torch.channels_last)
    placed = contiguous(image)
    assert torch.equal(placed, image)
    assert placed.stride() == (20, 20, 5, 1), "of one channel, too, which torch.compile compares"
    row = torch.zeros(1, 3)
    assert contiguous(row) is row and contiguous(5) == 5
    assert contiguous(torch.zeros(6)[::2]).stride() == (1,)
