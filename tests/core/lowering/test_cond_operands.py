# SPDX-License-Identifier: Apache-2.0
"""Branches of cond in compiled programs read their operands, however what computes them is laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn

from tests.core.toy import LINEAR, convert, export, randn, seeded, toy
from tests.sampling import at_once

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

IN_CPP = {"cpp_wrapper": True}
OPERANDS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.transpose(1, 2).contiguous(),
    "a part of it": lambda y: y.transpose(1, 2).contiguous()[:, 1:],
    "repeated": lambda y: y.transpose(1, 2)[:1].expand(2, -1, -1),
    "not contiguous": lambda y: (y + 1).transpose(1, 2),
    "channels last": lambda y: y[..., None].contiguous(memory_format=torch.channels_last),
}


def doubled(a: Tensor, b: Tensor) -> Tensor:
    return a * 2 + b


def less(a: Tensor, b: Tensor) -> Tensor:
    return a + 1 - b


def nested(a: Tensor, b: Tensor) -> Tensor:
    other = (a.transpose(1, 2) * 3).contiguous().transpose(1, 2).contiguous()
    return torch.cond(b.sum() > 0, doubled, less, (other, b))  # type: ignore[no-any-return]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.linear(x)
        operands = {name: operand(y) for name, operand in OPERANDS.items()}
        first = torch.cond(
            y.sum() > 0, nested, less, (operands["transposed"], operands["transposed"] * 3)
        )
        return [
            first,
            *(torch.cond(x.sum() > 0, doubled, less, (o, o * 3)) for o in operands.values()),
        ]


@pytest.mark.parametrize("options", at_once([{}, IN_CPP], {}), ids=["python", "cpp"])
def test_branches_read_what_was_computed(options: dict[str, Any]) -> None:
    x = randn(2, 7, 3)
    with torch.no_grad():  # with gradients, torch's trace of the branches warns
        program = export(seeded(Branching()), x)
    model = qompose.lower(convert(program, toy(LINEAR), x))
    compiled = qompose.compile_lowered(model, options=options)
    for given in (x.abs(), -x.abs()):
        torch.testing.assert_close(compiled(given), model(given))
    torch._dynamo.reset()


class OfConvolution(nn.Module):
    """Branches read parts of what torch computes as channels last, whose example is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 8), nn.ConvTranspose2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        z = self.conv(self.linear(x))
        parts = (z[0, 0], z[:, 0], z[:, :1], z[0])
        return [
            torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (part,)) for part in parts
        ]


@pytest.mark.parametrize("options", at_once([{}, IN_CPP], IN_CPP), ids=["python", "cpp"])
def test_parts_of_another_layout_are_read_without_its_gaps(options: dict[str, Any]) -> None:
    x = randn(1, 3, 8, 8)
    with torch.no_grad():
        program = export(seeded(OfConvolution()), x)
    model = qompose.lower(convert(program, toy(LINEAR), x))
    compiled = qompose.compile_lowered(model, options=options)
    for given in (x.abs(), -x.abs()):
        torch.testing.assert_close(compiled(given), model(given))
    torch._dynamo.reset()
