# SPDX-License-Identifier: Apache-2.0
"""The same annotations and the same data under torchao's engine and under ours: the same numbers.

Ranges are min-max, which do not depend on the order of the data. Where torchao's engine is wrong or fails,
see `test_peer_defects.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.toy import Model, export, plan_of, prepare, randn, seeded, toy
from tests.interop.peers import (
    MIN_MAX,
    QUANTIZERS,
    THEIR_WARNINGS,
    ByOperator,
    Converted,
    assert_same,
    by_qompose,
    by_torchao,
    torchao_observer,
    torchao_quantizer as ao,
)
from tests.sampling import at_once
from tests.zoo import by_name

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)

aten = torch.ops.aten

ALIKE = {
    "x86": (
        "lenet resnet18 mobilenet_v2 convnext unet efficient_block aspp spatial_transformer lstm mixer "
        "attention_bool_mask tied_language_model experts_where highway in_place pixels half_mlp "
        "bfloat16_conv_bn attention_latents"
    ),
    "xnnpack": (
        "lenet bottleneck dilated_context inception data_movement self_concatenation gru "
        "mlp_bn transposed_3d_bn embedding_mlp multi_output nested_inputs scalars weight_sliced "
        "bfloat16_mlp weight_of_two_names empty_parts vision_transformer"
    ),
}
READERS = "what readers in float share is dequantized for each"
FUNCTIONS = "it finds functions by source_fn_stack, as on a strict export, and ours is not strict"
SHARED = "a weight that two operators read is dequantized for each"
FOLDED = "theirs quantizes a cast of constants, which is folded here"


def one_reader_each(converted: Converted) -> None:
    assert all(len(node.users) == 1 for node in converted.calls("dequantize_per_"))


def both(name: str, quantizer: str) -> tuple[Converted, Converted]:
    """Ours and theirs, with batches of two ranges."""
    model = by_name(name)
    inputs = model.inputs()
    wider = inputs
    if all(isinstance(x, Tensor) for x in inputs):
        wider = tuple(2 * x if x.is_floating_point() else x for x in inputs)
    make = QUANTIZERS[quantizer]
    ours = by_qompose(model.export(), make(), wider, inputs)
    return ours, by_torchao(model.export(), make(), wider, inputs)


MODELS = [
    *((kind, name, 0, 0, "") for kind, names in ALIKE.items() for name in names.split()),
    ("xnnpack", "linear_attention", 0, 2, READERS),
    ("xnnpack", "mobilenet_v3", 0, 1, FUNCTIONS),
    ("xnnpack", "two_towers", 0, 4, SHARED),
    ("xnnpack", "gru_cell", 0, 2, SHARED),
    ("xnnpack", "yolo_head", -1, 0, FOLDED),
]
"""Quantizer, model, and how many quantize and dequantize operators we have more than torchao, and why."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("quantizer", "name", "quantizes", "dequantizes", "reason"),
    MODELS,
)
def test_models_of_the_zoo(
    quantizer: str, name: str, quantizes: int, dequantizes: int, reason: str
) -> None:
    """The numbers are the same; what is counted may differ, for the reason given."""
    ours, theirs = both(name, quantizer)
    assert_same(ours, theirs)
    assert ours.quantizes > 0
    assert ours.quantizes - theirs.quantizes == quantizes, reason
    assert ours.dequantizes - theirs.dequantizes == dequantizes, reason
    one_reader_each(ours)


def spec(
    dtype: torch.dtype, low: int, high: int, qscheme: Any = torch.per_tensor_affine, **facts: Any
) -> Any:
    per_channel = "ch_axis" in facts
    channels = torchao_observer.PerChannelMinMaxObserver.with_args(eps=2**-12)
    observer = facts.pop("observer", channels if per_channel else MIN_MAX)
    return ao.QuantizationSpec(dtype, observer, low, high, qscheme, **facts)


