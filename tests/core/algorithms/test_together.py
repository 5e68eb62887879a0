# SPDX-License-Identifier: Apache-2.0
"""Algorithms in bodies, with open dimensions, of several quantizers, and where another engine asks."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, algorithms
from qompose.conversion.convert import insert_qdq
from qompose.conversion.qparams_solver import solve
from qompose.observers import AutoRangeObserver
from qompose.spec.algorithm_choice import BIAS_CORRECTION, EQUALIZATION, GPTQ, SMOOTH_QUANT
from torch import Tensor, nn
from torch.export import Dim

from tests.core import toy as toys
from tests.core.toy import INT8, PRODUCTS, WEIGHT_PER_TENSOR, Model, convert, export, prepare, toy

LINEAR = replace(toys.LINEAR, bias="bias", channels=(-1, -1))
AUTO = replace(INT8, observer_or_fake_quant_ctr=AutoRangeObserver)
PLAIN = QuantizationConfig(AUTO, None, WEIGHT_PER_TENSOR, algorithms=())
ALGORITHM_WORDS = EQUALIZATION, SMOOTH_QUANT, GPTQ, BIAS_CORRECTION
ALL = replace(PLAIN, algorithms=ALGORITHM_WORDS)


def tail() -> nn.Sequential:
    """Uneven channels between two linears, and large ones in front of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    sizes = torch.logspace(-5, 5, 32, base=2)
    with torch.no_grad():
        model[0].weight.mul_(sizes.view(-1, 1))
        model[0].bias.mul_(sizes)
        model[2].weight.div_(sizes)
        model[0].weight[:, 3] /= 100
    return model


