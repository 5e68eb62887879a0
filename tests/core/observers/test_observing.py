# SPDX-License-Identifier: Apache-2.0
"""Observers made from specifications: what they are given, what is refused, and derived parameters."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec
from qompose.errors import ConfigError
from qompose.observers import (
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from qompose.observers.channel_ranges import PerChannelRangeObserver, base_observer
from qompose.observers.make_observer import DerivedObserver, make_observer
from qompose.spec import DerivedQuantizationSpec, FixedQParamsQuantizationSpec
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import (
    INT8,
    RUN_TIME,
    WEIGHT,
    WEIGHT_PER_TENSOR,
    Annotator,
    annotate,
    export,
    prepare,
    randn,
    seeded,
    sqnr,
)

aten = torch.ops.aten
BLOCKS = QuantizationSpec(
    torch.int8, PerBlockMinMaxObserver, -8, 7, torch.per_channel_symmetric, block_size=(2,)
)
TOKENS = replace(RUN_TIME, qscheme=torch.per_channel_affine, block_size=(-1,))


class Recorder(nn.Module):
    """An observer of another engine that keeps what it was given."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def calculate_qparams(self) -> None:
        """Estimate nothing."""


class PerChannelRecorder(Recorder):
    """Other engines go by the name: this one gets an axis, whatever the scheme."""


class WithoutAxis(Recorder):
    """One that could not take an axis."""

    def __init__(  # type: ignore[no-untyped-def]
        self, dtype, qscheme, quant_min, quant_max, is_dynamic
    ) -> None:
        super().__init__(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})


@pytest.mark.parametrize(
    ("spec", "kind", "extra"),
    [
        pytest.param(INT8, Recorder, set(), id="per tensor"),
        pytest.param(WEIGHT, Recorder, {"ch_axis"}, id="per channel"),
        pytest.param(WEIGHT, PerChannelRecorder, {"ch_axis"}, id="per channel by its name"),
        pytest.param(WEIGHT, WithoutAxis, set(), id="channels, and no such argument"),
        pytest.param(INT8, PerChannelRecorder, {"ch_axis"}, id="the name without channels"),
        pytest.param(BLOCKS, Recorder, {"block_size"}, id="blocks"),
        pytest.param(RUN_TIME, Recorder, set(), id="dynamic"),
        pytest.param(TOKENS, Recorder, set(), id="per token"),
    ],
)
def test_factories_get_the_fields_of_a_specification(
    spec: QuantizationSpec, kind: type[Recorder], extra: set[str]
) -> None:
    """None included; an axis and blocks only where they mean something."""
    recorder: Any = make_observer(replace(spec, observer_or_fake_quant_ctr=kind))
    names = {"dtype", "qscheme", "quant_min", "quant_max", "is_dynamic"} | extra
    assert recorder.arguments == {name: getattr(spec, name) for name in names}


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        pytest.param(INT8, MinMaxObserver, id="per tensor"),
        pytest.param(WEIGHT, PerChannelMinMaxObserver, id="per channel"),
        pytest.param(BLOCKS, PerBlockMinMaxObserver, id="blocks"),
        pytest.param(TOKENS, PlaceholderObserver, id="per token"),
        pytest.param(
            FixedQParamsQuantizationSpec(torch.uint8, 0.5, 3), FixedQParamsObserver, id="fixed"
        ),
        pytest.param(
            DerivedQuantizationSpec([], lambda o: None, torch.int32),  # type: ignore[arg-type, return-value]
            DerivedObserver, id="derived",
        ),
    ],
)  # fmt: skip
def test_kinds(spec: Any, kind: type) -> None:
    observer: Any = make_observer(spec)
    assert type(observer) is kind
    assert observer.dtype is spec.dtype


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            replace(WEIGHT, observer_or_fake_quant_ctr=HistogramObserver),
            "int8 .*axis 0.*ch_axis", id="channels without an axis",
        ),
        pytest.param(
            replace(BLOCKS, observer_or_fake_quant_ctr=PerChannelMinMaxObserver),
            r"per-block \(2,\).*block_size", id="blocks without a size",
        ),
        pytest.param(
            replace(INT8, observer_or_fake_quant_ctr=PerChannelMinMaxObserver),
            "PerChannelMinMaxObserver does not estimate torch.per_tensor_affine", id="per tensor",
        ),
        pytest.param(
            replace(INT8, qscheme=None, observer_or_fake_quant_ctr=PerChannelMinMaxObserver),
            "PerChannelMinMaxObserver does not estimate int8", id="no scheme",
        ),
        pytest.param(
            replace(INT8, observer_or_fake_quant_ctr=MinMaxObserver.with_args(bins=3)), "bins", id="unknown"
        ),
        pytest.param(
            replace(INT8, observer_or_fake_quant_ctr=functools.partial(MinMaxObserver, 1, 2)),
            "no observer can be made", id="too many arguments",
        ),
    ],
)  # fmt: skip
def test_observers_that_cannot_be_made(spec: QuantizationSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_observer(spec)


def _observed(*tensors: Tensor) -> list[nn.Module]:
    observers = [make_observer(INT8) for _ in tensors]
    for observer, tensor in zip(observers, tensors, strict=True):
        observer(tensor)
    return observers


def derived(result: Any, seen: Tensor | None = None, **facts: Any) -> Any:
    """The parameters that an observer derives by a function which returns `result`."""
    facts = {"dtype": torch.int8, "qscheme": torch.per_tensor_symmetric, **facts}
    observer: Any = make_observer(DerivedQuantizationSpec([], lambda o: result, **facts))
    observer.subject = "bias -> linear (me, rule mine)"
    if seen is not None:
        observer(seen)
    return observer.calculate_qparams()


ONE, ZERO = torch.ones(()), torch.zeros((), dtype=torch.int64)
CHANNELS = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}


