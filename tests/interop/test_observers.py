# SPDX-License-Identifier: Apache-2.0
"""torchao's observers and specifications under its engine and under ours: the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import _affine_quantization as affine, fake_quantize, observer as ao

from tests.core.toy import Model, export, randn, seeded, sqnr
from tests.interop.peers import (
    THEIR_WARNINGS,
    ByOperator,
    assert_same,
    by_qompose,
    by_torchao,
    torchao_engine,
    torchao_quantizer as quantizers,
)
from tests.sampling import at_once

pytestmark = pytest.mark.filterwarnings(
    *THEIR_WARNINGS, "ignore:Please use quant_min and quant_max:UserWarning"
)

aten = torch.ops.aten
LINEAR = aten.linear.default
TENSOR, BALANCED = torch.per_tensor_affine, torch.per_tensor_symmetric
CHANNELS, CHANNELS_AFFINE = torch.per_channel_symmetric, torch.per_channel_affine
UINT8 = {"dtype": torch.uint8, "quant_min": 0, "quant_max": 255}
BATCHES = [(randn(5, 8, seed=seed) * (seed + 1),) for seed in range(3)]


def spec(maker: Any, **facts: Any) -> Any:
    facts = {"dtype": torch.int8, "quant_min": -128, "quant_max": 127, "qscheme": TENSOR, **facts}
    return quantizers.QuantizationSpec(observer_or_fake_quant_ctr=maker, **facts)


def whole(dtype: torch.dtype, **facts: Any) -> dict[str, Any]:
    """A type's own range, which the observer fills in."""
    return {"dtype": dtype, "quant_min": None, "quant_max": None, **facts}


INT8 = spec(ao.HistogramObserver.with_args(eps=2**-12))
WEIGHT = spec(
    ao.PerChannelMinMaxObserver.with_args(eps=2**-12), quant_min=-127, qscheme=CHANNELS, ch_axis=0
)


def fake(observer: Any, **arguments: Any) -> Any:
    return fake_quantize.FakeQuantize.with_args(observer=observer, **arguments)


def affine_observer(kind: str, dtype: torch.dtype, granularity: Any, mapping: str) -> Any:
    maker = getattr(affine, f"AffineQuantized{kind}Observer")
    mapping_type = getattr(ao.MappingType, mapping)
    return maker.with_args(target_dtype=dtype, granularity=granularity, mapping_type=mapping_type)


TOKENS = affine_observer("MinMax", torch.uint8, ao.PerToken(), "ASYMMETRIC")
GROUPS = affine_observer("MinMax", torch.int8, ao.PerGroup(4), "SYMMETRIC")
ROWS = affine_observer("MinMax", torch.int8, ao.PerAxis(0), "SYMMETRIC")
AVERAGE = affine_observer("MovingAverageMinMax", torch.int8, ao.PerTensor(), "ASYMMETRIC")
AT_RUN_TIME = affine_observer("Placeholder", torch.int8, ao.PerToken(), "ASYMMETRIC")
FUSED = fake_quantize.FusedMovingAvgObsFakeQuantize.with_args(
    observer=ao.MovingAverageMinMaxObserver
)
FIXED = ao.FixedQParamsObserver.with_args(
    scale=1 / 16, zero_point=120, dtype=torch.quint8, qscheme=TENSOR
)

