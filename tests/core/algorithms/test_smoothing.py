# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant helps where a few channels are large, is free behind layer norms, and gives reasons."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec, SmoothQuant
from qompose.backend.rule import Rule
from qompose.errors import StatisticsError, UncalibratedError
from qompose.observers import MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from qompose.observers.channel_ranges import PerChannelRangeObserver
from qompose.spec import FixedQParamsQuantizationSpec
from torch import Tensor, nn

from tests.core import toy as toys
from tests.core.toy import (
    DYNAMIC,
    INT8,
    PER_TENSOR,
    WEIGHT,
    Model,
    convert,
    export,
    nodes_calling,
    prepare,
    randn,
    toy,
)
from tests.sampling import at_once

RULE: Rule = replace(toys.LINEAR, bias="bias", channels=(-1, -1))
RELU_RULE: Rule = replace(toys.LINEAR_RELU, bias="bias", channels=(-1, -1))
SMOOTH = ("smooth_quant",)
STATIC = QuantizationConfig(INT8, None, PER_TENSOR.weight, name="W8A8 per tensor", algorithms=())
ASKING = replace(STATIC, algorithms=SMOOTH)
PER_CHANNEL = QuantizationConfig(INT8, None, WEIGHT, name="W8A8 per channel", algorithms=())
PER_TOKEN = QuantizationConfig(
    QuantizationSpec(
        torch.int8, PlaceholderObserver, -128, 127, torch.per_channel_affine,
        is_dynamic=True, block_size=(-1,),
    ),
    None, WEIGHT, name="dynamic per token",
)  # fmt: skip
CONFIGS = {"static, per tensor": STATIC, "static, per channel": PER_CHANNEL,
           "dynamic": DYNAMIC, "dynamic per token": PER_TOKEN}  # fmt: skip

WIDTH, LOUD = 32, (3, 11, 20)


class Block(nn.Module):
    """A transformer block whose layer norms make three channels 50 to 100 times as large as the others."""

    def __init__(self, *, before: bool = True) -> None:
        super().__init__()
        self.before = before
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.eval()

    def attend(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / WIDTH**0.5
        return self.out(scores.softmax(-1) @ self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attend(self.first(x))
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))
        y = self.first(x)
        y = self.second(y + self.attend(y))
        return self.down(nn.functional.gelu(self.up(y)))


@functools.cache
def block(**options: Any) -> Block:
    torch.manual_seed(0)
    model = Block(**options)
    loud = torch.tensor([60.0, 100.0, 80.0])
    with torch.no_grad():
        for norm in (model.first, model.second):
            norm.weight[list(LOUD)] *= loud
            norm.bias.normal_()
        for linear in (model.q, model.k, model.v, model.up):
            linear.weight[:, list(LOUD)] /= loud
        for linear in (model.out, model.down):
            linear.weight *= 3
    return model


def tokens(seed: int = 0, batch: int = 8) -> Tensor:
    return randn(batch, 16, WIDTH, seed=seed)


@functools.cache
def program(model: nn.Module) -> torch.export.ExportedProgram:
    return export(model, tokens())


def quantized(model: nn.Module, config: QuantizationConfig) -> tuple[float, torch.fx.GraphModule]:
    prepared = prepare(program(model), toy(RULE, config=config))
    for seed in (0, 1):
        prepared(tokens(seed))
    converted = qompose.convert_pt2e(prepared)
    other = tokens(2)
    return toys.sqnr(model(other), converted(other)), converted


def lines(model: Any, word: str = "smooth_quant") -> tuple[list[str], list[str]]:
    """What was made by an algorithm, and what was not."""
    report = qompose.report(model)
    made, not_made = ([t for t in told if word in t] for told in (report.rewrites, report.notes))
    return made, not_made


