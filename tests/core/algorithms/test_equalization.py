# SPDX-License-Identifier: Apache-2.0
"""Equalization gives channels between products one size, changes nothing else, and says what it did."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose import QuantizationConfig
from qompose.backend import OperatorPattern
from qompose.errors import StatisticsError
from torch import Tensor, nn

from tests.core import toy as toys
from tests.core.toy import PER_TENSOR, STATIC, Model, convert, export, prepare, randn, seeded, toy

aten = torch.ops.aten
ASKING = replace(PER_TENSOR, algorithms=("equalization",))
PRODUCTS = (
    toys.LINEAR,
    toys.rule("conv", OperatorPattern((aten.conv2d.default,)), activations=("input",), weight="weight"),
    toys.rule("up", OperatorPattern((aten.conv_transpose2d.input,)),
              activations=("input",), weight="weight"),
)  # fmt: skip


def chain(activation: nn.Module | None = None) -> nn.Sequential:
    """Pointwise, depthwise, pointwise, as in MobileNet, and a classifier."""
    torch.manual_seed(0)
    between = activation or nn.ReLU()
    return nn.Sequential(
        nn.Conv2d(8, 32, 1), between, nn.Conv2d(32, 32, 3, padding=1, groups=32), between,
        nn.Conv2d(32, 16, 1), between, nn.AdaptiveAvgPool2d(2), nn.Flatten(1), nn.Linear(64, 10),
    ).eval()  # fmt: skip


def spread(model: nn.Sequential, first: int, second: int, inner: int = 1) -> None:
    """Make channels between two layers up to 2**5 times as large and as small; the function stays."""
    one, other = model[first], model[second]
    channels = one.weight.shape[0]
    exponents = torch.randint(-5, 6, (channels,), generator=torch.Generator().manual_seed(first))
    factors = torch.exp2(exponents.float())
    with torch.no_grad():
        one.weight.mul_(factors.view(-1, *[1] * (one.weight.dim() - 1)))
        one.bias.mul_(factors)
        grouped = getattr(other, "groups", 1) > 1
        shape = (-1, 1, 1, 1) if grouped else (1, -1, *[1] * (other.weight.dim() - 2))
        other.weight.div_(factors.repeat_interleave(inner).view(shape))


@functools.cache
def program(model: nn.Module) -> torch.export.ExportedProgram:
    return export(model, IMAGES)


@functools.cache
def uneven() -> nn.Sequential:
    model = chain()
    spread(model, 0, 2)
    spread(model, 2, 4)
    spread(model, 4, 8, inner=4)
    return model


def quantized(model: nn.Module, config: QuantizationConfig) -> tuple[float, qompose.Report]:
    converted = convert(program(model), toy(*PRODUCTS, config=config), IMAGES)
    return toys.sqnr(model(IMAGES), converted(IMAGES)), qompose.report(converted)


IMAGES = randn(8, 8, 12, 12)


class TestGain:
    def test_a_depthwise_chain_with_uneven_channels(self) -> None:
        model = uneven()
        without, plain = quantized(model, PER_TENSOR)
        gained, report = quantized(model, ASKING)
        assert gained > without + 10
        assert gained > 40
        lines = [line for line in report.rewrites if line.startswith("equalization: ")]
        assert len(lines) == 3
        assert lines[0].startswith("equalization: conv2d, conv2d_1; in 0, 2")
        assert not any(
            "equalization" in line for line in (*plain.rewrites, *plain.notes, *report.notes)
        )

    def test_the_program_computes_the_same(self) -> None:
        model = uneven()
        prepared = prepare(program(model), toy(*PRODUCTS, config=ASKING))
        assert toys.sqnr(model(IMAGES), prepared(IMAGES)) > 110
        assert not torch.equal(prepared.get_parameter("0.weight"), model[0].weight)

    def test_the_caller_s_model_is_left_alone(self) -> None:
        model = uneven()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        quantized(model, ASKING)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_channels_have_one_size_afterwards(self) -> None:
        model = chain()
        spread(model, 0, 2)
        prepared = prepare(program(model), toy(*PRODUCTS, config=ASKING))
        first, second = (prepared.get_parameter(f"{n}.weight").detach() for n in (0, 2))
        one, other = (w.abs().flatten(1).amax(1) for w in (first, second))
        assert torch.allclose(one, other, rtol=1e-2)

    @pytest.mark.parametrize("grouped", [1, 4])
    @pytest.mark.parametrize("up", [False, True])
    def test_groups_and_transposed_convolutions(self, grouped: int, up: bool) -> None:
        kind = nn.ConvTranspose2d if up else nn.Conv2d
        torch.manual_seed(3)
        model = nn.Sequential(
            kind(8, 16, 3, groups=grouped), nn.LeakyReLU(0.1), nn.MaxPool2d(2),
            kind(16, 12, 2, groups=grouped, bias=False),
        ).eval()  # fmt: skip
        with torch.no_grad():
            model[0].weight[..., 0, 0] *= 20
        prepared = prepare(program(model), toy(*PRODUCTS, config=ASKING))
        assert any("equalization" in line for line in qompose.report(prepared).rewrites)
        assert toys.sqnr(model(IMAGES), prepared(IMAGES)) > 110


def branches(*, residual: bool = False) -> nn.Module:
    """A value that two products read, and one that also goes into a sum."""

    def forward(m: Any, x: Tensor) -> Any:
        y = m.first(x).relu()
        sum_ = m.left(y) + m.right(y)
        return sum_ + y if residual else sum_

    layers = {name: nn.Linear(16, 16) for name in ("first", "left", "right")}
    return seeded(Model(forward, **layers))


ROWS = randn(64, 16)


# (an input, a layer, what does not keep its channels apart, a layer with as many channels)
MIXED: dict[str, tuple[Tensor, nn.Module, Callable[[Tensor], Tensor], nn.Module]] = {
    "another dimension": (IMAGES, nn.Conv2d(8, 12, 1), torch.relu, nn.Linear(12, 4)),
    "a pool": (ROWS, nn.Linear(16, 16), lambda y: F.avg_pool1d(y, 3, 1, 1), nn.Linear(16, 4)),
    "a mean": (IMAGES, nn.Conv2d(8, 12, 1), lambda y: y.mean((1, 3)), nn.Linear(12, 4)),
    "ones": (IMAGES, nn.Conv2d(8, 12, 1), lambda y: F.pad(y, (1, 1), value=1.0), nn.Conv2d(12, 4, 1)),
    "a reshape": (ROWS.view(8, 8, 16), nn.Linear(16, 16),
                  lambda y: y.reshape(8, 4, 16, 2).mean(3), nn.Linear(16, 4)),
}  # fmt: skip


class TestReasons:
    """What is asked for and cannot be done is in the report, with the reason."""

    def notes(self, model: nn.Module, x: Tensor, config: QuantizationConfig = ASKING) -> str:
        prepared = prepare(export(model, x), toy(*PRODUCTS, config=config))
        report = qompose.report(prepared)
        assert toys.sqnr(model(x), prepared(x)) > 110
        return "\n".join(n for n in report.notes if n.startswith("equalization was not applied"))

    @pytest.mark.parametrize("activation", [nn.ReLU6(), nn.Hardtanh()])
    def test_what_cuts_off(self, activation: nn.Module) -> None:
        notes = self.notes(chain(activation), IMAGES)
        assert "conv2d (aten.conv2d in 0)" in notes and "hardtanh" in notes

    def test_a_chain_that_ends_at_one(self) -> None:
        model = copy.deepcopy(uneven())
        model[3] = nn.ReLU6()
        notes = self.notes(model, IMAGES)
        assert "conv2d_1 (aten.conv2d in 2)" in notes and "hardtanh" in notes

    def test_what_is_not_homogeneous(self) -> None:
        assert "gelu (aten.gelu in 1)" in self.notes(chain(nn.GELU()), IMAGES)

    def test_all_readers_take_up_the_factors(self) -> None:
        model = branches()
        with torch.no_grad():
            model.first.weight[3] *= 50
            model.first.weight[4], model.first.bias[4] = 0, 0
            model.left.weight[:, 5], model.right.weight[:, 5] = 0, 0
        prepared = prepare(export(model, ROWS), toy(*PRODUCTS, config=ASKING))
        (line,) = [r for r in qompose.report(prepared).rewrites if r.startswith("equalization")]
        assert "linear_1" in line and "linear_2" in line and "not measured" in line
        assert float(line.split()[-2]) < 100
        assert torch.equal(prepared.get_parameter("left.weight")[:, 4], model.left.weight[:, 4])
        assert toys.sqnr(model(ROWS), prepared(ROWS)) > 110

    @pytest.mark.parametrize(("x", "first", "between", "second"), MIXED.values(), ids=MIXED)
    def test_what_mixes_channels(
        self, x: Tensor, first: nn.Module, between: Callable[[Tensor], Tensor], second: nn.Module
    ) -> None:
        model = Model(lambda m, x: m.second(between(m.first(x))), first=first, second=second)
        assert self.notes(seeded(model), x)

    def test_nothing_reads_it(self) -> None:
        model = Model(lambda m, x: (m.unread(x), x.relu())[1], unread=nn.Linear(16, 16))
        assert self.notes(model, ROWS)

    def test_a_sum_reads_it_too(self) -> None:
        assert "add" in self.notes(branches(residual=True), ROWS)

    @pytest.mark.parametrize(
        "mixed", [lambda y: F.max_pool1d(y, 3, 1, 1), lambda y: F.pad(y, (1, -1))]
    )
    def test_what_moves_values_between_channels(self, mixed: Any) -> None:
        first, second = nn.Linear(16, 16), nn.Linear(16, 4)
        model = seeded(Model(lambda m, x: m.b(mixed(m.a(x).relu())), a=first, b=second))
        with torch.no_grad():
            first.weight[3] *= 50
        assert self.notes(model, randn(4, 6, 16))

    def test_a_shared_weight(self) -> None:
        model = branches()
        model.right.weight = model.left.weight
        assert "right.weight" in self.notes(model, ROWS)

    def test_one_of_a_pair_does_not_ask(self) -> None:
        model = uneven()
        quantizer = toy(*PRODUCTS, config=ASKING).set_module_name("2", PER_TENSOR)
        prepared = prepare(program(model), quantizer)
        report = qompose.report(prepared)
        assert any(
            note.startswith("equalization was not applied to conv2d (") for note in report.notes
        )
        assert torch.equal(prepared.get_parameter("2.weight"), model[2].weight)
        assert any("conv2d_2" in line for line in report.rewrites), "the last pair asks"

    def test_even_channels(self) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        with torch.no_grad():
            model[0].weight.fill_(0.5)
            model[2].weight.fill_(0.5)
        assert self.notes(model, ROWS)
        prepared = prepare(export(model, ROWS), toy(*PRODUCTS, config=ASKING))
        assert torch.equal(prepared(ROWS), model(ROWS))

    def test_a_large_bias_does_not_grow(self) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        with torch.no_grad():
            model[0].weight[0] *= 1e-6
        most = float(model[0].bias.detach().abs().amax())
        prepared = prepare(export(model, ROWS), toy(*PRODUCTS, config=ASKING))
        assert float(prepared.get_parameter("0.bias").detach().abs().amax()) <= most * 1.001


class TestStages:
    def test_statistics_of_the_model_as_it_was_are_refused(self) -> None:
        model = uneven()
        plain = prepare(program(model), toy(*PRODUCTS, config=PER_TENSOR))
        plain(IMAGES)
        equalized = prepare(program(model), toy(*PRODUCTS, config=ASKING))
        with pytest.raises(StatisticsError, match="parameters"):
            qompose.statistics(plain).apply(equalized)
        equalized(IMAGES)
        again = prepare(program(model), toy(*PRODUCTS, config=ASKING))
        qompose.statistics(equalized).apply(again)
        assert torch.equal(
            qompose.convert_pt2e(again)(IMAGES), qompose.convert_pt2e(equalized)(IMAGES)
        )

    def test_a_folded_batch_norm(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)
        ).eval()
        with torch.no_grad():
            model[1].weight.copy_(torch.exp2(torch.linspace(-5, 5, 16)))
            model[3].weight.div_(model[1].weight.view(1, -1, 1, 1))
        without, _ = quantized(model, PER_TENSOR)
        gained, report = quantized(model, ASKING)
        assert any(line.startswith("equalization: conv2d, conv2d_1") for line in report.rewrites)
        assert gained > without + 10


def test_per_channel_weights_gain_too() -> None:
    """There the tensor between the products has one scale for all channels."""
    model = uneven()
    without, _ = quantized(model, STATIC)
    gained, _ = quantized(model, replace(STATIC, algorithms=("equalization",)))
    assert gained > without + 5
