# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant helps where a few channels are large, is free behind layer norms, and gives reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec, SmoothQuant
from qompose.backend.rule import Rule
from qompose.errors import StatisticsError, UncalibratedError
from torch import Tensor, nn

from tests.core import toy as toys
from tests.core.toy import DYNAMIC, INT8, PER_TENSOR, WEIGHT, export, nodes_calling, prepare, toy

RULE: Rule = replace(toys.LINEAR, bias="bias", channels=(-1, -1))
RELU_RULE: Rule = replace(toys.LINEAR_RELU, bias="bias", channels=(-1, -1))
SMOOTH = ("smooth_quant",)
STATIC = QuantizationConfig(INT8, None, PER_TENSOR.weight, name="W8A8 per tensor")
PER_CHANNEL = QuantizationConfig(INT8, None, WEIGHT, name="W8A8 per channel")
PER_TOKEN = QuantizationConfig(
    QuantizationSpec(
        torch.int8, qompose.observers.PlaceholderObserver, -128, 127, torch.per_channel_affine,
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
    return torch.randn(batch, 16, WIDTH, generator=torch.Generator().manual_seed(seed))


def quantized(
    model: nn.Module, config: QuantizationConfig, x: Tensor | None = None
) -> tuple[float, torch.fx.GraphModule]:
    x = tokens() if x is None else x
    prepared = prepare(export(model, x), toy(RULE, config=config))
    for batch in (x, tokens(1, len(x))):
        prepared(batch)
    converted = qompose.convert_pt2e(prepared)
    other = tokens(2, len(x))
    return toys.sqnr(model(other), converted(other)), converted


def lines(model: torch.fx.GraphModule) -> tuple[list[str], list[str]]:
    """What was made, and what was not."""
    report = qompose.report(model)
    return (
        [line for line in report.rewrites if "smooth_quant" in line],
        [line for line in report.notes if "smooth_quant" in line],
    )


class TestGain:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_a_transformer_block(self, name: str) -> None:
        model, config = block(), CONFIGS[name]
        without, plain = quantized(model, config)
        gained, converted = quantized(model, replace(config, repairs=SMOOTH))
        assert gained > max(without + 10, 35)
        assert lines(plain) == ([], [])
        made, _ = lines(converted)
        assert "by first.weight and first.bias" in made[0]
        assert "linear (aten.linear in q)" in made[0]

    @pytest.mark.parametrize("name", CONFIGS)
    def test_a_layer_norm_that_others_read_too(self, name: str) -> None:
        """The division stands in the graph there, in front of the linears."""
        model, config = block(before=False), CONFIGS[name]
        without, _ = quantized(model, config)
        gained, converted = quantized(model, replace(config, repairs=SMOOTH))
        assert gained > max(without + 10, 35)
        made, _ = lines(converted)
        assert "by a product in the graph" in made[0]
        assert "by second.weight and second.bias" in made[-1]

    @pytest.mark.parametrize("alpha", [0.25, 1.0])
    def test_a_strength_of_ones_own(self, alpha: float) -> None:
        """Factors are those of the formula: powers of two next to sizes over their median."""
        model = block()
        asked = replace(STATIC, repairs=(SmoothQuant(alpha),))
        prepared = prepare(export(model, tokens()), toy(RULE, config=asked))
        prepared(tokens())
        converted = qompose.convert_pt2e(prepared)
        made, _ = lines(converted)
        assert f"smooth_quant with alpha {alpha:g} of layer_norm, the input of linear (" in made[0]
        with torch.no_grad():
            seen = model.first(tokens()).flatten(0, 1).abs().amax(0)
        readers = torch.stack(
            [linear.weight.abs().amax(0) for linear in (model.q, model.k, model.v)]
        )
        sizes = seen**alpha / readers.amax(0) ** (1 - alpha)
        factors = torch.exp2(torch.log2(sizes / sizes.median()).round()).clamp(min=1)
        assert torch.equal(converted.state_dict()["first.weight"], model.first.weight / factors)

    def test_the_layer_norm_does_it_at_no_cost(self) -> None:
        _, plain = quantized(block(), STATIC)
        _, converted = quantized(block(), replace(STATIC, repairs=SMOOTH))
        mul = [len(nodes_calling(model, "mul")) for model in (plain, converted)]
        assert mul[1] <= mul[0] + 2  # of the tensors that no layer norm makes
        scaled = converted.state_dict()["first.weight"].abs()
        assert float(scaled.amax() / scaled.median()) < 10

    def test_the_model_is_left_alone(self) -> None:
        model = block()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        quantized(model, replace(STATIC, repairs=SMOOTH))
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def test_the_prepared_model_is_bitwise_the_exported_one(self) -> None:
        model = block()
        prepared = prepare(
            export(model, tokens()), toy(RULE, config=replace(STATIC, repairs=SMOOTH))
        )
        assert torch.equal(prepared(tokens()), model(tokens()))


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sigmoid() + self.b(x).tanh() + self.a(x * 2)


class TestReasons:
    def notes(self, model: nn.Module, quantizer: Any) -> str:
        x = tokens()
        prepared = prepare(export(model, x), quantizer)
        prepared(x)
        return "\n".join(lines(qompose.convert_pt2e(prepared))[1])

    def test_a_shared_weight(self) -> None:
        quantizer = toy(RULE, config=replace(STATIC, repairs=SMOOTH))
        assert "a.weight is read by other operators too" in self.notes(Reused().eval(), quantizer)

    def test_one_reader_does_not_ask(self) -> None:
        quantizer = toy(RULE, config=replace(STATIC, repairs=SMOOTH)).set_module_name("k", STATIC)
        notes = self.notes(block(), quantizer)
        assert "layer_norm -> linear_1 has the same integers, and does not ask for it" in notes

    def test_two_readers_ask_for_different_strengths(self) -> None:
        one, other = (replace(STATIC, repairs=(SmoothQuant(alpha),)) for alpha in (0.5, 0.75))
        quantizer = toy(RULE, config=one).set_module_name("k", other)
        told = "different strengths, smooth_quant with alpha 0.5 and smooth_quant with alpha 0.75"
        assert told in self.notes(block(), quantizer)

    def test_integers_from_the_operator_before(self) -> None:
        config = QuantizationConfig(INT8, INT8, PER_TENSOR.weight, repairs=SMOOTH)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)).eval()
        notes = self.notes(model, toy(RELU_RULE, RULE, config=config))
        assert "relu is integers already where it is computed" in notes

    def test_no_gain(self) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()).eval()
        with torch.no_grad():
            model[0].weight.fill_(0.1)
        _, converted = quantized(model, replace(STATIC, repairs=SMOOTH))
        (note,) = lines(converted)[1]
        assert "input_1, the input of linear (aten.linear in 0) was not made" in note

    def test_few_rows(self) -> None:
        x = tokens(0, 1)[:, :8]
        prepared = prepare(export(block(), x), toy(RULE, config=replace(STATIC, repairs=SMOOTH)))
        prepared(x)
        made, notes = lines(qompose.convert_pt2e(prepared))
        assert made == []
        assert "fewer than 32 rows" in notes[0]

    def test_training_does_without(self) -> None:
        quantizer = toy(RULE, config=replace(STATIC, repairs=SMOOTH))
        prepared = qompose.prepare_qat_pt2e(export(block(), tokens()), quantizer)
        assert "smooth_quant of 6 products was not made" in lines(prepared)[1][0]


