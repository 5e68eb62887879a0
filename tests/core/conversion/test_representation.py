# SPDX-License-Identifier: Apache-2.0
"""The reference representation equals the Q/DQ model within a step, operator by operator, in aten alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationSpec
from qompose.backend.integer_reference import REFERENCES
from qompose.conversion.reference_representation import Representation, represent
from qompose.observers import MinMaxObserver, PerChannelMinMaxObserver
from qompose.spec import FixedQParamsQuantizationSpec, qdq
from qompose.spec.qparams import PER_CHANNEL
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from tests.core.conversion.recorded import wrongly_recorded
from tests.core.toy import (
    CONV,
    CONV_ADD_RELU,
    DYNAMIC,
    LINEAR,
    LINEAR_RELU,
    Annotator,
    Call,
    Model,
    annotate,
    convert,
    export,
    nodes_calling,
    randn,
    seeded,
    toy,
)
from tests.sampling import at_once

aten, functional = torch.ops.aten, nn.functional
FEW = settings(max_examples=8, deadline=None)
RANGES = [
    (torch.int8, -128, 127), (torch.int8, -127, 127), (torch.int8, -8, 7), (torch.uint8, 0, 255),
    (torch.uint8, 0, 127), (torch.int16, -32768, 32767),
]  # fmt: skip


def fixed(bounds: Any, scale: float, zero_point: int) -> FixedQParamsQuantizationSpec:
    dtype, low, high = bounds
    return FixedQParamsQuantizationSpec(
        dtype, scale, zero_point, low, high, torch.per_tensor_affine
    )


def weight_spec(bounds: Any, scheme: torch.qscheme, axis: int = 0) -> QuantizationSpec:
    dtype, low, high = bounds
    if scheme in PER_CHANNEL:
        factory = PerChannelMinMaxObserver.with_args(eps=1e-30)
        return QuantizationSpec(dtype, factory, low, high, scheme, ch_axis=axis)
    return QuantizationSpec(dtype, MinMaxObserver.with_args(eps=1e-30), low, high, scheme)


def annotator(specs: list[Any], output: Any = None, targets: Any = REFERENCES) -> Annotator:
    """Quantizes the inputs of the operators, or of all for None, by position, and their output."""

    def visit(node: Node) -> None:
        if node.op == "call_function" and (targets is None or node.target in targets):
            pairs = zip(node.all_input_nodes, specs, strict=False)
            annotate(node, {source: spec for source, spec in pairs if spec is not None}, output)

    return Annotator(visit)


def represented(converted: GraphModule, *inputs: Tensor) -> tuple[GraphModule, Representation]:
    """The reference of a converted model; all its calls are aten's, and know what they give."""
    model = qompose.program.graph.copy_graph_module(converted)
    result = represent(model)
    model.graph.lint()
    model = qompose.program.graph.refresh(model)
    calls = [node for node in model.graph.nodes if node.op == "call_function"]
    assert not [node for node in calls if getattr(node.target, "namespace", "aten") != "aten"]
    assert all("val" in node.meta for node in calls)
    assert wrongly_recorded(model, *inputs) == []
    return model, result


def referenced(
    model: nn.Module | ExportedProgram, quantizer: Any, *inputs: Tensor, **options: Any
) -> tuple[GraphModule, GraphModule, Representation]:
    """The converted model, its reference, and what became of its operators."""
    program = export(model, *inputs, **options) if isinstance(model, nn.Module) else model
    converted = convert(program, quantizer, *inputs)
    return (converted, *represented(converted, *inputs))


Shape = tuple[int, ...]


@cache
def exported(
    function: Callable[..., Tensor], inputs: tuple[Shape, ...], parameters: tuple[Shape, ...]
) -> tuple[Call, ExportedProgram]:
    """A module of the function, whose parameters are to be filled, and its program, which has the same."""
    module = Call(function, *map(torch.empty, parameters))
    return module, export(module, *map(torch.empty, inputs))


