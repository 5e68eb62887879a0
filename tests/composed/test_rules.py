# SPDX-License-Identifier: Apache-2.0
"""Every rule of every plugin: it claims what it says, lowers to its kernel, and agrees with Q/DQ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import qompose
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A module in which a backend's rule must apply, with the shapes of its inputs."""

    backend: str
    rule: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((2, 4, 9, 9),)
    sqnr: float = 25.0
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.backend}-{self.rule}{f'-{self.name}' if self.name else ''}"


class Apply(nn.Module):
    """Modules and functions, one after the other; the convolution's second input is a summand."""

    def __init__(self, *steps: Callable[..., Tensor]) -> None:
        super().__init__()
        self.steps = list(steps)
        for number, step in enumerate(steps):
            if isinstance(step, nn.Module):
                self.add_module(f"step{number}", step)

    def forward(self, *inputs: Tensor) -> Tensor:
        value, *others = inputs
        for step in self.steps:
            value = step(value, *others) if getattr(step, "takes_all", False) else step(value)
        return value


def summand(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Mark a step that takes the second input too."""

    def step(value: Tensor, other: Tensor) -> Tensor:
        return function(value, other)

    step.takes_all = True  # type: ignore[attr-defined]
    return step


def conv(**options: object) -> nn.Module:
    return nn.Conv2d(4, 8, 3, padding=1, **options)  # type: ignore[arg-type]


IMAGES = ((2, 4, 9, 9), (2, 8, 9, 9))
ROWS = ((3, 5, 16),)

X86 = [
    Case("x86_inductor", "conv2d_add_relu", lambda: Apply(conv(), summand(torch.add), F.relu), IMAGES),
    Case("x86_inductor", "conv2d_add_relu",
         lambda: Apply(conv(), summand(lambda a, b: b + a), nn.ReLU(inplace=True)), IMAGES, name="swapped"),
    Case("x86_inductor", "conv2d_add", lambda: Apply(conv(bias=False), summand(torch.add)), IMAGES),
    Case("x86_inductor", "conv2d_relu", lambda: Apply(conv(stride=2), nn.ReLU(inplace=True))),
    Case("x86_inductor", "conv2d_relu", lambda: Apply(conv(), nn.BatchNorm2d(8), F.relu), name="bn"),
    Case("x86_inductor", "conv2d_hardtanh", lambda: Apply(conv(groups=4), nn.ReLU6())),
    Case("x86_inductor", "conv2d_hardswish", lambda: Apply(conv(dilation=2), nn.Hardswish())),
    Case("x86_inductor", "conv2d_silu", lambda: Apply(conv(), nn.SiLU(inplace=True))),
    Case("x86_inductor", "conv2d", lambda: Apply(conv(bias=False))),
    Case("x86_inductor", "linear_relu", lambda: Apply(nn.Linear(16, 8), F.relu), ROWS),
    Case("x86_inductor", "linear_gelu", lambda: Apply(nn.Linear(16, 8), nn.GELU("tanh")), ROWS),
    Case("x86_inductor", "linear_gelu", lambda: Apply(nn.Linear(16, 8), nn.GELU()), ROWS, name="erf"),
    Case("x86_inductor", "linear", lambda: Apply(nn.Linear(16, 8, bias=False)), ROWS),
    Case("x86_inductor", "max_pool2d", lambda: Apply(conv(), nn.MaxPool2d(2), conv8())),
]  # fmt: skip


def conv8() -> nn.Module:
    return nn.Conv2d(8, 4, 3)


XNNPACK = [
    Case("xnnpack", "linear_relu", lambda: Apply(nn.Linear(16, 8), F.relu), ROWS),
    Case("xnnpack", "linear", lambda: Apply(nn.Linear(16, 8, bias=False)), ROWS),
    Case("xnnpack", "conv2d_relu", lambda: Apply(conv(), nn.BatchNorm2d(8), nn.ReLU(inplace=True))),
    Case("xnnpack", "conv2d", lambda: Apply(conv(groups=2, bias=False))),
    Case("xnnpack", "conv1d_relu", lambda: Apply(nn.Conv1d(4, 8, 3), F.relu), ((2, 4, 9),)),
    Case("xnnpack", "conv1d", lambda: Apply(nn.Conv1d(4, 8, 3, stride=2)), ((2, 4, 9),)),
    Case("xnnpack", "add_relu", lambda: Apply(summand(torch.add), F.relu), ((2, 8), (2, 8))),
    Case("xnnpack", "add", lambda: Apply(summand(lambda a, b: a + b)), ((2, 8), (2, 8))),
    Case("xnnpack", "add", lambda: Apply(lambda a: a + a), ((2, 8),), name="with itself"),
    Case("xnnpack", "add", lambda: Apply(lambda a: a + 2.5), ((2, 8),), name="scalar"),
    Case("xnnpack", "mul", lambda: Apply(summand(torch.mul)), ((2, 8), (2, 8))),
    Case("xnnpack", "adaptive_avg_pool2d", lambda: Apply(conv(), nn.AdaptiveAvgPool2d(1))),
    Case("xnnpack", "mean", lambda: Apply(conv(), lambda x: x.mean((2, 3), keepdim=True))),
    Case("xnnpack", "max_pool2d", lambda: Apply(conv(), nn.MaxPool2d(3, 2, 1))),
    Case("xnnpack", "relu", lambda: Apply(conv(), nn.MaxPool2d(2), F.relu)),
    Case("xnnpack", "cat", lambda: Apply(conv(), summand(lambda a, b: torch.cat([a, b], 1))), IMAGES),
    Case("xnnpack", "view", lambda: Apply(conv(), lambda x: x.flatten(1))),
    Case("xnnpack", "permute", lambda: Apply(conv(), lambda x: x.permute(0, 2, 3, 1))),
    Case("xnnpack", "squeeze", lambda: Apply(conv(), nn.AdaptiveAvgPool2d(1), lambda x: x.squeeze(3))),
    Case("xnnpack", "slice", lambda: Apply(conv(), lambda x: x[:, 2:5])),
]  # fmt: skip

CASES = X86 + XNNPACK


def sqnr(reference: Tensor, other: Tensor) -> float:
    noise = (reference - other).norm()
    return math.inf if noise == 0 else 20 * math.log10(float(reference.norm() / noise))


def step_of(module: torch.fx.GraphModule) -> float:
    """The largest scale of any quantized activation in a graph."""
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    return max(node.args[1] for node in module.graph.nodes if node.target is quantize)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_rule_claims_lowers_and_agrees(case: Case) -> None:
    torch.manual_seed(sum(map(ord, str(case))))
    model = case.build().eval()
    inputs = tuple(torch.randn(shape) for shape in case.shapes)
    result = qompose.quantize(
        model, inputs, backends=[case.backend], calibration=[inputs], strict=True
    )
    rows = result.report.rows
    assert case.rule in {row.rule for row in rows}
    rule = qompose.load_backend(case.backend).rule(case.rule)
    assert {row.kernel for row in rows if row.rule == case.rule} == {rule.kernels["torch"].name}

    reference, simulated, lowered = model(*inputs), result.converted(*inputs), result.model(*inputs)
    assert sqnr(reference, simulated) > case.sqnr
    assert lowered.dtype is reference.dtype
    assert (simulated - lowered).abs().max() <= 1.01 * step_of(result.converted)
    assert not any("quantized_decomposed" in str(node.target) for node in _inside(result.model))


def _inside(lowered: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Nodes between the first and the last kernel: there are no stray Q/DQ operators among them."""
    nodes = list(lowered.graph.nodes)
    kernels = [i for i, node in enumerate(nodes) if "qompose_" in str(node.target)]
    one_input = sum(node.op == "placeholder" for node in nodes) == 1  # others are quantized later
    return nodes[kernels[0] : kernels[-1]] if one_input else []


@pytest.mark.parametrize("backend", ["x86_inductor", "xnnpack"])
def test_every_rule_has_a_case(backend: str) -> None:
    """Save one that applies to batches of any size alone, which tests/contracts tries."""
    rules = {rule.name for rule in qompose.load_backend(backend).rules} - {"view_any_batch"}
    assert rules == {case.rule for case in CASES if case.backend == backend}
