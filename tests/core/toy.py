# SPDX-License-Identifier: Apache-2.0
"""A small backend made for these tests, and the few lines that every test of core needs."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec, Quantizer, RuleQuantizer
from qompose.backend import Backend, Kernel, OperatorPattern, Pattern, Region, Rule, on_integers
from qompose.observers import MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec import QuantizationAnnotation
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

aten = torch.ops.aten

INT8 = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
UINT8 = QuantizationSpec(torch.uint8, MinMaxObserver, 0, 255, torch.per_tensor_affine)
WEIGHT = QuantizationSpec(
    torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0
)
WEIGHT_PER_TENSOR = QuantizationSpec(
    torch.int8, MinMaxObserver, -127, 127, torch.per_tensor_symmetric
)
RUN_TIME = QuantizationSpec(
    torch.int8, PlaceholderObserver, -128, 127, torch.per_tensor_affine, is_dynamic=True
)

STATIC = QuantizationConfig(INT8, INT8, WEIGHT, name="static", algorithms=())
STATIC_UINT8 = QuantizationConfig(UINT8, UINT8, WEIGHT, name="static uint8", algorithms=())
PER_TENSOR = QuantizationConfig(INT8, INT8, WEIGHT_PER_TENSOR, name="per tensor", algorithms=())
DYNAMIC = QuantizationConfig(RUN_TIME, None, WEIGHT, name="dynamic")
WEIGHT_ONLY = QuantizationConfig(None, None, WEIGHT, name="weight-only")
ALL_MODES = frozenset({"static", "dynamic", "weight-only"})


_FLAT = ((2, 3), (4, 3), (4,))
_IMAGE = ((1, 2, 4, 4), (3, 2, 1, 1), (3,))
_LINEAR = (("op", aten.linear.default),)
_CONV = (("op", aten.conv2d.default),)

LINEAR_PATTERN = Pattern(lambda input, weight, bias: F.linear(input, weight, bias), _FLAT, _LINEAR)
LINEAR_NO_BIAS_PATTERN = Pattern(lambda input, weight: F.linear(input, weight), _FLAT[:2], _LINEAR)
LINEAR_RELU_PATTERN = Pattern(
    lambda input, weight, bias: F.linear(input, weight, bias).relu(),
    _FLAT,
    (*_LINEAR, ("relu", aten.relu.default)),
)
CONV_PATTERN = Pattern(lambda input, weight, bias: F.conv2d(input, weight, bias), _IMAGE, _CONV)
CONV_RELU_PATTERN = Pattern(
    lambda input, weight, bias: F.conv2d(input, weight, bias).relu(), _IMAGE, _CONV
)
CONV_ADD_RELU_PATTERN = Pattern(
    lambda input, weight, bias, other: (F.conv2d(input, weight, bias) + other).relu(),
    (*_IMAGE, (1, 3, 4, 4)),
    _CONV,
)
ADD_RELU_PATTERN = Pattern(
    lambda self, other: (self + other).relu(), ((2, 3), (2, 3)), (("op", aten.add.Tensor),)
)


def emit_linear(region: Region) -> Node:
    """Multiply the integers, in float64, which is exact; requantize where the consumers want it."""
    x, w = region.quantized("input"), region.quantized("weight")
    out = region.output
    result = (1.0, 0, 0, 0) if out is None else (out.scale, out.zero_point, out.low, out.high)
    return region.call(
        torch.ops.qompose_toy.linear.default,
        x.node, x.scale, x.zero_point, w.node, region.constant("toy_scales", w.scales),
        region.argument("op", "bias"), out is not None, *result,
        dtype=None if out is None else out.dtype,
    )  # fmt: skip


@torch.library.custom_op("qompose_toy::linear", mutates_args=())
def toy_linear(
    x: Tensor, scale: float, zero_point: int, weight: Tensor, scales: Tensor, bias: Tensor | None,
    quantize: bool, out_scale: float, out_zero_point: int, low: int, high: int,
) -> Tensor:  # fmt: skip
    """The integer product, exactly, as float32 or requantized to int8."""
    y = F.linear(x.double() - zero_point, weight.double()) * (scales.double() * scale)
    y = y if bias is None else y + bias
    if not quantize:
        return y.float()
    return (torch.round(y / out_scale) + out_zero_point).clamp(low, high).to(torch.int8)


@toy_linear.register_fake
def _(x, scale, zero_point, weight, scales, bias, quantize, *rest) -> Tensor:  # type: ignore[no-untyped-def]
    kind = torch.int8 if quantize else torch.float32
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=kind)


def rule(name: str, *patterns: Any, **facts: Any) -> Rule:
    return Rule(name=name, patterns=patterns, modes=facts.pop("modes", ALL_MODES), **facts)


LINEAR = rule(
    "linear", LINEAR_PATTERN, LINEAR_NO_BIAS_PATTERN, anchor="op", weight="weight",
    kernels={"torch": Kernel("toy linear", emit_linear)},
)  # fmt: skip
LINEAR_RELU = rule("linear_relu", LINEAR_RELU_PATTERN, anchor="op", weight="weight")
CONV = rule("conv", CONV_PATTERN, anchor="op", weight="weight")
CONV_RELU = rule("conv_relu", CONV_RELU_PATTERN, anchor="op", weight="weight")
CONV_ADD_RELU = rule(
    "conv_add_relu", CONV_ADD_RELU_PATTERN,
    anchor="op", activations=("input", "other"), weight="weight",
)  # fmt: skip
ADD = rule("add", OperatorPattern((aten.add.Tensor,)), activations=("self", "other"))
ADD_RELU = rule("add_relu", ADD_RELU_PATTERN, anchor="op", activations=("self", "other"))
RELU = rule("relu", OperatorPattern((aten.relu.default,)), activations=("self",))
SIGMOID = rule("sigmoid", OperatorPattern((aten.sigmoid.default,)), activations=("self",))
MATMUL = rule("matmul", OperatorPattern((aten.matmul.default,)), activations=("self", "other"))
VIEW = rule(
    "view", OperatorPattern((aten.view.default, aten.permute.default, aten.reshape.default)),
    activations=("self",), shares=True, condition="all",
    kernels={"torch": Kernel("integers", on_integers)},
)  # fmt: skip
CAT = rule(
    "cat", OperatorPattern((aten.cat.default,)), activations=("tensors",), shares=True,
    condition="any", kernels={"torch": Kernel("integers", on_integers)},
)  # fmt: skip


def product(name: str, target: Any, channels: int = 1) -> Rule:
    """A product without a kernel, of a bias and of channels in a dimension."""
    return rule(
        name, OperatorPattern((target,)), activations=("input",), weight="weight", bias="bias",
        channels=(channels, channels),
    )  # fmt: skip


PRODUCTS = (
    product("linear", aten.linear.default, -1),
    product("conv", aten.conv2d.default),
    product("padded", aten.conv2d.padding),
    product("conv1d", aten.conv1d.default),
    product("up", aten.conv_transpose2d.input),
)
RULES = (CONV_ADD_RELU, CONV_RELU, LINEAR_RELU, CONV, LINEAR, ADD_RELU, ADD, SIGMOID, VIEW, CAT)


class ToyBackend(Backend):
    """A backend of the given rules."""

    api_version = 1

    def __init__(self, rules: Iterable[Rule] = RULES, name: str = "toy", **facts: Any) -> None:
        self.name, self.rules = name, tuple(rules)
        self.configs = {"static": STATIC, "dynamic": DYNAMIC, "weight-only": WEIGHT_ONLY}
        self.__dict__.update(facts)


def toy(
    *rules: Rule, config: QuantizationConfig | None = STATIC, name: str = "toy", **facts: Any
) -> RuleQuantizer:
    """A quantizer of `rules` (all, if none is given) that uses `config` everywhere."""
    return RuleQuantizer(ToyBackend(rules or RULES, name, **facts)).set_global(config)


class Model(nn.Module):
    """A model of the given layers, parameters and buffers, whose `forward` is `function(self, *inputs)`."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        # A method of the class: export asks it for the names of inputs.
        kind = type(self)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        self.__class__ = type(kind.__name__, (kind,), {"forward": function, **names})
        for name, part in parts.items():
            setattr(self, name, part)