def spread(x: Tensor, bounds: Any, scale: float, zero_point: int, generator: Any) -> Tensor:
    """Values over the whole range of a grid and a little beyond, with many at its ends."""
    _, low, high = bounds
    width = high - low
    integers = torch.randint(
        low - width // 8 - 1, high + width // 8 + 2, x.shape, generator=generator
    )
    return ((integers - zero_point) * scale).to(x.dtype)


LIN = functional.linear
CONV1, CONV2, CONV3 = functional.conv1d, functional.conv2d, functional.conv3d
T1, T2, T3 = (
    functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d
)  # fmt: skip


def with_options(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda x, w, b=None: function(x, w, b, **options)


# function, shape of the input, of the weight, length of the bias, weight's channel axis
PRODUCTS = {
    "linear": (LIN, (3, 2, 5), (4, 5), 4, 0),
    "linear without bias": (LIN, (3, 5), (4, 5), None, 0),
    "linear of a vector": (LIN, (5,), (4, 5), 4, 0),
    "linear, relu": (lambda x, w, b: LIN(x, w, b).relu(), (3, 5), (4, 5), 4, 0),
    "linear, relu6": (lambda x, w, b: functional.relu6(LIN(x, w, b)), (3, 5), (4, 5), 4, 0),
    "linear, hardtanh": (
        lambda x, w: functional.hardtanh(LIN(x, w), -0.5, 1.5, inplace=True), (3, 5), (4, 5), None, 0,
    ),
    "conv1d": (with_options(CONV1, stride=2, padding=1), (2, 3, 9), (4, 3, 3), 4, 0),
    "conv1d same": (with_options(CONV1, padding="same"), (2, 3, 6), (4, 3, 4), 4, 0),
    "conv2d": (with_options(CONV2, stride=(2, 1), padding=2, dilation=2), (2, 3, 7, 6), (4, 3, 3, 2), 4, 0),
    "conv2d grouped": (with_options(CONV2, groups=2), (2, 4, 5, 5), (6, 2, 3, 3), 6, 0),
    "conv2d depthwise, relu": (
        lambda x, w, b: CONV2(x, w, b, padding=1, groups=4).relu_(), (2, 4, 5, 5), (4, 1, 3, 3), 4, 0,
    ),
    "conv2d same": (with_options(CONV2, padding="same", dilation=2), (1, 2, 6, 6), (3, 2, 3, 3), None, 0),
    "conv2d valid": (with_options(CONV2, padding="valid"), (1, 2, 6, 6), (3, 2, 3, 3), 3, 0),
    "conv2d of one image": (with_options(CONV2, padding=1), (2, 6, 6), (3, 2, 3, 3), 3, 0),
    "conv3d": (with_options(CONV3, padding=1), (1, 2, 4, 4, 4), (3, 2, 3, 3, 3), 3, 0),
    "conv3d same": (with_options(CONV3, padding="same"), (1, 2, 4, 4, 4), (3, 2, 3, 3, 3), 3, 0),
    "conv_transpose1d": (with_options(T1, stride=2, output_padding=1), (2, 3, 5), (3, 4, 3), 4, 1),
    "conv_transpose2d": (with_options(T2, stride=2, padding=1), (2, 3, 4, 4), (3, 4, 3, 3), 4, 1),
    "conv_transpose2d grouped": (with_options(T2, groups=2, dilation=2), (2, 4, 4, 4), (4, 3, 3, 3), 6, 1),
    "conv_transpose2d depthwise": (with_options(T2, groups=3), (2, 3, 4, 4), (3, 2, 3, 3), 6, 0),
    "conv_transpose3d": (with_options(T3), (1, 2, 3, 3, 3), (2, 3, 2, 2, 2), 3, 1),
}  # fmt: skip

FEW_PRODUCTS = (
    "linear", "linear of a vector", "linear, hardtanh", "conv2d", "conv2d depthwise, relu", "conv3d",
    "conv_transpose2d grouped",
)  # fmt: skip
SCHEMES = [
    torch.per_channel_symmetric, torch.per_channel_affine,
    torch.per_tensor_symmetric, torch.per_tensor_affine,
]  # fmt: skip


@st.composite
def grid(draw: st.DrawFn, low_exponent: int = -8, high_exponent: int = 6) -> tuple[Any, float, int]:
    bounds = draw(st.sampled_from(RANGES))
    zero_point = draw(st.integers(bounds[1], bounds[2]) | st.sampled_from(bounds[1:]))
    scale = 10.0 ** draw(st.floats(low_exponent, high_exponent))
    return bounds, scale, zero_point


def output_spec(y: Tensor, bounds: Any, factor: float, zero_point: int) -> tuple[Any, float]:
    """A grid about as wide as the values are, times a factor."""
    scale = max(float(y.abs().max()), 1e-30) / (bounds[2] - bounds[1]) * factor
    return fixed(bounds, scale, zero_point), scale


def float_bound(depth: int, x_spec: Any, w: Tensor, y: Tensor) -> float:
    """What float32 may lose in a sum of products, with values at the ends of their ranges."""
    width = (x_spec[0][2] - x_spec[0][1]) * x_spec[1]
    return depth * 2.0**-24 * (depth * width * float(w.abs().max()) * 1.2 + float(y.abs().max()))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", at_once(PRODUCTS, *FEW_PRODUCTS))
@FEW
@given(data=st.data())
def test_products(case: str, data: st.DataObject) -> None:
    function, shape, weight_shape, bias_length, axis = PRODUCTS[case]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    x_grid, (out_bounds, _, zero_point) = data.draw(grid()), data.draw(grid())
    weight_scale = 10.0 ** data.draw(st.floats(-6, 4))
    shift = data.draw(st.sampled_from([0.0, 1.0]))
    weight = (torch.randn(weight_shape, generator=generator) + shift) * weight_scale
    x = spread(torch.empty(shape), *x_grid, generator)
    parameters = [weight]
    if bias_length is not None:
        largest = float(x.abs().max() * weight.abs().max())
        parameters.append(torch.randn(bias_length, generator=generator) * largest)
    shapes = tuple(tuple(parameter.shape) for parameter in parameters)
    module, program = exported(function, (shape,), shapes)
    for own, value in zip(module.parameters(), parameters, strict=True):
        own.data.copy_(value)
    y = module(x).detach()
    factor, quantized = data.draw(st.sampled_from([0.25, 1.0, 8.0])), data.draw(st.booleans())
    output, scale = output_spec(y, out_bounds, factor, zero_point)
    weight_bounds = data.draw(st.sampled_from(RANGES[:5]))
    scheme = data.draw(st.sampled_from(SCHEMES))
    specs = [fixed(*x_grid), weight_spec(weight_bounds, scheme, axis)]
    fused = case.partition(", ")[2]

    def visit(node: Node) -> None:
        if node.target not in REFERENCES:
            return
        last = all(user.op == "output" for user in node.users)
        inputs = dict(zip(node.all_input_nodes, specs, strict=False))
        annotate(node, {} if fused and last else inputs, output if last and quantized else None)

    converted, model, result = referenced(program, Annotator(visit), x)
    assert result.left == {}
    name = case.split()[0].rstrip(",")
    assert list(result.replaced.values()).count(name) == (2 if fused else 1)
    depth = weight[0].numel() if axis == 0 else weight[:, 0].numel()
    error = float_bound(depth + 1, x_grid, weight, y)
    assert_close(converted(x), model(x), error, scale if quantized else None)


def assert_close(want: Tensor, got: Tensor, error: float, scale: float | None) -> None:
    """Within a step; float32 itself may lose `error`, which counts where it is not small beside a step."""
    assert got.dtype is want.dtype
    difference = float((want.detach().double() - got.detach().double()).abs().max())
    if scale is None:
        assert difference <= 2 * error
    else:
        assert difference / scale <= 1.001 + (0 if error < scale / 4 else 2 * error / scale)


# function, shapes
ELEMENTWISE: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "add": (lambda a, b: a + b, ((2, 3, 4), (3, 1))),
    "add, alpha": (lambda a, b: torch.add(a, b, alpha=-3), ((2, 3), (2, 3))),
    "add in place": (lambda a, b: a.mul(1.0).add_(b), ((2, 3), (2, 3))),
    "add, relu": (lambda a, b: (a + b).relu(), ((2, 3), (2, 3))),
    "sub": (lambda a, b: a - b, ((4,), (2, 4))),
    "mul": (lambda a, b: a * b, ((2, 3), (3,))),
    "mul, relu6": (lambda a, b: functional.relu6(a * b), ((2, 3), (3,))),
    "add to itself": (lambda a: a + a, ((2, 3),)),
    "mul by itself": (lambda a: a * a, ((2, 3),)),
    "matmul": (torch.matmul, ((2, 3, 4), (4, 5))),
    "matmul of heads": (torch.matmul, ((2, 3, 4, 5), (2, 3, 5, 2))),
    "matmul of vectors": (torch.matmul, ((5,), (5,))),
    "bmm": (torch.bmm, ((2, 3, 4), (2, 4, 5))),
    "mm": (torch.mm, ((3, 4), (4, 5))),
    "max_pool1d": (lambda a: functional.max_pool1d(a, 2), ((1, 3, 8),)),
    "max_pool2d": (lambda a: functional.max_pool2d(a, 3, 2, 1), ((1, 3, 8, 8),)),
    "max_pool3d": (lambda a: functional.max_pool3d(a, 2, ceil_mode=True), ((1, 2, 5, 5, 5),)),
    "relu": (torch.relu, ((2, 3),)),
    "clamp": (lambda a: a.clamp(max=0.5), ((2, 3),)),
    "move": (lambda a: a.permute(2, 0, 1).reshape(4, -1), ((2, 3, 4),)),
}
FEW_ELEMENTWISE = (
    "add", "sub", "mul, relu6", "matmul of heads", "bmm", "max_pool2d", "clamp", "move",
)  # fmt: skip