class TestStages:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_statistics_of_parts(self, name: str, tmp_path: Any) -> None:
        """Put together from files they give the same bits as one calibration."""
        config = replace(CONFIGS[name], repairs=SMOOTH)
        program = export(block(), tokens())
        parts, (whole, applied) = [], (prepare(program, toy(RULE, config=config)) for _ in range(2))
        for seed in range(4):
            part = prepare(program, toy(RULE, config=config))
            part(tokens(seed))
            whole(tokens(seed))
            qompose.statistics(part).save(tmp_path / f"{seed}.safetensors")
            parts.append(qompose.Statistics.load(tmp_path / f"{seed}.safetensors"))
        parts[2].merged(parts[0], parts[3], parts[1]).apply(applied)
        one, other = (qompose.convert_pt2e(model) for model in (whole, applied))
        assert lines(one) == lines(other)
        assert torch.equal(one(tokens(9)), other(tokens(9)))

    def test_dynamic_activations_need_data(self) -> None:
        prepared = prepare(
            export(block(), tokens()), toy(RULE, config=replace(DYNAMIC, repairs=SMOOTH))
        )
        with pytest.raises(UncalibratedError, match="in q"):
            qompose.convert_pt2e(prepared)

    def test_statistics_without_rows(self) -> None:
        program = export(block(), tokens())
        plain = prepare(program, toy(RULE, config=STATIC))
        plain(tokens())
        asking = prepare(program, toy(RULE, config=replace(STATIC, repairs=SMOOTH)))
        with pytest.raises(StatisticsError, match="no rows, by which channels are balanced"):
            qompose.statistics(plain).apply(asking)

    @pytest.mark.parametrize("name", CONFIGS)
    def test_saved_and_loaded(self, name: str, tmp_path: Any) -> None:
        _, converted = quantized(block(), replace(CONFIGS[name], repairs=SMOOTH))
        qompose.save(converted, tmp_path / "model.qompose")
        loaded = qompose.load(tmp_path / "model.qompose")
        assert torch.equal(loaded(tokens()), converted(tokens()))
        assert lines(loaded) == lines(converted)