class Call(nn.Module):
    """A function as a module, called with its inputs and behind them its parameters, `p0` and so on."""

    def __init__(self, function: Callable[..., Any], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"p{number}", nn.Parameter(parameter))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.parameters())


class NullQuantizer(Quantizer):
    """Annotates nothing."""

    def annotate(self, model: GraphModule) -> GraphModule:
        return model


def seeded(module: nn.Module, seed: int = 0, size: float = 1.0) -> nn.Module:
    """The module in eval mode, its parameters drawn from a normal distribution of that size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=size, generator=generator)
    return module.eval()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def export(module: nn.Module, *inputs: Tensor, **options: Any) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), inputs, **options)


def prepare(program: Any, quantizer: Quantizer, **options: Any) -> GraphModule:
    """`prepare_pt2e`, for quantizers that may claim nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)
        return qompose.prepare_pt2e(program, quantizer, **options)


def convert(program: Any, quantizer: Quantizer, *inputs: Tensor, **options: Any) -> GraphModule:
    """Prepare, calibrate with one batch, and convert, even if no claim can be followed."""
    prepared = prepare(program, quantizer)
    prepared(*inputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Nothing was quantized", qompose.QomposeWarning)
        return qompose.convert_pt2e(prepared, **options)


def plan_of(module: GraphModule) -> qompose.plan.Plan:
    return module.meta["qompose"].plan


def claimed(module: GraphModule) -> dict[str, tuple[str, ...]]:
    """Rule -> operators of its claims; rules that stand more than once get a number."""
    result: dict[str, tuple[str, ...]] = {}
    for claim in plan_of(module).claims:
        name = claim.rule
        while name in result:
            name += "'"
        result[name] = claim.nodes
    return result


def groups_of(module: GraphModule) -> set[frozenset[str]]:
    return {frozenset(map(str, group.points)) for group in plan_of(module).groups}


def points_of(module: GraphModule) -> set[str]:
    """Every tensor, at its producer or at a reader, that gets parameters."""
    return {str(point) for group in plan_of(module).groups for point in group.points}


def operators(module: GraphModule) -> Counter[str]:
    """How often each operator is called, by its name without overload."""
    return Counter(
        str(node.target).partition(".")[2].partition(".")[0] or str(node.target)
        for node in module.graph.nodes
        if node.op == "call_function"
    )


def nodes_calling(module: GraphModule, name: str) -> list[Node]:
    return [
        n for n in module.graph.nodes if n.op == "call_function" and f".{name}." in f"{n.target}."
    ]


def observers_of(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "call_module"]


def graph_text(module: GraphModule) -> str:
    return "\n".join(node.format_node() or "" for node in module.graph.nodes)


def sqnr(reference: Tensor, actual: Tensor) -> float:
    """Signal to quantization noise ratio in decibels; infinite where both are equal."""
    reference, actual = reference.detach().double(), actual.detach().double()
    noise = float((reference - actual).square().sum())
    return math.inf if noise == 0 else 10 * math.log10(float(reference.square().sum()) / noise)


class Annotator(Quantizer):
    """Calls `annotate_node` on each node."""

    def __init__(self, annotate_node: Callable[[Node], None], name: str = "annotator") -> None:
        self.annotate_node, self.label = annotate_node, name

    @property
    def name(self) -> str:
        return self.label

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            self.annotate_node(node)
        return model


def annotate(node: Node, inputs: dict[Node, Any], output: Any = None) -> None:
    node.meta[ANNOTATION_KEY] = QuantizationAnnotation(inputs, output, _annotated=True)