@pytest.mark.parametrize("case", at_once(ELEMENTWISE, *FEW_ELEMENTWISE))
@FEW
@given(data=st.data())
def test_operators_without_parameters(case: str, data: st.DataObject) -> None:
    function, shapes = ELEMENTWISE[case]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    grids = [data.draw(grid(-3, 2)) for _ in shapes]
    inputs = [spread(torch.empty(s), *g, generator) for s, g in zip(shapes, grids, strict=True)]
    out_bounds, _, zero_point = data.draw(grid())
    module, program = exported(function, shapes, ())
    y = module(*inputs)
    output, scale = output_spec(y, out_bounds, data.draw(st.sampled_from([0.5, 4.0])), zero_point)
    quantized = data.draw(st.booleans())

    def visit(node: Node) -> None:
        if node.target in REFERENCES:
            last = all(user.op == "output" for user in node.users)
            sources = dict.fromkeys(a for a in node.all_input_nodes if a.op == "placeholder")
            specs = {s: fixed(*grids[int(i)]) for i, s in enumerate(sources)}
            annotate(node, specs, output if last and quantized else None)

    converted, model, result = referenced(program, Annotator(visit), *inputs)
    if "in place" not in case:
        assert result.left == {}
    peaks = [float(x.abs().max()) * 1.2 for x in (*inputs, *inputs)][: max(2, len(inputs))]
    product = case.startswith(("mul", "mat")) or "mm" in case
    error = 2.0**-22 * (8 * math.prod(peaks) if product else 4 * sum(peaks))
    assert_close(converted(*inputs), model(*inputs), error, scale if quantized else None)


