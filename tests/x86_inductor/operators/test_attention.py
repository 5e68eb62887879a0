# SPDX-License-Identifier: Apache-2.0
"""The operator ``attention`` is torch's attention of what its integers mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from qompose_x86_inductor.operators import attention as of_attention
from qompose_x86_inductor.operators.attention import attention_in_graph
from torch import Tensor

OPERATOR = torch.ops.qompose_x86.attention.default
SCALES, ZERO_POINTS = (0.02, 0.03, 0.05), (110, 140, 90)
FLOATS = (1.0, 0, torch.float32)
ROUNDING = 0.03 * SCALES[2]
"""How far a float result may be off: a part of a step of the values, for probabilities have 16 bits."""


def operands(query: tuple[int, ...], key: tuple[int, ...], columns: int) -> list[Tensor]:
    shapes = (query, key, (*key[:-1], columns))
    return [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes]


def real(tensors: list[Tensor]) -> list[Tensor]:
    told = zip(tensors, SCALES, ZERO_POINTS, strict=True)
    return [(x.double() - zero_point) * scale for x, scale, zero_point in told]


def arguments(
    tensors: list[Tensor],
    mask: Tensor | None = None,
    *,
    scale: float = 0.3,
    causal: bool = False,
    safe: bool = True,
    out: tuple[Any, ...] = FLOATS,
) -> tuple[Any, ...]:
    told = zip(tensors, SCALES, ZERO_POINTS, strict=True)
    return *(v for triple in told for v in triple), mask, scale, causal, safe, *out


def torchs(
    tensors: list[Tensor], mask: Tensor | None, *, scale: float = 0.3, causal: bool = False
) -> Tensor:
    """Torch's attention, in float64."""
    given = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    return F.scaled_dot_product_attention(
        *real(tensors), given, 0.0, causal, scale=scale, enable_gqa=tensors[0].dim() > 2
    )