class TestGain:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_a_transformer_block(self, name: str) -> None:
        model, config = block(), CONFIGS[name]
        without, plain = quantized(model, config)
        gained, converted = quantized(model, replace(config, algorithms=SMOOTH))
        assert gained > max(without + 10, 35)
        assert lines(plain) == ([], [])
        made, _ = lines(converted)
        assert all(name in made[0] for name in ("first.weight", "first.bias", "aten.linear in q"))

    @pytest.mark.parametrize("name", at_once(CONFIGS, "static, per tensor", "dynamic"))
    def test_a_layer_norm_that_others_read_too(self, name: str) -> None:
        """The division stands in the graph there, in front of the linears."""
        model, config = block(before=False), CONFIGS[name]
        without, _ = quantized(model, config)
        gained, converted = quantized(model, replace(config, algorithms=SMOOTH))
        assert gained > max(without + 10, 35)
        made, _ = lines(converted)
        assert "first.weight" not in made[0]
        assert any("second.weight" in line for line in made)

    @pytest.mark.parametrize("alpha", [0.25, 1.0])
    def test_a_strength_of_ones_own(self, alpha: float) -> None:
        """Factors are those of the formula: the steps of a quarter octave next to sizes over their median."""
        model = block()
        asked = replace(STATIC, algorithms=(SmoothQuant(alpha),))
        converted = convert(program(model), toy(RULE, config=asked), tokens())
        made, _ = lines(converted)
        assert f"alpha {alpha:g}" in made[0] and "layer_norm" in made[0]
        with torch.no_grad():
            seen = model.first(tokens()).flatten(0, 1).abs().amax(0)
        readers = torch.stack(
            [linear.weight.abs().amax(0) for linear in (model.q, model.k, model.v)]
        )
        sizes = seen**alpha / readers.amax(0) ** (1 - alpha)
        factors = torch.exp2((4 * torch.log2(sizes / sizes.quantile(0.5))).round() / 4).clamp(min=1)
        scaled = converted.state_dict()["first.weight"]
        torch.testing.assert_close(scaled, model.first.weight / factors)

    def test_the_layer_norm_does_it_at_no_cost(self) -> None:
        _, plain = quantized(block(), STATIC)
        _, converted = quantized(block(), ASKING)
        mul = [len(nodes_calling(model, "mul")) for model in (plain, converted)]
        assert mul[1] <= mul[0] + 2  # of the tensors that no layer norm makes
        scaled = converted.state_dict()["first.weight"].abs()
        assert float(scaled.amax() / scaled.median()) < 10

    def test_the_prepared_model_is_bitwise_the_exported_one(self) -> None:
        model = block()
        prepared = prepare(program(model), toy(RULE, config=ASKING))
        assert torch.equal(prepared(tokens()), model(tokens()))


TORCHS = replace(INT8, observer_or_fake_quant_ctr=torch.ao.quantization.MinMaxObserver)
KNOWN = FixedQParamsQuantizationSpec(torch.uint8, 1 / 8, 128, 0, 255, torch.per_tensor_affine)
OF_ALL = lambda m, x: m.a(x)  # noqa: E731
OF_WEIGHTS = lambda m, x: x[0, 0] + nn.functional.linear(m.b.weight, m.a.weight)  # noqa: E731
W = PER_TENSOR.weight
ALONG_ONE = replace(
    WEIGHT, ch_axis=1, observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(ch_axis=1)
)
NO_FACTORS = [
    (INT8, W, lambda m, x: torch.cat([x, m.a(x)]), "its range with linear -> cat"),
    (INT8, W, OF_WEIGHTS, "is a parameter"),
    (KNOWN, W, OF_ALL, "not estimated from data"),
    (TORCHS, W, OF_ALL, "observer is not from qompose"),
    (
        QuantizationSpec(torch.float16, PlaceholderObserver),
        W,
        OF_ALL,
        "observer is not from qompose",
    ),
    (
        replace(PER_TOKEN.input_activation, block_size=(-1, -1)),
        W,
        OF_ALL,
        "neither per tensor nor per token",
    ),
    (INT8, KNOWN, OF_ALL, "a.weight is not quantized to integers with an observer"),
    (INT8, ALONG_ONE, OF_ALL, "per tensor or per output channel"),
]