@pytest.mark.parametrize(("exact", "zero_point"), [(True, 0), (False, 0), (False, 900)])
def test_a_quantized_bias(exact: bool, zero_point: int) -> None:
    """Bias integers join the accumulator as they are where their unit is its own."""
    x = spread(torch.empty(4, 6), RANGES[0], 0.05, 9, torch.Generator().manual_seed(0))
    module = Call(LIN, torch.randn(3, 6) * 0.1, torch.randn(3))
    bound = (torch.int32, -(2**31), 2**31 - 1)
    w_scale, bias_scale = 2.0**-9, (2.0**-14 if exact else 0.0003)
    specs = [
        fixed(RANGES[0], 2.0**-5, 9),
        fixed(RANGES[1], w_scale, 0),
        fixed(bound, bias_scale, zero_point),
    ]
    output, scale = output_spec(module(x).detach(), RANGES[0], 1.0, 5)
    converted, model, result = referenced(module, annotator(specs, output), x)
    assert result.left == {}
    assert_close(converted(x), model(x), 0.0, scale)
    (added,) = [b for n, b in model.named_buffers() if n.endswith("_integer")]
    integers = dict(converted.named_buffers())["p1_q"]
    centred = integers.double() - zero_point
    assert torch.equal(added, torch.round(centred * bias_scale / 2.0**-14).long())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantized", [True, False])
