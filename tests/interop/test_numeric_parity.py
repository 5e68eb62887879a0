# SPDX-License-Identifier: Apache-2.0
"""Scales, zero points and integers against torch's own and torchao's: the same bits, or a stated difference.

`tests/core/spec/test_numerics.py` compares the formula with torch's observers over all ranges of floats; here
all that feeds or follows the formula is compared, and with both peers.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import qompose
import torch
from hypothesis import example, given, settings, strategies as st
from qompose import observers
from qompose.spec import qdq
from qompose.spec.qdq import QParams, integers_of, static_pair
from qompose.spec.qparams import DEFAULT_EPS, along, choose_qparams, fake_quantize
from torch import Tensor
from torch.ao.quantization import observer as torch_observer

from tests.core.toy import randn, sqnr
from tests.sampling import at_once

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchao warns about itself while it is imported
    from torchao.quantization import quant_primitives as affine
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.pt2e import (
        _affine_quantization as affine_observers,
        observer as torchao_observer,
    )

# Quantized tensors are on their way out of torch; until then they are its own word on the arithmetic.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel and other:UserWarning"
)

PEERS = {"torch": torch_observer, "torchao": torchao_observer}
RANGES = {
    "int8": (torch.int8, None, None), "int8 given": (torch.int8, -128, 127),
    "int8 narrow": (torch.int8, -127, 127), "4 bits in int8": (torch.int8, -8, 7),
    "uint8": (torch.uint8, None, None), "uint8 given": (torch.uint8, 0, 255),
    "uint8 reduced": (torch.uint8, 0, 127), "int16": (torch.int16, None, None),
    "int16 narrow": (torch.int16, -32767, 32767),
}  # fmt: skip
TENSOR_SCHEMES = [torch.per_tensor_affine, torch.per_tensor_symmetric]
CHANNEL_SCHEMES = [torch.per_channel_affine, torch.per_channel_symmetric]
KINDS = {
    "MinMaxObserver": (TENSOR_SCHEMES, {}),
    "MovingAverageMinMaxObserver": (TENSOR_SCHEMES, {"averaging_constant": 0.3}),
    "PerChannelMinMaxObserver": (CHANNEL_SCHEMES, {"ch_axis": 1}),
    "MovingAveragePerChannelMinMaxObserver": (CHANNEL_SCHEMES, {"ch_axis": 2}),
}
SCHEMES = [(kind, scheme) for kind, (schemes, _) in KINDS.items() for scheme in schemes]
BATCHES = [randn(4, 3, 5, seed=seed) * 3.0**seed for seed in range(3)]
ZEROS = [torch.zeros(4, 3, 5)]
ONE_SIDED = [batch.abs() + 1 for batch in BATCHES]
TIES = torch.arange(-40, 40).reshape(8, 10) / 8
"""Multiples of half a step of 0.25: where rounding half to even and rounding half up part."""

NEAR_TIES = (torch.arange(-40, 40) + 0.5) * 0.3
"""Multiples of half a step of 0.3, rounded: where the quotient and the product with 1 / scale part."""

examples = settings(max_examples=60, deadline=None)
floats = st.floats(-100, 100, width=32)
tensors = st.lists(floats, min_size=1, max_size=24).map(torch.tensor)
scales = st.floats(2.0**-20, 2.0**10, width=32)
bits = st.integers(-128, 127)


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal bits in scale and zero point, whatever shapes and integer types they come in."""
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.flatten(), other.flatten().to(one.dtype))


@pytest.mark.parametrize("bounds", RANGES)
@pytest.mark.parametrize(("kind", "scheme"), SCHEMES, ids=lambda v: str(v).removeprefix("torch."))
@pytest.mark.parametrize("peer", at_once(PEERS, "torchao"))
def test_observers(peer: str, kind: str, scheme: Any, bounds: str) -> None:
    dtype, low, high = RANGES[bounds]
    for batches, eps in itertools.product((BATCHES, ZEROS, ONE_SIDED), (DEFAULT_EPS, 2**-12)):
        facts = {"dtype": dtype, "quant_min": low, "quant_max": high, "qscheme": scheme, "eps": eps}
        ours, theirs = (
            getattr(m, kind)(**facts, **KINDS[kind][1]) for m in (observers, PEERS[peer])
        )
        for batch in batches:
            ours(batch), theirs(batch)
        assert_same(ours.calculate_qparams(), theirs.calculate_qparams())


