# SPDX-License-Identifier: Apache-2.0
"""Expands that change nothing are gone before the partitioner looks; those that do something stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from qompose_xnnpack import ExecutorchProgram
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor, nn

pytest.importorskip("executorch")

EXPAND = "aten.expand_copy.default"
X, Y = torch.randn(2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def lowered(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> ExecutorchProgram:
    exported = torch.export.export(Of(function).eval(), inputs, **options)
    return lower_to_executorch(exported.module(), inputs, **options)


def portable(program: ExecutorchProgram) -> list[str]:
    return [operator.name for operator in program.delegation.portable]


def agree(program: ExecutorchProgram, function: Callable[..., Any], *inputs: Tensor) -> None:
    torch.testing.assert_close(program.run(*inputs), function(*inputs), rtol=1e-4, atol=1e-5)


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).relu() @ x


def test_matrix_products_are_one_delegate() -> None:
    program = lowered(product, X, Y)
    assert (portable(program), len(program.delegation.delegates)) == ([], 1)
    agree(program, product, X, Y)


def test_with_a_dynamic_batch_too() -> None:
    batch = {0: torch.export.Dim("batch", max=8)}
    program = lowered(product, X, Y, dynamic_shapes=(batch, batch))
    assert EXPAND not in portable(program)
    for rows in (1, 2, 8):
        x, y = torch.randn(2, rows, 3, 4, 4)
        agree(program, product, x, y)


def test_expands_that_grow_their_input_or_are_returned_stay() -> None:
    """What is returned is an output of its own."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :1].expand(2, 3, 4, 4) @ y, (x + y).expand(2, 3, 4, 4)

    program = lowered(function, X, Y)
    assert portable(program).count(EXPAND) == 2
    agree(program, function, X, Y)