def test_half_precision(dtype: torch.dtype, quantized: bool) -> None:
    """Floats keep their type. The Q/DQ model rounds its operands to it, so the truth is float64's."""
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(8, 32, generator=generator), torch.randn(8, generator=generator)
    x = spread(torch.empty(16, 32), RANGES[0], 2.0**-5, 11, generator).to(dtype)
    module = Call(LIN, weight.to(dtype), bias.to(dtype))
    output, scale = output_spec(module(x).detach().float(), RANGES[0], 1.0, 5)
    specs = [fixed(RANGES[0], 2.0**-5, 11), weight_spec(RANGES[1], torch.per_tensor_symmetric)]
    converted, model, result = referenced(
        module, annotator(specs, output if quantized else None), x
    )
    assert result.left == {}
    want, got = converted(x), model(x)
    assert got.dtype is want.dtype is dtype
    (w,) = [n.args for n in converted.graph.nodes if "p0_q" in str(n.args)]
    integers = torch.round(x.double() * 32 + 11).clamp(-128, 127) - 11
    w_q = dict(converted.named_buffers())["p0_q"].double()
    y = functional.linear(integers / 32, w_q * w[1], bias.to(dtype).double())
    if quantized:
        y = (torch.round(y / scale) + 5).clamp(-128, 127).sub(5) * scale
        assert float((got.double() - y).abs().max()) <= 1.02 * scale
    else:
        torch.testing.assert_close(got, y.to(dtype), rtol=0, atol=0)


def test_a_dynamic_linear() -> None:
    module, x = seeded(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))), randn(5, 8)
    converted, model, result = referenced(module, toy(LINEAR, config=DYNAMIC), x)
    assert result.left == {}
    assert sorted(result.replaced.values()) == [
        "choose_qparams", "choose_qparams", "linear", "linear", "linear", "quantize", "quantize",
    ]  # fmt: skip
    for scale in (1e-6, 1.0, 1e5):
        assert wrongly_recorded(model, x * scale) == []
        torch.testing.assert_close(model(x * scale), converted(x * scale), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "scheme", "axis", "quantized"),
    [
        (torch.int8, torch.per_channel_symmetric, 0, True),
        (torch.int8, torch.per_channel_affine, 0, False),
        (torch.uint8, torch.per_channel_affine_float_qparams, 0, True),
        (torch.uint8, torch.per_channel_affine_float_qparams, 0, False),
        (torch.int8, torch.per_channel_affine, 1, True),
        (torch.uint8, torch.per_tensor_affine, None, False),
    ],
)
def test_embedding(
    dtype: torch.dtype, scheme: torch.qscheme, axis: int | None, quantized: bool
) -> None:
    """Rows are gathered as integers; the table is never dequantized whole."""
    table, ids = randn(10, 4) + 0.5, torch.tensor([[1, 9, 1], [0, 3, 5]])
    module = Call(lambda i, w: functional.embedding(i, w, padding_idx=3), table)
    observer = MinMaxObserver if axis is None else PerChannelMinMaxObserver
    spec = QuantizationSpec(dtype, observer, None, None, scheme, ch_axis=axis)
    output, scale = output_spec(table, RANGES[0], 1.0, 5)
    specs = annotator([spec], output if quantized else None)
    # all_input_nodes: the table, then the indices
    converted, model, result = referenced(module, specs, ids)
    assert result.left == {}
    assert "embedding" in result.replaced.values()
    calls = [node.meta["val"] for node in model.graph.nodes if node.op == "call_function"]
    assert (10, 4) not in {tuple(value.shape) for value in calls}
    assert_close(converted(ids), model(ids), 1e-6, scale if quantized else None)


