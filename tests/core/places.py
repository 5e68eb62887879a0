# SPDX-License-Identifier: Apache-2.0
"""Programs in which selectors have places to speak of, and what each of their operators got."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from qompose import RuleQuantizer
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from tests.core.toy import ADD, LINEAR, Model, ToyBackend, export, plan_of, prepare, randn, seeded

aten = torch.ops.aten
X = randn(4, 3)
IS_LINEAR = aten.linear.default


def rules(*table: Any) -> RuleQuantizer:
    return RuleQuantizer(ToyBackend(table or [LINEAR, ADD]))


def configs(program: Any, quantizer: RuleQuantizer) -> dict[str, str]:
    """Operator -> the configuration of its claim, of those that some rule could take."""
    plan = plan_of(prepare(program, quantizer))
    return {
        o.name: "float" if o.claim is None else plan.claims[o.claim].config
        for o in plan.operators
        if o.operator in ("aten.linear", "aten.add.Tensor", "aten.conv2d")
    }


def branches(m: Any, x: Tensor) -> Tensor:
    """Two layers beside each other, joined, and one layer after that."""
    x = m.first(x)
    return m.last(m.left(x) + m.right(x))


FOUR = {name: nn.Linear(3, 3) for name in ("first", "left", "right", "last")}


PROGRAM = export(seeded(Model(branches, **FOUR)), X)


class Caller(nn.Module):
    """Calls one function three times, the last time in a submodule, and one layer twice."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.fc = nn.Parameter(torch.empty(3, 3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(self.fc(x), self.weight)
            return F.linear(self.fc(x), self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = Caller.Inner(), nn.Parameter(torch.empty(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x), self.weight)


CALLS = export(
    seeded(Caller()), X
)  # linear: inner.fc, linear_1: inner, 2: inner.fc, 3: inner, 4: model


def regions() -> nn.Module:
    """Four layers, two of them in a region without gradients."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        with torch.no_grad():
            x = m.c(m.b(x))
        return m.d(x)

    return Model(forward, **{name: nn.Linear(3, 3) for name in "abcd"})


def scanned() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        def step(carried: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
            return carried + 1, m.cell(part)

        return m.after(scan(step, torch.zeros(1), m.before(x))[1])

    return Model(forward, **{name: nn.Linear(3, 3) for name in ("before", "cell", "after")})


def held(m: Any, x: Tensor) -> Tensor:
    """Layers in containers, which run nothing themselves."""
    for block in m.blocks:
        x = block(x)
    return m.parts["an odd name"](x)


BLOCKS = nn.ModuleList([nn.Sequential(nn.Linear(3, 3)) for _ in range(2)])
PARTS = nn.ModuleDict({"an odd name": nn.Linear(3, 3)})
HELD = export(seeded(Model(held, blocks=BLOCKS, parts=PARTS)), X)
