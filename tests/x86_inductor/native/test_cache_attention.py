# SPDX-License-Identifier: Apache-2.0
"""The C++ of attention to caches of bytes computes torch's attention: any sizes, masks and threads."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.native import cache_attention
from torch import Tensor

from tests.x86_inductor.attention_calls import (
    Guarded,
    agree as agree_with_floats,
    call,
    operands_and_mask,
    plain_operands,
    with_rows_out,
)


def rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Integers and their scales."""
    scales = values.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    return (values / scales).round().to(torch.int8).contiguous(), scales.contiguous()


def run(library: ctypes.CDLL, *arguments: Any, threads: int = 1) -> Tensor:
    """Run the C++ on the arguments of `cache_attention.ATTENTION`."""
    query, key, key_scales, value, value_scales, mask, is_causal, scale = arguments
    batch, heads, length, _ = query.shape
    result = torch.full((batch, length, heads, value.shape[3]), 77.0)
    numbers = (
        ctypes.c_void_p(key_scales.data_ptr()), ctypes.c_void_p(value_scales.data_ptr()),
        ctypes.c_bool(is_causal), ctypes.c_double(scale),
    )  # fmt: skip
    call(library.cache_attention, (query, key, value), mask, result, threads, *numbers)
    return result


def agree(got: Tensor, arguments: tuple[Any, ...]) -> None:
    """Compare with attention to what integers and scales stand for."""
    query, key, key_scales, value, value_scales, *others = arguments
    floats = (key * key_scales.double(), value * value_scales.double())
    agree_with_floats(got, query, *floats, *others)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of the operator, from all that torch's attention accepts."""
    query, key, value, mask = operands_and_mask(draw, torch.randn)
    is_causal = mask is None and draw(st.booleans())
    scale = 0.3 if is_causal else draw(st.sampled_from([0.0, 0.3, -1.0]))
    return query, *rows(key), *rows(value), mask, is_causal, scale


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_it_computes_torchs_attention(library: ctypes.CDLL, data: st.DataObject) -> None:
    arguments = data.draw(calls())
    agree(run(library, *arguments), arguments)


def a_call(mask: Tensor | None = None, **sizes: int) -> tuple[Any, ...]:
    query, key, value = plain_operands(torch.randn, **sizes)
    return query, *rows(key), *rows(value), mask, False, 0.2


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(library: ctypes.CDLL, threads: int) -> None:
    arguments = a_call(heads=4, length=30, keys=3000)
    one = run(library, *arguments)
    assert torch.equal(run(library, *arguments, threads=threads), one)
    agree(one, arguments)


@pytest.mark.parametrize("infinite", [False, True])
def test_a_row_without_keys_is_zero(library: ctypes.CDLL, infinite: bool) -> None:
    got = run(library, *a_call(mask=with_rows_out(infinite)))
    assert torch.equal(got[:, 3], torch.zeros_like(got[:, 3]))
    assert bool(got.isfinite().all())


def test_means_of_many_keys_lose_no_digits(library: ctypes.CDLL) -> None:
    query, key, key_scales, _, _, *rest = a_call(heads=1, length=1, keys=65536, width=20)
    values = rows(torch.full_like(key, 0.1, dtype=torch.float32))
    got = run(library, query * 0, key, key_scales, *values, *rest)
    torch.testing.assert_close(got, torch.full_like(got, 0.1), rtol=5e-6, atol=0)


@pytest.mark.parametrize("width", [1, 5, 33])
def test_nothing_is_read_behind_a_tensor(library: ctypes.CDLL, width: int) -> None:
    arguments = a_call(heads=1, length=7, keys=21, width=width)
    guarded = [Guarded(x) for x in arguments[:5]]
    agree(run(library, *(each.tensor for each in guarded), *arguments[5:]), arguments)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_uncompiled_it_is_the_same(data: st.DataObject) -> None:
    """In this process, by way of torch's compiler for C++; keys and values have adjacent columns."""
    arguments = data.draw(calls())
    agree(cache_attention.ATTENTION(*arguments), arguments)


def test_a_model_of_another_type_is_refused() -> None:
    query, *others = a_call()
    with pytest.raises(ValueError, match="float64"):
        cache_attention.ATTENTION(query.double(), *others)


def test_without_our_code_it_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_attention, "_compiled", lambda: None)
    arguments = a_call()
    assert torch.equal(cache_attention.ATTENTION(*arguments), cache_attention.reference(*arguments))


def test_shapes_that_do_not_fit_are_an_error() -> None:
    """Torch's attention repeats heads and batches; the C++ would read behind the cache."""
    query, key, key_scales, *rest = a_call(heads=4)
    one_head = key[:, :1], key_scales[:, :1]
    with pytest.raises(ValueError, match=r"\(1, 1, 50, 32\)"):
        cache_attention.ATTENTION(query, *one_head, *rest)


def test_rows_in_another_memory_format() -> None:
    arguments = a_call()
    changed = [x.to(memory_format=torch.channels_last) for x in arguments[:5]]
    got, wanted = (cache_attention.ATTENTION(*x) for x in ((*changed, *arguments[5:]), arguments))
    torch.testing.assert_close(got, wanted)