def test_readers_of_every_kind() -> None:
    """One accumulator serves two quantized readers alike, one on another grid, and one in float."""

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Any:
        y = LIN(x, w, b)
        n = y.shape[0]
        return y + y, y * y, y.tanh(), n * y, torch.add(y, y, alpha=n), y.clamp(n)

    module = Call(forward, randn(3, 5, seed=1), randn(3, seed=2))
    x = randn(4, 5)
    grids = {
        "linear": [fixed(RANGES[0], 0.03, 4), weight_spec(RANGES[1], torch.per_channel_symmetric)],
        "add": [fixed(RANGES[0], 0.05, 4)],
        "mul": [fixed(RANGES[3], 0.07, 100)],
        "clamp": [fixed(RANGES[0], 0.05, 4)],
    }

    def visit(node: Node) -> None:
        for name, specs in grids.items():
            if f".{name}." in f"{node.target}." and isinstance(node.args[-1], Node):
                annotate(node, dict(zip(node.all_input_nodes, specs, strict=False)))

    shapes = {"inputs": ({0: torch.export.Dim.AUTO},)}
    converted, model, result = referenced(module, Annotator(visit), x, dynamic_shapes=shapes)
    assert len(nodes_calling(model, "linear")) == 1
    (size,) = nodes_calling(model, "sym_size")
    assert result.left == {
        "mul_1": f"its operand {size.name} is a number",
        "add_1": f"its factor {size.name} is not a constant",
        "clamp": "its bounds are not constants",
    }
    assert {"linear", "add", "mul"} <= set(result.replaced)
    for inputs in (x, randn(9, 5, seed=5)):
        want, got = converted(inputs), model(inputs)
        for a, b, atol in zip(want, got, (0.101, 1.5, 1e-6, *[1e-5] * 3), strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=atol)


def residual(self: Any, x: Tensor) -> Tensor:
    y = self.skip(x)
    return (self.second(self.first(x).relu()) + y).relu()


def test_a_product_goes_into_a_sum_without_a_float_in_between() -> None:
    layers = {"first": nn.Conv2d(3, 4, 3, padding=1), "second": nn.Conv2d(4, 4, 1)}
    module = seeded(Model(residual, **layers, skip=nn.Conv2d(3, 4, 1)))
    x, dim = randn(2, 3, 6, 6), torch.export.Dim("batch", min=1, max=64)
    quantizer = toy(CONV_ADD_RELU, CONV, LINEAR_RELU)
    converted, model, result = referenced(module, quantizer, x, dynamic_shapes=({0: dim},))
    assert not [reason for name, reason in result.left.items() if "conv" in name or "add" in name]
    scale = float(converted.graph.output_node().args[0][0].args[1])  # type: ignore[index, union-attr]
    for inputs in (x, randn(5, 3, 6, 6, seed=1)):
        assert_close(converted(inputs), model(inputs), 0.0, scale)


def test_it_can_be_exported_and_keeps_dynamic_shapes() -> None:
    module = seeded(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)))
    x, shapes = randn(3, 6), ({0: torch.export.Dim("rows", min=2, max=100)},)
    _, model, _ = referenced(module, toy(), x, dynamic_shapes=shapes)
    again = torch.export.export(model, (x,), dynamic_shapes=shapes)
    called = [n.target for n in again.graph.nodes if n.op == "call_function"]
    assert {target.namespace for target in called} == {"aten"}
    more = randn(50, 6, seed=4)
    assert torch.equal(again.module()(more), model(more))
    assert {str(p) for p in (again.range_constraints or {}).values()} == {"VR[2, 100]"}


ACT = fixed(RANGES[0], 0.05, 3)
OTHER = fixed(RANGES[0], 0.25, 3)


