# SPDX-License-Identifier: Apache-2.0
"""A file with weights of four bits is lowered with one weight unpacked at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.program import disk
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config as config,
)
from torch import Tensor, nn


def test_one_weight_is_unpacked_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).eval()
    four = config(weight_only=True, group_size=32, algorithms=())
    program, x = torch.export.export(net, (torch.randn(2, 64),)), torch.randn(2, 64)
    prepared = qompose.prepare_pt2e(program, X86InductorQuantizer().set_global(four))
    converted, path = qompose.convert_pt2e(prepared), tmp_path / "four.qompose"
    qompose.save(converted, path)
    made: list[weakref.ref[Tensor]] = []
    unpack = disk.unpack_fields

    def watched(packed: Tensor, count: int, *facts: Any) -> Tensor:
        assert all(weight() is None for weight in made), "the one before is still there"
        integers = unpack(packed, count, *facts)
        made.append(weakref.ref(integers))
        return integers

    monkeypatch.setattr(disk, "unpack_fields", watched)
    lowered = qompose.load(path, target="torch")
    assert len(made) >= 2
    assert not any(weight() is not None for weight in made)
    assert torch.equal(lowered(x), qompose.lower(converted)(x))
