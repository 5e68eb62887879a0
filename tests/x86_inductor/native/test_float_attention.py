# SPDX-License-Identifier: Apache-2.0
"""The C++ of attention in float computes torch's attention: any sizes, layouts, masks and threads."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.native import float_attention
from torch import Tensor

from tests.x86_inductor.attention_calls import (
    Guarded,
    agree,
    call,
    operands_and_mask,
    plain_operands,
    with_rows_out,
)


def run(library: ctypes.CDLL, *arguments: Any, threads: int = 1) -> Tensor:
    """Run the C++ on the arguments of `float_attention.ATTENTION`."""
    query, key, value, mask, is_causal, scale, *others = arguments
    hidden, safe_softmax = others or (-math.inf, True)
    batch, heads, length, _ = query.shape
    result = torch.full((batch, length, heads, value.shape[3]), 77.0)
    numbers = (ctypes.c_bool(is_causal), ctypes.c_double(scale), ctypes.c_double(hidden))
    numbers += (ctypes.c_bool(safe_softmax),)
    call(library.float_attention, (query, key, value), mask, result, threads, *numbers)
    return result


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of the operator, from all that torch's attention accepts."""
    *tensors, mask = operands_and_mask(draw, torch.randn)
    is_causal = mask is None and draw(st.booleans())
    # torch multiplies what hides later keys, -inf, by the scale: NaN where that is 0.
    scale = 0.3 if is_causal else draw(st.sampled_from([0.0, 0.3, -1.0]))
    hidden = draw(st.sampled_from([-math.inf, torch.finfo(torch.float32).min, -1e4, 0.5]))
    return *tensors, mask, is_causal, scale, hidden, draw(st.booleans())


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_it_computes_torchs_attention(library: ctypes.CDLL, data: st.DataObject) -> None:
    arguments = data.draw(calls())
    agree(run(library, *arguments), *arguments)


def a_call(mask: Tensor | None = None, **sizes: int) -> tuple[Any, ...]:
    return *plain_operands(torch.randn, **sizes), mask, False, 0.2


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("heads", [1, 4])
def test_any_number_of_threads_gives_the_same(
    library: ctypes.CDLL, threads: int, heads: int
) -> None:
    arguments = a_call(heads=heads, length=400, keys=60)
    one = run(library, *arguments)
    assert torch.equal(run(library, *arguments, threads=threads), one)
    agree(one, *arguments)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"length": 0}, {"keys": 0}, {"heads": 0}], ids=str)
def test_empty_tensors(library: ctypes.CDLL, sizes: dict[str, int]) -> None:
    got = run(library, *a_call(**sizes))
    assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("infinite", [False, True])
def test_a_row_without_keys_is_zero(library: ctypes.CDLL, infinite: bool) -> None:
    got = run(library, *a_call(mask=with_rows_out(infinite)))
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
    agree(run(library, query * size, key, value, *rest), query * size, key, value, *rest)


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


@pytest.mark.parametrize("keys", [1500, 65536])
def test_means_of_many_keys_lose_no_digits(library: ctypes.CDLL, keys: int) -> None:
    """Equal values, which each step may round in one direction, were off by 6e-4 when added one by one."""
    query, key, value, *rest = a_call(heads=1, length=13, keys=keys, width=20)
    value[:] = 0.1
    got = run(library, query * 0, key, value, *rest)
    torch.testing.assert_close(got, torch.full_like(got, 0.1), rtol=5e-6, atol=0)


@pytest.mark.parametrize("width", [1, 5, 33])
def test_nothing_is_read_behind_a_tensor(library: ctypes.CDLL, width: int) -> None:
    query, key, value, *rest = a_call(heads=1, length=7, keys=21, width=width)
    guarded = [Guarded(x) for x in (query, key, value)]
    got = run(library, *(each.tensor for each in guarded), *rest)
    agree(got, query, key, value, *rest)


def test_running_it_uncompiled_says_so() -> None:
    arguments = (*a_call(), -math.inf, True)
    with pytest.warns(UserWarning, match="cpp_wrapper"):
        result = float_attention.ATTENTION(*arguments)
    assert torch.equal(result, float_attention.reference(*arguments))