def test_moves_share_integers() -> None:
    """Operators that move values hand integers on where the grid stays, and dequantize nothing."""

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.view(4, 3), y.transpose(0, 1)])[1:].unsqueeze(0).clone()

    module, inputs = Call(forward), (randn(3, 4), randn(3, 5))
    converted, model, result = referenced(module, annotator([ACT] * 2, ACT, None), *inputs)
    assert result.left == {}
    assert torch.equal(model(*inputs), converted(*inputs))
    called = [n for n in model.graph.nodes if n.op == "call_function"]
    assert {n.target for n in called if n.meta["val"].is_floating_point()} <= {
        aten.mul.Tensor, aten.round.default, aten.add.Tensor, aten.clamp.default, aten.to.dtype,
        aten.sub.Tensor,
    }  # fmt: skip
    assert {n.meta["val"].dtype for n in nodes_calling(model, "cat")} == {torch.int8}


def left_of(module: nn.Module, quantizer: Annotator, x: Tensor) -> dict[str, str]:
    converted, model, result = referenced(module, quantizer, x)
    torch.testing.assert_close(model(x), converted(x), rtol=0, atol=0)
    return result.left


@pytest.mark.parametrize(
    ("function", "specs", "output", "reason"),
    [
        (lambda x, w: x.softmax(-1), [ACT], ACT, "aten.softmax.int has no integer reference"),
        (lambda x, w: x.relu(), [], ACT, "its input inputs_0 is float"),
        (LIN, [None, weight_spec(RANGES[1], torch.per_channel_symmetric)], None,
         "it is weight-only, so its activation is float"),
        (LIN, [ACT], None, "its input p0 is float"),
        (LIN, [ACT, weight_spec(RANGES[1], torch.per_channel_symmetric, 1)], None,
         "it sums over weight dimension 1, which has several scales"),
        (LIN, [ACT, weight_spec(RANGES[3], torch.per_channel_affine_float_qparams)], None,
         "its weight has non-integer zero points"),
        (lambda x, w: x + w, [ACT], None, "its input p0 is float"),
        (lambda x, w: torch.cat([x, w]), [ACT, OTHER], None,
         "its inputs have different quantization parameters"),
        (lambda x, w: functional.dropout(x, 0.0), [ACT], ACT, "it drops values at random"),
        (torch.maximum, [ACT], ACT, "aten.maximum has no integer reference"),
        (lambda x, w: x + 1.0, [ACT], None, "its operand 1.0 is a number"),
    ],
)  # fmt: skip
def test_what_is_left_is_named(function: Any, specs: list[Any], output: Any, reason: str) -> None:
    """And simulated in aten, bit for bit."""
    left = left_of(Call(function, randn(1, 5)), annotator(specs, output, None), randn(2, 5))
    assert list(left.values()) == [reason]


def test_too_long_a_sum_is_left() -> None:
    ends = annotator([fixed(RANGES[5], 1e-4, -32768), fixed(RANGES[5], 1e-4, 32767)])
    x, weight = randn(1, 2**21 + 201), randn(1, 2**21 + 201)
    assert left_of(Call(LIN, weight), ends, x) == {}  # int64 holds it
    left = left_of(Call(CONV1, weight.unsqueeze(-1)), ends, x.unsqueeze(-1))
    assert "torch.float64" in left["conv1d"]


def test_a_sum_is_as_long_as_its_terms_are_many() -> None:
    wide = fixed((torch.int32, -(2**28), 2**28 - 1), 1e-6, 0)
    inputs = randn(512, 2), randn(2, 3)
    assert referenced(Call(torch.matmul), annotator([wide, wide]), *inputs)[2].left == {}


def test_a_weight_that_is_moved_keeps_its_integers() -> None:
    module, x = Call(lambda x, w: x.matmul(w.t()), randn(4, 5)), randn(2, 5)
    converted, model, result = referenced(module, annotator([ACT]), x)
    assert result.left == {}
    assert {result.replaced["t"], result.replaced["matmul"]} == {"move", "matmul"}
    assert_close(converted(x), model(x), 1e-6, None)


