# SPDX-License-Identifier: Apache-2.0
"""Programs of ExecuTorch: of many operators or models, each beside what shall give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import qompose
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from qompose_xnnpack import ExecutorchProgram
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor, nn
from torch.fx import GraphModule

QD = torch.ops.quantized_decomposed
FULL = (-128, 127)

QParams = tuple[float, int]
Constants = dict[str, Tensor]


def converted(
    model: nn.Module, *batches: Any, quantizer: Any = None, kwargs: Any = None, sizes: Any = None
) -> GraphModule:
    """Export with the first batch, one input or several, calibrate with all, and convert."""
    inputs = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    model = model.eval().requires_grad_(False)
    program = torch.export.export(model, inputs[0], kwargs, dynamic_shapes=sizes)
    prepared = qompose.prepare_pt2e(program, quantizer or qompose.compose("xnnpack"))
    for each in inputs:
        prepared(*each, **(kwargs or {}))
    return qompose.convert_pt2e(prepared)


def in_two_programs(
    names: Iterable[str], at_once: Sequence[str], make: Callable[[str], GraphModule]
) -> Callable[[str], tuple[GraphModule, Any]]:
    """What gives a model and its method by name: of a program of those `at_once`, or of one of all others."""

    @cache
    def program(now: bool) -> dict[str, tuple[GraphModule, Any]]:
        chosen = [name for name in names if (name in at_once) == now]
        models = {f"method{number}": make(name) for number, name in enumerate(chosen)}
        methods = qompose.lower(models, "executorch").methods
        return {n: (models[e], methods[e]) for n, e in zip(chosen, models, strict=True)}

    return lambda name: program(name in at_once)[name]


def quantize(x: Tensor, qparams: QParams) -> Tensor:
    return QD.quantize_per_tensor.default(x, *qparams, *FULL, torch.int8)


def dequantize(integers: Tensor, qparams: QParams) -> Tensor:
    return QD.dequantize_per_tensor.default(integers, *qparams, *FULL, torch.int8)


def through(x: Tensor, qparams: QParams) -> Tensor:
    """Quantize and dequantize, as around an operator in a converted graph."""
    return dequantize(quantize(x, qparams), qparams)


def per_token(x: Tensor) -> Tensor:
    scale, zero = QD.choose_qparams_per_token_asymmetric.default(x, torch.int8)
    integers = QD.quantize_per_token.default(x, scale, zero, *FULL, torch.int8)
    args = (scale, zero, *FULL, torch.int8, torch.float32)
    return QD.dequantize_per_token.default(integers, *args)


def at_run_time(x: Tensor) -> Tensor:
    """Quantize with a range chosen at run time; the runtime chooses one per image or row."""
    eps = torch.finfo(torch.float32).eps
    scale, zero = QD.choose_qparams.tensor(x, *FULL, eps, torch.int8)
    integers = QD.quantize_per_tensor.tensor(x, scale, zero, *FULL, torch.int8)
    return QD.dequantize_per_tensor.tensor(integers, scale, zero, *FULL, torch.int8)


def per_channel(constants: Constants, axis: int = 0) -> Tensor:
    """The real weight, from ``weight``, ``scale`` and ``zero``."""
    args = (constants["weight"], constants["scale"], constants["zero"])
    return QD.dequantize_per_channel.default(*args, axis, -127, 127, torch.int8)


def weight_constants(seed: int, *shape: int, axis: int = 0, bias: bool = True) -> Constants:
    """An int8 weight, a scale and a zero per channel of ``axis``, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    channels = shape[axis]
    constants = {
        "weight": weight,
        "scale": torch.rand(channels, generator=generator) * 0.01 + 1e-3,
        "zero": torch.zeros(channels, dtype=torch.int64),
    }
    if bias:
        constants["bias"] = torch.randn(channels, generator=generator)
    return constants


@dataclass(frozen=True)
class Case:
    """An operator in Q/DQ form and by the kernels under test, of constants and inputs of these shapes."""

    graph: Callable[..., Tensor]
    kernel: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    constants: Constants = field(default_factory=dict)


class Together(nn.Module):
    """The graphs of all cases, on inputs of their own."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = list(cases)
        for index, case in enumerate(self.cases):
            for name, value in case.constants.items():
                self.register_buffer(f"{name}_{index}", value)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        rest, results = list(inputs), []
        for index, case in enumerate(self.cases):
            constants = {name: getattr(self, f"{name}_{index}") for name in case.constants}
            mine, rest = rest[: len(case.shapes)], rest[len(case.shapes) :]
            results.append(case.graph(constants, *mine))
        return results


def lower(cases: Sequence[Case]) -> ExecutorchProgram:
    """Lower all cases as one program; every operator must run in XNNPACK."""
    model = Together(cases)
    inputs = tuple(torch.ones(shape) for case in cases for shape in case.shapes)
    graph = torch.export.export(model, inputs).module()
    program = lower_to_executorch(graph, inputs)
    assert program.delegation.portable == ()
    return program


def compare(
    cases: Sequence[Case], program: ExecutorchProgram, inputs: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return what the runtime and what the kernel gives, per case."""
    rest, pairs = list(inputs), []
    for case, there in zip(cases, program.run(*inputs), strict=True):
        mine, rest = rest[: len(case.shapes)], rest[len(case.shapes) :]
        here = case.kernel(case.constants, *mine)
        assert here.shape == there.shape
        assert here.dtype == there.dtype
        pairs.append((there, here))
    return pairs


def steps_apart(pair: tuple[Tensor, Tensor]) -> int:
    there, here = pair
    return int((there.int() - here.int()).abs().max())
