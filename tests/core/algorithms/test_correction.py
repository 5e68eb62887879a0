# SPDX-License-Identifier: Apache-2.0
"""Bias correction takes off what rounded weights add to means of outputs, the same for any split of data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.backend import OperatorPattern
from qompose.errors import StatisticsError
from qompose.observers import AutoRangeObserver
from qompose.observers.input_sums import Means
from torch import Tensor, nn

from tests.core import toy as toys
from tests.core.toy import (
    INT8,
    PRODUCTS,
    STATIC,
    WEIGHT,
    WEIGHT_PER_TENSOR,
    convert,
    export,
    prepare,
    toy,
)

FOUR_BITS = replace(WEIGHT, quant_min=-8, quant_max=7)
PLAIN = QuantizationConfig(INT8, None, FOUR_BITS, name="weights of four bits", algorithms=())
PER_TENSOR = QuantizationConfig(
    INT8,
    None,
    replace(WEIGHT_PER_TENSOR, quant_min=-16, quant_max=15),
    name="per tensor",
    algorithms=(),
)
ASKING = replace(PLAIN, algorithms=("bias_correction",))
AUTO = replace(ASKING, input_activation=replace(INT8, observer_or_fake_quant_ctr=AutoRangeObserver))


RULES = (replace(toys.LINEAR, bias="bias"), *PRODUCTS[1:])


GATE = toys.Model(lambda m, x: torch.sigmoid(x) + 0.5)
"""Activations that are not zero on average, as behind a relu."""


@functools.cache
def deep() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), GATE)]
    return nn.Sequential(*layers, nn.Linear(64, 64)).eval()


def rows(seed: int = 0, number: int = 64) -> Tensor:
    return torch.rand(number, 64, generator=torch.Generator().manual_seed(seed)) + 1


@functools.cache
def deep_program() -> torch.export.ExportedProgram:
    return export(deep(), rows())


def quantized(
    model: nn.Module, config: QuantizationConfig, *batches: Tensor, **options: Any
) -> torch.fx.GraphModule:
    program = deep_program() if model is deep() else export(model, batches[0])
    prepared = prepare(program, toy(*RULES, config=config))
    for batch in batches:
        prepared(batch)
    return qompose.convert_pt2e(prepared, **options)


def gain(model: nn.Module, config: QuantizationConfig, *batches: Tensor) -> tuple[float, float]:
    """The distance from float without and with correction, on what calibration has not seen."""
    *seen, other = batches
    asking = replace(config, algorithms=("bias_correction",))
    with torch.no_grad():
        found = [
            toys.sqnr(model(other), quantized(model, c, *seen)(other)) for c in (config, asking)
        ]
    return found[0], found[1]


LAYERS: dict[str, Callable[[bool], nn.Module]] = {
    "linear": lambda bias: nn.Linear(8, 12, bias=bias),
    "padded": lambda bias: nn.Conv2d(8, 12, 3, padding=1, bias=bias),
    "depthwise": lambda bias: nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=bias),
    "groups": lambda bias: nn.Conv2d(8, 12, 3, stride=2, dilation=2, groups=4, bias=bias),
    "same": lambda bias: nn.Conv2d(8, 12, 3, padding="same", bias=bias),
    "transposed": lambda bias: nn.ConvTranspose2d(8, 12, 3, stride=2, groups=2, bias=bias),
}


def padded(part: float, seed: int) -> Tensor:
    """Texts of 32 words, of which a part of all are the same padding."""
    generator = torch.Generator().manual_seed(seed)
    padding = 2 * torch.randn(64, generator=torch.Generator().manual_seed(-1))
    words = torch.randn(16, 32, 64, generator=generator) + torch.linspace(0, 2, 64)
    return words.where(torch.rand(16, 32, 1, generator=generator) >= part, padding)


@pytest.mark.parametrize(("part", "made"), [(0.0, True), (0.9, False)], ids=["words", "padding"])
@pytest.mark.parametrize("algorithms", [None, ("bias_correction",)], ids=["by itself", "asked for"])
def test_where_rows_are_kept_they_judge(
    part: float, made: bool, algorithms: tuple[str, ...] | None
) -> None:
    """What padding shifts the means by is nothing that words want taken off."""
    model = toys.seeded(nn.Linear(64, 64)).eval()
    auto = replace(INT8, observer_or_fake_quant_ctr=AutoRangeObserver)
    program, found = export(model, padded(part, 0)), {}
    for config in (PLAIN, replace(PLAIN, algorithms=algorithms)):
        prepared = prepare(program, toy(*RULES, config=replace(config, input_activation=auto)))
        for seed in range(4):
            prepared(padded(part, seed))
        found[config.algorithms] = qompose.convert_pt2e(prepared)
    report = qompose.report(found[algorithms])
    assert any(line.startswith("bias_correction") for line in report.rewrites) == made
    if algorithms:
        assert any(line.startswith("bias_correction") for line in report.notes) != made
    words = padded(0.0, 9)
    before, after = (toys.sqnr(model(words), found[r](words)) for r in ((), algorithms))
    assert after > before - 0.05


class Crossed(nn.Module):
    """A convolution and a linear read one tensor, whose channels are in two dimensions for them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(8, 4, 1), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), self.linear(x)