@pytest.mark.parametrize("group", [4, 16])
@pytest.mark.parametrize("bounds", ["int8 given", "int8 narrow", "4 bits in int8", "int16"])
@pytest.mark.parametrize(
    ("mapping", "scheme"), list(zip(["ASYMMETRIC", "SYMMETRIC"], CHANNEL_SCHEMES, strict=True))
)
def test_observers_of_groups(mapping: str, scheme: Any, bounds: str, group: int) -> None:
    """torchao's affine observers."""
    dtype, low, high = RANGES[bounds]
    ours = qompose.observers.PerBlockMinMaxObserver(
        dtype=dtype, quant_min=low, quant_max=high, block_size=(group,), eps=2**-12, qscheme=scheme
    )
    theirs = affine_observers.AffineQuantizedMinMaxObserver(
        affine.MappingType[mapping], dtype, PerGroup(group), quant_min=low, quant_max=high,
        eps=2**-12,
    )  # fmt: skip
    for seed in range(3):
        weight = randn(6, 32, seed=seed)
        ours(weight), theirs(weight)
    assert_same(ours.calculate_qparams(), theirs.calculate_qparams())


@examples
@given(x=tensors, eps=st.sampled_from([2.0**-12, 2.0**-23]))
@pytest.mark.parametrize("bounds", ["int8 given", "int8 narrow", "uint8 given", "uint8 reduced"])
def test_parameters_chosen_at_run_time(bounds: str, x: Tensor, eps: float) -> None:
    """What the operator of dynamic quantization computes is what an observer of the same tensor gives."""
    dtype, low, high = RANGES[bounds]
    facts: dict[str, Any] = {"dtype": dtype, "quant_min": low, "quant_max": high, "eps": eps}
    ours = choose_qparams(*torch.aminmax(x), qscheme=torch.per_tensor_affine, **facts)
    assert_same(ours, qdq.choose_qparams(x, low, high, eps, dtype))
    if dtype is torch.int8:
        ours = choose_qparams(*torch.aminmax(x), qscheme=torch.per_tensor_symmetric, **facts)
        assert_same(ours, qdq.choose_qparams_symmetric(x, low, high, eps, dtype))


@examples
@given(x=tensors, scale=scales, zero_point=bits)
@example(x=TIES.flatten(), scale=0.25, zero_point=3)
@example(x=NEAR_TIES, scale=0.3, zero_point=-4)
def test_integers_per_tensor(x: Tensor, scale: float, zero_point: int) -> None:
    step, zero = torch.tensor(scale), torch.tensor(zero_point)
    ours = integers_of(x, QParams(step, zero, -128, 127, torch.int8))
    assert torch.equal(ours, affine.quantize_affine(x, x.shape, step, zero, torch.int8, -128, 127))
    arguments = float(step), zero_point, -128, 127
    restored = qdq.dequantize_per_tensor(ours, *arguments, torch.int8)
    assert torch.equal(restored, affine.dequantize_affine(ours, x.shape, step, zero, torch.int8))
    assert torch.equal(restored, torch.fake_quantize_per_tensor_affine(x, *arguments))
    assert torch.equal(restored, fake_quantize(x, step, zero, -128, 127))


@examples
@given(rows=st.lists(st.tuples(floats, floats, scales, bits), min_size=1, max_size=6))
@example(rows=[(float(x), float(-x), 0.25, 3) for x in TIES.flatten()])
@example(rows=[(float(x), float(-x), 0.3, -4) for x in NEAR_TIES])
@pytest.mark.parametrize("axis", [0, 1])
def test_integers_per_channel(axis: int, rows: Any) -> None:
    """Not against `torch.quantize_per_channel`, whose kernels disagree on ties: it depends on the axis."""
    one, other, steps, zeros = (torch.tensor(column) for column in zip(*rows, strict=True))
    x = torch.stack([one, other], 1 - axis)
    ours = integers_of(x, QParams(steps, zeros, -128, 127, torch.int8, axis=axis))
    assert torch.equal(ours, qdq.quantize_per_channel(x, steps, zeros, axis, -128, 127, torch.int8))
    block = tuple(2 if dim != axis else 1 for dim in range(2))
    assert torch.equal(ours, affine.quantize_affine(x, block, steps, zeros, torch.int8))
    bounds = (axis, -128, 127)
    fake = torch.fake_quantize_per_channel_affine(x, steps, zeros.int(), *bounds)
    assert torch.equal(
        fake_quantize(x, along(steps, axis, 2), along(zeros, axis, 2), -128, 127), fake
    )
    restored = qdq.dequantize_per_channel(ours, steps, zeros, *bounds, torch.int8)
    assert torch.equal(restored, fake)


