# SPDX-License-Identifier: Apache-2.0
"""GPTQ rounds weights so that products are truer on data that it did not see, and says where it does not."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationConfig
from qompose.algorithms import GPTQ, SequentialGPTQ, gptq
from qompose.algorithms.gptq import _Form, _Order, _Rounding
from qompose.algorithms.product_inputs import InputRows, Symmetric, in_stripes
from qompose.algorithms.products import Operands, columns_of
from qompose.errors import ConfigError, StatisticsError
from qompose.observers import (
    AutoRangeObserver,
    MinMaxObserver,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
)
from qompose.observers.auto_range import Reader
from qompose.observers.make_observer import make_observer
from qompose.spec import qdq
from qompose.spec.qdq import QParams
from torch import Tensor, nn

from tests.core import toy as toys
from tests.core.algorithms.test_smoothing import lines
from tests.core.toy import INT8, PRODUCTS, WEIGHT, WEIGHT_PER_TENSOR, export, prepare, toy

AUTO = replace(INT8, observer_or_fake_quant_ctr=AutoRangeObserver)
FOUR_BITS = replace(WEIGHT, quant_min=-8, quant_max=7)
ALONG_ONE = replace(
    FOUR_BITS, ch_axis=1, observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(ch_axis=1)
)
PER_TENSOR = replace(WEIGHT_PER_TENSOR, quant_min=-8, quant_max=7)
BLOCKS = replace(
    FOUR_BITS, ch_axis=None, block_size=(1, 16),
    observer_or_fake_quant_ctr=PerBlockMinMaxObserver.with_args(block_size=(1, 16)),
)  # fmt: skip
PLAIN = QuantizationConfig(AUTO, None, FOUR_BITS, algorithms=())
ASKING = replace(PLAIN, algorithms=("gptq",))
ITSELF = replace(PLAIN, algorithms=None)
MINMAX = replace(INT8, observer_or_fake_quant_ctr=MinMaxObserver)
INPUTS = {"static": AUTO, "dynamic": toys.DYNAMIC.input_activation, "weight-only": None}


@functools.cache
def mixing(channels: int) -> Tensor:
    """What makes channels correlate."""
    drawn = torch.randn(channels, channels, generator=torch.Generator().manual_seed(7))
    return drawn * torch.logspace(0, -1.5, channels)[:, None]


def data(seed: int, *shape: int) -> Tensor:
    """Rows whose channels, in dimension 1 of images and the last of others, correlate."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if len(shape) == 2:
        return x @ mixing(shape[1])
    return torch.einsum("nc...,cd->nd...", x, mixing(shape[1]))


MODELS: dict[str, tuple[nn.Module, tuple[int, ...], Any]] = {
    "linear": (nn.Linear(48, 16), (256, 48), FOUR_BITS),
    "one scale": (nn.Linear(48, 16), (256, 48), PER_TENSOR),
    "convolution": (nn.Conv2d(24, 8, 3, padding=1), (16, 24, 9, 9), FOUR_BITS),
    "in groups": (nn.Conv1d(24, 8, 3, groups=2), (32, 24, 20), FOUR_BITS),
    "transposed": (nn.ConvTranspose2d(24, 8, 2, stride=2), (16, 24, 6, 6), ALONG_ONE),
    "blocks": (nn.Linear(48, 16), (256, 48), BLOCKS),
}


def run(model: nn.Module, config: QuantizationConfig, *batches: Tensor) -> torch.fx.GraphModule:
    prepared = prepare(export(model, batches[0]), toy(*PRODUCTS, config=config))
    for batch in batches:
        prepared(batch)
    return qompose.convert_pt2e(prepared)


def said(model: torch.fx.GraphModule) -> tuple[list[str], list[str]]:
    """What was made, and what was not."""
    return lines(model, "gptq")


@pytest.mark.parametrize("mode", ["static", "dynamic", "weight-only"])
@pytest.mark.parametrize("name", MODELS)
def test_products_are_truer_on_other_data(name: str, mode: str) -> None:
    """By 1 dB at least, four bits being all that is rounded much."""
    module, shape, weight = MODELS[name]
    model = toys.seeded(module).eval()
    seen, other = data(0, *shape), data(1, *shape)
    changes = {"weight": weight, "input_activation": INPUTS[mode]}
    plain, asking = (run(model, replace(c, **changes), seen) for c in (PLAIN, ASKING))
    expected = model(other)
    gained = toys.sqnr(expected, asking(other)) - toys.sqnr(expected, plain(other))
    assert gained > 1
    assert len(said(asking)[0]) == 1 and said(plain) == ([], [])