@pytest.mark.parametrize("config", [ASKING, AUTO], ids=["means", "rows too"])
@pytest.mark.parametrize("width", [8, 6], ids=["as many", "fewer"])
def test_channels_in_two_dimensions(width: int, config: QuantizationConfig) -> None:
    """Means are kept along one of them; the other product is named, and its bias stays."""
    model = toys.seeded(Crossed(width)).eval()
    x = torch.rand(16, 8, 5, width) + torch.arange(width)
    converted = quantized(model, config, x, x + 1)
    report = qompose.report(converted)
    (kept,) = (line for line in report.notes if "channels are in dimension 1" in line)
    assert "conv2d" in kept
    assert torch.equal(converted.state_dict()["conv.bias"], model.conv.bias)
    assert not torch.equal(converted.state_dict()["linear.bias"], model.linear.bias)


def test_means_of_another_dimension_are_not_taken() -> None:
    model, x = toys.seeded(Crossed(8)).eval(), torch.rand(16, 8, 5, 8)
    program, prepared = export(model, x), {}
    for name in ("conv", "linear"):
        quantizer = toy(*RULES, config=PLAIN).set_module_name(name, ASKING)
        prepared[name] = prepare(program, quantizer)
        prepared[name](x)
    with pytest.raises(StatisticsError):
        qompose.statistics(prepared["linear"]).apply(prepared["conv"])


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

    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    @pytest.mark.parametrize("kind", LAYERS)
    def test_layers(self, kind: str, bias: bool) -> None:
        """One without a bias gets one.

        Where positions differ in their means, correction is for the mean of those, as padding shows.
        """
        layer = LAYERS[kind](bias).eval()
        x = torch.rand((128, 8) if kind == "linear" else (32, 8, 6, 6))
        x = x + torch.arange(8).view(-1, *[1] * (x.dim() - 2))
        weight = replace(WEIGHT_PER_TENSOR, quant_min=-8, quant_max=7)
        config, errors = QuantizationConfig(INT8, None, weight, algorithms=()), []
        program = export(nn.Sequential(layer), x)
        for chosen in (config, replace(config, algorithms=("bias_correction",))):
            converted = convert(program, toy(*RULES, config=chosen), x)
            with torch.no_grad():
                error = (converted(x) - layer(x)).transpose(0, 1).flatten(1).mean(1)
            errors.append(error.norm().item())
        assert errors[1] < errors[0] / 20
        assert "0.bias" in converted.state_dict()
        assert any("add_bias" in line for line in qompose.report(converted).rewrites) is not bias

    def test_balanced_channels(self) -> None:
        """Means of inputs and the rounding of weights are those with the factors."""
        model, x = nn.Linear(64, 64).eval(), rows(0, 512)
        x[:, 3] *= 100
        with torch.no_grad():
            model.weight[:, 3] /= 100
        rule = replace(RULES[0], channels=(-1, -1))
        errors = {}
        for algorithms in (("smooth_quant",), ("smooth_quant", "bias_correction")):
            quantizer = toy(rule, config=replace(PLAIN, algorithms=algorithms))
            converted = convert(export(model, x), quantizer, x)
            assert any("channels divided" in line for line in qompose.report(converted).rewrites)
            with torch.no_grad():
                errors[algorithms] = (converted(x) - model(x)).mean(0).norm().item()
        assert errors["smooth_quant", "bias_correction"] < errors["smooth_quant",] / 20


