# SPDX-License-Identifier: Apache-2.0
"""A digest of a tensor differs where a number was changed or moved, and is equal for equal tensors."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, strategies as st
from qompose import UserError
from qompose.quantizer.interop.sandbox import _CHUNK, digest
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import Foreign
from tests.core.toy import export, prepare, randn, seeded

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool,
          torch.complex64, torch.complex128)  # fmt: skip
LARGE = 4 * _CHUNK + 3
"""Numbers of float32 in two chunks and a rest that is no whole word."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors(dtype: torch.dtype) -> None:
    tensor = (randn(5, 7) * 3).to(dtype)
    assert digest(tensor) == digest(tensor.clone()) == digest(tensor.t().contiguous().t())
    changed = tensor.clone()
    changed[4, 6] = not changed[4, 6] if dtype is torch.bool else changed[4, 6] + 1
    assert digest(tensor) != digest(changed)


@given(st.integers(2, 40), st.data())
def test_moved_numbers(size: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(size)))
    tensor = torch.arange(1.0, size + 1)
    assert (digest(tensor) == digest(tensor[list(order)])) == (list(order) == sorted(order))


@given(st.integers(0, LARGE - 1), st.integers(0, LARGE - 1))
def test_two_numbers_of_a_large_tensor(one: int, other: int) -> None:
    before = _large()
    after = before.clone()
    after[one], after[other] = before[other], before[one]
    assert (digest(before) == digest(after)) == (one == other)


def _large() -> Tensor:
    return torch.arange(1.0, LARGE + 1)


@pytest.mark.parametrize("turn", [torch.fliplr, torch.flipud, torch.t], ids=lambda f: f.__name__)
def test_turned(turn: Any) -> None:
    for size in (4, 512):  # whole chunks change places too
        tensor = randn(size, size)
        assert digest(tensor) != digest(turn(tensor).contiguous())


def test_shape_and_dtype_count() -> None:
    tensor = torch.zeros(4, 6)
    assert len({digest(t) for t in (tensor, tensor.view(6, 4), tensor.int(), tensor[:, :5])}) == 4


def test_tensors_that_begin_anywhere_in_their_memory() -> None:
    memory = randn(9)
    for start in range(4):
        part = memory[start : start + 5]
        assert digest(part) == digest(part.clone())


OTHERS = {
    "empty": torch.empty(0),
    "one number": torch.tensor(2.0),
    "meta": torch.empty(3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("tensor", OTHERS.values(), ids=OTHERS)
def test_others(tensor: Tensor) -> None:
    assert digest(tensor) == digest(tensor.clone())


def _flipped_in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(weight.flip(0))


def _flipped(weight: Tensor) -> None:
    weight.data = weight.data.flip(0)


@pytest.mark.parametrize("flip", [_flipped_in_place, _flipped])
@pytest.mark.parametrize("hook", ["transform_for_annotation", "annotate", "validate"])
def test_a_member_that_moves_the_rows_of_a_parameter(hook: str, flip: Any) -> None:
    """A sum of the numbers would stay the same."""

    def act(self: Any, model: GraphModule) -> Any:
        flip(model.get_parameter("weight"))
        return model

    program = export(seeded(nn.Linear(4, 4)), randn(6, 4))
    with pytest.raises(UserError, match=r"tests\.Flipping wrote to parameters .*: weight\b"):
        prepare(program, qompose.compose(type("Flipping", (Foreign,), {hook: act})()))
