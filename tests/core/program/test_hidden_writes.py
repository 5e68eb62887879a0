# SPDX-License-Identifier: Apache-2.0
"""Writes that no schema of the program shows: in bodies, by normalisations, to memory with two names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import qompose
import torch
from torch import Tensor, nn

from tests.core.toy import NullQuantizer, export, prepare, randn, seeded, sqnr, toy

X = randn(3, 4)


class Region(nn.Module):
    """Writes to a value inside a region without gradients, and reads it behind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            y[:, :2] = 5.0
        return self.b(y)


class View(Region):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        view = y.view(-1)
        with torch.no_grad():
            view.zero_()
        return self.b(y)


class Autocast(Region):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y.mul_(3)
        return self.b(y)


FORMS: dict[str, Callable[[qompose.Quantizer, nn.Module], nn.Module]] = {
    "prepared": lambda quantizer, model: prepare(export(model, X), quantizer),
    "converted": lambda quantizer, model: _converted(quantizer, model),
    "reference": lambda quantizer, model: _converted(
        quantizer, model, use_reference_representation=True
    ),
    "lowered": lambda quantizer, model: qompose.lower(_converted(quantizer, model)),
}


def _converted(quantizer: qompose.Quantizer, model: nn.Module, **options: bool) -> nn.Module:
    prepared = prepare(export(model, X), quantizer)
    prepared(X)
    return qompose.convert_pt2e(prepared, **options)


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [Region, View, Autocast])
@pytest.mark.parametrize("quantizer", [NullQuantizer(), toy()], ids=["null", "toy"])
def test_writes_in_regions_are_kept(
    form: str, kind: type[nn.Module], quantizer: qompose.Quantizer
) -> None:
    """What the region writes to stays in float; the rest may be quantized."""
    model = seeded(kind())
    made = FORMS[form](quantizer, model)
    least = 20 if isinstance(quantizer, qompose.RuleQuantizer) else 200
    with torch.no_grad():
        assert sqnr(model(X), made(X)) > least


class Cache(nn.Module):
    """A cache that is filled without gradients, as generation does."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(3, 4))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.cache.copy_(self.key(x))
        return self.cache.sum(0)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        return x * 2


@pytest.mark.parametrize(
    ("kind", "name"), [(Cache, "cache"), (Counting, "seen")], ids=["cache", "counter"]
)
def test_calibration_fills_no_buffer_of_the_caller(kind: type[nn.Module], name: str) -> None:
    model = seeded(kind())
    program = export(model, X)
    prepared = prepare(program, NullQuantizer())
    for _ in range(3):
        prepared(X)
    converted = qompose.convert_pt2e(prepared)
    assert not program.state_dict[name].any() and not dict(model.named_buffers())[name].any()
    assert not dict(converted.named_buffers())[name].any()
    lowered = qompose.lower(converted)
    lowered(X)
    assert dict(lowered.named_buffers())[name].any(), "lowering keeps the write"


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)], ids=["batch", "instance"]
)  # fmt: skip
def test_calibration_moves_no_running_statistics_of_the_caller(norm: nn.Module) -> None:
    x = randn(2, 4, 5)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), norm).train()
    before = norm.running_mean.clone()
    prepared = prepare(torch.export.export(model, (x,)), NullQuantizer())
    prepared(x)
    assert torch.equal(norm.running_mean, before)
    assert not torch.equal(dict(prepared.named_buffers())["1.running_mean"], before)
    converted = qompose.convert_pt2e(prepared)
    assert torch.equal(dict(converted.named_buffers())["1.running_mean"], before)


class TwoNames(nn.Module):
    """One block of memory under two names, written by one and read by the other."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(2, 1, 3, 4)
        self.register_buffer("both", both)
        self.register_buffer("first", both[0])
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.first[:, :3].copy_(x)
        return self.out(self.both.sum((0, 2)))


@pytest.mark.parametrize("quantizer", [NullQuantizer(), toy()], ids=["null", "toy"])
def test_names_of_one_memory_stay_together(quantizer: qompose.Quantizer) -> None:
    model = seeded(TwoNames())
    expected = model(X)
    model.both.zero_()
    prepared = prepare(export(model, X), quantizer)
    with torch.no_grad():
        assert torch.equal(prepared(X), expected)
        converted = qompose.convert_pt2e(prepared)
        assert sqnr(expected, converted(X)) > 25


class Vmapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row - row.mean())(self.a(x))


def test_calls_that_only_have_an_effect_survive_lowering() -> None:
    model = seeded(Vmapped())
    lowered = qompose.lower(_converted(toy(), model))
    with torch.no_grad():
        assert sqnr(model(X), lowered(X)) > 25
