# SPDX-License-Identifier: Apache-2.0
"""Schemes: what a specification may say, the operators it becomes, and integers equal to theirs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationConfig, QuantizationSpec
from qompose.errors import ConfigError
from qompose.observers import MinMaxObserver, PerBlockMinMaxObserver, PerChannelMinMaxObserver
from qompose.spec import qdq
from qompose.spec.qdq import QParams, integers_of, static_pair, values_of_integers
from torch import Tensor, nn

from tests.core.toy import (
    LINEAR,
    STATIC,
    Annotator,
    Model,
    annotate,
    export,
    nodes_calling,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

aten = torch.ops.aten
SYMMETRIC, AFFINE = torch.per_channel_symmetric, torch.per_channel_affine
FLOAT_POINTS = torch.per_channel_affine_float_qparams


def in_blocks_of(*sizes: int, **facts: Any) -> QuantizationSpec:
    facts = {"dtype": torch.int8, "quant_min": -8, "quant_max": 7, "qscheme": SYMMETRIC, **facts}
    return QuantizationSpec(
        observer_or_fake_quant_ctr=PerBlockMinMaxObserver, block_size=sizes, **facts
    )


def test_block_sizes_given_as_a_list_are_one_specification_with_those_of_a_tuple() -> None:
    assert replace(in_blocks_of(32), block_size=[32]) == in_blocks_of(32)
    assert hash(replace(in_blocks_of(32), block_size=[32])) == hash(in_blocks_of(32))


SHAPES = [(6, 8), (4, 6, 4), (2, 4, 3, 2), (8,)]
BLOCKS = [(2,), (-1,), (2, 2), (-1, 2), (1, 1), (4, -1, 1)]


def fits(shape: tuple[int, ...], blocks: tuple[int, ...]) -> bool:
    pairs = list(zip(reversed(shape), reversed(blocks), strict=False))
    return len(blocks) <= len(shape) and all(b == -1 or n % b == 0 for n, b in pairs)


@pytest.mark.parametrize(
    ("shape", "blocks"), [(s, b) for s in SHAPES for b in BLOCKS if fits(s, b)], ids=str
)
def test_the_observer_knows_minimum_and_maximum_of_each_block(
    shape: tuple[int, ...], blocks: tuple[int, ...]
) -> None:
    observer = PerBlockMinMaxObserver(torch.int8, blocks, qscheme=AFFINE)
    data = [randn(*shape, seed=seed) for seed in range(3)]
    for x in data:
        observer(x)
    full = (1,) * (len(shape) - len(blocks)) + tuple(
        n if b == -1 else b for n, b in zip(shape[-len(blocks) :], blocks, strict=True)
    )
    counts = [n // b for n, b in zip(shape, full, strict=True)]
    assert list(observer.minimum.shape) == counts
    for place in itertools.product(*map(range, counts)):
        block = tuple(slice(i * b, (i + 1) * b) for i, b in zip(place, full, strict=True))
        assert float(observer.minimum[place]) == min(float(x[block].min()) for x in data)
        assert float(observer.maximum[place]) == max(float(x[block].max()) for x in data)


@pytest.mark.parametrize("blocks", [(3,), (5, 2), (2, 2, 2)], ids=str)
def test_the_observer_refuses_blocks_that_do_not_fit(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"\(4, 8\)"):
        PerBlockMinMaxObserver(torch.int8, blocks)(randn(4, 8))


PAIRS = [
    pytest.param((6, 8), (6, 4), "quantize_per_channel_group", (2,), id="groups in rows"),
    pytest.param((6, 8), (6, 1), "quantize_per_channel_group", (8,), id="rows"),
    pytest.param((6, 8), (6, 8), "quantize_per_block", (), id="single numbers"),
    pytest.param((6, 8), (3, 4), "quantize_per_block", (), id="squares"),
    pytest.param((6, 8), (3, 1), "quantize_per_block", (), id="pairs of rows"),
    pytest.param((8,), (4,), "quantize_per_block", (), id="a vector"),
    pytest.param((2, 3, 4, 4), (2, 3, 4, 2), "quantize_per_block", (), id="a convolution's weight"),
]


@pytest.mark.parametrize(("shape", "counts", "name", "rest"), PAIRS)
def test_torchs_operator_is_taken_where_it_has_one(
    shape: tuple[int, ...], counts: tuple[int, ...], name: str, rest: tuple[int, ...]
) -> None:
    zeros = torch.zeros(counts, dtype=torch.int64)
    q = QParams(torch.ones(counts), zeros, -8, 7, torch.int8, blocks=True)
    pair = static_pair(q, shape, "scale", "zero")
    assert pair.quantize._schema.name.partition("::")[2] == name  # type: ignore[attr-defined]
    assert pair.dequantize._schema.name.partition("::")[2] == f"de{name}"  # type: ignore[attr-defined]
    assert pair.arguments == ("scale", "zero", -8, 7, torch.int8, *rest)


@pytest.mark.parametrize("axis", [-1, -3, 0, 2], ids=str)
def test_channels_are_counted_from_the_front(axis: int) -> None:
    q = QParams(torch.ones(4), torch.zeros(4), -8, 7, torch.int8, axis)
    assert static_pair(q, (4, 4, 4), "scale", "zero").arguments[2] == axis % 3


@st.composite
def quantized(draw: Any) -> tuple[Tensor, QParams]:
    """A tensor with many halves between integers, and parameters of any granularity."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    sizes = [draw(st.integers(1, 4)) for _ in counts]
    shape = [count * size for count, size in zip(counts, sizes, strict=True)]
    unsigned = draw(st.booleans())
    low, high, dtype = (0, 15, torch.uint8) if unsigned else (-8, 7, torch.int8)
    kind = draw(st.sampled_from(["tensor", "channel", "block"]))
    axis = draw(st.integers(-len(shape), len(shape) - 1)) if kind == "channel" else None
    scales = {"tensor": (), "channel": (shape[axis or 0],), "block": tuple(counts)}[kind]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    scale = 2.0 ** torch.randint(-3, 3, scales, generator=generator)
    if draw(st.booleans()):
        scale = scale / 3
    zero_point = torch.randint(low, high + 1, scales, generator=generator)
    if kind != "tensor" and draw(st.booleans()):
        zero_point = zero_point + torch.randint(1, 8, scales, generator=generator) / 8
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
    x = torch.randint(-30, 31, shape, generator=generator) / 2 * scale.flatten()[0]
    return x.to(draw(dtypes)), QParams(scale, zero_point, low, high, dtype, axis, kind == "block")


