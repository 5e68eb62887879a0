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
    config: str = ""

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


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 8, bias=False), (3, 5, 16)),
    "conv1d": (lambda: nn.Conv1d(4, 8, 3, stride=2), (2, 4, 9)),
    "conv2d": (lambda: conv(groups=2, bias=False), (2, 4, 9, 9)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 9)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, padding=1), (2, 4, 7, 7)),
    "conv_transpose1d_grouped": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 9)),
    "conv_transpose2d_grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 7, 7)),
    "pad_conv1d": (
        lambda: nn.Sequential(nn.ConstantPad1d((0, 2), 0.0), nn.Conv1d(4, 8, 3)), (2, 4, 9)
    ),
    "pad_conv2d": (
        lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 8, 3, stride=2)),
        (2, 4, 8, 8),
    ),
}  # fmt: skip
BEHIND: dict[str, Callable[[], nn.Module]] = {
    "": nn.Identity, "_relu": lambda: nn.ReLU(inplace=True), "_hardtanh": nn.ReLU6
}  # fmt: skip

FUSED = [
    Case("xnnpack", f"{layer}{behind}", lambda make=make, act=act: Apply(make(), act()), (shape,),
         config="static per-tensor" if "grouped" in layer else "")
    for layer, (make, shape) in LAYERS.items() for behind, act in BEHIND.items()
]  # fmt: skip

XNNPACK = [
    Case("xnnpack", "linear_relu", lambda: Apply(nn.Linear(16, 8), F.relu), ROWS, name="bias"),
    Case("xnnpack", "conv2d_relu", lambda: Apply(conv(), nn.BatchNorm2d(8), F.relu), name="bn"),
    Case("xnnpack", "conv2d_hardtanh", lambda: Apply(conv(), nn.Hardtanh(-0.3, 0.5)), name="odd bounds"),
    Case("xnnpack", "conv2d", lambda: Apply(nn.Conv2d(4, 4, 4, padding="same")), name="even kernel"),
    Case("xnnpack", "conv2d", lambda: Apply(nn.Conv2d(4, 8, 3, groups=4)), name="depthwise"),
    Case("xnnpack", "linear_dynamic", lambda: Apply(nn.Linear(16, 8)), ROWS, config="dynamic per-channel"),
    Case("xnnpack", "linear_dynamic_per_tensor", lambda: Apply(nn.Linear(16, 8)), ROWS,
         config="dynamic per-channel, one scale per tensor"),
    Case("xnnpack", "linear_dynamic_groups", lambda: Apply(nn.Linear(64, 8)), ((3, 64),),
         config="dynamic int4 groups of 32", sqnr=15.0),
    Case("xnnpack", "conv2d_dynamic", lambda: Apply(conv(groups=2)), config="dynamic per-channel"),
    Case("xnnpack", "conv_transpose2d_dynamic", lambda: Apply(nn.ConvTranspose2d(4, 6, 3, stride=2)),
         config="dynamic per-channel"),
    Case("xnnpack", "linear_weight_only", lambda: Apply(nn.Linear(16, 8)), ROWS,
         config="weight-only per-channel"),
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
    Case("xnnpack", "sub", lambda: Apply(summand(torch.sub)), ((2, 8), (2, 8))),
    Case("xnnpack", "avg_pool2d", lambda: Apply(conv(), nn.AvgPool2d(9))),
    Case("xnnpack", "mean", lambda: Apply(conv(), lambda x: x.mean((-1, -2))), name="that drops"),
    Case("xnnpack", "clamp", lambda: Apply(conv(), nn.MaxPool2d(2), lambda x: x.clamp(-0.2, 0.3))),
    Case("xnnpack", "copy", lambda: Apply(conv(), lambda x: x.clone(), conv8())),
    Case("xnnpack", "dropout", lambda: Apply(conv(), nn.Dropout(), conv8())),
    Case("xnnpack", "unsqueeze", lambda: Apply(conv(), lambda x: x.unsqueeze(1))),
    Case("xnnpack", "select", lambda: Apply(conv(), lambda x: x[:, 2])),
    Case("xnnpack", "expand", lambda: Apply(conv(), nn.AdaptiveAvgPool2d(1), lambda x: x.expand(2, 8, 3, 3))),
    Case("xnnpack", "cat", lambda: Apply(conv(), lambda x: torch.cat([x, x], 1)), name="with itself"),
    Case("xnnpack", "slice", lambda: Apply(conv(), lambda x: x[:, ::2]), name="with gaps"),
]  # fmt: skip

CASES = X86 + FUSED + XNNPACK


def sqnr(reference: Tensor, other: Tensor) -> float:
    noise = (reference - other).norm()
    return math.inf if noise == 0 else 20 * math.log10(float(reference.norm() / noise))


def bound(module: torch.fx.GraphModule, values: Tensor) -> float:
    """How far a kernel may be off: a step of a quantized activation, or what sums in float32 differ in."""
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    steps = [node.args[1] for node in module.graph.nodes if node.target is quantize]
    return 1.01 * max(steps) if steps else 1e-5 * float(values.abs().max())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_rule_claims_lowers_and_agrees(case: Case) -> None:
    torch.manual_seed(sum(map(ord, str(case))))
    model = case.build().eval()
    inputs = tuple(torch.randn(shape) for shape in case.shapes)
    backend = qompose.backend.load_backend(case.backend)
    config = backend.configs[case.config] if case.config else backend.default_config
    quantizer = qompose.quantizer_of(case.backend).set_global(config)
    result = qompose.quantize(model, inputs, backends=quantizer, calibration=[inputs], strict=True)
    rows = result.report.rows
    assert case.rule in {row.rule for row in rows}
    rule = backend.rule(case.rule)
    assert {row.kernel for row in rows if row.rule == case.rule} == {rule.kernels["torch"].name}

    reference, simulated, lowered = model(*inputs), result.converted(*inputs), result.model(*inputs)
    assert sqnr(reference, simulated) > case.sqnr
    assert lowered.dtype is reference.dtype
    assert (simulated - lowered).abs().max() <= bound(result.converted, simulated)
    assert not any("quantized_decomposed" in str(node.target) for node in _inside(result.model))


def _inside(lowered: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Nodes between the first and the last kernel: there are no stray Q/DQ operators among them."""
    nodes = list(lowered.graph.nodes)
    kernels = [i for i, node in enumerate(nodes) if "qompose_" in str(node.target)]
    one_input = sum(node.op == "placeholder" for node in nodes) == 1  # others are quantized later
    return nodes[kernels[0] : kernels[-1]] if one_input else []


def test_every_rule_has_a_case() -> None:
    """Later ones of x86 are in `tests/x86_inductor/rules/test_static.py`, and all in its contract suite."""
    of_a_case = {
        backend: {case.rule for case in CASES if case.backend == backend}
        for backend in ("x86_inductor", "xnnpack")
    }
    rules = {b: {rule.name for rule in qompose.backend.load_backend(b).rules} for b in of_a_case}
    assert of_a_case["xnnpack"] == rules["xnnpack"]
    assert of_a_case["x86_inductor"] < rules["x86_inductor"]
