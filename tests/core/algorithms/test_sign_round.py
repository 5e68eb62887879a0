# SPDX-License-Identifier: Apache-2.0
"""SignRound trains how a block is rounded, is judged on examples held back, and says what it did."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.algorithms import Algorithm, SignRound, sign_round
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.algorithms.test_gptq import BLOCKS, INPUTS, MODELS, PLAIN, data
from tests.core.algorithms.test_smoothing import lines
from tests.core.calibration.test_ranks import together
from tests.core.calibration.test_sequential import Layer
from tests.core.toy import PRODUCTS, Model, export, prepare, randn, seeded, sqnr, toy

FEW = SignRound(iterations=40)


def run(model: nn.Module, config: QuantizationConfig, *batches: Tensor) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)
        prepared = prepare(export(model, batches[0]), toy(*PRODUCTS, config=config))
        return qompose.convert_pt2e(qompose.calibrate(prepared, batches))


def with_algorithms(config: QuantizationConfig, *algorithms: str | Algorithm) -> QuantizationConfig:
    return replace(config, algorithms=algorithms)


def gained(
    model: nn.Module, config: QuantizationConfig, seen: list[Tensor], other: Tensor
) -> float:
    """How many dB outputs of other data gain over weights rounded to nearest."""
    models = [run(model, with_algorithms(config, *chosen), *seen) for chosen in ((), (FEW,))]
    exact = model(other)
    before, after = (sqnr(exact, m(other)) for m in models)
    assert len(lines(models[1], "sign_round")[0]) >= 1
    return after - before


@pytest.mark.parametrize(
    "mode",
    ["weight-only", *(pytest.param(m, marks=pytest.mark.full) for m in ("static", "dynamic"))],
)
@pytest.mark.parametrize(
    "name",
    ["linear", "convolution", "blocks",
     *(pytest.param(n, marks=pytest.mark.full) for n in ("one scale", "in groups", "transposed"))],
)  # fmt: skip
def test_products_are_truer_on_other_data(name: str, mode: str) -> None:
    """By 1 dB at least, four bits being all that is rounded much."""
    module, shape, weight = MODELS[name]
    model, seen, other = seeded(module), data(0, *shape), data(1, *shape)
    config = replace(PLAIN, weight=weight, input_activation=INPUTS[mode])
    assert gained(model, config, [seen], other) > 1


def stack() -> nn.Module:
    inner = nn.Sequential(*(Layer() for _ in range(2)))
    return seeded(Model(lambda m, x: m.layers(x), layers=inner), 0, 0.2)


WEIGHTS = replace(PLAIN, weight=BLOCKS, input_activation=None)
ALONG_8 = replace(
    WEIGHTS,
    weight=replace(
        BLOCKS, block_size=(1, 8),
        observer_or_fake_quant_ctr=BLOCKS.observer_or_fake_quant_ctr.with_args(block_size=(1, 8)),
    ),
)  # fmt: skip


def correlated(seed: int, rows: int) -> Tensor:
    """Rows whose channels correlate less than those of `data`, so that there is something left to train."""
    mixed = 0.3 * randn(24, 24, seed=7) + torch.eye(24)
    return randn(rows, 24, seed=seed) @ mixed


@pytest.mark.full
def test_training_goes_beyond_where_it_begins() -> None:
    """Outputs of other data are truer than by GPTQ, and the report says how far training went."""
    model, seen = stack(), [correlated(number, 64) for number in range(4)]
    other = correlated(9, 64)
    by = {
        word: run(model, with_algorithms(ALONG_8, word), *seen)
        for word in ("gptq_sequential", "sign_round")
    }
    exact = model(other)
    ratios = {word: sqnr(exact, found(other)) for word, found in by.items()}
    assert ratios["sign_round"] > ratios["gptq_sequential"] + 0.1
    made, refused = lines(by["sign_round"], "sign_round")
    assert len(made) == 4 and refused == []
    assert all("layers." in line and "of 200 iterations" in line for line in made)


def test_the_same_data_gives_the_same_bits_in_whatever_order() -> None:
    model, seen = stack(), [data(number, 16, 24) for number in range(3)]
    config = with_algorithms(ALONG_8, FEW)
    one, other = (run(model, config, *b).state_dict() for b in (seen, seen[::-1]))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "batch, reason",
    [
        (data(0, 4, 48), "distinct examples in calibration, 4;"),
        (data(0, 1, 48).expand(16, 48), "distinct examples in calibration, 1;"),
        (torch.zeros(16, 48), "distinct examples"),
        (data(0, 16, 48) / 0, "non-finite"),
    ],
)
def test_odd_data_is_a_line(batch: Tensor, reason: str) -> None:
    model = seeded(nn.Linear(48, 16, bias=False))
    config = with_algorithms(replace(WEIGHTS, weight=MODELS["linear"][2]), FEW)
    made, refused = lines(run(model, config, batch), "sign_round")
    assert made == [] and len(refused) == 1 and reason in refused[0]


@pytest.mark.parametrize("shape", [(48,), (3, 48)])
def test_a_batch_without_rows_changes_nothing(shape: tuple[int, ...]) -> None:
    model = seeded(nn.Linear(48, 16))
    config = with_algorithms(replace(WEIGHTS, weight=MODELS["linear"][2]), FEW)
    seen = [data(number, 32, *shape) for number in range(2)]
    program = torch.export.export(model, (seen[0],), dynamic_shapes=({0: torch.export.Dim("n")},))
    one, other = (
        qompose.convert_pt2e(
            qompose.calibrate(prepare(program, toy(*PRODUCTS, config=config)), batches)
        )
        for batches in (seen, [seen[0], seen[0][:0], seen[1]])
    )
    assert len(lines(other, "sign_round")[0]) == 1
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])


@pytest.mark.parametrize("of_one", [lambda x: x.split(1), lambda x: x.unbind()])
def test_batches_of_one_example_are_held_back_as_a_whole(of_one: Any) -> None:
    """Errors on them are about those of the same examples in one batch, of which others may be held back."""
    model, seen = seeded(nn.Linear(48, 16)), data(0, 64, 48)
    config = with_algorithms(replace(WEIGHTS, weight=MODELS["linear"][2]), FEW)
    (whole,), (apart,) = (
        lines(run(model, config, *batches), "sign_round")[0] for batches in ([seen], of_one(seen))
    )
    numbers = r"reduced ([\d.]+)x: ([\d.]+) before"
    ((of_whole,), (of_apart,)) = (re.findall(numbers, line) for line in (whole, apart))
    assert [*map(float, of_apart)] == pytest.approx([*map(float, of_whole)], rel=0.1)


def test_a_dead_channel_harms_nothing() -> None:
    model, seen = seeded(nn.Linear(48, 16)), data(0, 64, 48)
    seen[:, :4] = 0.0
    config = replace(WEIGHTS, weight=MODELS["linear"][2])
    other = data(1, 64, 48)
    other[:, :4] = 0.0
    assert gained(model, config, [seen], other) > 1


def test_where_nothing_is_gained_weights_stay_as_they_are() -> None:
    """Of values that are integers already there is nothing to gain."""
    model = nn.Linear(48, 16, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-7, 8, (16, 48)).clamp(-7, 7))
        model.weight[:, 0] = 7.0
    plain, asked = (
        run(
            model,
            with_algorithms(replace(WEIGHTS, weight=MODELS["linear"][2]), *chosen),
            randn(64, 48),
        )
        for chosen in ((), (FEW,))
    )
    assert all(torch.equal(v, asked.state_dict()[k]) for k, v in plain.state_dict().items())
    assert len(lines(asked, "sign_round")[1]) == 1


def test_ranges_are_trained_if_that_is_asked_for() -> None:
    """They are stored in the type that the observer of groups rounds them to."""
    model, seen = seeded(nn.Linear(24, 24)), [data(number, 32, 24) for number in range(4)]
    found = {
        ranges: run(model, with_algorithms(ALONG_8, SignRound(20, ranges)), *seen).state_dict()
        for ranges in (True, False)
    }
    plain = run(model, with_algorithms(ALONG_8), *seen).state_dict()
    scales = [key for key in plain if "scale" in key]
    assert scales and all(torch.equal(found[False][key], plain[key]) for key in scales)
    with (
        mock.patch.object(sign_round, "compensated", lambda *given: given[-1]),  # begins at nearest
        mock.patch.multiple(sign_round, _RATE=1.0, _RATE_OF_RANGES=1.0),
    ):
        moved = run(model, with_algorithms(ALONG_8, SignRound(20, True)), *seen).state_dict()
    assert any(not torch.equal(moved[key], plain[key]) for key in scales)


BODY = """
from tests.core.algorithms.test_sign_round import ALONG_8, FEW, stack, with_algorithms
from tests.core.algorithms.test_gptq import data
from tests.core.toy import PRODUCTS, export, prepare, toy
seen = [data(number, 16, 24) for number in range(3)]
config = with_algorithms(ALONG_8, FEW)
model = prepare(export(stack(), seen[0]), toy(*PRODUCTS, config=config))
qompose.statistics(qompose.calibrate(model, seen)).save(f"{out}/{rank}.safetensors")
"""


@pytest.mark.full
def test_processes_train_together_what_one_trains(tmp_path: Any) -> None:
    done = together(tmp_path, BODY, count=2)
    assert [process.returncode for process in done] == [0, 0], done[0].stderr
    ranks = [qompose.Statistics.load(tmp_path / f"{rank}.safetensors").learned for rank in (0, 1)]
    seen = [data(number, 16, 24) for number in range(3)]
    model = prepare(export(stack(), seen[0]), toy(*PRODUCTS, config=with_algorithms(ALONG_8, FEW)))
    alone = qompose.statistics(qompose.calibrate(model, seen)).learned
    assert alone is not None and ranks[0] is not None and ranks[1] is not None
    for one, other, own in zip(ranks[0].weights, ranks[1].weights, alone.weights, strict=True):
        assert torch.equal(one.integers, other.integers)
        assert float((one.integers != own.integers).float().mean()) <= 1e-4