@settings(max_examples=100)
@given(quantized(), st.sampled_from([1, 7, 2**18]))
def test_folded_integers_are_the_operators_bit_for_bit(
    case: tuple[Tensor, QParams], chunk: int
) -> None:
    """Halves tell whether the zero point is added before the rounding or after it."""
    x, q = case
    scale, zero_point = q.scale, q.zero_point
    numbers = (float(scale), int(zero_point)) if q.per_tensor else (scale, zero_point)
    pair = static_pair(q, tuple(x.shape), *numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qdq, "_CHUNK", chunk)
        folded = integers_of(x, q)
    operated = pair.quantize(x, *pair.arguments)
    assert folded.dtype is operated.dtype is q.dtype
    assert torch.equal(folded, operated)


@given(quantized(), st.integers(1, 30))
def test_values_are_those_of_all_integers_at_once_but_some_rows_at_a_time(
    case: tuple[Tensor, QParams], chunk: int
) -> None:
    """Operators hold copies of what they are given."""
    x, q = case
    integers, most = integers_of(x, q), list[int]()
    expected, before = values_of_integers(integers, q), qdq._dequantize

    def dequantize(rows: Tensor, own: QParams) -> Tensor:
        most.append(rows.numel())
        return before(rows, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qdq, "_CHUNK", chunk)
        patch.setattr(qdq, "_dequantize", dequantize)
        assert torch.equal(values_of_integers(integers, q), expected)
    rows = len(x) // len(q.scale) if q.blocks and x.numel() else 1
    assert not x.numel() or max(most) <= max(chunk, rows * x[0].numel() if x.dim() else 1)


