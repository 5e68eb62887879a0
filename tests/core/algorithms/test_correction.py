# SPDX-License-Identifier: Apache-2.0
"""Bias correction takes off what rounded weights add to means of outputs, the same for any split of data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.backend import OperatorPattern
from qompose.errors import StatisticsError
from torch import Tensor, nn

from tests.core import toy as toys
from tests.core.toy import INT8, STATIC, WEIGHT, WEIGHT_PER_TENSOR, export, prepare, toy

aten = torch.ops.aten
FOUR_BITS = replace(WEIGHT, quant_min=-8, quant_max=7)
PLAIN = QuantizationConfig(INT8, None, FOUR_BITS, name="weights of four bits")
PER_TENSOR = QuantizationConfig(
    INT8, None, replace(WEIGHT_PER_TENSOR, quant_min=-16, quant_max=15), name="per tensor"
)
ASKING = replace(PLAIN, repairs=("bias_correction",))


def product(name: str, target: Any) -> Any:
    return toys.rule(
        name, OperatorPattern((target,)), activations=("input",), weight="weight", bias="bias"
    )


RULES = (
    replace(toys.LINEAR, bias="bias"),
    product("conv", aten.conv2d.default),
    product("padded", aten.conv2d.padding),
    product("conv1d", aten.conv1d.default),
    product("up", aten.conv_transpose2d.input),
)


class Gate(nn.Module):
    """Activations that are not zero on average, as behind a relu."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) + 0.5


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), Gate())]
    return nn.Sequential(*layers, nn.Linear(64, 64)).eval()


def rows(seed: int = 0, number: int = 64) -> Tensor:
    return torch.rand(number, 64, generator=torch.Generator().manual_seed(seed)) + 1


def quantized(
    model: nn.Module, config: QuantizationConfig, *batches: Tensor, **options: Any
) -> torch.fx.GraphModule:
    prepared = prepare(export(model, batches[0]), toy(*RULES, config=config))
    for batch in batches:
        prepared(batch)
    return qompose.convert_pt2e(prepared, **options)


def gain(model: nn.Module, config: QuantizationConfig, *batches: Tensor) -> tuple[float, float]:
    """The distance from float without and with correction, on what calibration has not seen."""
    *seen, other = batches
    asking = replace(config, repairs=("bias_correction",))
    with torch.no_grad():
        found = [
            toys.sqnr(model(other), quantized(model, c, *seen)(other)) for c in (config, asking)
        ]
    return found[0], found[1]


