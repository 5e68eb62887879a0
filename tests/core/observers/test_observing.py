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
from qompose.errors import ConfigError, StatisticsError
from qompose.observers import (
    HistogramObserver,
    MinMaxObserver,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
)
from qompose.observers.channel_ranges import PerChannelRangeObserver, base_observer
from qompose.observers.make_observer import DerivedObserver, make_observer
from qompose.spec import DerivedQuantizationSpec
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import (
    INT8,
    RUN_TIME,
    WEIGHT,
    Annotator,
    Call,
    annotate,
    export,
    prepare,
    randn,
    seeded,
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
        (INT8, Recorder, set()), (WEIGHT, Recorder, {"ch_axis"}), (WEIGHT, WithoutAxis, set()),
        (INT8, PerChannelRecorder, {"ch_axis"}), (BLOCKS, Recorder, {"block_size"}),
        (RUN_TIME, Recorder, set()), (TOKENS, Recorder, set()),
    ],
    ids=["tensor", "channel", "no axis", "by its name", "blocks", "dynamic", "token"],
)  # fmt: skip
def test_factories_get_the_fields_of_a_specification(
    spec: QuantizationSpec, kind: type[Recorder], extra: set[str]
) -> None:
    """None included; an axis and blocks only where they mean something."""
    recorder: Any = make_observer(replace(spec, observer_or_fake_quant_ctr=kind))
    names = {"dtype", "qscheme", "quant_min", "quant_max", "is_dynamic"} | extra
    assert recorder.arguments == {name: getattr(spec, name) for name in names}


def by(spec: QuantizationSpec, factory: Any, **change: Any) -> QuantizationSpec:
    return replace(spec, observer_or_fake_quant_ctr=factory, **change)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (by(WEIGHT, HistogramObserver), "ch_axis"),
        (by(BLOCKS, PerChannelMinMaxObserver), "block_size"),
        (by(INT8, PerChannelMinMaxObserver), "PerChannelMinMaxObserver .*per_tensor_affine"),
        (by(INT8, PerChannelMinMaxObserver, qscheme=None), "PerChannelMinMaxObserver .*int8"),
        (by(INT8, MinMaxObserver.with_args(bins=3)), "bins"),
        (by(INT8, functools.partial(MinMaxObserver, 1, 2)), "int8"),
    ],
    ids=["no axis", "no block size", "per tensor", "no scheme", "unknown", "too many arguments"],
)
def test_observers_that_cannot_be_made(spec: QuantizationSpec, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
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
        ((ONE, ZERO), {}, ()), ((0.5, -128), {}, ()), ((0.5, 127), {}, ()),
        ((ONE.reshape(1), ZERO.reshape(1)), {}, ()), ((ONE.expand(4), ZERO.expand(4)), CHANNELS, (4,)),
    ],
    ids=["tensors", "the least", "the largest", "one number each", "per channel"],
)  # fmt: skip
def test_what_a_function_may_return(
    result: Any, facts: dict[str, Any], shape: tuple[int, ...]
) -> None:
    scale, zero_point = derived(result, randn(4), **facts)
    assert scale.shape == zero_point.shape == torch.Size(shape)
    assert scale.dtype is torch.float32
    assert float(scale.flatten()[0]) == float(torch.as_tensor(result[0]).flatten()[0])


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        (None, {}), ((ONE,), {}), (("a", "b"), {}), ((ONE.expand(4), ZERO.expand(4)), {}),
        ((ONE, ZERO), CHANNELS), ((ONE.expand(3), ZERO.expand(3)), CHANNELS), ((-ONE, ZERO), {}),
        ((0.0, 0), {}), ((float("nan"), 0), {}), ((float("inf"), 0), {}), ((1.0, 128), {}), ((1.0, -129), {}),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_may_not(result: Any, facts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"bias -> linear \(me, rule mine\)"):
        derived(result, randn(4), **facts)


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
    with pytest.raises(ConfigError, match="bias -> linear"):
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


def test_channels_without_rows_balance_nothing() -> None:
    seen, other = (PerChannelRangeObserver(make_observer(INT8), 1) for _ in range(2))
    seen(randn(9, 4))
    other(randn(9, 3))
    for sample in (None, other.facts().sample):
        with pytest.raises(StatisticsError):
            other.take(replace(seen.facts(), sample=sample))
    with pytest.raises(StatisticsError):
        seen.facts().channels.merged(other.facts().channels)
    with pytest.raises(StatisticsError):
        seen.facts().channel_ranges(0)


