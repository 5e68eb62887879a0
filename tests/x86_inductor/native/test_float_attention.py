# SPDX-License-Identifier: Apache-2.0
"""The C++ of attention in float computes torch's attention: any sizes, layouts, masks and threads."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.native import float_attention
from torch import Tensor

from tests.x86_inductor.attention_calls import LAYOUTS, MASKS, a_mask, call, operand


def run(library: ctypes.CDLL, *arguments: Any, threads: int = 1) -> Tensor:
    """Run the C++ on the arguments of `float_attention.ATTENTION`."""
    query, key, value, mask, is_causal, scale = arguments
    batch, heads, length, _ = query.shape
    result = torch.full((batch, length, heads, value.shape[3]), 77.0)
    numbers = (ctypes.c_bool(is_causal), ctypes.c_double(scale))
    call(library.float_attention, (query, key, value), mask, result, threads, *numbers)
    return result


def agree(got: Tensor, arguments: tuple[Any, ...]) -> None:
    """The bound is of some roundings of scores, which are sums of products of float32."""
    query, key, value, mask, is_causal, scale = arguments
    exact = mask if mask is None or mask.dtype == torch.bool else mask.double()
    wide = (query.double(), key.double(), value.double())
    wanted = float_attention.reference(*wide, exact, is_causal, scale)
    times = query.shape[1] // key.shape[1]
    sums = query.abs() @ key.abs().repeat_interleave(times, 1).mT * abs(scale)
    bound = 2**-22 * (float(sums.max()) + 4) * float(value.abs().max())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=bound, equal_nan=True)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of the operator, from all that torch's attention accepts."""
    batch, shared, times = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, length = shared * times, draw(st.integers(1, 30))
    keys = draw(st.integers(1, 40) | st.integers(60, 150))
    width, columns = (draw(st.integers(1, 40) | st.sampled_from([64, 128])) for _ in range(2))
    torch.manual_seed(draw(st.integers(0, 99)))
    query, key, value = (
        operand(torch.randn, draw(st.sampled_from(LAYOUTS)), batch, *sizes)
        for sizes in ((heads, length, width), (shared, keys, width), (shared, keys, columns))
    )
    full = (batch, heads, length, keys)
    shape = tuple(size if draw(st.booleans()) else 1 for size in full)[draw(st.integers(0, 2)) :]
    mask = a_mask(draw(st.sampled_from(MASKS)), shape)
    is_causal = mask is None and draw(st.booleans())
    # torch multiplies what hides later keys, -inf, by the scale: NaN where that is 0.
    scale = 0.3 if is_causal else draw(st.sampled_from([0.0, 0.3, -1.0]))
    return query, key, value, mask, is_causal, scale


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_it_computes_torchs_attention(library: ctypes.CDLL, data: st.DataObject) -> None:
    arguments = data.draw(calls())
    agree(run(library, *arguments), arguments)


def a_call(
    batch: int = 1,
    heads: int = 3,
    length: int = 20,
    keys: int = 50,
    width: int = 32,
    mask: Tensor | None = None,
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    tensors = (torch.randn(batch, heads, rows, width) for rows in (length, keys, keys))
    return *tensors, mask, False, 0.2


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("heads", [1, 4])
def test_any_number_of_threads_gives_the_same(
    library: ctypes.CDLL, threads: int, heads: int
) -> None:
    arguments = a_call(heads=heads, length=400, keys=60)
    one = run(library, *arguments)
    assert torch.equal(run(library, *arguments, threads=threads), one)
    agree(one, arguments)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"length": 0}, {"keys": 0}, {"heads": 0}], ids=str)
def test_empty_tensors(library: ctypes.CDLL, sizes: dict[str, int]) -> None:
    got = run(library, *a_call(**sizes))
    assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("kind", ["keep", "infinite"])
def test_a_row_without_keys_is_zero(library: ctypes.CDLL, kind: str) -> None:
    mask = torch.ones(20, 50, dtype=torch.bool)
    mask[3], mask[7, 1:] = False, False
    given = mask if kind == "keep" else torch.zeros(20, 50).masked_fill(~mask, -math.inf)
    got = run(library, *a_call(mask=given))
    assert torch.equal(got[:, 3], torch.zeros_like(got[:, 3]))
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("where", ["query", "key", "value", "mask"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_stays_none(library: ctypes.CDLL, where: str, value: float) -> None:
    """Up to infinity in values, which is no number beside others of both signs."""
    arguments = a_call(mask=torch.zeros(20, 50))
    dict(zip(("query", "key", "value", "mask"), arguments, strict=False))[where][..., 4, 9] = value
    got, wanted = run(library, *arguments), float_attention.reference(*arguments)
    assert torch.equal(got.isfinite(), wanted.isfinite())
    assert not bool(wanted.isfinite().all())


@pytest.mark.parametrize("size", [1e-30, 1e4])
def test_tiny_and_huge_scores(library: ctypes.CDLL, size: float) -> None:
    query, key, value, *rest = a_call()
    agree(run(library, query * size, key, value, *rest), (query * size, key, value, *rest))


@pytest.mark.parametrize("kind", ["keep", "infinite", "lowest", "causal"])
def test_what_is_masked_weighs_nothing(library: ctypes.CDLL, kind: str) -> None:
    """Of a cache, what is not written yet may be anything."""
    query, key, value, _, _, scale = a_call(length=50)
    mask, causal = torch.ones(50, 50, dtype=torch.bool).tril(), kind == "causal"
    value[..., 25:, :] = 3e38
    lowest = torch.finfo(torch.float32).min if kind == "lowest" else -math.inf
    wide = None if causal else torch.zeros(50, 50).masked_fill(~mask, lowest)
    given = mask if kind == "keep" else wide
    got = run(library, query, key, value, given, causal, scale)[:, :25]
    wanted = float_attention.reference(query, key, value, given, causal, scale)[:, :25]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_many_keys(library: ctypes.CDLL) -> None:
    """More than a block of twelve rows may have."""
    query, key, value, *rest = a_call(heads=1, length=13, keys=20000, width=8)
    got = run(library, query, key, value, *rest)
    wanted = float_attention.reference(query.double(), key.double(), value.double(), *rest)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [1, 5, 33])
def test_nothing_is_read_behind_a_tensor(library: ctypes.CDLL, width: int) -> None:
    query, key, value, *rest = a_call(heads=1, length=7, keys=21, width=width)
    kept = []
    for x in (query, key, value):
        memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        kept.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None).mprotect
        assert protect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
        at = mmap.PAGESIZE - 4 * x.numel()
        memory[at : mmap.PAGESIZE] = x.numpy().tobytes()
        moved = torch.frombuffer(memory, dtype=torch.float32, count=x.numel(), offset=at)
        kept.append(moved.view(x.shape))
    agree(run(library, kept[1], kept[3], kept[5], *rest), (query, key, value, *rest))


def test_running_it_uncompiled_says_so() -> None:
    arguments = a_call()
    with pytest.warns(UserWarning, match="cpp_wrapper"):
        result = float_attention.ATTENTION(*arguments)
    assert torch.equal(result, float_attention.reference(*arguments))