ACTIVATIONS: dict[str, Any] = {
    "histogram": INT8,
    "range": spec(ao.MinMaxObserver),
    "moving average": spec(ao.MovingAverageMinMaxObserver.with_args(averaging_constant=0.1)),
    "no bounds": spec(ao.MinMaxObserver, **whole(torch.uint8)),
    "fewer steps of its own": spec(ao.MinMaxObserver.with_args(reduce_range=True), **whole(torch.uint8)),
    "arguments that the spec overrides": spec(
        ao.MinMaxObserver.with_args(dtype=torch.uint8, quant_min=0, quant_max=3, qscheme=BALANCED)
    ),
    "uint8, symmetric": spec(ao.MinMaxObserver, **UINT8, qscheme=BALANCED),
    "uint8, symmetric, no bounds": spec(ao.MinMaxObserver, **whole(torch.uint8, qscheme=BALANCED)),
    "int16": spec(ao.MinMaxObserver, **whole(torch.int16, qscheme=BALANCED)),
    "uint16 in int32": spec(ao.MovingAverageMinMaxObserver, dtype=torch.int32, quant_min=0, quant_max=65535),
    "an axis of no use": spec(ao.HistogramObserver, ch_axis=1),
    "fixed by its observer": spec(FIXED, **UINT8),
    "fixed": quantizers.FixedQParamsQuantizationSpec(torch.int8, 1 / 16, -5, -128, 127, TENSOR),
    "fake quantize": spec(fake(ao.MovingAverageMinMaxObserver, averaging_constant=0.2)),
    "fused": spec(FUSED, **UINT8),
    "dynamic": spec(ao.PlaceholderObserver.with_args(eps=2**-12), is_dynamic=True),
    "dynamic fake quantize": spec(
        fake(ao.MovingAverageMinMaxObserver, averaging_constant=1, eps=2**-12), is_dynamic=True
    ),
    "float16": spec(ao.PlaceholderObserver, **whole(torch.float16, qscheme=None)),
    "per token": spec(TOKENS, **UINT8, qscheme=None),
    "moving average, affine": spec(AVERAGE, qscheme=None),
    "per token at run time": spec(AT_RUN_TIME, qscheme=None, is_dynamic=True),
}  # fmt: skip

WEIGHTS: dict[str, Any] = {
    "channels": WEIGHT,
    "moving average": spec(ao.MovingAveragePerChannelMinMaxObserver, qscheme=CHANNELS, ch_axis=0),
    "channels, affine": spec(
        ao.PerChannelMinMaxObserver, **UINT8, qscheme=CHANNELS_AFFINE, ch_axis=0
    ),
    "columns": spec(ao.PerChannelMinMaxObserver, qscheme=CHANNELS, ch_axis=1),
    "an axis of no use": spec(ao.MinMaxObserver, qscheme=BALANCED, ch_axis=0),
    "4 bits": spec(ao.PerChannelMinMaxObserver, quant_min=-8, quant_max=7, qscheme=CHANNELS, ch_axis=0),
    "fake quantize": spec(fake(ao.PerChannelMinMaxObserver), quant_min=-127, qscheme=CHANNELS, ch_axis=0),
    "groups": spec(GROUPS, qscheme=None),
    "groups of 4 bits": spec(GROUPS, quant_min=-8, quant_max=7, qscheme=None),
    "rows, affine": spec(ROWS, qscheme=None),
}  # fmt: skip


def model() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))


def member(x: Any = None, weight: Any = None, bias: Any = None, output: Any = None) -> Any:
    """Annotates each linear; `bias` may make its specification of the node."""

    def asked(node: Node) -> Any:
        made = bias(node) if callable(bias) else bias
        return dict(zip(node.args, (x, weight, made), strict=True)), output

    return ByOperator({LINEAR: asked})


def both(make: Callable[[], Any], float_model: nn.Module | None = None, *batches: Any) -> Any:
    """Ours and theirs: the same outputs, and the same number of operators."""
    batches = batches or tuple(BATCHES)
    float_model = model() if float_model is None else float_model
    ours = by_qompose(export(float_model, *batches[0]), make(), *batches)
    theirs = by_torchao(export(float_model, *batches[0]), make(), *batches)
    assert_same(ours, theirs)
    assert not torch.equal(ours.outputs[0], float_model(*batches[-1]))
    for name in ("quantize_affine", "dequantize_affine", "choose_qparams"):
        asked = [[_literals(node) for node in found.calls(name)] for found in (ours, theirs)]
        assert sorted(asked[0]) == sorted(asked[1]), name
    assert (ours.quantizes, ours.dequantizes) == (theirs.quantizes, theirs.dequantizes)
    return ours, theirs


