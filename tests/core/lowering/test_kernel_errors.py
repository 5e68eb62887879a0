# SPDX-License-Identifier: Apache-2.0
"""Errors of a lowered program as it runs: notes say which layer, and whose kernel."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import Kernel, Region
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import LINEAR, RELU, Model, convert, export, randn, seeded, toy

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
X = randn(4, 8)


PICKY = {"raises": False}


@torch.library.custom_op("qompose_toy::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    if PICKY["raises"]:
        raise ValueError("not today")
    return x.relu()


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def emit(region: Region) -> Node:
    (source,) = region.inputs("self")
    return region.call(torch.ops.qompose_toy.picky.default, source)


def notes_of(model: nn.Module, error: type[Exception], *inputs: Any) -> list[str]:
    with pytest.raises(error) as raised:
        model(*inputs)
    return getattr(raised.value, "__notes__", [])


def lowered(forward: Any, *inputs: Any, **layers: Any) -> Any:
    picked = replace(RELU, kernels={"torch": Kernel("picky relu", emit, float_output=True)})
    program = export(seeded(Model(forward, block=nn.ModuleDict(layers))), *inputs)
    return qompose.lower(convert(program, toy(LINEAR, picked), *inputs))


def test_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"one": nn.Linear(8, 8), "act": nn.ReLU()}
    model = lowered(lambda m, x: m.block.act(m.block.one(x)), X, **layers)
    before = model(X)
    monkeypatch.setitem(PICKY, "raises", True)
    (note,) = notes_of(model, ValueError, X)
    assert "in block.act" in note
    assert "kernel 'picky relu' of toy, rule relu, for relu" in note
    monkeypatch.undo()
    assert torch.equal(model(X), before)


def test_of_an_operator_in_float_inside_a_branch() -> None:
    def forward(m: Any, x: Tensor, ids: Tensor) -> Tensor:
        found = torch.cond(x.sum() > -1e9, m.block.words, lambda i: i[:, None] * X[:1], (ids,))
        return m.block.one(x) + found  # type: ignore[no-any-return]

    layers = {"one": nn.Linear(8, 8), "words": nn.Embedding(5, 8)}
    ids = torch.arange(4)
    (note,) = notes_of(lowered(forward, X, ids, **layers), IndexError, X, ids + 3)
    assert "aten.embedding in block.words" in note
    assert "kernel" not in note


def test_of_inputs_that_no_operator_saw() -> None:
    model = lowered(lambda m, x: m.block.one(x), X, one=nn.Linear(8, 8))
    assert not notes_of(model, TypeError, X, X)