@pytest.mark.parametrize(
    ("result", "facts", "shape"),
    [
        pytest.param((ONE, ZERO), {}, (), id="tensors"),
        pytest.param((0.5, 3), {}, (), id="numbers"),
        pytest.param((ONE.reshape(1), ZERO.reshape(1)), {}, (), id="one number each"),
        pytest.param((ONE.expand(4), ZERO.expand(4)), CHANNELS, (4,), id="per channel"),
    ],
)
def test_what_a_function_may_return(
    result: Any, facts: dict[str, Any], shape: tuple[int, ...]
) -> None:
    scale, zero_point = derived(result, randn(4), **facts)
    assert scale.shape == zero_point.shape == torch.Size(shape)
    assert scale.dtype is torch.float32
    assert float(scale.flatten()[0]) == float(torch.as_tensor(result[0]).flatten()[0])


@pytest.mark.parametrize(
    ("result", "facts", "message"),
    [
        pytest.param(None, {}, "None .*expected a scale and a zero point", id="nothing"),
        pytest.param((ONE,), {}, "expected a scale and a zero point", id="one"),
        pytest.param(("a", "b"), {}, "expected a scale and a zero point", id="words"),
        pytest.param((ONE.expand(4), ZERO.expand(4)), {}, r"\(4,\), not \(\)", id="per tensor"),
        pytest.param((ONE, ZERO), CHANNELS, r"\(\), not \(4,\)", id="per channel"),
        pytest.param((ONE.expand(3), ZERO.expand(3)), CHANNELS, r"\(3,\), not", id="channels"),
        pytest.param((-ONE, ZERO), {}, "positive and finite", id="negative"),
        pytest.param((0.0, 0), {}, "positive and finite", id="zero"),
        pytest.param((float("nan"), 0), {}, "positive and finite", id="NaN"),
        pytest.param((float("inf"), 0), {}, "positive and finite", id="infinite"),
        pytest.param((1.0, 200), {}, r"zero point is outside \[-128, 127\]", id="zero point"),
    ],
)
def test_what_it_may_not(result: Any, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        derived(result, randn(4), **facts)
    assert "for bias -> linear (me, rule mine)" in str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_channels_of_what_has_one_scale_for_all(shape: tuple[int, ...]) -> None:
    """As of a bias whose specification is per channel, where the weight's is per tensor after all."""
    observer = _per_channel(lambda o: (ONE.reshape(shape) * 0.5, ZERO.reshape(shape)))
    observer.derive_from(_observed(randn(3), randn(3)))
    scale, zero_point = observer.calculate_qparams()
    assert scale.tolist() == [0.5] * 4 and zero_point.tolist() == [0] * 4


@pytest.mark.parametrize("by_way", [False, True], ids=["itself", "derived"])
def test_channels_of_what_has_channels_need_a_scale_each(by_way: bool) -> None:
    observer, weight = _per_channel(lambda o: (ONE, ZERO)), make_observer(WEIGHT)
    weight(randn(4, 3))
    if by_way:
        other = _per_channel(lambda o: o[0].calculate_qparams())
        other.derive_from([weight])
        weight = other
    observer.derive_from([*_observed(randn(3)), weight])
    with pytest.raises(ConfigError, match=r"\(\), not \(4,\)"):
        observer.calculate_qparams()


def _per_channel(function: Any) -> Any:
    observer: Any = make_observer(DerivedQuantizationSpec([], function, torch.int8, **CHANNELS))  # type: ignore[arg-type]
    observer.subject = "bias -> linear (me, rule mine)"
    observer(randn(4))
    return observer


def test_derived_observers_own_no_submodules() -> None:
    spec = DerivedQuantizationSpec([], lambda o: o[0].calculate_qparams(), torch.int8)  # type: ignore[operator]
    observer = make_observer(spec)
    assert isinstance(observer, DerivedObserver)
    observer.derive_from(_observed(randn(3)))
    assert not list(observer.children())
    assert observer.calibrated


def test_functions_see_the_observers_that_users_know() -> None:
    plain = make_observer(INT8)
    assert base_observer(plain) is plain
    assert base_observer(PerChannelRangeObserver(plain, 1)) is plain


BIAS = {"dtype": torch.int32, "quant_min": -(2**31), "quant_max": 2**31 - 1}


def product(observers: list[nn.Module]) -> tuple[Tensor, Tensor]:
    """The worked example: the scale of a bias is that of the products that it is added to."""
    (activation, _), (weight, _) = (o.calculate_qparams() for o in observers)  # type: ignore[operator]
    scale = activation * weight
    return scale, torch.zeros(scale.shape, dtype=torch.int64)


def linear(weight: QuantizationSpec, bias: Any) -> Annotator:
    """Annotates each linear; `bias` makes its specification from the edges of input and weight."""

    def annotate_node(node: Node) -> None:
        if node.target is aten.linear.default:
            x, w, b = node.args
            annotate(node, {x: INT8, w: weight, b: bias((x, node), (w, node))}, INT8)

    return Annotator(annotate_node)


SCHEMES = [
    pytest.param(WEIGHT_PER_TENSOR, {"qscheme": torch.per_tensor_symmetric}, id="per tensor"),
    pytest.param(WEIGHT, CHANNELS, id="per channel"),
]


@pytest.mark.parametrize("swapped", [False, True], ids=["in order", "swapped"])
@pytest.mark.parametrize(("weight", "facts"), SCHEMES)
def test_a_bias_has_the_scale_of_its_products(
    weight: QuantizationSpec, facts: dict[str, Any], swapped: bool
) -> None:
    model, x = seeded(nn.Linear(3, 4)), randn(8, 3)
    seen = []

    def derive(observers: list[nn.Module]) -> tuple[Tensor, Tensor]:
        seen.append([o.qscheme for o in observers])
        return product(observers)

    def bias(*places: Any) -> DerivedQuantizationSpec:
        order = list(reversed(places)) if swapped else list(places)
        return DerivedQuantizationSpec(order, derive, **BIAS, **facts)

    prepared = prepare(export(model, x), linear(weight, bias))
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    schemes = [INT8.qscheme, weight.qscheme]
    assert seen[0] == (schemes[::-1] if swapped else schemes)
    (node,) = (n for n in converted.graph.nodes if n.target is aten.linear.default)
    scales = [a.args[1] for a in node.args]
    numbers = [
        converted.get_buffer(str(s.target)) if isinstance(s, Node) else torch.tensor(s)
        for s in scales
    ]
    assert torch.equal(numbers[2], numbers[0] * numbers[1])
    integers = converted.get_buffer("bias_q")
    assert integers.dtype is torch.int32
    assert torch.equal(integers, torch.round(model.bias / numbers[2]).to(torch.int32))
    assert (integers * numbers[2] - model.bias).abs().max() <= numbers[2].max() / 2
    assert 28 < sqnr(model(x), converted(x)) < 80


@pytest.mark.parametrize("number", [0, 1, 3, 8])
def test_any_number_of_sources(number: int) -> None:
    seen = []

    def derive(observers: list[nn.Module]) -> tuple[float, int]:
        seen.append(len(observers))
        return 0.25, 0

    def bias(x: Any, w: Any) -> Any:
        return DerivedQuantizationSpec([x, w, *[x] * 6][:number], derive, **BIAS)  # type: ignore[arg-type]

    model, x = seeded(nn.Linear(3, 4)), randn(8, 3)
    prepared = prepare(export(model, x), linear(WEIGHT, bias))
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    assert set(seen) == {number}
    assert torch.equal(converted.get_buffer("bias_q"), torch.round(model.bias * 4).to(torch.int32))


@pytest.mark.parametrize("mask", [False, True], ids=["data", "a mask"])
def test_derived_from_derived_and_dropped_with_its_source(mask: bool) -> None:
    """A tensor whose source stays in float stays in float too, and the report says why."""

    def double(observers: list[nn.Module]) -> tuple[Tensor, Tensor]:
        scale, zero_point = observers[0].calculate_qparams()  # type: ignore[operator]
        return scale * 2, zero_point

    def annotate_node(node: Node) -> None:
        facts = {"dtype": torch.int8, "qscheme": torch.per_tensor_affine}
        if node.name == "sigmoid":
            annotate(node, {node.args[0]: INT8})
        elif node.name == "tanh":
            place = next(n for n in node.graph.nodes if n.name == "sigmoid")
            source = (place.args[0], place)
            annotate(node, {node.args[0]: DerivedQuantizationSpec([source], double, **facts)})
        elif node.name == "sin":
            place = next(n for n in node.graph.nodes if n.name == "tanh")
            source = (place.args[0], place)
            annotate(node, {node.args[0]: DerivedQuantizationSpec([source], double, **facts)})

    class Three(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return torch.sigmoid(x), torch.tanh(y), torch.sin(z)

    inputs = [randn(4, 4, seed=seed) for seed in range(3)]
    if mask:
        inputs[0][0, 0] = -torch.inf
    prepared = prepare(export(Three(), *inputs), Annotator(annotate_node))
    prepared(*inputs)
    told = pytest.warns(qompose.QomposeWarning, match="Nothing was quantized")
    with told if mask else nullcontext():
        converted = qompose.convert_pt2e(prepared)
    steps = sorted(n.args[1] for n in converted.graph.nodes if n.name.startswith("quantize"))
    rows = {row.name: row for row in qompose.report(converted).rows}
    if mask:
        assert steps == []
        assert {row.state for row in rows.values()} == {"float"}
        assert "x -> sigmoid stays in float" in rows["tanh"].reason
        assert "y -> tanh stays in float" in rows["sin"].reason
        for one, other in zip(Three()(*inputs), converted(*inputs), strict=True):
            assert torch.equal(one, other)
    else:
        assert steps == pytest.approx([steps[0], 2 * steps[0], 4 * steps[0]])


def test_fixed_parameters_are_those_that_were_given() -> None:
    fixed = FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)

    def annotate_node(node: Node) -> None:
        if node.target is aten.sigmoid.default:
            annotate(node, {}, fixed)

    x = randn(4, 4)
    prepared = prepare(export(nn.Sigmoid(), x), Annotator(annotate_node))
    converted = qompose.convert_pt2e(prepared)  # without calibration
    (quantize,) = (n for n in converted.graph.nodes if n.name.startswith("quantize"))
    assert quantize.args[1:] == (1 / 256, 0, 0, 255, torch.uint8)
    assert (converted(x) - x.sigmoid()).abs().max() <= 1 / 512