def _literals(node: Node) -> str:
    return str([argument for argument in node.args if not isinstance(argument, Node)])


@pytest.mark.parametrize(
    "name",
    at_once(
        ACTIVATIONS,
        *("histogram", "no bounds", "fewer steps of its own", "uint16 in int32", "fixed", "fused"),
        *("dynamic fake quantize", "float16", "per token", "per token at run time"),
    ),
)
def test_activations(name: str) -> None:
    ours, _ = both(lambda: member(ACTIVATIONS[name], WEIGHT))
    assert sqnr(model()(*BATCHES[-1]), ours.outputs[0]) > 6
    assert all(row.state != "float" for row in qompose.report(ours.model).rows if row.macs)


@pytest.mark.parametrize("name", ["fake quantize", "moving average, affine"])
def test_outputs_share_with_their_readers(name: str) -> None:
    both(lambda: member(ACTIVATIONS[name], WEIGHT, output=ACTIVATIONS[name]))


@pytest.mark.parametrize(
    "name",
    at_once(WEIGHTS, "channels, affine", "an axis of no use", "groups of 4 bits", "rows, affine"),
)
def test_weights(name: str) -> None:
    """Their integers are stored, and no floats beside them."""
    ours, _ = both(lambda: member(weight=WEIGHTS[name]))
    state = ours.model.state_dict()
    assert {key: state[key].dtype for key in ("0.weight_q", "2.weight_q")} == dict.fromkeys(
        ("0.weight_q", "2.weight_q"), WEIGHTS[name].dtype
    )
    assert not {"0.weight", "2.weight"} & set(state)
    assert sqnr(model()(*BATCHES[-1]), ours.outputs[0]) > 12


def product(
    scheme: torch.qscheme | None, sequence: Any, zero: torch.dtype
) -> Callable[[Node], Any]:
    """A bias with the scale of the products that it is added to."""

    def derive(observers: list[Any]) -> tuple[Tensor, Tensor]:
        scales = [observer.calculate_qparams()[0] for observer in observers]
        scale = scales[0] * scales[1]
        return scale, torch.zeros_like(scale, dtype=zero)

    def make(node: Node) -> Any:
        edges = sequence((source, node) for source in node.args[:2])
        axis = None if scheme is None else 0
        bounds = (-(2**31), 2**31 - 1)
        return quantizers.DerivedQuantizationSpec(edges, derive, torch.int32, *bounds, scheme, axis)

    return make


PLAIN = spec(ao.MinMaxObserver, qscheme=BALANCED)
BIASES: dict[str, tuple[Any, Any]] = {
    "derived per channel, list": (WEIGHT, product(CHANNELS, list, torch.int32)),
    "derived per channel, tuple": (WEIGHT, product(CHANNELS, tuple, torch.int64)),
    "derived without a scheme": (PLAIN, product(None, tuple, torch.int32)),
    "derived per tensor": (PLAIN, product(TENSOR, list, torch.int32)),
    "its own range": (WEIGHT, spec(ao.MinMaxObserver, **whole(torch.int32, qscheme=BALANCED))),
}


@pytest.mark.parametrize("name", at_once(BIASES, "derived per channel, tuple", "its own range"))
def test_biases(name: str) -> None:
    weight, bias = BIASES[name]
    ours, _ = both(lambda: member(INT8, weight, bias))
    assert ours.model.state_dict()["0.bias_q"].dtype is torch.int32


def test_a_prepared_model_computes_what_theirs_does() -> None:
    """Fake-quantizers change what goes on; each module has the name of its call."""
    make = lambda: member(ACTIVATIONS["fake quantize"], WEIGHTS["fake quantize"], output=INT8)  # noqa: E731
    ours = qompose.prepare_pt2e(export(model(), *BATCHES[0]), make())
    theirs = torchao_engine.prepare_pt2e(export(model(), *BATCHES[0]).module(), make())
    for batch in BATCHES:
        assert torch.equal(ours(*batch), theirs(*batch))
    assert _observers(ours) == _observers(theirs)


