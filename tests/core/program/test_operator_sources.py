# SPDX-License-Identifier: Apache-2.0
"""Python's operators as sources: of tensors they are methods, whose names differ."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.core.program.test_sources import found, sourced

BINARY = [
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "lshift", "rshift"),
]
IN_PLACE = [
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    "imatmul",
]
UNARY = ["neg", "pos", "abs", "invert"]
INTEGERS = ["and_", "or_", "xor", "invert", "iand", "ior", "ixor", "lshift", "rshift"]


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*(tensor.clone() for tensor in tensors))


@pytest.mark.parametrize("name", BINARY + IN_PLACE + UNARY)
def test_functions_of_operator(name: str) -> None:
    function = getattr(operator, name)
    x = torch.ones(2, 2, dtype=torch.int32 if name in INTEGERS else torch.float32)
    inputs = (x,) if name in UNARY else (x, x + 1)
    model = sourced(Apply(function), *inputs)
    others = [getattr(operator, other) for other in BINARY + IN_PLACE + UNARY if other != name]
    assert len(found(model, function)) == 1
    assert sum(len(found(model, other)) for other in others) == (name.endswith("matmul"))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
def test_numbers_on_the_left(name: str) -> None:
    function = getattr(operator, name)
    model = sourced(Apply(lambda x: function(2, x)), torch.ones(2) * 3)
    assert len(found(model, function)) == 1