@settings(max_examples=50)
@given(quantized(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_dequantize_gives_the_value_of_each_integer_in_the_models_type(
    case: tuple[Tensor, QParams], dtype: torch.dtype
) -> None:
    x, q = case
    numbers = (float(q.scale), int(q.zero_point)) if q.per_tensor else (q.scale, q.zero_point)
    pair = static_pair(q, tuple(x.shape), *numbers)
    integers = integers_of(x, q)
    arguments, keywords = pair.to_float(dtype)
    actual = pair.dequantize(integers, *arguments, **keywords)
    sizes = [n // c for n, c in zip(x.shape, q.scale.shape, strict=False)] if q.blocks else []
    scale, zero_point = q.scale, q.zero_point
    for dim, size in enumerate(sizes):
        scale, zero_point = (v.repeat_interleave(size, dim) for v in (scale, zero_point))
    if q.axis is not None:
        shape = [-1 if dim == q.axis % x.dim() else 1 for dim in range(x.dim())]
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    expected = (integers.double() - zero_point) * scale.double()
    assert (actual.dtype, actual.shape) == (dtype, x.shape)
    error = (actual.double() - expected).abs()
    assert bool((error <= 2 * torch.finfo(dtype).eps * expected.abs()).all())


def test_the_operators_of_blocks_keep_torchs_rules() -> None:
    """Schema, example values with strides, dynamic shapes."""
    x = randn(2, 4, 4, 4).to(memory_format=torch.channels_last)
    scale = torch.rand([n // 2 for n in x.shape]) + 0.1
    zeros = torch.zeros_like(scale, dtype=torch.int64)
    torch.library.opcheck(qdq.quantize_per_block, (x, scale, zeros, -8, 7, torch.int8))
    arguments = x.to(torch.int8), scale, zeros, -8, 7, torch.float16
    torch.library.opcheck(qdq.dequantize_per_block, arguments)


def three() -> Any:
    """A convolution, a linear layer and a table, each with a weight that 4 divides."""
    layers = {"conv": nn.Conv2d(4, 4, 2, 2, bias=False), "linear": nn.Linear(16, 8)}
    return seeded(
        Model(
            lambda m, x, ids: m.linear(m.conv(x).flatten(1) + m.table(ids)),
            **layers, table=nn.Embedding(8, 16),
        )
    )  # fmt: skip


INPUTS = randn(2, 4, 4, 4), torch.tensor([3, 5])
TARGETS = {aten.conv2d.default: 1, aten.linear.default: 1, aten.embedding.default: 0}


@cache
def program() -> torch.export.ExportedProgram:
    return export(three(), *INPUTS)


def weights(spec: QuantizationSpec, *targets: Any) -> Annotator:
    def annotate_node(node: torch.fx.Node) -> None:
        if node.target in (targets or TARGETS):
            annotate(node, {node.args[TARGETS[node.target]]: spec})

    return Annotator(annotate_node)


UINT4 = {"dtype": torch.uint8, "quant_min": 0, "quant_max": 15}
WEIGHTS = {  # bound: SQNR in dB, from 6 dB per bit less the headroom of a normal distribution
    "across dimensions": (in_blocks_of(4, 1, 1), "quantize_per_block", 1, 12),
    "rows of a kernel": (in_blocks_of(1, 2), "quantize_per_block", 1, 14),
    "uint4 groups with float zero points": (
        in_blocks_of(4, **UINT4, qscheme=FLOAT_POINTS), "quantize_per_channel_group", 2, 18
    ),
    "rectangles with float zero points": (
        in_blocks_of(2, 4, **UINT4, qscheme=FLOAT_POINTS), "quantize_per_block", 2, 14
    ),
    "int8 groups": (
        in_blocks_of(8, quant_min=-127, quant_max=127), "quantize_per_channel_group", 2, 38
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "name", "number", "bound"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_in_blocks(spec: QuantizationSpec, name: str, number: int, bound: float) -> None:
    targets = {1: [aten.conv2d.default], 2: list(TARGETS)[1:]}[number]
    prepared = prepare(program(), weights(spec, *targets))
    converted = qompose.convert_pt2e(prepared)
    unfolded = qompose.convert_pt2e(prepared, fold_quantize=False)
    assert len(nodes_calling(converted, f"de{name}")) == len(targets)
    assert len(nodes_calling(unfolded, name)) == len(targets)
    assert torch.equal(converted(*INPUTS), unfolded(*INPUTS))
    integers = {n: t for n, t in converted.state_dict().items() if n.endswith("_q")}
    assert len(integers) == len(targets)
    for tensor in integers.values():
        assert tensor.dtype is spec.dtype
        assert spec.quant_min <= int(tensor.min()) and int(tensor.max()) <= spec.quant_max
        assert int(tensor.max()) == spec.quant_max, "the range is used"
    assert bound < sqnr(three()(*INPUTS), converted(*INPUTS)) < bound + 18


CHANNELS = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, SYMMETRIC, ch_axis=2)
REFUSED = [
    (in_blocks_of(5), "conv_weight -> conv2d .*scribe"),
    (in_blocks_of(3, 3), "conv_weight -> conv2d "),
    (in_blocks_of(1, 1, 4, 2, 1), "conv_weight"),
    (CHANNELS, "linear_weight -> linear "),
    (replace(in_blocks_of(2), observer_or_fake_quant_ctr=MinMaxObserver), "per-block"),
]


@pytest.mark.parametrize(
    ("spec", "named"), REFUSED, ids=["groups", "squares", "dimensions", "axis", "observer"]
)
def test_what_does_not_fit_a_tensor_is_refused_when_it_is_prepared(
    spec: QuantizationSpec, named: str
) -> None:
    quantizer = weights(spec)
    quantizer.label = "scribe"
    with pytest.raises(ConfigError, match=named):
        prepare(program(), quantizer)


def test_rules_name_the_weight_that_blocks_do_not_divide() -> None:
    config = QuantizationConfig(None, None, in_blocks_of(5))
    (linear,) = qompose.report(prepare(program(), toy(LINEAR, config=config))).why("linear")
    assert linear.state == "float"
    assert "linear_weight" in linear.reason


def test_what_is_computed_has_no_static_blocks() -> None:
    config = QuantizationConfig(in_blocks_of(4), None, STATIC.weight)
    with pytest.raises(ConfigError, match=r"flatten|add -> linear"):
        prepare(program(), toy(LINEAR, config=config))
