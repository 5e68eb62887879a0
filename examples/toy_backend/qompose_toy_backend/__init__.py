# SPDX-License-Identifier: Apache-2.0
"""The qompose backend toy_backend: linear in int8, and relu on integers."""

import torch
from qompose import QuantizationConfig, QuantizationSpec, backend
from qompose.observers import HistogramObserver, PerChannelMinMaxObserver
from torch import Tensor
from torch.nn import functional

INT8 = QuantizationSpec(torch.int8, HistogramObserver, -128, 127, torch.per_tensor_affine)
ROWS = QuantizationSpec(
    torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0
)
ACTIVATION, WEIGHT = (backend.TensorConstraint.like(spec) for spec in (INT8, ROWS))


@torch.library.custom_op("qompose_toy_backend::linear", mutates_args=())
def linear(
    x: Tensor, x_scale: float, x_zero: int, weight: Tensor, w_scales: Tensor, bias: Tensor | None,
    y_scale: float, y_zero: int, low: int, high: int,
) -> Tensor:  # fmt: skip
    """Multiply integers exactly; then scale, add the bias, round half to even and saturate."""
    total = functional.linear(x.long() - x_zero, weight.long()) * (w_scales * x_scale)
    y = total if bias is None else total + bias
    return (torch.round(y / y_scale) + y_zero).clamp(low, high).to(torch.int8)


@linear.register_fake
def _(x, x_scale, x_zero, weight, *_):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def emit_linear(region):
    x, weight, y = (region.quantized(role) for role in ("input", "weight", "output"))
    inputs = (x.node, x.scale, x.zero_point, weight.node, weight.scale)
    bias, output = region.argument("linear", "bias"), (y.scale, y.zero_point, y.low, y.high)
    return region.call(linear, *inputs, bias, *output, dtype=y.dtype)


def linear_pattern(input, weight, bias=None):
    return functional.linear(input, weight, bias)


SHAPES, OPERATORS = ((2, 3), (4, 3), (4,)), (("linear", torch.ops.aten.linear.default),)
LINEAR = backend.Rule(
    name="linear",
    patterns=tuple(backend.Pattern(linear_pattern, SHAPES[:n], OPERATORS) for n in (3, 2)),
    weight="weight",
    bias="bias",
    channels=(-1, -1),  # of input and output
    accepts={"activation": ACTIVATION, "weight": WEIGHT, "output": ACTIVATION},
    kernels={"torch": backend.Kernel("int8 linear", emit_linear)},
)
RELU = backend.Rule(
    name="relu",
    patterns=(backend.OperatorPattern((torch.ops.aten.relu.default,)),),
    activations=("self",),
    shares=True,  # input and output have one scale and zero point
    condition="all",  # it applies where the input is quantized already
    accepts={"activation": ACTIVATION},
    kernels={"torch": backend.Kernel("relu on integers", backend.on_integers)},
)


class ToyBackend(backend.Backend):
    name = "toy_backend"
    api_version = 1
    rules = (LINEAR, RELU)  # in order of priority: longer fusions first
    configs = {"static": QuantizationConfig(INT8, INT8, ROWS, name="static")}


@backend.hookimpl
def qompose_backend():
    return ToyBackend()