def test_without_a_word_nothing_is_learned_of_the_same_rows_over_and_over() -> None:
    """Held-out examples have them too, and gain alike: 16 rows are padding, the other is one of 64 words."""
    words, padding = data(0, 64, 48), data(1, 16, 48).expand(256, 16, 48)
    seen = torch.cat([words.repeat(4, 1)[:, None], padding], dim=1)
    model = toys.seeded(nn.Linear(48, 16)).eval()
    asked, by_itself = (run(model, config, seen) for config in (ASKING, ITSELF))
    assert [len(said(m)[0]) for m in (asked, by_itself)] == [1, 0]
    without = run(model, replace(ITSELF, algorithms=()), seen)
    named = [
        [n for n in qompose.report(m).notes if "80 of 4352 rows for 48 channels" in n]
        for m in (asked, by_itself, without)
    ]
    assert [*map(len, named)] == [0, 1, 0]
    assert 'algorithms=("bias_correction", "gptq",' in named[1][0]
    assert not lines(by_itself, "bias_correction")[0]
    usual = run(model, ITSELF, data(2, 256 * 17, 48).view(256, 17, 48))
    assert len(said(usual)[0]) == 1


@pytest.mark.parametrize("kind", ["words without places", "windows of few colors"])
def test_without_a_word_it_is_learned_of_what_repeats_by_nature(kind: str) -> None:
    """A vocabulary of which every word was seen, and images of two colors each: their windows differ."""
    drawn = torch.Generator().manual_seed(0)
    model: nn.Module = nn.Linear(48, 16)
    seen = torch.randn(80, 48, generator=drawn)[torch.randint(80, (256, 17), generator=drawn)]
    if kind != "words without places":
        model = nn.Conv2d(24, 16, 3)
        background, own = data(0, 1, 24, 1, 1), data(1, 64, 24, 1, 1)
        seen = torch.where(torch.rand(64, 1, 9, 9, generator=drawn) < 0.5, own, background)
    converted = run(toys.seeded(model).eval(), ITSELF, seen + 1)
    assert said(converted)[0] or lines(converted, "bias_correction")[0]
    assert not any("repeated" in note for note in qompose.report(converted).notes)


def test_without_a_word_it_is_made_where_it_helps() -> None:
    model = toys.seeded(nn.Linear(48, 16)).eval()
    by_itself = run(model, ITSELF, data(0, 256, 48))
    assert len(said(by_itself)[0]) == 1
    even = run(model, ITSELF, torch.randn(256, 48))
    assert said(even) == ([], [])