CHANNELS, SYMMETRIC = torch.per_channel_symmetric, torch.per_tensor_symmetric
INT8, UINT8, UINT7 = (
    spec(torch.int8, -128, 127),
    spec(torch.uint8, 0, 255),
    spec(torch.uint8, 0, 127),
)
INT16 = spec(torch.int16, -(2**15), 2**15 - 1)
INT4 = spec(torch.int8, -8, 7, CHANNELS, ch_axis=0)
WEIGHT = spec(torch.int8, -127, 127, CHANNELS, ch_axis=0)
WEIGHT_AXIS_1 = replace(WEIGHT, ch_axis=1)
WEIGHT_PER_TENSOR = spec(torch.int8, -127, 127, SYMMETRIC)
PER_COLUMN = spec(torch.int8, -128, 127, torch.per_channel_affine, ch_axis=1)
_AT_RUN_TIME = torchao_observer.PlaceholderObserver.with_args(eps=2**-12)
DYNAMIC = spec(torch.int8, -128, 127, observer=_AT_RUN_TIME, is_dynamic=True)
DYNAMIC_SYMMETRIC = replace(DYNAMIC, qscheme=SYMMETRIC, quant_min=-127)
HALF = ao.QuantizationSpec(torch.float16, torchao_observer.PlaceholderObserver)
FIXED = ao.FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)


def product(input: Any, weight: Any, output: Any = None, bias: Any = None) -> Callable[[Node], Any]:
    def specs(node: Node) -> Any:
        found = {node.args[0]: input, node.args[1]: weight}
        if bias is not None:
            found[node.args[2]] = bias(node)
        return found, output

    return specs


def every(input: Any, output: Any) -> Callable[[Node], Any]:
    return lambda node: (dict.fromkeys(node.all_input_nodes, input), output)


def one_scale(node: Node) -> Any:
    """All inputs and the output share the scale of the first."""
    first, *rest = node.all_input_nodes
    shared = ao.SharedQuantizationSpec((first, node))
    return {first: INT8, **dict.fromkeys(rest, shared)}, shared


def derived(per_channel: bool) -> Callable[[Node], Any]:
    def derive(observers: list[Any]) -> tuple[Tensor, Tensor]:
        scale = observers[0].calculate_qparams()[0] * observers[1].calculate_qparams()[0]
        return scale, torch.zeros_like(scale, dtype=torch.int64)

    return lambda node: ao.DerivedQuantizationSpec(
        [(node.args[0], node), (node.args[1], node)], derive, torch.int32, -(2**31), 2**31 - 1,
        CHANNELS if per_channel else SYMMETRIC, 0 if per_channel else None,
    )  # fmt: skip


def layers(between: Callable[[Tensor], Tensor] = torch.relu) -> nn.Module:
    """Two linear layers and what stands between them."""
    return Model(
        lambda m, x: m.second(between(m.first(x))), first=nn.Linear(12, 16), second=nn.Linear(16, 5)
    )


