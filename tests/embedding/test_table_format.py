# SPDX-License-Identifier: Apache-2.0
"""The formats of tables: packed rows are torch's own, byte by byte, and plain ones can be read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from qompose_embedding.executorch_kernels import signed_bytes
from qompose_embedding.lookup import compute, from_packed, from_plain
from qompose_embedding.table_format import TableFormat, in_bytes
from torch import Tensor

PREPACK = {
    8: torch.ops.quantized.embedding_bag_byte_prepack.default,
    4: torch.ops.quantized.embedding_bag_4bit_prepack.default,
    2: torch.ops.quantized.embedding_bag_2bit_prepack.default,
}

FORMATS = st.builds(TableFormat, st.sampled_from([8, 4, 2]), st.just(0), st.integers(1, 33))


def integers(form: TableFormat, rows: int = 5) -> Tensor:
    return torch.randint(2**form.bits, (rows, form.width), dtype=torch.uint8)


@given(FORMATS)
def test_plain_rows_come_back(form: TableFormat) -> None:
    whole, scale = integers(form), torch.ones(5, 1)
    read = from_plain(compute, form, in_bytes(whole, form), scale, None, torch.arange(5))
    assert torch.equal(read, whole.float())


@given(FORMATS, st.sampled_from([(), (3,), (0,), (2, 3), (2, 1, 2)]))
def test_packed_rows_are_read_in_any_shape(form: TableFormat, shape: tuple[int, ...]) -> None:
    whole = integers(form)
    tail = (
        torch.tensor([[0.5, -3.0]]).repeat(5, 1).to(torch.float32 if form.bits == 8 else torch.half)
    )
    rows = torch.cat([in_bytes(whole, form), tail.view(torch.uint8)], 1)
    indices = torch.randint(5, shape)
    read = from_packed(compute, form, rows, indices, shape)
    assert torch.equal(read, whole[indices].float() * 0.5 - 3.0)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_bytes_are_those_of_torchs_packing(bits: int) -> None:
    """Of a table whose range is known exactly: the integers themselves."""
    form = TableFormat(bits, 0, 16)
    whole = integers(form)
    whole[:, 0], whole[:, 1] = 0, 2**bits - 1
    torchs = PREPACK[bits](whole.float())
    width = 16 // form.in_a_byte
    assert torch.equal(torchs[:, :width], in_bytes(whole, form))


@pytest.mark.filterwarnings("ignore")  # ExecuTorch's own
@pytest.mark.parametrize("bits", [4, 2])
def test_signed_bytes_are_read_by_executorchs_operator(bits: int) -> None:
    pytest.importorskip("executorch")
    from executorch.exir.passes import _quant_patterns_and_replacements  # noqa: F401

    form, low = TableFormat(bits, 0, 12), -(2 ** (bits - 1))
    whole = integers(form)
    operator: Any = getattr(torch.ops.quantized_decomposed, f"embedding_{bits}bit")
    stored = signed_bytes(whole, form)
    read = operator(stored, torch.ones(5), None, low, -low - 1, torch.arange(5))
    assert torch.equal(read, whole.float() + low)