OPTIONS: dict[str, GPTQ] = {
    "damping": GPTQ(damping=0.05),
    "as they come": GPTQ(act_order=False),
    "small blocks": GPTQ(block_size=5),
    "scales of what is left": GPTQ(act_order=False, static_groups=False),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_how_it_rounds_and_it_helps(name: str) -> None:
    """By 1 dB at least on other data; sizes of blocks leave the integers as they are."""
    model, seen, other = toys.seeded(nn.Linear(48, 16)).eval(), data(0, 256, 48), data(1, 256, 48)
    groups = replace(PLAIN, weight=BLOCKS, input_activation=None)
    words = ((), ("gptq",), (OPTIONS[name],))
    plain, usual, chosen = (run(model, replace(groups, algorithms=w), seen) for w in words)
    expected = model(other)
    assert toys.sqnr(expected, chosen(other)) > toys.sqnr(expected, plain(other)) + 1
    same = torch.equal(usual.get_buffer("weight_q"), chosen.get_buffer("weight_q"))
    assert same == (name == "small blocks")
    scales = torch.equal(usual.get_buffer("weight_scale"), chosen.get_buffer("weight_scale"))
    assert scales == (name != "scales of what is left")
    assert len(said(chosen)[0]) == 1


def test_groups_have_the_scales_of_what_is_left_of_them() -> None:
    """GPTQ as its paper has it, in float64: columns that wait have taken up the errors of all before."""
    model, seen = toys.seeded(nn.Linear(48, 16)).eval(), data(0, 256, 48)
    algorithm = GPTQ(damping=0.01, act_order=False, static_groups=False)
    config = replace(PLAIN, weight=BLOCKS, input_activation=None, algorithms=(algorithm,))
    state = run(model, config, seen).state_dict()
    scales, integers = state["weight_scale"].double(), state["weight_q"].double()
    size, moments = 48 // scales.shape[1], seen.double().T @ seen.double()
    damped = moments + 0.01 * moments.diagonal().mean() * torch.eye(48)
    passed_on = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    left = model.weight.detach().double().clone()
    for at in range(48):
        scale = scales[:, at // size]
        if at % size == 0:
            expected = qparams_of_block(left[:, at : at + size])
            assert torch.allclose(scale, expected, rtol=1e-4)
        error = (left[:, at] - integers[:, at] * scale) / passed_on[at, at]
        left[:, at:] -= error[:, None] * passed_on[at, at:]


def qparams_of_block(block: Tensor) -> Tensor:
    """The scale of each row."""
    observer: Any = make_observer(BLOCKS)
    observer(block.float())
    scale: Tensor = observer.calculate_qparams()[0]
    return scale.double().flatten()


@pytest.mark.parametrize(
    "options",
    [
        {"damping": 0}, {"damping": -1.0}, {"damping": math.nan}, {"damping": True}, {"damping": "1"},
        {"block_size": 0}, {"block_size": 1.5}, {"block_size": True}, {"act_order": 1},
        {"static_groups": None}, {"static_groups": False},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [GPTQ, SequentialGPTQ])
def test_options_that_are_none(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        kind(**options)


def test_moments_that_cannot_be_factorized_are_a_line() -> None:
    """Damping so small that float32 does not show it, and fewer rows than channels."""
    algorithm = GPTQ(damping=1e-12)
    config = replace(PLAIN, input_activation=None, algorithms=(algorithm,))
    model = toys.seeded(nn.Linear(48, 16)).eval()
    made, refused = said(run(model, config, data(0, 20, 48)))
    assert not made and "singular" in refused[0] and "damping" in refused[0]


@pytest.mark.parametrize(
    "model, config, batch, reason",
    [
        (nn.Conv2d(8, 8, 1, groups=8), ASKING, data(0, 16, 8, 9, 9), "single value"),
        (nn.Conv2d(8, 8, 3, groups=8), ITSELF, data(0, 16, 8, 9, 9), None),
        (nn.Linear(48, 16), ITSELF, data(0, 7, 48), None),
        (nn.Linear(48, 16), replace(ITSELF, input_activation=MINMAX), data(0, 256, 48), None),
        (nn.Linear(48, 16), ASKING, data(0, 1, 48), "too few distinct"),
        (toys.seeded(nn.Linear(48, 16)), ASKING, toys.randn(8, 48), "is required"),
        (
            nn.Linear(48, 16),
            replace(ASKING, input_activation=None),
            data(0, 256, 48) / 0,
            "non-finite",
        ),
        (
            nn.Linear(48, 16),
            replace(ASKING, input_activation=None),
            torch.empty(0, 48),
            "never saw",
        ),
    ],
)
def test_what_was_asked_for_and_is_not_made_is_a_line(
    model: nn.Module, config: QuantizationConfig, batch: Tensor, reason: str | None
) -> None:
    made, refused = said(run(model.eval(), config, batch))
    assert made == [] and bool(refused) == (reason is not None)
    assert all(str(reason) in line for line in refused)


@pytest.mark.parametrize("name", ["linear", "convolution", "in groups", "transposed"])
def test_a_weight_of_several_layers_is_rounded_by_what_all_read(name: str) -> None:
    """As if one layer read it all."""
    module, shape, weight = MODELS[name]
    config = replace(ASKING, input_activation=None, weight=weight)
    x, y = data(0, *shape), 3 * data(1, *shape)
    model = toys.seeded(
        toys.Model(lambda m, x, y: (m.a(x), m.a(y)), a=copy.deepcopy(module))
    ).eval()
    prepared = prepare(export(model, x, y), toy(*PRODUCTS, config=config))
    prepared(x, y)
    found, one = qompose.convert_pt2e(prepared), run(model.a, config, x, y)  # type: ignore[arg-type]
    assert torch.equal(found.get_buffer("a.weight_q"), one.get_buffer("weight_q"))
    made, refused = said(found)
    assert len(made) == 2 and not refused


@pytest.mark.parametrize("config", [ASKING, ITSELF], ids=["asked", "by itself"])
def test_two_layers_with_one_weight_are_truer_on_other_data(config: QuantizationConfig) -> None:
    model = toys.seeded(toys.Model(lambda m, x, y: (m.a(x), m.a(y)), a=nn.Linear(48, 16))).eval()
    seen, other = ((data(at, 256, 48), -data(at + 1, 256, 48)) for at in (0, 2))
    errors = []
    for each in (PLAIN, config):
        prepared = prepare(export(model, *seen), toy(*PRODUCTS, config=each))
        prepared(*seen)
        found = qompose.convert_pt2e(prepared)(*other)
        errors.append([toys.sqnr(a, b) for a, b in zip(model(*other), found, strict=True)])
    assert all(after > before + 1 for before, after in zip(*errors, strict=True))


def test_a_weight_that_layers_read_which_do_not_ask_is_named() -> None:
    """Those are to have what they would have without."""
    layers = {"a": nn.Linear(48, 16), "b": nn.Linear(48, 16)}
    model = toys.seeded(toys.Model(lambda m, x, y: (m.a(x), m.b(y)), **layers)).eval()
    model.b.weight = model.a.weight  # type: ignore[union-attr, assignment]
    batch = data(0, 256, 48), data(1, 256, 48)
    quantizer = toy(*PRODUCTS, config=ASKING).set_module_name("b", PLAIN)
    prepared = prepare(export(model, *batch), quantizer)
    prepared(*batch)
    made, refused = said(qompose.convert_pt2e(prepared))
    assert not made and len(refused) == 1 and "linear_1" in refused[0]


def test_any_range_and_any_size_will_do_where_it_is_asked_for() -> None:
    model, x = toys.seeded(nn.Linear(48, 16)).eval(), data(0, 256, 48)
    with_range = run(model, replace(ASKING, input_activation=MINMAX), x)
    large = run(model, ASKING, x * 1e20)
    assert len(said(with_range)[0]) == len(said(large)[0]) == 1
    few = run(model, ASKING, data(0, 40, 48))
    assert "40 rows" in said(few)[0][0]


def test_biases_are_corrected_for_the_integers_that_were_chosen() -> None:
    model = toys.seeded(nn.Linear(48, 16)).eval()
    x, means = data(0, 512, 48) + 3, []
    for words in (("gptq",), ("gptq", "bias_correction")):
        found = run(model, replace(PLAIN, algorithms=words), x)
        means.append(float((found(x) - model(x)).detach().mean(0).abs().max()))
    assert means[1] < means[0] / 5


def test_unfolded_parameters_give_the_same() -> None:
    model, x = toys.seeded(nn.Linear(48, 16)).eval(), data(0, 256, 48)
    prepared = prepare(export(model, x), toy(*PRODUCTS, config=ASKING))
    prepared(x)
    folded, unfolded = (
        qompose.convert_pt2e(prepared, fold_quantize=fold) for fold in (True, False)
    )
    assert len(said(folded)[0]) == 1
    assert torch.equal(folded(x), unfolded(x))


NEAR = _Form(0.5, near=True)


def rounding(weight: Tensor, step: float) -> _Rounding:
    q = QParams(torch.tensor(step), torch.tensor(0), -8, 7, torch.int8)
    return _Rounding.of(Reader(weight), q, together=False)


def rounded(tried: _Rounding, rows: InputRows) -> Tensor:
    """Return integers as floats."""
    orders = [_Order.of(c, rows.symmetric(c), NEAR) for c in gptq._together(rows.channels)]
    return torch.cat([tried.rounded(order).positions for order in orders], dim=2).round()


def input_rows(rows: Tensor, noise: float = 0.0) -> InputRows:
    return InputRows(rows[None], torch.ones(len(rows)), torch.arange(len(rows)) % 2 == 0, noise)


@given(st.integers(0, 1000), st.integers(2, 80))
def test_without_correlations_the_nearest_integers_are_taken(seed: int, channels: int) -> None:
    drawn = torch.randn(5, channels, generator=torch.Generator().manual_seed(seed))
    tried, rows = rounding(drawn, 0.3), input_rows(torch.diag(drawn[0]), 0.1)
    assert torch.equal(rounded(tried, rows), tried.nearest())


@pytest.mark.parametrize("together", [64, 2048], ids=["in parts", "together"])
@given(st.integers(0, 1000), st.integers(2, 150))
def test_the_error_that_rows_give_is_never_much_larger(
    together: int, seed: int, channels: int
) -> None:
    """Of several blocks of channels, too, over many outputs; integers stay within their bounds."""
    generator = torch.Generator().manual_seed(seed)
    tried = rounding(torch.randn(200, channels, generator=generator), 0.3)
    rows = input_rows(torch.randn(64, channels, generator=generator) + 2)
    with mock.patch.object(gptq, "MOST_TOGETHER", together):
        found = rounded(tried, rows)
    offs = [(x - tried.zero_point) * tried.step - tried.weight for x in (found, tried.nearest())]
    error, of_nearest = rows.errors(offs)
    assert error < 1.1 * of_nearest
    assert float(found.min()) >= -8 and float(found.max()) <= 7


@given(st.integers(1, 60), st.sampled_from([1, 4, 24, 40]))
def test_groups_are_in_one_part_and_no_part_is_empty(groups: int, size: int) -> None:
    """Even groups that are wider than a part is otherwise."""
    with mock.patch.object(gptq, "MOST_TOGETHER", 32):
        parts = gptq._together(groups * size, size)
    assert [*itertools.chain(*(range(part.start, part.stop) for part in parts))] == [
        *range(groups * size)
    ]
    widths = [part.stop - part.start for part in parts]
    assert all(width and not width % size and width <= max(32, size) for width in widths)


@pytest.mark.parametrize("word", ["gptq", "gptq_sequential"])
def test_a_default_type_changes_no_integers(word: str) -> None:
    """Nor do parts that weights are read and rounded in."""
    model, found = toys.seeded(nn.Sequential(nn.Linear(48, 16), nn.Linear(16, 48))).eval(), []
    config, seen = replace(ASKING, algorithms=(word,)), data(0, 256, 48)
    with mock.patch.object(gptq, "_AT_A_TIME", 100), mock.patch.object(qdq, "_CHUNK", 100):
        for kind in (torch.float32, torch.float64):
            prepared = prepare(export(model, seen), toy(*PRODUCTS, config=config))
            try:
                torch.set_default_dtype(kind)
                qompose.calibrate(prepared, [(seen,)], progress=False)
                found.append(qompose.convert_pt2e(prepared))
            finally:
                torch.set_default_dtype(torch.float32)
    assert all(len(lines(m, word)[0]) == 2 for m in found)
    first, second = (m.state_dict() for m in found)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@given(st.integers(0, 1000), st.integers(2, 12), st.sampled_from([0.5, 0.9]))
def test_a_column_takes_back_what_later_ones_cannot(
    seed: int, channels: int, believed: float
) -> None:
    """Whatever errors the first columns have: its own makes the least of all that the rest can do."""
    drawn = torch.randn(3 * channels, channels, generator=torch.Generator().manual_seed(seed))
    moments = (drawn.T @ drawn).double()
    as_they_come, held = torch.arange(channels)[None], Symmetric.of(moments[None].float())
    handed_on = gptq._handed_on(held, as_they_come, _Form(believed))[0].double()
    moments = believed * moments + (1 - believed) * moments.diagonal().diag()
    for at in range(1, channels):
        errors = drawn[0, :at].double()
        rest = -torch.linalg.solve(moments[at:, at:], moments[at:, :at] @ errors)
        assert torch.allclose(-errors @ handed_on[:at, at], rest[0], rtol=1e-3, atol=1e-3)


@given(st.integers(0, 1000), st.integers(1, 40), st.booleans())
def test_half_of_a_symmetric_matrix_is_all_of_it(seed: int, width: int, half: bool) -> None:
    drawn = torch.randn(2, width, width, generator=torch.Generator().manual_seed(seed))
    matrices = drawn + drawn.transpose(1, 2)
    held = Symmetric.of(matrices)
    if half:
        held = Symmetric({(a, b): matrices[:, a:b, :b] for a, b in in_stripes(width)})
    order = torch.stack([matrix[0].argsort() for matrix in matrices])
    assert torch.equal(held.whole(), matrices)
    assert torch.equal(held.diagonal(), matrices.diagonal(dim1=1, dim2=2))
    expected = [m[own][:, own] for m, own in zip(matrices, order, strict=True)]
    assert torch.equal(gptq._in_order(held, order), torch.stack(expected))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_columns_are_what_a_product_multiplies(drawn: st.DataObject) -> None:
    """A convolution is the product of its weight's rows and the columns of its input."""
    groups, rank = drawn.draw(st.integers(1, 3)), drawn.draw(st.integers(1, 3))
    size, stride, dilation = (
        tuple(drawn.draw(st.integers(1, 3)) for _ in range(rank)) for _ in range(3)
    )
    same = drawn.draw(st.booleans())
    padding: Any = "same" if same else drawn.draw(st.integers(0, 2))
    stride = (1,) * rank if same else stride
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    module: Any = kind(2 * groups, 3 * groups, size, stride, padding, dilation, groups, bias=False)
    x = data(0, 2, 2 * groups, *(7,) * rank)
    program = export(module, x).module()
    (node,) = (n for n in program.graph.nodes if n.op == "call_function")
    columns, width = columns_of(Operands.of(node))
    found = columns.of(x)
    assert found.shape[2] == width
    taps = module.weight.view(groups, 3, -1)
    wanted = module(x).movedim(1, -1).reshape(found.shape[1], groups, 3).transpose(0, 1)
    torch.testing.assert_close(found @ taps.transpose(1, 2), wanted, atol=1e-4, rtol=1e-4)


def test_moments_come_back_from_files_and_merge(tmp_path: Path) -> None:
    """The parts of the data give the integers of the whole, for two products of one tensor apart."""
    layers = {"a": nn.Conv2d(4, 8, 3), "b": nn.Conv2d(4, 8, 3, padding=1)}
    model = toys.seeded(toys.Model(lambda m, x: (m.a(x), m.b(x)), **layers)).eval()
    batches = [data(seed, 8, 4, 7, 7) for seed in range(3)]
    exported = export(model, batches[0])
    quantizer = toy(*PRODUCTS, config=replace(ASKING, input_activation=None))

    def calibrated(*some: Tensor) -> torch.fx.GraphModule:
        prepared = prepare(exported, quantizer)
        qompose.calibrate(prepared, [(x,) for x in some], progress=False)
        return prepared

    parts = [qompose.statistics(calibrated(batch)) for batch in batches]
    assert len(parts[0].moments) == 2 and not parts[0].diff(parts[0])
    assert parts[0].diff(parts[1])
    merged = parts[2].merged(parts[0], parts[1])
    assert merged.diff(qompose.statistics(calibrated(*batches))) == ()
    for name in ("it.safetensors", "it.json"):
        merged.save(tmp_path / name)
        fresh = qompose.Statistics.load(tmp_path / name).apply(prepare(exported, quantizer))
        found, whole = (qompose.convert_pt2e(m) for m in (fresh, calibrated(*batches)))
        for layer in layers:
            one, other = (m.get_buffer(f"{layer}.weight_q") for m in (found, whole))
            assert torch.equal(one, other)
        assert len(said(found)[0]) == 2
    with pytest.raises(StatisticsError):
        replace(merged, moments=()).apply(prepare(exported, quantizer))
    written = json.loads((tmp_path / "it.json").read_text())
    total = written["moments"][0][1]["total"]
    for wrong in (total[0], [*total, total[0]], [[part[:-1] for part in half] for half in total]):
        written["moments"][0][1]["total"] = wrong
        (tmp_path / "it.json").write_text(json.dumps(written))
        with pytest.raises(StatisticsError, match=r"it\.json"):
            qompose.Statistics.load(tmp_path / "it.json")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_differences_may_have_any_float_type(dtype: torch.dtype) -> None:
    rows, off = input_rows(data(0, 8, 4)), torch.ones(1, 3, 4)
    assert rows.error(off.to(dtype)) == rows.error(off)
