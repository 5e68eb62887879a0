# SPDX-License-Identifier: Apache-2.0
"""The C++ of attention computes what its operator means in torch: any sizes, layouts, masks and threads."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.native import attention, processor
from qompose_x86_inductor.native.attention import AttentionEnds, AttentionSizes, reference
from qompose_x86_inductor.native.products import KINDS
from torch import Tensor

from tests.x86_inductor.attention_calls import (
    Guarded,
    call,
    operands_and_mask,
    plain_operands,
    with_rows_out,
)

needs_vnni = pytest.mark.skipif(
    processor.of_machine() is not processor.AVX512_VNNI, reason="no AVX-512 VNNI, or AMX beside it"
)


@pytest.fixture(scope="module")
def library(library_for: Callable[[processor.Isa], ctypes.CDLL]) -> ctypes.CDLL:
    """Return the C++ of the one instruction set that this attention is for."""
    return library_for(processor.AVX512_VNNI)


STEP = 0.05
"""Of the values, in units."""


def run(library: ctypes.CDLL, *arguments: Any, threads: int = 1) -> Tensor:
    """Run the C++ on the arguments of `attention.ATTENTION`."""
    query, key, value, mask, sizes, ends = arguments
    batch, heads, length, _ = query.shape
    result = torch.full((batch, length, heads, value.shape[3]), 77, dtype=KINDS[sizes[-1]])
    numbers = ((ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_double * len(ends))(*ends))
    call(library.attention, (query, key, value), mask, result, threads, *numbers)
    return result


def agree(got: Tensor, wanted: Tensor) -> None:
    """Integers differ by a step where a value lies in the middle between two; floats by what rounding a
    probability to 16 bits, and a score to float32, makes of it."""
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=0, atol=0.02 * STEP, equal_nan=True)
        return
    apart = (got.int() - wanted.int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).double().mean()) <= max(0.02, 1.01 / got.numel())


def integers(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of the operator, from all that a rule may ask of it."""
    query, key, value, mask = operands_and_mask(draw, integers)
    kind = draw(st.integers(0, 2))
    zero_point = draw(st.integers(0, 100)) if kind < 2 else 0
    limits = [(0, 255), (-128, 127)][kind] if kind < 2 else (-math.inf, math.inf)
    zero_points = (draw(st.integers(0, 255)) for _ in range(2))
    sizes = AttentionSizes(
        *zero_points, draw(st.booleans()), kind < 2 or draw(st.booleans()), zero_point, kind
    )
    scale = 3 / (5500 * math.sqrt(query.shape[3]))  # of scores up to some ten units
    ends = AttentionEnds(
        scale, 1.70437 if kind < 2 else STEP, *(bound - zero_point for bound in limits)
    )
    return query, key, value, mask, [*sizes], [*ends]


@needs_vnni
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_it_computes_what_the_operator_means(library: ctypes.CDLL, data: st.DataObject) -> None:
    arguments = data.draw(calls())
    agree(run(library, *arguments), reference(*arguments))


def a_call(mask: Tensor | None = None, safe: bool = True, **lengths: int) -> tuple[Any, ...]:
    """Arguments with a result in float32."""
    sizes, ends = (
        AttentionSizes(120, 130, 0, safe, 0, 2),
        AttentionEnds(2e-4, STEP, -math.inf, math.inf),
    )
    return *plain_operands(integers, **lengths), mask, [*sizes], [*ends]


@needs_vnni
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("heads", [1, 4])
def test_any_number_of_threads_gives_the_same(
    library: ctypes.CDLL, threads: int, heads: int
) -> None:
    arguments = a_call(heads=heads, length=400, keys=60)
    one = run(library, *arguments)
    assert torch.equal(run(library, *arguments, threads=threads), one)
    agree(one, reference(*arguments))


@needs_vnni
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"length": 0}, {"keys": 0}, {"heads": 0}], ids=str)
def test_empty_tensors(library: ctypes.CDLL, sizes: dict[str, int]) -> None:
    arguments = a_call(**sizes)
    got = run(library, *arguments)
    assert torch.equal(got, reference(*arguments))
    assert torch.equal(got, torch.zeros_like(got))


@needs_vnni
@pytest.mark.parametrize(("safe", "result"), [(True, 0.0), (False, math.nan)])
@pytest.mark.parametrize("infinite", [False, True])
def test_rows_masked_throughout(
    library: ctypes.CDLL, infinite: bool, safe: bool, result: float
) -> None:
    arguments = a_call(mask=with_rows_out(infinite), safe=safe)
    got = run(library, *arguments)
    agree(got, reference(*arguments))
    rows = torch.full_like(got[:, 3], result)
    torch.testing.assert_close(got[:, 3], rows, rtol=0, atol=0, equal_nan=True)
    assert bool(got[:, [0, 1, 2, *range(4, 20)]].isfinite().all())


@needs_vnni
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_mask_that_makes_no_number_of_a_row(library: ctypes.CDLL, value: float) -> None:
    mask = torch.zeros(20, 50)
    mask[4, 49] = value
    got = run(library, *a_call(mask=mask))
    assert bool(got[:, 4].isnan().all())
    assert not bool(got[:, :4].isnan().any() or got[:, 5:].isnan().any())


@needs_vnni
def test_many_equal_scores_are_an_exact_mean(library: ctypes.CDLL) -> None:
    """The largest sums: 255 * 128 * keys, of probabilities that are all the largest integer."""
    keys, value = 65536, torch.zeros((), dtype=torch.uint8)
    query, key = integers(1, 1, 1, 4), integers(1, 1, 1, 4).expand(1, 1, keys, 4)
    sizes, ends = AttentionSizes(3, 130, 0, 1, 0, 2), AttentionEnds(1e-3, 1.0, -math.inf, math.inf)
    values = value.expand(1, 1, keys, 16)
    got = run(library, query, key, values, None, [*sizes], [*ends])
    assert torch.equal(got, torch.full_like(got, -130.0))


@needs_vnni
@pytest.mark.parametrize("width", [1, 5, 33])
def test_nothing_is_read_behind_a_tensor(library: ctypes.CDLL, width: int) -> None:
    query, key, value, *rest = a_call(heads=1, length=7, keys=21, width=width)
    wanted = reference(query, key, value, *rest)
    guarded = [Guarded(x) for x in (query, key, value)]
    agree(run(library, *(each.tensor for each in guarded), *rest), wanted)


def test_running_it_uncompiled_says_so() -> None:
    arguments = a_call()
    with pytest.warns(UserWarning, match="cpp_wrapper"):
        result = attention.ATTENTION(*arguments)
    assert torch.equal(result, reference(*arguments))