def rows(number: int = 256, seed: int = 0) -> Tensor:
    x = torch.rand(number, 32, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 100
    return x


@functools.cache
def program() -> torch.export.ExportedProgram:
    return export(tail(), rows())


def repaired(config: QuantizationConfig = ALL) -> torch.fx.GraphModule:
    return convert(program(), toy(LINEAR, config=config), rows())


def made(model: torch.fx.GraphModule) -> list[str]:
    lines = qompose.report(model).rewrites
    return [word for word in ALGORITHM_WORDS for line in lines if line.startswith(word)]


def test_in_a_body() -> None:
    model = Model(
        lambda m, x: torch.cond(x.sum() > 0, m.tail, lambda x: x[:, :8] * 2, (x,)), tail=tail()
    ).eval()
    exported = export(model, rows())
    plain, mended = (convert(exported, toy(LINEAR, config=c), rows()) for c in (PLAIN, ALL))
    assert set(made(mended)) == set(ALGORITHM_WORDS)
    expected = model(rows())
    assert toys.sqnr(expected, mended(rows())) > toys.sqnr(expected, plain(rows())) + 10


def test_open_dimensions() -> None:
    layers = {"first": nn.Conv2d(4, 32, 3, padding=1), "second": nn.Conv2d(32, 32, 1)}
    model = Model(
        lambda m, x: m.tail(m.second(m.first(x).relu()).mean((2, 3))), tail=tail(), **layers
    ).eval()
    x = torch.rand(32, 4, 8, 8)
    open_ = ({0: Dim("batch", min=2), 2: Dim("height", min=4), 3: Dim("width", min=4)},)
    quantizer = toy(PRODUCTS[1], LINEAR, config=ALL)
    converted = convert(export(model, x, dynamic_shapes=open_), quantizer, x)
    fixed = convert(export(model, x), quantizer, x)
    assert toys.sqnr(fixed(x), converted(x)) > 100
    other = torch.rand(3, 4, 12, 10)
    assert toys.sqnr(model(other), converted(other)) > 25
    assert set(made(converted)) >= {"equalization", "bias_correction"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_quantizers(order: tuple[int, int]) -> None:
    """A pair may belong to two of them, if both ask."""
    ones = [
        toy(LINEAR, config=None, name=name).set_module_name(path, ALL)
        for name, path in (("one", "0"), ("other", "2"))
    ]
    both = qompose.compose(*(ones[number] for number in order))
    mended, alone = convert(program(), both, rows()), repaired()
    assert made(mended) == made(alone)
    assert torch.equal(mended(rows()), alone(rows()))


@pytest.mark.parametrize("word", ALGORITHM_WORDS)
def test_each_alone(word: str) -> None:
    assert set(made(repaired(replace(PLAIN, algorithms=(word,))))) == {word}


def test_other_engines_are_told() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toy(LINEAR, config=ALL).annotate(program().module())
    text = "\n".join(str(w.message) for w in caught)
    assert all(word in text for word in ALGORITHM_WORDS)
    assert "balanced" not in text


def test_training_does_without_and_says_so() -> None:
    prepared = qompose.prepare_qat_pt2e(program(), toy(LINEAR, config=ALL))
    assert made(prepared) == []
    notes = qompose.report(prepared).notes
    assert all(any(word in note for note in notes) for word in ALGORITHM_WORDS)


def test_neither_autocast_nor_a_default_type_changes_integers() -> None:
    prepared = prepare(program(), toy(LINEAR, config=ALL))
    prepared(rows())
    plain = qompose.convert_pt2e(prepared)
    with torch.autocast("cpu", torch.bfloat16):
        other = qompose.convert_pt2e(prepared)
    try:
        torch.set_default_dtype(torch.float64)
        third = qompose.convert_pt2e(prepared)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    for found in (other, third):
        for name, value in plain.state_dict().items():
            assert torch.equal(found.state_dict()[name], value), name


def test_saved_and_loaded(tmp_path: Any) -> None:
    converted = repaired()
    qompose.save(converted, tmp_path / "model.qompose")
    loaded = qompose.load(tmp_path / "model.qompose")
    assert torch.equal(loaded(rows(seed=3)), converted(rows(seed=3)))
    assert qompose.report(loaded).rewrites == qompose.report(converted).rewrites
    assert set(made(loaded)) == set(ALGORITHM_WORDS)


def test_resumed_and_shared_calibration(tmp_path: Any) -> None:
    batches = [(rows(seed=seed),) for seed in range(4)]
    whole = prepare(program(), toy(LINEAR, config=ALL))
    qompose.calibrate(whole, batches)
    resumed, again = (prepare(program(), toy(LINEAR, config=ALL)) for _ in range(2))
    qompose.calibrate(resumed, batches[:2], resume=tmp_path / "kept.safetensors")
    qompose.calibrate(again, batches, resume=tmp_path / "kept.safetensors")
    assert qompose.statistics(again).diff(qompose.statistics(whole)) == ()
    assert qompose.statistics(again).means
    one, other = (qompose.convert_pt2e(model) for model in (whole, again))
    assert torch.equal(one(rows()), other(rows()))


def test_in_place() -> None:
    prepared = prepare(program(), toy(LINEAR, config=ALL))
    prepared(rows())
    apart = qompose.convert_pt2e(prepared)
    assert torch.equal(qompose.convert_pt2e(prepared, inplace=True)(rows()), apart(rows()))


def test_capabilities_know_them() -> None:
    quantizer = toy(LINEAR, config=replace(ALL, name="mended"))
    listed = quantizer.quantization_capabilities()
    (row,) = (row for row in listed.to_dict()["rows"] if row["config"] == "mended")
    assert row["settings"]["algorithms"] == list(ALGORITHM_WORDS)
    assert listed.supports("linear", ALL)
    assert listed.supports("linear", replace(ALL, algorithms=()))


@pytest.mark.parametrize("fold_quantize", [True, False])
def test_solving_changes_no_model_and_inserting_no_solution(fold_quantize: bool) -> None:
    rule = replace(LINEAR, integer_bias=True)
    prepared = prepare(program(), toy(rule, config=ALL))
    prepared(rows())
    plan, state = toys.plan_of(prepared), dict(prepared.named_parameters())
    graph, values = str(prepared.graph), {name: v.clone() for name, v in state.items()}
    metas = [dict(node.meta) for node in prepared.graph.nodes]
    solution = solve(prepared, plan, allow_uncalibrated=False)
    assert str(prepared.graph) == graph
    assert [node.meta for node in prepared.graph.nodes] == metas
    assert all(torch.equal(v, values[name]) for name, v in prepared.named_parameters())
    found = (solution.qparams, solution.parameters, solution.biases, solution.askers)
    assert all(found) and solution.factors.factors and solution.made and not solution.dropped
    before = [dict(part) for part in found]
    tensors = [t.clone() for t in (*solution.parameters.values(), *solution.biases.values())]
    insert_qdq(prepared, plan, solution, fold_quantize=fold_quantize)
    assert [dict(part) for part in found] == before and not solution.dropped
    after = (*solution.parameters.values(), *solution.biases.values())
    assert all(torch.equal(one, other) for one, other in zip(after, tensors, strict=True))
    assert str(prepared.graph) != graph


@pytest.mark.parametrize("asked", [True, False], ids=["by word", "by default"])
def test_the_same_with_other_options_is_not_asked_by_the_word(asked: bool) -> None:
    """It was refused on the other's layers, where nobody wanted it."""
    named = replace(PLAIN, algorithms=(GPTQ,)) if asked else replace(PLAIN, algorithms=None)
    with_options = replace(PLAIN, algorithms=(algorithms.GPTQ(damping=0.05),))
    quantizer = toy(LINEAR, config=named).set_module_name("2", with_options)
    converted = convert(program(), quantizer, rows())
    lines = [line for line in qompose.report(converted).rewrites if line.startswith(GPTQ)]
    first, second = (next(line for line in lines if f"in {layer})" in line) for layer in "02")
    assert first.startswith("gptq on ") and second.startswith("gptq with damping 0.05 on ")
    assert not [note for note in qompose.report(converted).notes if "gptq" in note]