class TestReasons:
    def notes(self, model: nn.Module, quantizer: Any) -> str:
        return "\n".join(lines(convert(program(model), quantizer, tokens()))[1])

    def test_a_shared_weight(self) -> None:
        layers = {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}
        model = Model(lambda m, x: m.a(x).sigmoid() + m.b(x).tanh() + m.a(x * 2), **layers)
        assert "a.weight" in self.notes(model.eval(), toy(RULE, config=ASKING))

    def test_channels_that_are_not_those_of_the_weight(self) -> None:
        notes = self.notes(block(), toy(replace(RULE, channels=(0, 0)), config=ASKING))
        assert "[32, 32]" in notes and "8 channels along dimension 0" in notes
        assert f"`channels` of rule {RULE.name}" in notes

    def test_one_reader_does_not_ask(self) -> None:
        quantizer = toy(RULE, config=ASKING).set_module_name("k", STATIC)
        assert "layer_norm -> linear_1" in self.notes(block(), quantizer)

    def test_two_readers_ask_for_different_strengths(self) -> None:
        one, other = (replace(STATIC, algorithms=(SmoothQuant(alpha),)) for alpha in (0.5, 0.75))
        quantizer = toy(RULE, config=one).set_module_name("k", other)
        notes = self.notes(block(), quantizer)
        assert "alpha 0.5" in notes and "alpha 0.75" in notes

    def test_integers_from_the_operator_before(self) -> None:
        config = QuantizationConfig(INT8, INT8, PER_TENSOR.weight, algorithms=SMOOTH)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)).eval()
        notes = self.notes(model, toy(RELU_RULE, RULE, config=config))
        assert "linear_1 (aten.linear in 2)" in notes and "relu" in notes

    def test_a_reader_left_in_float(self) -> None:
        """Its output held infinities."""
        model = Model(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(WIDTH, 4), b=nn.Linear(WIDTH, 4))
        x = tokens()
        with torch.no_grad():
            model.b.bias[2] = -math.inf
            x[..., 1] *= 100
            model.a.weight[:, 1] /= 100
        config = QuantizationConfig(INT8, INT8, WEIGHT, algorithms=SMOOTH)
        converted = convert(export(model, x), toy(RULE, config=config), x)
        made, (note,) = lines(converted)
        assert not made and "linear_1" in note
        assert torch.equal(converted(x)[1], model(x)[1])

    def test_no_gain(self) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()).eval()
        with torch.no_grad():
            model[0].weight.fill_(0.1)
        (note,) = lines(quantized(model, ASKING)[1])[1]
        assert "input_1" in note and "aten.linear in 0" in note

    def test_readers_along_different_dimensions(self) -> None:
        layers = {"a": nn.Linear(WIDTH, 4), "c": nn.Conv1d(16, 4, 1)}
        model = Model(lambda m, x: (m.a(x), m.c(x)), **layers)
        assert "different dimensions" in self.notes(
            model.eval(), toy(*toys.PRODUCTS, config=ASKING)
        )

    def test_few_rows(self) -> None:
        x = tokens(0, 1)[:, :8]
        quantizer = toy(RULE, config=ASKING)
        made, notes = lines(convert(export(block(), x), quantizer, x))
        assert made == [] and "32" in notes[0]

    @pytest.mark.parametrize(("spec", "weight", "function", "why"), NO_FACTORS)
    def test_a_tensor_that_may_have_no_factors(
        self, spec: Any, weight: Any, function: Any, why: str
    ) -> None:
        config = QuantizationConfig(spec, None, weight, algorithms=SMOOTH)
        model = Model(function, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))
        cat = replace(toys.CAT, condition=None)
        prepared = prepare(export(model, tokens()), toy(RULE, cat, config=config))
        assert [why in line for line in lines(prepared)[1]] == [True]