@pytest.mark.parametrize("offset", [0, 1], ids=["symmetric", "affine"])
@pytest.mark.parametrize("group", [2, 5, 10])
def test_integers_per_group(group: int, offset: int) -> None:
    """Those of the operator, which rounds the sum with the zero point; torchao's functions round first.

    The two agree where the zero point is even: rounding half to even does not see it.
    """
    shape = (8, 10 // group)
    steps, zeros = torch.full(shape, 0.25), torch.arange(math.prod(shape)).reshape(shape) * offset
    q = QParams(steps, zeros, -128, 127, torch.int8, blocks=True)
    pair = static_pair(q, (8, 10), steps, zeros)
    for x in (TIES, randn(8, 10)):
        ours = integers_of(x, q)
        assert torch.equal(ours, pair.quantize(x, *pair.arguments))
        theirs = affine.quantize_affine(x, (1, group), steps, zeros, torch.int8)
        odd = (zeros % 2).bool().repeat_interleave(group, 1)
        assert torch.equal(ours[~odd], theirs[~odd])
        assert bool(((ours - theirs).abs() <= 1).all())
        arguments, keywords = pair.to_float(torch.float32)
        restored = pair.dequantize(ours, *arguments, **keywords)
        expected = affine.dequantize_affine(ours, (1, group), steps, zeros, torch.int8)
        assert torch.equal(restored, expected)


NORMAL = randn(100_000, seed=1)
UNIFORM = torch.rand(100_000, generator=torch.Generator().manual_seed(2)) - 0.5
SHAPES = {
    "normal": NORMAL, "laplace": -UNIFORM.sign() * torch.log1p(-1.99999 * UNIFORM.abs()),
    "heavy tail": NORMAL**3, "one-sided": NORMAL.relu(), "uniform": UNIFORM,
    "one outlier": torch.cat([NORMAL, torch.tensor([60.0])]),
}  # fmt: skip


def observed_sqnr(kind: Any, x: Tensor, bounds: str, scheme: Any, **arguments: Any) -> float:
    dtype, low, high = RANGES[bounds]
    observer = kind(dtype=dtype, quant_min=low, quant_max=high, qscheme=scheme, **arguments)
    for batch in x.split(10_000):
        observer(batch)
    return sqnr(x, fake_quantize(x, *observer.calculate_qparams(), low, high))


@pytest.mark.parametrize("scheme", at_once(TENSOR_SCHEMES, torch.per_tensor_affine))
@pytest.mark.parametrize("bounds", at_once(("int8 given", "4 bits in int8"), "4 bits in int8"))
@pytest.mark.parametrize("shape", at_once(SHAPES, "normal", "heavy tail", "one outlier"))
@pytest.mark.parametrize("peer", at_once(PEERS, "torch"))
def test_histogram_ranges(peer: str, shape: str, bounds: str, scheme: Any) -> None:
    """A deliberate difference: bins are powers of two wide, and the search is exhaustive.

    With squared errors ours is never noisier than the peers' (0.02 dB are the bins' own). The default
    weighs large errors more (`HistogramObserver`); it gives up 1 dB at most to the peers' range, and no
    more than 0.01 dB to the whole range.
    """
    x = SHAPES[shape]
    squared = observed_sqnr(qompose.observers.HistogramObserver, x, bounds, scheme, power=2.0)
    default = observed_sqnr(qompose.observers.HistogramObserver, x, bounds, scheme)
    theirs = observed_sqnr(PEERS[peer].HistogramObserver, x, bounds, scheme)
    whole = observed_sqnr(qompose.observers.MinMaxObserver, x, bounds, scheme)
    assert squared >= theirs - 0.02
    assert default >= max(theirs - 1.0, whole - 0.01)