def fan() -> nn.Module:
    """A tensor with three readers, and an input with two."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.first(x)
        return torch.cat([m.second(y), y], 1), y * x

    return Model(forward, first=nn.Linear(12, 12), second=nn.Linear(12, 5))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, stride=2))


LINEAR, RELU, MUL, CAT = aten.linear.default, aten.relu.default, aten.mul.Tensor, aten.cat.default
TRANSPOSED = aten.conv_transpose2d.input
LAYERS: dict[str, dict[Any, Callable[[Node], Any]]] = {
    "int8": {LINEAR: product(INT8, WEIGHT, INT8)},
    "uint8": {LINEAR: product(UINT8, WEIGHT, UINT8)},
    "7 bits": {LINEAR: product(UINT7, WEIGHT, UINT7)},
    "int16": {LINEAR: product(INT16, WEIGHT, INT16)},
    "weight of 4 bits": {LINEAR: product(INT8, INT4, INT8)},
    "weight per tensor": {LINEAR: product(INT8, WEIGHT_PER_TENSOR, INT8)},
    "weight along the other axis": {LINEAR: product(INT8, WEIGHT_AXIS_1, INT8)},
    "weight alone": {LINEAR: product(None, WEIGHT)},
    "activation alone": {LINEAR: product(INT8, None)},
    "output alone": {LINEAR: product(None, None, INT8)},
    "activation per channel": {LINEAR: product(PER_COLUMN, WEIGHT, PER_COLUMN)},
    "other scales on either side": {LINEAR: product(INT8, WEIGHT, UINT8), RELU: every(UINT7, INT8)},
    "bias derived per channel": {LINEAR: product(INT8, WEIGHT, INT8, derived(True))},
    "bias derived per tensor": {LINEAR: product(INT8, WEIGHT_PER_TENSOR, INT8, derived(False))},
    "dynamic": {LINEAR: product(DYNAMIC, WEIGHT)},
    "dynamic symmetric": {LINEAR: product(DYNAMIC_SYMMETRIC, WEIGHT)},
    "half precision": {LINEAR: product(HALF, HALF)},
}
SIGMOID = {LINEAR: product(INT8, WEIGHT, INT8), aten.sigmoid.default: every(INT8, FIXED)}
FANS = {
    "all of one scale": {LINEAR: product(INT8, WEIGHT, INT8), MUL: every(INT8, INT8), CAT: one_scale},
    "readers of their own": {LINEAR: product(INT8, WEIGHT), MUL: every(UINT8, INT8), CAT: one_scale},
    "cat alone": {CAT: one_scale},
}  # fmt: skip
IMAGES = {
    aten.conv2d.default: product(UINT8, WEIGHT), TRANSPOSED: product(INT8, WEIGHT_AXIS_1),
    RELU: every(None, INT8),
}  # fmt: skip
AT_ONCE = (
    *("7 bits", "int16", "weight along the other axis", "output alone", "activation per channel"),
    *("other scales on either side", "dynamic symmetric", "half precision"),
)
CASES = [
    *(
        pytest.param(
            layers, (6, 12), table, id=name, marks=[] if name in AT_ONCE else pytest.mark.full
        )
        for name, table in LAYERS.items()
    ),
    pytest.param(lambda: layers(torch.sigmoid), (6, 12), SIGMOID, id="fixed"),
    *(pytest.param(fan, (6, 12), table, id=name) for name, table in FANS.items()),
    pytest.param(convolutions, (2, 3, 8, 8), IMAGES, id="transposed convolution"),
]


@pytest.mark.parametrize(
    "implicit",
    [True, pytest.param(False, marks=pytest.mark.full)],
    ids=["implicit sharing", "no sharing"],
)
@pytest.mark.parametrize(("make", "shape", "table"), CASES)
def test_specifications(make: Any, shape: tuple[int, ...], table: Any, implicit: bool) -> None:
    """Every kind of specification, in torchao's classes."""
    model, batches = seeded(make()), [(randn(*shape, seed=seed),) for seed in range(2)]
    program = export(model, *batches[0])
    ours = by_qompose(program, ByOperator(table, implicit), *batches)
    theirs = by_torchao(program, ByOperator(table, implicit), *batches)
    assert_same(ours, theirs)
    assert ours.quantizes == theirs.quantizes
    assert ours.dequantizes >= theirs.dequantizes
    one_reader_each(ours)


def stripped(program: torch.export.ExportedProgram) -> GraphModule:
    """The program as a graph whose nodes know nothing but their values. The program is spoilt."""
    module = program.module(check_guards=False)
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    return module


def own_quantizer(name: str) -> qompose.Quantizer:
    return toy() if name == "toy" else qompose.compose(name)


BARE = ("lenet", "mobilenet_v3", "data_movement", "in_place", "cond_conv", "vision_transformer")


@pytest.mark.parametrize(
    ("quantizer", "name"),
    at_once(
        itertools.product(("toy", "xnnpack", "x86_inductor"), BARE),
        *(("xnnpack", "cond_conv"), ("x86_inductor", "in_place")),
    ),
)
def test_plans_need_no_meta_but_values(quantizer: str, name: str) -> None:
    """Module paths, sources and traces change from one torch to the next; rules match operators alone."""
    full = plan_of(prepare(by_name(name).export(), own_quantizer(quantizer)))
    bare = plan_of(prepare(stripped(by_name(name).export()), own_quantizer(quantizer)))
    assert bare.claims == full.claims != ()
    assert bare.groups == full.groups
    assert bare.rewrites == full.rewrites
    without_paths = [[replace(o, module="") for o in plan.operators] for plan in (full, bare)]
    assert without_paths[0] == without_paths[1]
