# SPDX-License-Identifier: Apache-2.0
"""Balancing helps where one channel drowns the others, and harms nothing else."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.backend.rule import Rule
from qompose.observers.config import ACTIVATION_RANGES, OF_TORCH
from torch import Tensor, nn

from tests.core import toy as toys
from tests.core.algorithms.test_awq import FOLDED, LEFT, Unrounded, loud_rows, multiplications
from tests.core.toy import LINEAR, LINEAR_RELU, STATIC as PLAIN, Model, convert, export, randn, toy

BALANCED = replace(PLAIN, balance=True, weight=replace(
    PLAIN.weight, qscheme=torch.per_channel_symmetric, ch_axis=0,
    observer_or_fake_quant_ctr=qompose.observers.PerChannelMinMaxObserver.with_args(),
))  # fmt: skip
PER_CHANNEL = replace(BALANCED, balance=False)
RULE: Rule = replace(LINEAR, bias="bias", channels=(-1, -1))


def sqnr(model: nn.Module, x: Tensor, config: QuantizationConfig) -> tuple[float, qompose.Report]:
    converted = convert(export(model, x), toy(RULE, config=config), x)
    return toys.sqnr(model(x), converted(x)), qompose.report(converted)


def data(
    change: Callable[[Tensor], object] = lambda x: None, width: int = 32, rows: int = 256
) -> Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    change(x)
    return x


def layer(change: Callable[[nn.Linear], object] = lambda m: None, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(width, 24)
    with torch.no_grad():
        change(linear)
    return nn.Sequential(linear, nn.Sigmoid()).eval()


@pytest.mark.parametrize("word", [None, *ACTIVATION_RANGES, OF_TORCH])
def test_an_outlier_channel_of_the_input(word: str | None) -> None:
    """Whatever its range is estimated by; torch's own observer has a tensor for its eps."""
    x = data(lambda x: x[:, 3].mul_(100))
    model = layer(lambda m: m.weight[:, 3].div_(100))
    balanced = BALANCED
    if word is not None:
        observer = qompose.observers.observer_for_range(word)
        one = replace(BALANCED.input_activation, observer_or_fake_quant_ctr=observer)
        balanced = replace(BALANCED, input_activation=one, output_activation=one)
    with_factors, report = sqnr(model, x, balanced)
    without, _ = sqnr(model, x, replace(balanced, balance=False))
    assert with_factors > without + 10
    assert any("input_1 -> linear" in line for line in report.rewrites)


@pytest.mark.parametrize("asked", [{"balance": True}, {"algorithms": ("smooth_quant",)}], ids=str)
def test_a_range_that_somebody_chose_stays(asked: dict[str, Any]) -> None:
    x = data(lambda x: x[:, 3].mul_(100))
    model = layer(lambda m: m.weight[:, 3].div_(100))
    prepared = toys.prepare(export(model, x), toy(RULE, config=replace(PER_CHANNEL, **asked)))
    prepared(x)
    seen = qompose.statistics(prepared)
    site = next(site for e in seen for site in e.sites if "the program" in str(site))
    converted = qompose.convert_pt2e(seen.with_range(site, -20.0, 31.0).apply(prepared))
    scales = [n.args[1] for n in converted.graph.nodes if "quantize_per_tensor" in str(n.target)]
    assert pytest.approx(51 / 255) in scales
    report = qompose.report(converted)
    assert not report.rewrites and any("set manually" in line for line in report.notes)


def test_an_outlier_channel_of_the_output() -> None:
    """It is worth a pass over the output where the product is large beside that.

    In few rows the gain depends on which half of them has the largest value.
    """
    found = {}
    for width in (32, 512):
        loud = layer(lambda m: m.weight[5].mul_(3), width)[0]
        model = nn.Sequential(loud, nn.LayerNorm(24)).eval()
        lines = sqnr(model, data(width=width, rows=4096), BALANCED)[1].rewrites
        found[width] = any("output of linear" in line for line in lines)
    assert found == {32: False, 512: True}