def _observers(prepared: GraphModule) -> set[str]:
    nodes = [
        n for n in prepared.graph.nodes if str(n.target).startswith("activation_post_process_")
    ]
    assert all(node.op == "call_module" and node.name == node.target for node in nodes)
    return {node.name for node in nodes}


PAIRS = [tuple(randn(3, 4, seed=seed) for seed in (n, n + 9)) for n in range(3)]
SUMS = Model(lambda m, x, y: torch.cat([x + y, x * y]).relu())


def _forward(node: Node) -> Any:
    """A producer's output goes by the edge behind it, which may go by the output."""
    share = quantizers.SharedQuantizationSpec
    if node.target is aten.relu.default:
        return {node.args[0]: INT8}, share((node.args[0], node))
    if node.target is aten.cat.default:
        (user,) = node.users
        return dict.fromkeys(node.all_input_nodes, INT8), share((node, user))
    return {}, INT8


def test_references_forward() -> None:
    """torchao makes observers as it comes by, and asserts that the other one is there."""
    targets = (aten.add.Tensor, aten.mul.Tensor, aten.cat.default, aten.relu.default)
    table = dict.fromkeys(targets, _forward)
    with pytest.raises(AssertionError):
        by_torchao(export(SUMS, *PAIRS[0]), ByOperator(table), *PAIRS)
    found = by_qompose(export(SUMS, *PAIRS[0]), ByOperator(table), *PAIRS)
    cat, relu = (found.calls(name)[0] for name in ("cat", "relu"))
    (before,), (behind,) = (list(node.users) for node in (cat, relu))
    assert before.args[1:] == behind.args[1:]
    assert sqnr(SUMS(*PAIRS[-1]), found.outputs[0]) > 25


def test_integers_are_those_of_a_parameter_and_its_observer() -> None:
    """One observer of two parameters, and one parameter with two observers, of other axes."""

    def asked(node: Node) -> Any:
        first = next(n for n in node.graph.nodes if n.target is LINEAR)
        share = quantizers.SharedQuantizationSpec((first.args[1], first))
        weights = {
            "linear": WEIGHTS["rows, affine"],
            "linear_1": spec(GROUPS, qscheme=None, ch_axis=1),
        }
        return {node.args[1]: weights.get(node.name, share)}, None

    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    float_model, x = seeded(Model(lambda m, x: m.b(m.a(m.a(x))), **layers)), randn(5, 8)
    found = by_qompose(export(float_model, x), ByOperator({LINEAR: asked}), (x,))
    assert sqnr(float_model(x), found.outputs[0]) > 25
    integers = [t for t in found.model.state_dict().values() if t.dtype is torch.int8]
    assert len({tensor.data_ptr() for tensor in integers}) == 3


def test_in_a_body() -> None:
    """Operators of another package stand in bodies, and what they read becomes operands."""

    def branching(m: Any, x: Tensor) -> Any:
        return m.a(torch.cond(x.sum() > 0, lambda x: m.a(x), lambda x: torch.tanh(x), (x,)))

    float_model, x = seeded(Model(branching, a=nn.Linear(8, 8))), randn(5, 8).abs()
    found = by_qompose(export(float_model, x), member(weight=WEIGHTS["groups"]), (x,))
    for each in (x, -x):
        assert sqnr(float_model(each), found.model(each)) > 30
    integers = [t for t in found.model.state_dict().values() if t.dtype is torch.int8]
    assert len({tensor.data_ptr() for tensor in integers}) == 1, "stored once"
    assert "a.weight" not in found.model.state_dict()
    assert torch.equal(torch.export.export(found.model, (x,)).module()(x), found.outputs[0])
