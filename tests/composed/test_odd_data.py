# SPDX-License-Identifier: Apache-2.0
"""Little and odd calibration data: defaults lose nothing by it that ranges of all values keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import qompose
import torch
from qompose.testing.fixtures import sqnr
from torch import Tensor, nn

from tests.core.algorithms.test_smoothing import block
from tests.core.toy import Model, export, randn
from tests.products import x86, xnnpack
from tests.sampling import at_once

QUANTIZERS: dict[str, Callable[..., Any]] = {"xnnpack": xnnpack, "x86": x86}
SHAPES = {"images": (3, 12, 12), "tokens": (16, 32), "two inputs": (40,)}
WORST = {"constant": -1.4}
"""Decibels that may be lost, on usual data and on data of the same odd kind; 0.3 where nothing is said.

Of usual data constant images know nothing: ranges that fit them well leave others less room.
"""
LOUD = (torch.arange(0, 96, 9), torch.tensor(5))
Odd = Callable[[Tensor, Tensor], Tensor]
KINDS: dict[str, tuple[int, Odd]] = {
    "usual": (96, lambda x, kind: x),
    "one batch": (16, lambda x, kind: x),
    "ten of one kind": (10, lambda x, kind: 0.8 * randn(*x.shape[1:], seed=5) + 0.3 * x),
    "seven": (7, lambda x, kind: x),
    "padding": (96, lambda x, kind: torch.full_like(x, 0.37)),
    "constant": (96, lambda x, kind: 0 * x + x.flatten(1)[:, 0].view(-1, *[1] * (x.dim() - 1))),
    "a class is missing": (96, lambda x, kind: x[kind != 2]),
    "1e30": (96, lambda x, kind: x.flatten(1).index_put(LOUD, torch.tensor(1e30)).view_as(x)),
    "negative": (96, lambda x, kind: -x.abs() - 0.1),
    "an input is zero": (96, lambda x, kind: torch.cat([x[:, :24], 0 * x[:, 24:]], 1)),
    "a channel is zero": (96, lambda x, kind: torch.cat([0 * x[:, :1], x[:, 1:]], 1)),
}  # fmt: skip
"""How many examples there are, and what becomes of usual ones and the class of each."""
FEW = {"seven": 7, "padding": 1}


def usual(name: str, seed: int) -> tuple[Tensor, Tensor]:
    kind = (randn(96, seed=seed).abs() * 1e4).long() % 4
    return 0.7 * randn(4, *SHAPES[name], seed=99)[kind] + randn(96, *SHAPES[name], seed=seed), kind


@cache
def network(name: str) -> tuple[nn.Module, torch.export.ExportedProgram]:
    torch.manual_seed(0)
    if name == "images":
        first, up = nn.Conv2d(3, 12, 3, stride=2), nn.ConvTranspose2d(12, 8, 2, stride=2)
        model: nn.Module = nn.Sequential(first, nn.BatchNorm2d(12), nn.Hardswish(), up).eval()
    else:
        parts = {"a": nn.Linear(24, 32), "b": nn.Linear(16, 32), "out": nn.Linear(32, 8)}
        two = Model(lambda m, x: m.out((m.a(x[:, :24]) + m.b(x[:, 24:])).relu()), **parts)
        model = block() if name == "tokens" else two
    dims = ({0: torch.export.Dim("batch", min=1)},)
    return model, export(model, randn(4, *SHAPES[name]), dynamic_shapes=dims)


CASES = [*product(QUANTIZERS, SHAPES, KINDS)]  # every fifth: each kind once or twice


@pytest.mark.parametrize(("backend", "name", "kind"), at_once(CASES, *CASES[::5]))
def test_no_worse_than_ranges_of_all_values(backend: str, name: str, kind: str) -> None:
    (model, program), (number, odd) = network(name), KINDS[kind]
    data = odd(*usual(name, 1))[:number]
    parts = (data,) if kind == "one batch" else data.tensor_split([1, 6, 7])
    models = []
    for options in ({}, {"range": "minmax", "algorithms": ()}):
        prepared = qompose.prepare_pt2e(program, QUANTIZERS[backend](**options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", qompose.QomposeWarning)  # what looks wrong does
            qompose.calibrate(prepared, [part for part in parts if len(part)])
        models.append(qompose.convert_pt2e(prepared))
    other, report = usual(name, 2), qompose.report(models[0])
    with torch.no_grad():
        for x in (other[0], odd(*other)):
            own, plain = (sqnr(model(x), converted(x)) for converted in models)
            assert own - plain > WORST.get(kind, -0.3)
    few = [note for note in report.notes if f" {FEW.get(kind)} distinct example" in note]
    assert bool(few) == (kind in FEW)
    assert not any("nan" in line for line in report.rewrites)
