# SPDX-License-Identifier: Apache-2.0
"""Random programs: a chain of operators that read any of the values before them, of one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6

Step = tuple[str, int, int]
Values = list[Tensor]

OPERATORS: dict[str, Callable[[Random, Tensor, Tensor, int], Tensor]] = {
    "linear": lambda model, x, y, n: model.linears[n % len(model.linears)](x),
    "gelu": lambda model, x, y, n: F.gelu(x),
    "relu": lambda model, x, y, n: torch.relu(x),
    "softmax": lambda model, x, y, n: torch.softmax(x, 1),
    "norm": lambda model, x, y, n: model.norm(x),
    "add": lambda model, x, y, n: x + y,
    "add_relu": lambda model, x, y, n: torch.relu(x + y),
    "scalar": lambda model, x, y, n: x + float(n),
    "scaled": lambda model, x, y, n: x * 1.0,
    "dropout": lambda model, x, y, n: F.dropout(x, 0.1, model.training),
    "clone": lambda model, x, y, n: x.clone(),
    "swap": lambda model, x, y, n: torch.cat(x.chunk(2, 1)[::-1], 1),
    "half": lambda model, x, y, n: torch.cat([x.chunk(2, 1)[0], y.chunk(2, 1)[1]], 1),
    "table": lambda model, x, y, n: x + model.table,
    "sized": lambda model, x, y, n: x.reshape(x.shape[0], 2, -1).transpose(1, 2).flatten(1),
}


class Random(nn.Module):
    """Runs steps, each an operator on two of the values so far; two of its linear layers are tied."""

    def __init__(self, steps: list[Step], outputs: list[int]) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.linears[2].weight = self.linears[0].weight
        self.linears[1].bias = None
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.randn(WIDTH))
        self.steps, self.outputs = steps, outputs

    def forward(self, first: Tensor, second: Tensor) -> Any:
        values = [first, second]
        for number, (kind, one, other) in enumerate(self.steps):
            x, y = values[-1 - one % len(values)], values[-1 - other % len(values)]
            values.append(OPERATORS[kind](self, x, y, number))
        return [values[-1 - n % len(values)] for n in self.outputs]


steps = st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 3), st.integers(0, 5))
programs = st.builds(
    Random,
    st.lists(steps, min_size=3, max_size=14),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
)


def example(seed: int, batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, WIDTH, generator=generator),
        torch.randn(batch, WIDTH, generator=generator),
    )


def exported(model: nn.Module, dynamic: bool) -> torch.fx.GraphModule:
    batch = torch.export.Dim("batch", max=64)
    shapes = {"first": {0: batch}, "second": {0: batch}} if dynamic else None
    program = torch.export.export(model.eval(), example(0), dynamic_shapes=shapes)
    module = program.module(check_guards=False)
    assert isinstance(module, torch.fx.GraphModule)
    return module