class TestGain:
    @pytest.mark.parametrize("config", [PLAIN, PER_TENSOR], ids=str)
    def test_a_deep_net(self, config: QuantizationConfig) -> None:
        without, gained = gain(deep(), config, rows(0), rows(1), rows(2))
        assert gained > without + 2

    def test_means_of_outputs(self) -> None:
        """What remains of the error is without bias, but for the rounding of activations."""
        model, x = nn.Linear(64, 64).eval(), rows(0, 512)
        errors = [
            (quantized(model, config, x)(x) - model(x)).mean(0).norm().item()
            for config in (PLAIN, ASKING)
        ]
        assert errors[1] < errors[0] / 20

    @pytest.mark.parametrize(
        "layer",
        [
            nn.Conv2d(8, 12, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Conv2d(8, 12, 3, stride=2, dilation=2, groups=4),
            nn.Conv2d(8, 12, 3, padding="same"),
            nn.ConvTranspose2d(8, 12, 3, stride=2),
        ],
        ids=["padded", "depthwise", "groups", "same", "transposed"],
    )
    def test_convolutions(self, layer: nn.Module) -> None:
        """Where positions differ in their means, correction is for the mean of those, as padding shows."""
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(32, 8, 6, 6, generator=generator) + torch.arange(8).view(-1, 1, 1)
        config = QuantizationConfig(
            INT8, None, replace(WEIGHT_PER_TENSOR, quant_min=-8, quant_max=7)
        )
        errors = []
        for chosen in (config, replace(config, repairs=("bias_correction",))):
            with torch.no_grad():
                error = quantized(layer.eval(), chosen, x)(x) - layer(x)
            errors.append(error.mean((0, 2, 3)).norm().item())
        assert errors[1] < errors[0] / 20

    def test_balanced_channels(self) -> None:
        """Means of inputs and the rounding of weights are those with the factors."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), Gate()).eval()
        x = rows(0, 512)
        x[:, 3] *= 100
        with torch.no_grad():
            model[0].weight[:, 3] /= 100
        rule = replace(RULES[0], channels=(-1, -1))
        errors = {}
        for repairs in (("smooth_quant",), ("smooth_quant", "bias_correction")):
            prepared = prepare(
                export(model[0], x), toy(rule, config=replace(PLAIN, repairs=repairs))
            )
            prepared(x)
            converted = qompose.convert_pt2e(prepared)
            assert any("channels divided" in line for line in qompose.report(converted).rewrites)
            with torch.no_grad():
                errors[repairs] = (converted(x) - model[0](x)).mean(0).norm().item()
        assert errors["smooth_quant", "bias_correction"] < errors["smooth_quant",] / 20


class TestReport:
    def test_it_lists_what_was_done(self) -> None:
        report = qompose.report(quantized(deep(), ASKING, rows()))
        lines = [line for line in report.rewrites if "bias_correction" in line]
        assert len(lines) == 5
        assert lines[0].startswith(
            "bias_correction of linear (aten.linear in 0): the means of its outputs were off by up to 0."
        )
        assert not any("bias_correction" in note for note in report.notes)

    def test_nothing_changes_where_nobody_asks(self) -> None:
        quantizer = toy(*RULES, config=PLAIN).set_module_name("8", ASKING)
        prepared = prepare(export(deep(), rows()), quantizer)
        prepared(rows())
        converted, plain = qompose.convert_pt2e(prepared), quantized(deep(), PLAIN, rows())
        state, other = converted.state_dict(), plain.state_dict()
        assert state.keys() == other.keys()
        assert [k for k in state if not torch.equal(state[k], other[k])] == ["8.bias"]

    def test_reasons(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.other, self.masked = (nn.Linear(64, 64) for _ in range(3))
                self.other.bias = self.one.bias

            def forward(self, x: Tensor) -> tuple[Tensor, ...]:
                infinite = torch.where(x > 1.5, -torch.inf, x)
                return self.one(x), self.other(x), self.masked(infinite)

        report = qompose.report(quantized(Odd().eval(), ASKING, rows()))
        notes = "\n".join(note for note in report.notes if "bias_correction" in note)
        assert (
            "(aten.linear in one) was not made: other.bias is read by other operators too" in notes
        )
        assert "(aten.linear in masked) was not made: it stays in float, since" in notes

    def test_a_kernel_without_a_form_for_biases(self) -> None:
        model = nn.Linear(64, 64, bias=False).eval()
        rule = toys.rule("bare", toys.LINEAR_NO_BIAS_PATTERN, anchor="op", weight="weight")
        prepared = prepare(export(model, rows()), toy(rule, config=ASKING))
        prepared(rows())
        report = qompose.report(qompose.convert_pt2e(prepared))
        assert any("was not made: it has no bias" in note for note in report.notes)
        assert report.rewrites == ()

    def test_training_does_without(self) -> None:
        program = export(nn.Sequential(*deep(), nn.Linear(64, 2, bias=False)), rows())
        prepared = qompose.prepare_qat_pt2e(program, toy(*RULES, config=ASKING))
        assert not any("add_bias" in line for line in qompose.report(prepared).rewrites)
        assert any("bias_correction of 6 products" in n for n in qompose.report(prepared).notes)


class TestNoBias:
    """A product without a bias gets one, where its own configuration asks and its rule has a form for it."""

    @pytest.mark.parametrize(
        "layer",
        [
            nn.Linear(8, 12, bias=False),
            nn.Conv2d(8, 12, 3, groups=4, bias=False),
            nn.ConvTranspose2d(8, 12, 3, groups=2, bias=False),
        ],
        ids=["linear", "convolution", "transposed"],
    )
    def test_it_gets_one(self, layer: nn.Module) -> None:
        image = not isinstance(layer, nn.Linear)
        x = torch.rand((32, 8, 6, 6) if image else (128, 8)) + 1
        config = QuantizationConfig(
            INT8, None, replace(WEIGHT_PER_TENSOR, quant_min=-8, quant_max=7)
        )
        errors, inner = [], (0, 2, 3) if image else (0,)
        for chosen in (config, replace(config, repairs=("bias_correction",))):
            converted = quantized(nn.Sequential(layer).eval(), chosen, x)
            with torch.no_grad():
                errors.append((converted(x) - layer(x)).mean(inner).norm().item())
        assert errors[1] < errors[0] / 20
        assert qompose.report(converted).rewrites[0].startswith("add_bias: ")
        assert "0.bias" in converted.state_dict()

    def test_a_batch_norm_brings_one(self) -> None:
        model = nn.Sequential(nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12)).eval()
        report = qompose.report(quantized(model, ASKING, torch.rand(8, 8, 6, 6)))
        assert next(line.partition(":")[0] for line in report.rewrites) == "fold_batch_norm"
        assert not any("add_bias" in line for line in report.rewrites)
        assert any("bias_correction of" in line for line in report.rewrites)

    def test_others_get_none(self) -> None:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False)).eval()
        quantizer = toy(*RULES, config=PLAIN).set_module_name("1", ASKING)
        prepared = prepare(export(model, rows()), quantizer)
        assert [name for name in prepared.state_dict() if "bias" in name] == ["1.bias"]
        assert torch.equal(prepared(rows()), model(rows()))


class TestStatistics:
    """Sums are integers: the same for any order and any split."""

    def prepared(self, config: QuantizationConfig = ASKING) -> torch.fx.GraphModule:
        return prepare(export(deep(), rows()), toy(*RULES, config=config))

    def test_parts_give_the_same_bits(self, tmp_path: Any) -> None:
        whole, applied, parts = self.prepared(), self.prepared(), []
        for seed in range(5):
            whole(rows(seed))
            part = self.prepared()
            part(rows(seed))
            path = tmp_path / f"{seed}.{'json' if seed % 2 else 'safetensors'}"
            qompose.statistics(part).save(path)
            parts.append(qompose.Statistics.load(path))
        merged = parts[3].merged(parts[1], parts[4]).merged(parts[0].merged(parts[2]))
        assert merged.diff(qompose.statistics(whole)) == ()
        merged.apply(applied)
        one, other = (qompose.convert_pt2e(model) for model in (whole, applied))
        assert all(
            torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
        )
        assert qompose.report(one).rewrites == qompose.report(other).rewrites

    def test_statistics_without_means(self) -> None:
        plain = self.prepared(PLAIN)
        plain(rows())
        with pytest.raises(StatisticsError, match="no means of its channels, by which biases"):
            qompose.statistics(plain).apply(self.prepared())

    def test_means_that_were_not_kept_are_a_line(self) -> None:
        plain, asking = self.prepared(PLAIN), self.prepared()
        plain(rows())
        qompose.statistics(plain).apply(asking, partial=True)
        report = qompose.report(qompose.convert_pt2e(asking))
        assert (
            sum("of the means of" in note and "never saw data" in note for note in report.notes)
            == 5
        )

    def test_means_of_a_part_alone_are_lost(self) -> None:
        plain, asking = self.prepared(PLAIN), self.prepared()
        plain(rows())
        asking(rows(1))
        merged = qompose.statistics(asking).merged(qompose.statistics(plain))
        assert qompose.statistics(asking).means
        assert merged.means == ()

    def test_a_calibration_that_fails_leaves_nothing(self) -> None:
        prepared = self.prepared()
        before = qompose.statistics(prepared)
        with pytest.raises(qompose.errors.CalibrationError):
            qompose.calibrate(prepared, [(rows(),), (rows()[:, :3],)])
        assert qompose.statistics(prepared).means == before.means == ()

    def test_the_observers_are_gone_once_converted(self) -> None:
        converted = quantized(deep(), ASKING, rows())
        assert toys.observers_of(converted) == []
        assert not any("means" in name for name, _ in converted.named_buffers())

    def test_prepared_computes_what_was_exported(self) -> None:
        assert torch.equal(self.prepared()(rows()), deep()(rows()))


def test_integer_biases_are_rounded_as_ever() -> None:
    """What a kernel adds as an integer stands in the converted model as that integer does."""
    rule = replace(RULES[0], integer_bias=True)
    x = rows()
    prepared = prepare(export(deep(), x), toy(rule, config=ASKING))
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    assert any("bias_rounded" in name for name, _ in converted.named_buffers())
    plain = prepare(export(deep(), x), toy(rule, config=PLAIN))
    plain(x)
    without = qompose.convert_pt2e(plain)
    other = rows(7)
    assert toys.sqnr(deep()(other), converted(other)) > toys.sqnr(deep()(other), without(other)) + 2


def test_saved_and_loaded(tmp_path: Any) -> None:
    converted = quantized(deep(), ASKING, rows())
    qompose.save(converted, tmp_path / "model.qompose")
    loaded = qompose.load(tmp_path / "model.qompose")
    assert torch.equal(loaded(rows(3)), converted(rows(3)))
    assert qompose.report(loaded).rewrites == qompose.report(converted).rewrites


def test_weights_that_are_left_to_be_quantized_later() -> None:
    one, other = (quantized(deep(), ASKING, rows(), fold_quantize=fold) for fold in (True, False))
    assert toys.sqnr(one(rows(1)), other(rows(1))) > 100


def test_in_a_body() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, self.body, lambda x: x * 2, (x,))

    model, x = Choice().eval(), rows()
    report = qompose.report(quantized(model, ASKING, x))
    assert any("bias_correction of" in line for line in report.rewrites)
    errors = [(quantized(model, c, x)(x) - model(x)).mean(0).norm().item() for c in (PLAIN, ASKING)]
    assert errors[1] < errors[0] / 20


def test_eight_bits_do_no_harm() -> None:
    config = replace(STATIC, output_activation=None)
    without, gained = gain(deep(), config, rows(0), rows(1), rows(2))
    assert gained > without - 0.5
