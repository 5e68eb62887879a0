# SPDX-License-Identifier: Apache-2.0
"""The C++ of recurrent layers computes what torch's do: any sizes, directions, projections and threads."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.native import recurrent
from qompose_x86_inductor.native.processor import AVX2, Isa
from qompose_x86_inductor.native.recurrent import RecurrentSizes, pack, reference, unpack
from qompose_x86_inductor.operators.recurrent import Cell, Weight
from torch import Tensor


def run(library: ctypes.CDLL, *arguments: Any, threads: int = 1) -> list[Tensor]:
    """Run the C++ on the arguments of `recurrent.LSTM` or ``GRU``."""
    x, *states, weights, starts, values, flat = arguments
    sizes = RecurrentSizes(*flat)
    steps, batch = x.shape[:2] if not sizes.batch_first else (x.shape[1], x.shape[0])
    out = torch.full((*x.shape[:2], sizes.width * sizes.directions), 77.0)
    results = [out, *(torch.full_like(state, 77.0) for state in states)]
    cell = [] if len(states) == 2 else [None]
    tensors = [x, *states, *cell, weights, starts, values, *results, *cell]
    packed = (weights, starts, values)
    failed = library.recurrent(
        ctypes.c_int(threads),
        (ctypes.c_int64 * len(flat))(*flat),
        ctypes.c_int64(steps),
        ctypes.c_int64(batch),
        (ctypes.c_int64 * 3)(*(tensor.numel() for tensor in packed)),
        (ctypes.c_void_p * 9)(*(0 if t is None else t.data_ptr() for t in tensors)),
    )
    assert not failed
    return results


def weight(rows: int, depth: int, isa: Isa, *, has_bias: bool = True) -> Weight:
    low, high = isa.weights
    matrix = torch.randint(low, high + 1, (rows, depth), dtype=torch.int8)
    scale = torch.rand(rows) / (60 * depth**0.5)
    return Weight(matrix, scale, torch.randn(rows) / 4 if has_bias else None)


def cells(sizes: RecurrentSizes, isa: Isa) -> Iterator[Cell]:
    for layer in range(sizes.layers):
        for _ in range(sizes.directions):
            rows = sizes.gates * sizes.hidden
            projection = weight(sizes.projected, sizes.hidden, isa, has_bias=False)
            pair = weight(rows, sizes.depth(layer), isa), weight(rows, sizes.width, isa)
            yield Cell(*pair, projection if sizes.projected else None)


def arguments_of(isa: Isa, sizes: RecurrentSizes, steps: int, batch: int) -> tuple[Any, ...]:
    """Arguments of the operator of these sizes."""
    torch.manual_seed(0)
    sizes = sizes._replace(lanes=isa.lanes)
    packed = pack(cells(sizes, isa), sizes)
    both = (batch, steps) if sizes.batch_first else (steps, batch)
    count = sizes.layers * sizes.directions
    states = [torch.randn(count, batch, sizes.width)]
    states += [torch.randn(count, batch, sizes.hidden)] if sizes.gates == 4 else []
    return torch.randn(*both, sizes.input_width), *states, *packed, [*sizes]


def expected(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *states, weights, starts, values, flat = rest
    packed = recurrent.PackedLayers(weights, starts, values)
    result: tuple[Tensor, ...] = reference(x, states, packed, flat)
    return result


def agree(got: list[Tensor], wanted: tuple[Tensor, ...]) -> None:
    """What rounding to 16 bits makes of values of about 1, step by step."""
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@st.composite
def sizes_of_layers(draw: st.DrawFn) -> RecurrentSizes:
    gates = draw(st.sampled_from([4, 3]))
    hidden = draw(st.integers(1, 70))
    most = hidden - 1 if gates == 4 else 0  # torch has no wider projections
    projected = draw(st.just(0) | st.integers(min(1, most), most))
    layers, directions = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    first, lanes = draw(st.integers(0, 1)), draw(st.sampled_from([8, 16]))
    return RecurrentSizes(
        gates, draw(st.integers(1, 70)), hidden, projected, layers, directions, first, lanes
    )


@given(sizes_of_layers(), st.integers(1, 9), st.integers(1, 30), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_layers(
    library: ctypes.CDLL, isa: Isa, sizes: RecurrentSizes, steps: int, batch: int, threads: int
) -> None:
    arguments = arguments_of(isa, sizes, steps, batch)
    agree(run(library, *arguments, threads=threads), expected(*arguments))


@given(sizes_of_layers())
@settings(max_examples=40, deadline=None)
def test_packing_loses_nothing(sizes: RecurrentSizes) -> None:
    wanted = list(cells(sizes, AVX2))
    for one, other in zip(unpack(pack(wanted, sizes), sizes), wanted, strict=True):
        for got, given_ in zip(one, other, strict=True):
            assert (got is None) == (given_ is None)
            for a, b in zip(got or (), given_ or (), strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


LSTM = RecurrentSizes(4, 40, 96, 0, 2, 2, 1, 8)
GRU = RecurrentSizes(3, 40, 96, 0, 2, 2, 1, 8)


@pytest.mark.parametrize("sizes", [LSTM, LSTM._replace(projected=33), GRU])
@pytest.mark.parametrize("threads", [2, 8])
def test_threads_compute_the_same_and_ask_for_no_memory(
    library: ctypes.CDLL, isa: Isa, sizes: RecurrentSizes, threads: int
) -> None:
    arguments = arguments_of(isa, sizes, 60, 40)
    before = library.count_allocations(True)
    got = run(library, *arguments, threads=threads)
    assert library.count_allocations(True) == before == 0
    for one, other in zip(got, run(library, *arguments), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sizes", [LSTM, GRU])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_sequence_alone(
    library: ctypes.CDLL, isa: Isa, sizes: RecurrentSizes, value: float
) -> None:
    arguments = arguments_of(isa, sizes._replace(directions=1, layers=1), 5, 4)
    x = arguments[0].clone()
    x[1, 2, 7] = value
    out, *_ = run(library, x, *arguments[1:])
    clean, *_ = run(library, *arguments)
    assert bool(out[1, 2:].isnan().all())
    assert torch.equal(out[1, :2], clean[1, :2])
    others = [0, 2, 3]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("sizes", [LSTM._replace(projected=20), GRU])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e10])
def test_inputs_of_any_size(
    library: ctypes.CDLL, isa: Isa, sizes: RecurrentSizes, size: float
) -> None:
    arguments = arguments_of(isa, sizes, 4, 3)
    x, *rest = arguments
    x = torch.sign(x) * size
    exact = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in rest]
    wanted = expected(x.double(), *exact)  # float32 would lose what large sums nearly cancel to
    agree(run(library, x, *rest), tuple(each.float() for each in wanted))


@pytest.mark.parametrize("sizes", [LSTM._replace(projected=20), GRU])
def test_the_largest_floats_saturate_as_large_ones_do(
    library: ctypes.CDLL, isa: Isa, sizes: RecurrentSizes
) -> None:
    x, *rest = arguments_of(isa, sizes, 4, 3)
    large, largest = (run(library, torch.sign(x) * size, *rest) for size in (1e30, 3e38))
    for one, other in zip(large, largest, strict=True):
        assert torch.equal(one, other) and bool(one.isfinite().all())


@pytest.mark.parametrize("end", [0, 1])
def test_the_largest_sums_are_exact(library: ctypes.CDLL, isa: Isa, end: int) -> None:
    sizes, extreme = RecurrentSizes(3, 4096, 3, 0, 1, 1, 0, isa.lanes), isa.weights[end]
    x, hidden, *_, flat = arguments_of(isa, sizes, 2, 2)
    whole = Weight(torch.full((9, 4096), extreme, dtype=torch.int8), torch.full((9,), 1e-5), None)
    state = Weight(torch.full((9, 3), extreme, dtype=torch.int8), torch.full((9,), 1e-5), None)
    packed = pack([Cell(whole, state, None)], sizes)
    arguments = (torch.ones_like(x), hidden, *packed, flat)
    agree(run(library, *arguments), expected(*arguments))


def test_running_it_uncompiled_says_so() -> None:
    arguments = arguments_of(AVX2, RecurrentSizes(4, 3, 5, 2, 1, 1, 0, 8), 2, 2)
    with pytest.warns(UserWarning, match="cpp_wrapper"):
        results = recurrent.LSTM(*arguments)
    for one, other in zip(results, expected(*arguments), strict=True):
        assert torch.equal(one, other)
    for empty, other in zip(fake_of(recurrent.LSTM, *arguments), results, strict=True):
        assert empty.shape == other.shape


def fake_of(operator: Any, *arguments: Any) -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        return operator(*fakes)
