# SPDX-License-Identifier: Apache-2.0
"""What eight bits cost a model, without any quantizer: every float value rounded to 256 steps of its range.

It is what `zoo.py` judges error by, and uses nothing of qompose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

STEPS = 255
LARGEST = 1e4
"""Values beyond are masks, not data: a range that holds them would leave nothing of the rest."""


class Rounded(Interpreter):
    """Runs a program; once the ranges are known, with every float result on a grid of its own.

    Weights, that is parameters of two dimensions or more, have a symmetric grid for each index of the
    first. What bodies of control flow compute stays as it is.
    """

    def __init__(self, program: GraphModule) -> None:
        super().__init__(program)
        self.ranges: dict[str, tuple[float, float]] = {}
        self.rounding = False

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        if n.op == "get_attr":
            return _rows(value) if self.rounding and value.dim() > 1 else value
        if not self.rounding:
            low, high = self.ranges.get(n.name, (0.0, 0.0))
            self.ranges[n.name] = min(low, float(value.min())), max(high, float(value.max()))
            return value
        return _on_grid(value, *self.ranges[n.name]) if n.op != "output" else value


def _on_grid(value: Tensor, low: float, high: float) -> Tensor:
    scale = (high - low) / STEPS
    if not 0.0 < scale < LARGEST / STEPS:  # not a number neither
        return value
    zero = round(-low / scale)
    return (((value / scale).round() + zero).clamp(0, STEPS) - zero) * scale


def _rows(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True) / (STEPS // 2)
    scale = torch.where(scale > 0, scale, 1)
    return (weight / scale).round() * scale


def rounded_outputs(
    program: GraphModule, calibration: Sequence[tuple[Any, ...]], held_out: Sequence[Any]
) -> list[Any]:
    """The outputs on each of the held-out inputs, with ranges of the calibration inputs."""
    runner = Rounded(program)
    with torch.no_grad():
        with buffers_restored(program):
            for inputs in calibration:
                runner.run(*inputs)
        runner.rounding = True
        return [runner.run(*inputs) for inputs in held_out]


@contextmanager
def buffers_restored(program: nn.Module) -> Iterator[None]:
    """Give a program the buffers again that it began with: a run may write to them."""
    before = [(buffer, buffer.clone()) for buffer in program.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