def by_hand(activation: Callable[[Tensor], Tensor], weight: Callable[..., Tensor]) -> nn.Module:
    """A linear operator between Q/DQ operators that its builder writes."""
    generator = torch.Generator().manual_seed(0)
    buffers = {
        "w": torch.randint(-127, 128, (6, 8), dtype=torch.int8, generator=generator),
        "scale": torch.rand(6, generator=generator) + 0.01,
        "zero_point": torch.zeros(6, dtype=torch.int64),
        "scales": torch.rand(6, 2, generator=generator) + 0.01,
        "zero_points": torch.randint(-9, 9, (6, 2), generator=generator),
    }
    parts = {name: nn.Buffer(tensor) for name, tensor in buffers.items()}
    return Model(lambda m, x: functional.linear(activation(x), weight(m)), **parts)


def by_token(choose: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def activation(x: Tensor) -> Tensor:
        scale, zero_point = choose(x, torch.int8)
        rest = (scale, zero_point, -128, 127, torch.int8)
        return qdq.dequantize_per_token(qdq.quantize_per_token(x, *rest), *rest, torch.float32)

    return activation


ROWS = (-128, 127, torch.int8)


def per_channel(m: Any) -> Tensor:
    return qdq.dequantize_per_channel(m.w, m.scale, m.zero_point, 0, *ROWS)


def per_group(m: Any) -> Tensor:
    return qdq.dequantize_per_group(m.w, m.scales, m.zero_points, *ROWS, 4, torch.float32)


def per_block(m: Any) -> Tensor:
    return qdq.dequantize_per_block(
        m.w, m.scales[::3], m.zero_points[::3], *ROWS[:2], torch.float32
    )


@pytest.mark.parametrize(
    ("symmetric", "weight"),
    [(True, per_channel), (False, per_channel), (True, per_group), (False, per_block)],
)
def test_scales_of_tokens_and_blocks(symmetric: bool, weight: Callable[..., Tensor]) -> None:
    """Tokens have a reference; weights in blocks are simulated, in aten."""
    choose = qdq.choose_qparams_per_token_symmetric if symmetric else qdq.choose_qparams_per_token
    x, dim = randn(2, 3, 8), torch.export.Dim("batch", min=1, max=9)
    program = export(by_hand(by_token(choose), weight), x, dynamic_shapes=({0: dim},))
    simulated: Any = program.module(check_guards=False)
    model, result = represented(simulated, x)
    if weight is per_channel:
        assert result.left == {}
        assert result.replaced["linear"] == "linear"
    else:
        assert result.left.keys() == {"linear"}
    for inputs in (x, randn(5, 3, 8, seed=1) * 100):
        torch.testing.assert_close(model(inputs), simulated(inputs), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("others", [False, True])
def test_a_write_in_place_that_others_read_is_left(others: bool) -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2.0
        read = z.view(3, 2) if others else z
        z += y
        return read * read

    module, inputs = Call(forward), (randn(2, 3), randn(2, 3))
    targets = {aten.mul.Tensor, aten.add_.Tensor}
    converted, model, result = referenced(module, annotator([ACT, ACT], targets=targets), *inputs)
    torch.testing.assert_close(model(*inputs), converted(*inputs))
    assert result.left.keys() == ({"add_"} if others else set())


def test_requantizing_takes_no_float() -> None:
    specs = {"relu": ACT, "neg": OTHER}

    def visit(node: Node) -> None:
        for name, spec in specs.items():
            if f".{name}." in f"{node.target}.":
                annotate(node, {node.args[0]: spec}, ACT if name == "relu" else None)  # type: ignore[dict-item]

    module, x = Call(lambda x: -(x.relu())), randn(3, 4)
    converted, model, result = referenced(module, Annotator(visit), x)
    assert "requantize" in result.replaced.values()
    assert_close(converted(x), model(x), 0.0, 0.25)


def test_every_node_says_where_it_comes_from() -> None:
    module, x = seeded(nn.Sequential(nn.Linear(4, 3), nn.Tanh())), randn(2, 4)
    _, model, _ = referenced(module, toy(), x)
    (product,) = nodes_calling(model, "linear")
    assert qompose.program.graph.module_path(product) == "0"
    state = model.state_dict()
    assert {name: value.dtype for name, value in state.items()} == {
        "0.weight_q": torch.int8, "0.weight_real": torch.float64, "0.weight_integer": torch.int64,
    }  # fmt: skip
    assert not any(buffer.requires_grad for buffer in model.buffers())
