# SPDX-License-Identifier: Apache-2.0
"""Integers of few values take few bits in a file, and come back bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, strategies as st
from qompose.storage.artifact_file import pack_bits, unpack_bits
from torch import Tensor

from tests.core.storage.test_artefact import X, mlp


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """With both bounds among them."""
    block = torch.randint(low, high + 1, shape, dtype=dtype)
    block.view(-1)[:2] = torch.tensor([low, high], dtype=dtype)
    return block


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (integers(-8, 7, 32, 64), 1 / 2),
        (integers(-2, 1, 32, 64), 1 / 4),
        (integers(0, 0, 1024), 1 / 4),
        (integers(0, 15, 41, 41, dtype=torch.uint8), 1 / 2),
        (integers(240, 255, 1027, dtype=torch.uint8), 1 / 2),
        (integers(-128, -125, 1025), 1 / 4),
        (integers(112, 127, 16, 8, 9), 1 / 2),
        (integers(-8, 8, 32, 64), 1),  # a value too many
        (integers(-127, 127, 32, 64), 1),
        (integers(-8, 7, 1023), 1),  # not worth it
        (integers(-8, 7, 32, 64, dtype=torch.int32), 1 / 8),
        (integers(2**62, 2**62 + 3, 1024, dtype=torch.int64), 1 / 32),
        (integers(-(2**15), 15 - 2**15, 1024, dtype=torch.int16), 1 / 4),
        (torch.tensor([-(2**63), 2**63 - 1]).repeat(600), 1),
        (torch.zeros(2000, dtype=torch.bool), 1),
        (torch.zeros(2000), 1),
    ],
)
def test_what_fits_is_packed(block: Tensor, part: float) -> None:
    packed, stored = pack_bits({"block": block})
    assert stored["block"].nbytes == -(-block.nbytes * part // 1)
    assert (stored["block"] is block) == (not packed)
    back = unpack_bits(packed, stored)["block"]
    assert back.dtype is block.dtype and torch.equal(back, block)


@given(
    low=st.integers(-128, 127),
    span=st.integers(0, 15),
    size=st.integers(1024, 1040),
    seed=st.integers(0, 99),
)
def test_every_range(low: int, span: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    block = integers(low, min(low + span, 127), size)
    packed, stored = pack_bits({"block": block})
    assert packed and torch.equal(unpack_bits(packed, stored)["block"], block)


@pytest.mark.parametrize(
    "forged",
    [
        {"bits": 3},
        {"bits": True},
        {"bits": 1},
        {"low": 1e3},
        {"low": 4000},
        {"dtype": "float32"},
        {"shape": [2048, 2]},
        {"shape": [-1]},
        {"shape": [2**40, 2**40]},
        {"shape": "32"},
    ],
)
def test_what_is_no_packing(forged: dict[str, Any]) -> None:
    packed, stored = pack_bits({"block": integers(-8, 7, 32, 64)})
    with pytest.raises((ValueError, TypeError, LookupError, RuntimeError)):
        unpack_bits({"block": {**packed["block"], **forged}}, stored)
    with pytest.raises(LookupError):
        unpack_bits({"other": packed["block"]}, stored)


def test_a_model_of_four_bits_takes_half_the_file(tmp_path: Path) -> None:
    sizes = []
    for number, low in enumerate((-127, -8)):
        model, path = mlp(), tmp_path / f"{number}.qompose"
        model.register_buffer("table", integers(low, -low - 1, 256, 256))
        with model.graph.inserting_before(model.graph.output_node()):
            model.graph.get_attr("table")
        qompose.save(model, path)
        again = qompose.load(path)
        assert torch.equal(again.get_buffer("table"), model.get_buffer("table"))
        assert torch.equal(again(X), model(X))
        sizes.append(path.stat().st_size)
    assert sizes[0] - sizes[1] == pytest.approx(256 * 256 / 2, abs=200)