@pytest.mark.parametrize(
    "rows", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (4, 16, 64)), 40]
)
def test_few_rows_do_not_decide_for_all(rows: int) -> None:
    """Whatever channels look like in a few rows, other inputs lose nothing that the plain scheme keeps."""
    model, batch = layer(), {0: torch.export.Dim("batch")}
    some = torch.randn(rows, 32, generator=torch.Generator().manual_seed(7))
    ratios = []
    for config in (BALANCED, PER_CHANNEL):
        program = export(model, data(), dynamic_shapes=(batch,))
        converted = convert(program, toy(RULE, config=config), some)
        ratios.append(toys.sqnr(model(data()), converted(data())))
    assert ratios[0] > ratios[1] - 1


def kill(x: Tensor) -> None:
    x[:, :20] = 0


def heavy(x: Tensor) -> None:
    torch.manual_seed(1)
    x.copy_(torch.distributions.StudentT(torch.tensor(2.0)).sample(x.shape))


ODD = {
    "plain": len,
    "dead channels": kill,
    "quiet channels": lambda x: x[:, :16].mul_(1e-6),
    "heavy tails": heavy,
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_nothing_else_is_harmed(change: Callable[[Tensor], None]) -> None:
    x = data(change)
    with_factors, _ = sqnr(layer(), x, BALANCED)
    without, _ = sqnr(layer(), x, PER_CHANNEL)
    assert with_factors > without - 1.5


def test_a_channel_that_was_silent_in_calibration_may_speak_later() -> None:
    model = layer()
    x = data()
    converted = convert(export(model, x), toy(RULE, config=BALANCED), data(kill))
    assert (converted(x) - model(x)).norm() < 0.05 * model(x).norm()


def test_a_shared_bias_is_left_alone() -> None:
    model = Model(lambda m, x: (m.a(x).sigmoid(), torch.sin(m.a.bias)), a=nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model.a.weight[0] *= 50
    x = torch.randn(64, 8)
    converted = convert(export(model, x), toy(RULE, config=BALANCED), x)
    assert torch.equal(converted(x)[1], model(x)[1])


def test_a_group_with_a_reader_left_in_float_is_not_balanced() -> None:
    model = Model(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model.b.bias[2] = -math.inf
        for part in (model.a, model.b):
            part.weight[:, 1] /= 100
    x = torch.randn(16, 8)
    x[:, 1] *= 100
    converted = convert(export(model, x), toy(RULE, config=BALANCED), x)
    assert torch.equal(converted(x)[1], model(x)[1]), "its output held infinities: it stays float"


INPUTS = replace(BALANCED, output_activation=None)


def loud_inside(forward: Callable[..., Tensor], first: nn.Module, last: nn.Module) -> Any:
    """Two layers with loud channels between them, which the second reads by small columns."""
    model, read = loud_rows(forward, first, last), list[Tensor]()
    hook = model.last.register_forward_pre_hook(lambda _, inputs: read.extend(inputs))
    with torch.no_grad():
        model(SEEN)
        hook.remove()
        model.last.weight.div_(read[0].flatten(0, -2).std(0))
    return model


SEEN, OTHER = randn(40, 16, 48), randn(40, 16, 48, seed=1)


def in_float_parts(model: nn.Module, config: QuantizationConfig) -> Any:
    """The model converted, with weights that are quantized as it runs."""
    prepared = toys.prepare(export(model, SEEN), toy(RULE, config=config))
    prepared(SEEN)
    return qompose.convert_pt2e(prepared, fold_quantize=False)


@pytest.mark.parametrize("name", FOLDED)
def test_a_layer_in_front_divides_without_an_operator(name: str) -> None:
    """In float the program is the same to rounding, and values on the way are compared without factors."""
    model = loud_inside(*map(copy.deepcopy, FOLDED[name]))
    scaled, plain = (in_float_parts(model, replace(INPUTS, balance=b)) for b in (True, False))
    (line,) = (line for line in qompose.report(scaled).rewrites if "-> linear" in line)
    assert "first.weight and first.bias" in line
    assert multiplications(scaled) == multiplications(plain)
    with torch.no_grad():
        assert toys.sqnr(model(OTHER), Unrounded(scaled).run(OTHER)) > 100
        found = toys.sqnr(model(OTHER), scaled(OTHER))
        assert found > toys.sqnr(model(OTHER), plain(OTHER)) + 3
    compared = qompose.compare(export(model, OTHER), scaled, [(OTHER,)])
    assert min(row.sqnr for row in compared.rows) > found - 3


@pytest.mark.parametrize(("name", "config"), [("gelu", INPUTS), ("another reads it", INPUTS),
                                              ("gate", BALANCED)])  # fmt: skip
def test_where_no_layer_in_front_may_divide_an_operator_does(
    name: str, config: QuantizationConfig
) -> None:
    """Nor may one whose output is integers, of a range that was seen without factors."""
    model = loud_inside(*map(copy.deepcopy, (FOLDED | LEFT)[name]))
    scaled, plain = (in_float_parts(model, replace(config, balance=b)) for b in (True, False))
    assert not any("first.weight" in line for line in qompose.report(scaled).rewrites)
    assert multiplications(scaled) > multiplications(plain)
    assert toys.sqnr(model(OTHER), scaled(OTHER)) > toys.sqnr(model(OTHER), plain(OTHER)) + 1


def behind(m: Any, x: Tensor) -> Tensor:
    return m.last(m.first(x))  # type: ignore[no-any-return]


def behind_relu(m: Any, x: Tensor) -> Tensor:
    return m.last(m.first(x).relu())  # type: ignore[no-any-return]


def returned_too(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.first(x)
    return m.last(y), y


FUSED: Rule = replace(LINEAR_RELU, bias="bias", channels=(-1, -1))


def between(forward: Callable[..., Any], balance: bool, seen: int = 200) -> tuple[nn.Module, Any]:
    """Two layers with integers between them, and the model converted, with weights quantized as it runs."""
    model = loud_inside(forward, nn.Linear(48, 48), nn.Linear(48, 48))
    config = replace(BALANCED, balance=balance)
    prepared = toys.prepare(export(model, SEEN), toy(FUSED, RULE, config=config))
    for part in randn(seen, 16, 48, seed=2).split(40):
        prepared(part)
    return model, qompose.convert_pt2e(prepared, fold_quantize=False)


@pytest.mark.parametrize("forward", [behind, behind_relu])
def test_channels_of_integers_between_two_layers(forward: Callable[..., Tensor]) -> None:
    """The layer in front divides them, as it does floats, and its own output is quantized so."""
    (model, scaled), (_, plain) = (between(forward, balance) for balance in (True, False))
    (line,) = qompose.report(scaled).rewrites
    assert "first.weight and first.bias" in line
    assert multiplications(scaled) == multiplications(plain) == 0
    with torch.no_grad():
        assert toys.sqnr(model(OTHER), Unrounded(scaled).run(OTHER)) > 100
        found = toys.sqnr(model(OTHER), scaled(OTHER))
        assert found > toys.sqnr(model(OTHER), plain(OTHER)) + 3
    compared = qompose.compare(export(model, OTHER), scaled, [(OTHER,)])
    assert min(row.sqnr for row in compared.rows) > found - 3


@pytest.mark.parametrize(("forward", "seen"), [(returned_too, 200), (behind, 160)])
def test_integers_without_factors(forward: Callable[..., Any], seen: int) -> None:
    """Of others that read them as well, which no operator can divide them for, and of 53 rows a channel."""
    (_, scaled), (_, plain) = (between(forward, balance, seen) for balance in (True, False))
    assert not qompose.report(scaled).rewrites
    for one, other in zip(scaled(OTHER), plain(OTHER), strict=True):
        assert torch.equal(one, other)