BIAS = {"dtype": torch.int32, "quant_min": -(2**31), "quant_max": 2**31 - 1}


def linear(weight: QuantizationSpec, bias: Any) -> Annotator:
    """Annotates each linear; `bias` makes its specification from the edges of input and weight."""

    def annotate_node(node: Node) -> None:
        if node.target is aten.linear.default:
            x, w, b = node.args
            annotate(node, {x: INT8, w: weight, b: bias((x, node), (w, node))}, INT8)

    return Annotator(annotate_node)


@pytest.mark.parametrize("number", [0, 2, 8])
def test_any_number_of_sources_in_their_order(number: int) -> None:
    seen = []

    def derive(observers: list[Any]) -> tuple[float, int]:
        seen.append([observer.qscheme for observer in observers])
        return 0.25, 0

    def bias(x: Any, w: Any) -> Any:
        return DerivedQuantizationSpec([x, w, *[x] * 6][:number], derive, **BIAS)  # type: ignore[arg-type]

    model, x = seeded(nn.Linear(3, 4)), randn(8, 3)
    prepared = prepare(export(model, x), linear(WEIGHT, bias))
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    assert seen[0] == [INT8.qscheme, WEIGHT.qscheme, *[INT8.qscheme] * 6][:number]
    assert torch.equal(converted.get_buffer("bias_q"), torch.round(model.bias * 4).to(torch.int32))


@pytest.mark.parametrize("mask", [False, True], ids=["data", "a mask"])
def test_derived_from_derived_and_dropped_with_its_source(mask: bool) -> None:
    """A tensor whose source stays in float stays in float too, and the report says why."""

    def double(observers: list[nn.Module]) -> tuple[Tensor, Tensor]:
        scale, zero_point = observers[0].calculate_qparams()  # type: ignore[operator]
        return scale * 2, zero_point

    def annotate_node(node: Node) -> None:
        before = {"tanh": "sigmoid", "sin": "tanh"}
        if node.name == "sigmoid":
            annotate(node, {node.args[0]: INT8})
        elif node.name in before:
            place = next(n for n in node.graph.nodes if n.name == before[node.name])
            facts = {"dtype": torch.int8, "qscheme": torch.per_tensor_affine}
            spec = DerivedQuantizationSpec([(place.args[0], place)], double, **facts)
            annotate(node, {node.args[0]: spec})

    three = Call(lambda x, y, z: (torch.sigmoid(x), torch.tanh(y), torch.sin(z)))
    inputs = [randn(4, 4, seed=seed) for seed in range(3)]
    if mask:
        inputs[0][0, 0] = -torch.inf
    prepared = prepare(export(three, *inputs), Annotator(annotate_node))
    prepared(*inputs)
    told = pytest.warns(qompose.QomposeWarning)
    with told if mask else nullcontext():
        converted = qompose.convert_pt2e(prepared)
    steps = sorted(n.args[1] for n in converted.graph.nodes if n.name.startswith("quantize"))
    rows = {row.name: row for row in qompose.report(converted).rows}
    if mask:
        assert steps == []
        assert {row.state for row in rows.values()} == {"float"}
        assert "inputs_0 -> sigmoid" in rows["tanh"].reason
        assert "inputs_1 -> tanh" in rows["sin"].reason
        for one, other in zip(three(*inputs), converted(*inputs), strict=True):
            assert torch.equal(one, other)
    else:
        assert steps == pytest.approx([steps[0], 2 * steps[0], 4 * steps[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [(32,), (3, 32), (-1, 8), (-1,)], ids=str)
def test_ends_of_blocks_are_those_of_all_values(block: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of more values than are looked at at a time."""
    x = torch.randn(4500, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    observer = PerBlockMinMaxObserver(torch.int8, block_size=block)
    observer(x)
    rows, columns = (x.shape[0] if size == -1 else size for size in (1, *block)[-2:])
    columns = x.shape[1] if block[-1] == -1 else columns
    blocks = x.unfold(0, rows, rows).unfold(1, columns, columns).float().flatten(2)
    assert torch.equal(observer.minimum, blocks.amin(2))
    assert torch.equal(observer.maximum, blocks.amax(2))