FLOAT = replace(PLAIN, input_activation=None, name="weight-only")
RUN_TIME = replace(PLAIN, input_activation=toys.RUN_TIME, name="dynamic")


def pooled(seed: int) -> nn.Sequential:
    """Of errors of outputs, a mean over an image leaves what all of it has in common."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()]
    return toys.seeded(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), seed).eval()


@pytest.mark.parametrize("config", [FLOAT, RUN_TIME], ids=str)
class TestInputsThatNothingObserves:
    def test_few_bits_are_corrected_by_default(self, config: QuantizationConfig) -> None:
        """Scales that err less alone may add to what other layers err in the mean."""
        beside_none, beside_scales = [], []
        for seed in range(6):
            model, found = pooled(seed), {}
            generator = torch.Generator().manual_seed(seed)
            *seen, other = (torch.randn(16, 3, 10, 10, generator=generator) for _ in range(5))
            for words in ((), ("scale_search",), None):
                converted = quantized(model, replace(config, algorithms=words), *seen)
                found[words] = toys.sqnr(model(other), converted(other))
            assert found[None] > max(found[()], found["scale_search",] - 0.1)
            beside_none.append(found[None] - found[()])
            beside_scales.append(found[None] - found["scale_search",])
        # Scale search alone, where nothing corrects biases, looks after the mean too.
        assert sum(beside_scales) / len(beside_scales) > 0.8
        assert sum(beside_none) / len(beside_none) > 8

    @pytest.mark.parametrize("kind", LAYERS)
    def test_means_of_outputs(self, kind: str, config: QuantizationConfig) -> None:
        layer = LAYERS[kind](True).eval()
        x = torch.rand((128, 8) if kind == "linear" else (32, 8, 6, 6))
        x = x + torch.arange(8).view(-1, *[1] * (x.dim() - 2))
        program, errors = export(nn.Sequential(layer), x), []
        weight = replace(WEIGHT_PER_TENSOR, quant_min=-8, quant_max=7)
        for words in ((), ("bias_correction",)):
            chosen = replace(config, weight=weight, algorithms=words)
            converted = convert(program, toy(*RULES, config=chosen), x)
            with torch.no_grad():
                error = (converted(x) - layer(x)).transpose(0, 1).flatten(1).mean(1)
            errors.append(error.norm().item())
        assert errors[1] < errors[0] / 20

    def test_eight_bits_only_where_asked(self, config: QuantizationConfig) -> None:
        for words, made in ((None, 0), (("bias_correction",), 5)):
            eight = replace(config, weight=WEIGHT, algorithms=words)
            report = qompose.report(quantized(deep(), eight, rows(0), rows(1)))
            assert sum("bias_correction" in line for line in report.rewrites) == made

    @pytest.mark.parametrize("words", [None, ("bias_correction",)], ids=["default", "asked for"])
    def test_without_data(self, words: tuple[str, ...] | None, config: QuantizationConfig) -> None:
        quantizer = toy(*RULES, config=replace(config, algorithms=words))
        report = qompose.report(qompose.convert_pt2e(prepare(deep_program(), quantizer)))
        assert report.rewrites == ()
        told = [note for note in report.notes if "bias_correction" in note]
        assert bool(told) == (words is not None)

    def test_means_of_one_half_have_to_help_the_other(self, config: QuantizationConfig) -> None:
        asking = replace(config, algorithms=("bias_correction",))
        signs = torch.tensor([1.0, -1.0] * 32)
        converted = quantized(nn.Linear(64, 64).eval(), asking, rows() * signs[:, None])
        report = qompose.report(converted)
        assert report.rewrites == () and "would not decrease" in "".join(report.notes)

    def test_padding_counts_once(self, config: QuantizationConfig) -> None:
        model = toys.seeded(nn.Linear(64, 64)).eval()
        seen, words = [padded(0.9, seed) for seed in range(4)], padded(0.0, 9)
        found = [
            toys.sqnr(model(words), quantized(model, c, *seen)(words))
            for c in (config, replace(config, algorithms=("bias_correction",)))
        ]
        assert found[1] > found[0]

    def test_batches_in_any_order(self, config: QuantizationConfig) -> None:
        batches = [rows(seed) for seed in range(4)]
        asking = replace(config, algorithms=("bias_correction",))
        one, other = (quantized(deep(), asking, *order) for order in (batches, batches[::-1]))
        for name, value in one.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-6, atol=1e-7)


class TestReport:
    def test_it_lists_what_was_done(self) -> None:
        report = qompose.report(quantized(deep(), ASKING, rows()))
        lines = [line for line in report.rewrites if "bias_correction" in line]
        assert len(lines) == 5
        assert lines[0].startswith("bias_correction on linear (aten.linear in 0)")
        assert not any("bias_correction" in note for note in report.notes)

    def test_nothing_changes_where_nobody_asks(self) -> None:
        quantizer = toy(*RULES, config=PLAIN).set_module_name("8", ASKING)
        converted, plain = (
            convert(deep_program(), quantizer, rows()),
            quantized(deep(), PLAIN, rows()),
        )
        state, other = converted.state_dict(), plain.state_dict()
        assert state.keys() == other.keys()
        assert [k for k in state if not torch.equal(state[k], other[k])] == ["8.bias"]

    def test_reasons(self) -> None:
        def odd(m: Any, x: Tensor) -> tuple[Tensor, ...]:
            moved = nn.functional.linear(x, m.moved.weight, m.moved.bias * 2)
            masked = m.masked(torch.where(x > 1.5, -torch.inf, x))
            return m.one(x), m.other(x), masked, moved, m.picked(x[x[:, 0] > 1.5])

        names = ("one", "other", "masked", "moved", "picked")
        layers: dict[str, Any] = {name: nn.Linear(64, 64) for name in names}
        layers["other"].bias = layers["one"].bias
        report = qompose.report(quantized(toys.Model(odd, **layers).eval(), ASKING, rows()))
        notes = "\n".join(note for note in report.notes if "bias_correction" in note)
        named = ("aten.linear in one", "other.bias", "stays in float", "mul", "in picked")
        assert all(name in notes for name in named)

    def test_no_gain(self) -> None:
        x = torch.randn(64, 64)
        report = qompose.report(quantized(nn.Linear(64, 64).eval(), AUTO, x))
        assert report.rewrites == () and "would not decrease" in report.notes[0]

    def test_what_is_no_product_of_channels(self) -> None:
        rule = toys.rule(
            "mul",
            OperatorPattern((torch.ops.aten.matmul.default,)),
            activations=("self",),
            weight="other",
        )
        scaled = toys.Model(lambda m, x: x @ m.by.weight, by=nn.Linear(64, 64))
        report = qompose.report(convert(export(scaled, rows()), toy(rule, config=ASKING), rows()))
        assert any("not a linear or convolution" in note for note in report.notes)

    def test_a_kernel_without_a_form_for_biases(self) -> None:
        model = nn.Linear(64, 64, bias=False).eval()
        rule = toys.rule("bare", toys.LINEAR_NO_BIAS_PATTERN, anchor="op", weight="weight")
        report = qompose.report(convert(export(model, rows()), toy(rule, config=ASKING), rows()))
        assert any("bias_correction was not applied to linear" in note for note in report.notes)
        assert report.rewrites == ()


class TestNoBias:
    """A product without a bias gets one, where its own configuration asks and its rule has a form for it."""

    def test_a_batch_norm_brings_one(self) -> None:
        model = nn.Sequential(nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12)).eval()
        report = qompose.report(quantized(model, ASKING, torch.rand(8, 8, 6, 6)))
        assert next(line.partition(":")[0] for line in report.rewrites) == "fold_batch_norm"
        assert not any("add_bias" in line for line in report.rewrites)
        assert any("bias_correction on" in line for line in report.rewrites)

    @pytest.mark.parametrize("mode", ["static", "dynamic", "weight-only"])
    def test_where_it_is_left_to_the_engine(self, mode: str) -> None:
        """Data is certain to be seen where inputs are static: without any, a bias would stay zero."""
        activation = {"static": INT8, "dynamic": toys.RUN_TIME, "weight-only": None}[mode]
        config = QuantizationConfig(activation, None, FOUR_BITS)
        model = nn.Sequential(nn.Linear(64, 64, bias=False)).eval()
        prepared = prepare(export(model, rows()), toy(*RULES, config=config))
        assert [name for name in prepared.state_dict() if "bias" in name] == ["0.bias"] * (
            mode == "static"
        )

    def test_others_get_none(self) -> None:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False)).eval()
        quantizer = toy(*RULES, config=PLAIN).set_module_name("1", ASKING)
        prepared = prepare(export(model, rows()), quantizer)
        assert [name for name in prepared.state_dict() if "bias" in name] == ["1.bias"]
        assert torch.equal(prepared(rows()), model(rows()))


class TestStatistics:
    """Sums are integers: the same for any order and any split."""

    def prepared(self, config: QuantizationConfig = ASKING) -> torch.fx.GraphModule:
        return prepare(deep_program(), toy(*RULES, config=config))

    def test_statistics_without_means(self) -> None:
        plain = self.prepared(PLAIN)
        plain(rows())
        with pytest.raises(StatisticsError, match="the program: input"):
            qompose.statistics(plain).apply(self.prepared())

    def test_sums_that_integers_might_not_hold_are_not_taken(self) -> None:
        with pytest.raises(StatisticsError):
            Means(torch.ones(2), 1, 1.0).merged(Means(torch.ones(1), 1, 1.0))
        sums = [Means(torch.ones(2, dtype=torch.int64), 2**18, size) for size in (2.0**19, 2.0**20)]
        assert [isinstance(each.values(), str) for each in sums] == [False, True]

    def test_means_that_were_not_kept_are_a_line(self) -> None:
        plain, asking = self.prepared(PLAIN), self.prepared()
        plain(rows())
        qompose.statistics(plain).apply(asking, partial=True)
        report = qompose.report(qompose.convert_pt2e(asking))
        assert sum("bias_correction was not applied" in note for note in report.notes) == 5

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

    def test_prepared_computes_what_was_exported(self) -> None:
        assert torch.equal(self.prepared()(rows()), deep()(rows()))


def test_integer_biases_are_rounded_as_ever() -> None:
    """What a kernel adds as an integer stands in the converted model as that integer does."""
    rule = replace(RULES[0], integer_bias=True)
    converted, without = (
        convert(deep_program(), toy(rule, config=config), rows()) for config in (ASKING, PLAIN)
    )
    assert any("bias_rounded" in name for name, _ in converted.named_buffers())
    other = rows(7)
    assert toys.sqnr(deep()(other), converted(other)) > toys.sqnr(deep()(other), without(other)) + 2


def test_weights_that_are_left_to_be_quantized_later() -> None:
    one, other = (quantized(deep(), ASKING, rows(), fold_quantize=fold) for fold in (True, False))
    assert toys.sqnr(one(rows(1)), other(rows(1))) > 100


def test_eight_bits_do_no_harm() -> None:
    config = replace(STATIC, output_activation=None)
    without, gained = gain(deep(), config, rows(0), rows(1), rows(2))
    assert gained > without - 0.5