class TestStages:
    def test_dynamic_activations_need_data(self) -> None:
        prepared = prepare(program(block()), toy(RULE, config=replace(DYNAMIC, algorithms=SMOOTH)))
        with pytest.raises(UncalibratedError, match="in q"):
            qompose.convert_pt2e(prepared)

    @pytest.mark.parametrize("config", [DYNAMIC, STATIC], ids=["dynamic", "static"])
    def test_without_data_each_tensor_is_named(self, config: Any) -> None:
        prepared = prepare(program(block()), toy(RULE, config=replace(config, algorithms=SMOOTH)))
        with pytest.raises(UncalibratedError) as refused:
            qompose.convert_pt2e(prepared)
        with pytest.warns(qompose.QomposeWarning) as caught:
            converted = qompose.convert_pt2e(prepared, allow_uncalibrated="unit_scale")
        made, notes = lines(converted)
        assert not made and len(notes) == len(refused.value.tensors) == 4
        for tensor in refused.value.tensors:
            assert tensor in str(caught[0].message)
            assert [n for n in qompose.report(converted).notes if n.startswith(tensor)]

    def test_statistics_without_rows(self) -> None:
        plain = prepare(program(block()), toy(RULE, config=STATIC))
        plain(tokens())
        asking = prepare(program(block()), toy(RULE, config=ASKING))
        with pytest.raises(StatisticsError, match="layer_norm"):
            qompose.statistics(plain).apply(asking)

    def test_an_observer_that_was_replaced(self) -> None:
        prepared = prepare(program(block()), toy(RULE, config=ASKING))
        for name, module in [*prepared.named_modules()]:
            if isinstance(module, PerChannelRangeObserver):
                prepared.set_submodule(
                    name, MinMaxObserver(torch.int8, qscheme=torch.per_tensor_affine)
                )
        prepared(tokens())
        made, notes = lines(qompose.convert_pt2e(prepared))
        assert made == [] and all("replaced" in note for note in notes)


class TestWithoutAWord:
    """A static configuration that says nothing of algorithms has those made that cost no time."""

    def test_behind_a_layer_norm(self) -> None:
        parts = {"norm": nn.LayerNorm(WIDTH), "linear": nn.Linear(WIDTH, 3)}
        model = Model(lambda m, x: m.linear(m.norm(x)), **parts)
        with torch.no_grad():
            model.norm.weight[1] = 60.0
            model.linear.weight[:, 1] /= 60.0
        x = randn(64, 5, WIDTH)
        found = {}
        for config in (STATIC, replace(STATIC, algorithms=None)):
            prepared = prepare(export(model, x), toy(RULE, config=config))
            prepared(x)
            converted = qompose.convert_pt2e(prepared)
            found[config.algorithms] = toys.sqnr(model(x), converted(x)), qompose.report(converted)
        (before, plain), (after, itself) = found[()], found[None]
        assert after > before + 10
        assert not plain.rewrites
        assert [line.split()[0] for line in itself.rewrites] == ["smooth_quant"]

    def test_what_does_not_help_is_no_line(self) -> None:
        parts = {"norm": nn.LayerNorm(WIDTH), "linear": nn.Linear(WIDTH, 3)}
        parts["other"] = nn.Linear(WIDTH, 3, bias=False)
        model = Model(lambda m, x: m.linear(m.norm(x)) + m.other(x.relu()), **parts)
        config = replace(STATIC, algorithms=None)
        x = randn(64, 5, WIDTH)
        prepared = prepare(export(model, x), toy(RULE, config=config))
        prepared(x)
        report = qompose.report(qompose.convert_pt2e(prepared))
        assert not [line for line in report.rewrites if line.startswith("smooth_quant")]
        assert not [line for line in report.notes if "not applied" in line]

    def test_statistics_without_means_are_a_line(self) -> None:
        program = export(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)), torch.randn(9, 4))
        plain = prepare(program, toy(RULE, config=STATIC))
        plain(torch.randn(9, 4))
        prepared = prepare(program, toy(RULE, config=replace(STATIC, algorithms=None)))
        with pytest.raises(StatisticsError, match="channel ranges"):
            qompose.statistics(plain).apply(prepared, complete=True)
        qompose.statistics(plain).apply(prepared)
        report = qompose.report(qompose.convert_pt2e(prepared))
        assert (
            len(
                [
                    line
                    for line in report.notes
                    if line.startswith("bias_correction was not applied to 1")
                ]
            )
            == 1
        )


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_channels_that_padding_keeps_quiet_are_not_cut_off(norm: Any) -> None:
    """Rows of padding are loud in two channels, those of data in all: 18 dB there at least."""
    model = toys.seeded(nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, 8))).eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    padding = 0.3 * randn(256, WIDTH) * torch.linspace(0.1, 1, 256)[:, None]
    padding[:, :2] += 3.0
    config = replace(PER_CHANNEL, algorithms=SMOOTH)
    smooth = convert(export(model, padding), toy(RULE, config=config), padding)
    data = randn(256, WIDTH, seed=1)
    assert lines(smooth, "smooth_quant")[0]
    assert toys.sqnr(model(data), smooth(data)) > 18