@given(
    batch=st.lists(st.integers(1, 3), max_size=1), shared=st.integers(1, 3), times=st.integers(1, 3),
    length=st.integers(1, 20), keys=st.integers(1, 40), width=st.integers(1, 130),
    columns=st.integers(1, 40), seed=st.integers(0, 99),
    mask=st.sampled_from(["none", "causal", "bool", "added", "by key", "infinite"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_it_is_torchs_attention(
    batch: list[int], shared: int, times: int, length: int, keys: int, width: int, columns: int,
    seed: int, mask: str,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    tensors = operands(
        (*batch, shared * times, length, width), (*batch, shared, keys, width), columns
    )
    kept = torch.rand(length, keys) < 0.6
    given_mask = {
        "bool": kept, "added": torch.randn(length, keys), "by key": kept[:1],
        "infinite": torch.zeros(length, keys).masked_fill(~kept, -math.inf),
    }.get(mask)  # fmt: skip
    scale = 1 / (2 * math.sqrt(width))
    got = OPERATOR(*arguments(tensors, given_mask, scale=scale, causal=mask == "causal"))
    wanted = torchs(tensors, given_mask, scale=scale, causal=mask == "causal")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_integers_are_those_of_torchs_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = operands((2, 4, 19, 16), (2, 4, 33, 16), 16)
    limits, zero_point, scale = torch.iinfo(dtype), 20, 0.008
    got = OPERATOR(*arguments(tensors, out=(scale, zero_point, dtype)))
    steps = torch.round(torchs(tensors, None) / scale) + zero_point
    apart = (got.int() - steps.clamp(limits.min, limits.max).int()).abs()
    assert got.dtype == dtype
    assert int(apart.max()) <= 1
    assert float((apart > 0).double().mean()) < 0.02


def test_small_probabilities_keep_their_share() -> None:
    """Eight bits would lose a thousand keys of e**-7 each, which are half of the sum."""
    query = torch.full((1, 1, 1), 210, dtype=torch.uint8)
    key = torch.full((1, 1001, 1), 140, dtype=torch.uint8)
    value = torch.full((1, 1001, 1), 90, dtype=torch.uint8)
    key[0, 0], value[0, 0] = 240, 240
    scale = 7 / (100 * SCALES[0] * 100 * SCALES[1])
    got = OPERATOR(*arguments([query, key, value], scale=scale))
    share = 1 / (1 + 1000 * math.exp(-7))
    assert float(got) == pytest.approx(150 * SCALES[2] * share, rel=0.01)


@pytest.mark.parametrize("safe", [True, False])
def test_rows_masked_throughout_are_as_in_torch(safe: bool) -> None:
    tensors = operands((2, 3, 4), (2, 5, 4), 4)
    mask = torch.zeros(3, 5)
    mask[1] = -math.inf
    got = OPERATOR(*arguments(tensors, mask, safe=safe))
    query, key, value = real(tensors)
    written_out = (query @ key.mT * 0.3 + mask).softmax(-1) @ value
    wanted = torchs(tensors, mask) if safe else written_out
    assert bool(wanted[:, 1].isnan().all()) is not safe
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=ROUNDING, equal_nan=True)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "added", "causal", "groups"])
def test_the_form_for_compilers_without_our_kernel(mask: str, safe: bool) -> None:
    tensors = operands((2, 4, 6, 8), (2, 2 if mask == "groups" else 4, 9, 8), 8)
    kept = torch.rand(6, 9) < 0.6
    kept[2] = False
    added = torch.zeros(6, 9).masked_fill(~kept, -math.inf)
    given_mask = {"bool": kept, "added": added}.get(mask)
    given_arguments = arguments(tensors, given_mask, causal=mask == "causal", safe=safe)
    got, wanted = attention_in_graph(*given_arguments), OPERATOR(*given_arguments)
    torch.testing.assert_close(got, wanted, rtol=0, atol=ROUNDING, equal_nan=True)


def test_long_rows_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = operands((2, 21, 8), (2, 30, 8), 8)
    masks = (None, torch.rand(21, 30) < 0.5, torch.randn(21, 30), torch.randn(1, 30))
    whole = [OPERATOR(*arguments(tensors, mask)) for mask in masks]
    monkeypatch.setattr(of_attention, "_MOST_SCORES", 2 * 30 * 4)
    for mask, wanted in zip(masks, whole, strict=True):
        torch.testing.assert_close(
            OPERATOR(*arguments(tensors, mask)), wanted, rtol=0, atol=1e-5 * SCALES[2]
        )


@pytest.mark.parametrize(("length", "keys"), [(0, 3), (3, 0)])
def test_empty_tensors(length: int, keys: int) -> None:
    tensors = operands((2, length, 4), (2, keys, 4), 4)
    got = OPERATOR(*arguments(tensors, safe=False))
    assert torch.equal(got, torch.zeros(2, length, 4))


def test_its_fake_has_its_layout() -> None:
    from torch._subclasses import FakeTensorMode

    tensors = operands((2, 4, 6, 8), (2, 2, 9, 8), 5)
    for rank in (4, 3):
        given_tensors = [x[0] if rank == 3 else x for x in tensors]
        result = OPERATOR(*arguments(given_tensors))
        with FakeTensorMode() as mode:
            fake = OPERATOR(*arguments([mode.from_tensor(x) for x in given_tensors]))
        assert (fake.shape, fake.dtype) == (result.shape, result.dtype)
        assert fake.stride() == result.stride()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({0: torch.zeros(2, 3, 4)}, "uint8"),
        ({0: torch.zeros(3, dtype=torch.uint8)}, "dimensions"),
        ({0: torch.zeros(3, 3, 4, dtype=torch.uint8)}, "match"),
        ({0: torch.zeros(2, 3, 5, dtype=torch.uint8)}, "match"),
        ({6: torch.zeros(2, 6, 4, dtype=torch.uint8)}, "match"),
        ({9: torch.zeros(3, 5, dtype=torch.int32)}, "mask"),
        ({14: 3}, "out_zp"),
    ],
)
def test_what_it_does_not_take_is_refused(change: dict[int, Any], word: str) -> None:
    given_arguments = [*arguments(operands((2, 3, 4), (2, 5, 4), 4))]
    for place, value in change.items():
        given_arguments[place] = value
    with pytest.raises(ValueError, match=f"attention.*{word}"):
        OPERATOR(*given_arguments)
