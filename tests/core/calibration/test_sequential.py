# SPDX-License-Identifier: Apache-2.0
"""Algorithms learn from one part of a program after another, from what quantizing those before it gives."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import qompose
import torch
from qompose import QuantizationConfig, Statistics
from qompose.algorithms import (
    Algorithm,
    Block,
    NotChanged,
    Operands,
    SequentialGPTQ,
    SignRound,
    change_products,
    gptq,
    noted,
    set_integers,
    set_scales,
    weight_group,
)
from qompose.algorithms.blocks import learned_of
from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import Part
from qompose.errors import CalibrationError, MemberError, StatisticsError, UnlearnedError
from qompose.program import disk
from qompose.spec.claim import Claim
from qompose.spec.qdq import integers_of
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from tests.core.algorithms.test_gptq import FOUR_BITS, data
from tests.core.algorithms.test_smoothing import lines
from tests.core.calibration.test_ranks import together
from tests.core.live_bytes import LiveBytes
from tests.core.toy import DYNAMIC, PRODUCTS, STATIC, Model, export, prepare, seeded, toy
from tests.sampling import at_once

MODES = {
    "static": replace(STATIC, weight=FOUR_BITS),
    "dynamic": replace(DYNAMIC, weight=FOUR_BITS),
    "weight-only": QuantizationConfig(None, None, FOUR_BITS, name="weights"),
}
SEQUENTIAL = replace(MODES["weight-only"], algorithms=("gptq_sequential",))


class Layer(nn.Module):
    """Two products, of which the second reads what the first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def net(layers: int = 2) -> nn.Module:
    stack = nn.Sequential(*(Layer() for _ in range(layers)))
    return seeded(
        Model(lambda m, x: m.head(m.layers(x)), layers=stack, head=nn.Linear(24, 8)), 0, 0.2
    )


def batches(count: int = 4, seed: int = 0) -> list[Tensor]:
    return [data(seed + number, 16, 24) for number in range(count)]


def observed(model: nn.Module, config: QuantizationConfig) -> GraphModule:
    with torch.no_grad():
        return prepare(export(model, batches(1)[0]), toy(*PRODUCTS, config=config))


def calibrated(model: nn.Module, config: QuantizationConfig, **options: Any) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)
        return qompose.calibrate(observed(model, config), batches(), **options)


def notes(converted: GraphModule) -> str:
    return "\n".join(qompose.report(converted).notes)


@dataclass(frozen=True)
class Watching(Algorithm):
    """Rounds every weight down, and keeps what it was shown; it stops at a block if it is told to."""

    word: ClassVar[str] = "watching"
    part: Part = "product"
    stop: str = field(default="", compare=False)
    shown: dict[str, Any] = field(default_factory=dict, compare=False)

    def learns(self, claim: Claim) -> Part | None:
        return self.part

    def learn(self, found: Calibrated, block: Block) -> None:
        if block.name == self.stop:
            raise RuntimeError("stopped")
        self.shown[block.name] = (
            [(p.node.name, [x[1] for x in block.inputs(p)]) for p in block.products],
            [(block.wanted(batch), block.given(batch)) for batch in range(block.batches)],
            block.outputs,
        )
        for product in block.products:
            _, q = weight_group(found, product)
            with noted(found, self, product) as effects:
                down = integers_of(
                    found.factors.constant(product.weight.name) - q.scale[:, None] / 2, q
                )
                set_integers(found, product, down)
                effects.append("rounded down")


class Values(Interpreter):
    """What the operators of a program gave, and what they read, by name."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.read: dict[str, Any] = {}
        self.gave: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        self.read[n.name], self.gave[n.name] = args[:1], super().run_node(n)
        return self.gave[n.name]


@pytest.mark.parametrize("mode", MODES)
def test_inputs_are_those_of_the_program_with_all_weights_before_rounded(mode: str) -> None:
    """As the converted model computes them in the end, to the bit."""
    watching, model = Watching(), net()
    config = replace(MODES[mode], algorithms=(watching,))
    converted = qompose.convert_pt2e(calibrated(model, config))
    assert list(watching.shown) == [
        "layers.0.up",
        "layers.0.down",
        "layers.1.up",
        "layers.1.down",
        "head",
    ]
    for number, batch in enumerate(batches()):
        values = Values(converted)
        values.run(batch)
        for products, _, _ in watching.shown.values():
            for name, inputs in products:
                assert torch.equal(inputs[number], values.read[name][0]), name
    assert notes(converted).count("watching") == 0
    assert len([line for line in qompose.report(converted).rewrites if "rounded down" in line]) == 5


def test_a_block_is_the_repeated_module_around_a_product_or_the_product_alone() -> None:
    watching, model = Watching("block"), net()
    calibrated(model, replace(MODES["weight-only"], algorithms=(watching,)))
    products, outputs, names = watching.shown["layers.1"]
    assert [list(map(len, products[at][1])) for at in (0, 1)] == [[16] * 4] * 2
    assert list(watching.shown) == ["layers.0", "layers.1", "head"] and len(names) == 1
    for batch, (exact, _) in zip(batches(), outputs, strict=True):
        assert torch.allclose(exact[0], model.get_submodule("layers")(batch), atol=1e-6)
    assert not torch.equal(*(side[0] for side in outputs[0]))


def test_sequential_gptq_is_truer_than_rounding_to_nearest_and_says_so() -> None:
    model, other = net(), data(9, 16, 24)
    plain, found = (
        qompose.convert_pt2e(calibrated(model, c))
        for c in (replace(SEQUENTIAL, algorithms=()), SEQUENTIAL)
    )
    with torch.no_grad():
        exact = model(other)
        lost = [float((exact - m(other)).square().sum()) for m in (plain, found)]
    assert lost[1] * 2 < lost[0]
    lines = [line for line in qompose.report(found).rewrites if "gptq_sequential on" in line]
    assert len(lines) == 5


@cache
def learned() -> tuple[GraphModule, Statistics]:
    """A model that GPTQ has learned of, and its statistics."""
    prepared = calibrated(net(1), SEQUENTIAL)
    return prepared, qompose.statistics(prepared)


class TestStatistics:
    """What was learned goes with the statistics, as long as they are whole."""

    @pytest.mark.parametrize("kind", ["safetensors", "json"])
    def test_they_give_the_same_bits(self, kind: str, tmp_path: Path) -> None:
        model, path = net(1), tmp_path / f"seen.{kind}"
        first, seen = learned()
        seen.save(path)
        second = Statistics.load(path).apply(observed(model, SEQUENTIAL))
        one, other = (qompose.convert_pt2e(m).state_dict() for m in (first, second))
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)

    def test_the_file_of_a_calibration_that_ended_has_it(self, tmp_path: Path) -> None:
        path = tmp_path / "seen.safetensors"
        first = calibrated(net(1), SEQUENTIAL, resume=path)
        second = Statistics.load(path).apply(observed(net(1), SEQUENTIAL))
        one, other = (qompose.convert_pt2e(m).state_dict() for m in (first, second))
        assert all(torch.equal(one[k], other[k]) for k in one)

    def test_more_batches_are_learned_of_with_those_before(self, tmp_path: Path) -> None:
        path = tmp_path / "seen.safetensors"
        calibrated(net(1), SEQUENTIAL, limit=2, resume=path)
        more = calibrated(net(1), SEQUENTIAL, resume=path)
        one, other = (qompose.convert_pt2e(m).state_dict() for m in (more, learned()[0]))
        assert all(torch.equal(one[k], other[k]) for k in one)
        with pytest.raises(CalibrationError, match="batches"):
            calibrated(net(1), SEQUENTIAL, limit=2, resume=path)

    def test_what_was_learned_for_other_inputs_is_not_taken(self, tmp_path: Path) -> None:
        """Its integers make up for the errors of those."""
        path = tmp_path / "seen.safetensors"
        other = replace(MODES["dynamic"], algorithms=SEQUENTIAL.algorithms)
        calibrated(net(1), SEQUENTIAL, resume=path)
        resumed = calibrated(net(1), other, resume=path)
        anew = calibrated(net(1), other)
        one, two = (qompose.convert_pt2e(m).state_dict() for m in (resumed, anew))
        assert all(torch.equal(one[k], two[k]) for k in two)
        with pytest.raises(StatisticsError, match="algorithm must learn"):
            learned()[1].apply(observed(net(1), other))

    def test_parts_that_were_merged_lack_it(self) -> None:
        _, seen = learned()
        with pytest.raises(StatisticsError, match="algorithm must learn"):
            seen.merged(seen).apply(observed(net(1), SEQUENTIAL))

    def test_what_another_algorithm_learned_does_not_stand_in(self) -> None:
        _, seen = learned()
        other = replace(SEQUENTIAL, algorithms=("sign_round",))
        with pytest.raises(StatisticsError, match=r"layers\.0\.down"):
            seen.apply(observed(net(1), other))
        found = seen.apply(observed(net(1), replace(SEQUENTIAL, algorithms=())))
        report = qompose.report(qompose.convert_pt2e(found))
        assert not report.rewrites and len(report.notes) == 1 and "of 3 weights" in report.notes[0]

    def test_weights_that_did_not_ask_then_are_lacking(self) -> None:
        _, seen = learned()
        one = toy(*PRODUCTS, config=replace(SEQUENTIAL, algorithms=()))
        one = one.set_module_name("head", SEQUENTIAL)
        prepared = prepare(export(net(1), batches(1)[0]), one)
        seen = qompose.statistics(seen.apply(prepared))
        assert [weight.path for weight in seen.learned.weights] == ["head.weight"]  # type: ignore[union-attr]
        with pytest.raises(StatisticsError, match=r"layers\.0\.up") as caught:
            seen.apply(observed(net(1), SEQUENTIAL))
        assert "in head" not in str(caught.value)

    def test_what_was_learned_with_other_options_is_not_used(self, tmp_path: Path) -> None:
        _, seen = learned()
        damped = replace(SEQUENTIAL, algorithms=(SequentialGPTQ(damping=0.5),))
        with pytest.raises(StatisticsError, match="up"):
            seen.apply(observed(net(1), damped))
        seen.apply(one := observed(net(1), damped), partial=True)
        assert learned_of(one).weights == ()  # type: ignore[union-attr]

    def test_other_scales_are_refused(self) -> None:
        _, seen = learned()
        three = replace(FOUR_BITS, quant_min=-4, quant_max=3)
        prepared = seen.apply(observed(net(1), replace(SEQUENTIAL, weight=three)))
        with pytest.raises(CalibrationError, match="learned for other scales"):
            qompose.convert_pt2e(prepared)

    def test_a_calibration_goes_on_with_what_was_not_learned(self, tmp_path: Path) -> None:
        def run(stop: str, **options: Any) -> tuple[Watching, GraphModule]:
            watching = Watching(stop=stop)
            config = replace(MODES["weight-only"], algorithms=(watching,))
            return watching, calibrated(net(), config, **options)

        path = tmp_path / "seen.safetensors"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemberError, match="stopped"):
            patch.setattr("qompose.calibration.calibrator.EVERY", 0.0)
            run("layers.1.up", resume=path)
        watching, resumed = run("", resume=path)
        assert list(watching.shown) == ["layers.1.up", "layers.1.down", "head"]
        _, whole = run("")
        one, other = (qompose.convert_pt2e(m).state_dict() for m in (resumed, whole))
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_without_a_turn_conversion_is_refused_unless_that_is_allowed() -> None:
    prepared = observed(net(1), SEQUENTIAL)
    prepared(batches(1)[0])
    with pytest.raises(UnlearnedError) as caught:
        qompose.convert_pt2e(prepared)
    assert caught.value.products == {"gptq_sequential": 3}
    assert "gptq_sequential was not applied to 3 layers" in notes(
        qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    )


def test_converted_models_do_not_share_what_was_learned() -> None:
    """Writing to one in place changed all others."""
    prepared = calibrated(net(1), SEQUENTIAL)
    one, other = qompose.convert_pt2e(prepared), qompose.convert_pt2e(prepared)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for value in one.buffers():
        value.fill_(3)
    changed = [n for n, v in other.named_buffers() if not torch.equal(v, before[n])]
    assert not changed and any(name.endswith("_q") for name, _ in one.named_buffers())


def test_a_failure_leaves_nothing_learned() -> None:
    config = replace(MODES["weight-only"], algorithms=(Watching(stop="head"),))
    prepared = observed(net(1), config)
    with pytest.raises(MemberError, match="head"):
        qompose.calibrate(prepared, batches())
    with pytest.raises(UnlearnedError):
        qompose.convert_pt2e(prepared)


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
def test_after_another_calibration_a_product_has_one_line() -> None:
    """Of the last one that learned of it: the first data was too little."""
    prepared = observed(net(1), SEQUENTIAL)
    qompose.calibrate(prepared, [batches(1, seed=9)[0][:1].repeat(16, 1)])
    qompose.calibrate(prepared, batches())
    found = qompose.report(qompose.convert_pt2e(prepared))
    lines = [line for line in (*found.rewrites, *found.notes) if "gptq_sequential on" in line]
    assert len(lines) == 3 and not notes(qompose.convert_pt2e(prepared)).count("too few")


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
def test_what_is_learned_does_not_leave_out_later_batches_in_silence() -> None:
    prepared = calibrated(net(1), SEQUENTIAL)
    before = qompose.statistics(prepared)
    with pytest.raises(CalibrationError, match=r"up\.weight"):
        qompose.calibrate(prepared, batches(seed=9))
    assert qompose.statistics(prepared) == before


def test_products_in_bodies_and_programs_that_write_are_named() -> None:
    def branch(m: Any, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: m.inner(y), lambda y: y * 2.0, (m.outer(x),))

    model = seeded(Model(branch, outer=nn.Linear(24, 24), inner=nn.Linear(24, 24)), 0, 0.2)
    assert "inner" in notes(qompose.convert_pt2e(calibrated(model, SEQUENTIAL)))

    def counting(m: Any, x: Tensor) -> Any:
        m.seen.add_(1.0)
        return m.layer(x) + m.seen

    counter = Model(counting, layer=nn.Linear(24, 8))
    counter.register_buffer("seen", torch.zeros(()))
    with pytest.raises(CalibrationError, match="seen"):
        calibrated(seeded(counter), SEQUENTIAL)


class Adding(nn.Module):
    """A product behind a sum that is written over what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.add_(1.0))


def test_values_that_are_written_in_place_are_run_again_as_they_were() -> None:
    """A block is run several times, each time on what came before it."""
    inner = nn.Sequential(Adding(), Adding())
    model = seeded(Model(lambda m, x: m.layers(torch.sigmoid(x)), layers=inner), 0, 0.2)
    watching = Watching("block")
    converted = qompose.convert_pt2e(
        calibrated(model, replace(MODES["weight-only"], algorithms=(watching,)))
    )
    values = Values(converted)
    values.run(batches(1)[0])
    ((_, inputs),), outputs, _ = watching.shown["layers.1"]
    assert torch.equal(inputs[0], values.read["linear_1"][0])
    with torch.no_grad():
        assert torch.allclose(outputs[0][0][0], model(batches(1)[0]), atol=1e-6)


def test_inputs_that_are_written_are_read_by_both_programs_as_they_were_given() -> None:
    """The quantized program does not add to what the float one has added, and data stays as it is."""

    def integers(function: Any) -> dict[str, Tensor]:
        layers = {"up": nn.Linear(24, 24), "down": nn.Linear(24, 8)}
        model = seeded(Model(function, **layers), 0, 0.2)
        given = [(x, torch.ones(16, 24)) for x in batches()]
        with torch.no_grad():
            program = export(model, *given[0])
        prepared = prepare(program, toy(*PRODUCTS, config=SEQUENTIAL))
        found = qompose.convert_pt2e(qompose.calibrate(prepared, given, progress=False))
        assert all(torch.equal(state, torch.ones(16, 24)) for _, state in given)
        return {n: b for n, b in found.state_dict().items() if b.dtype == torch.int8}

    def added(m: Any, x: Tensor, state: Tensor) -> Tensor:
        found: Tensor = m.down(state + m.up(x))
        return found

    def written(m: Any, x: Tensor, state: Tensor) -> Tensor:
        state.add_(m.up(x))
        found: Tensor = m.down(state * 1.0)
        return found

    expected, found = integers(added), integers(written)
    assert len(expected) == 2
    assert all(map(torch.equal, found.values(), expected.values()))


def test_a_cache_is_read_as_calibration_has_seen_it() -> None:
    """Each batch began with the first contents, as if it were the first one."""

    def fill(m: Any, x: Tensor, state: Tensor) -> Tensor:
        found: Tensor = m.down(state.mul_(0.5).add_(m.up(x)) * 1.0)
        return found

    layers = {"up": nn.Linear(24, 24), "down": nn.Linear(24, 8)}
    with torch.no_grad():
        program = export(seeded(Model(fill, **layers)), batches(1)[0], torch.ones(16, 24))
    run, state, seen = program.module(), torch.ones(16, 24), list[Tensor]()
    for x in batches():
        seen.append(state.clone())
        run(x, state)

    def integers(caches: Iterable[Tensor]) -> list[Tensor]:
        prepared = prepare(program, toy(*PRODUCTS, config=SEQUENTIAL))
        learned = learned_of(qompose.calibrate(prepared, zip(batches(), caches, strict=False)))
        assert learned is not None and len(learned.weights) == 2
        return [weight.integers for weight in learned.weights]

    found = integers(repeat(torch.ones(16, 24)))
    assert all(map(torch.equal, found, integers(seen)))
    assert not all(map(torch.equal, found, integers(torch.ones(16, 24) for _ in seen)))


def test_memory_of_a_batch_may_be_filled_with_the_next() -> None:
    """As loaders do that pin memory once, and transforms that write into a buffer."""
    expected, refilled = (observed(net(1), SEQUENTIAL) for _ in range(2))
    loaded, transformed = torch.empty(2, 16, 24)
    qompose.calibrate(expected, batches())
    qompose.calibrate(refilled, map(loaded.copy_, batches()), transform=transformed.copy_)
    wanted, found = (learned_of(prepared) for prepared in (expected, refilled))
    assert wanted is not None and found is not None and len(wanted.weights) == 3
    for one, other in zip(wanted.weights, found.weights, strict=True):
        assert torch.equal(one.integers, other.integers)


def test_the_bar_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    qompose.calibrate(observed(net(1), SEQUENTIAL), batches(), progress=True)
    printed = capsys.readouterr()
    assert printed.out == "" and "learning head" in printed.err and "3/3" in printed.err


WIDTH, LAYERS = 128, 6


def memory(word: str, together: int) -> list[int]:
    """The most bytes that calibration takes, and conversion then, of layers large beside what is rounded."""
    stack = seeded(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    seen = [data(number, 20, WIDTH) for number in range(2)]
    config = replace(MODES["weight-only"], algorithms=(word,))
    prepared = prepare(export(stack, seen[0]), toy(*PRODUCTS, config=config))
    few = mock.patch.multiple(gptq, MOST_TOGETHER=together, _JUDGED=8, _AT_A_TIME=8 * WIDTH)
    with few, mock.patch.object(disk, "_SMALL", WIDTH**2):
        with LiveBytes() as calibrating:
            qompose.calibrate(prepared, seen)
        with LiveBytes() as converting:
            converted = qompose.convert_pt2e(prepared)
    assert len(lines(converted, word)[0]) >= LAYERS - 1
    return [calibrating.peak, converting.peak]


@pytest.mark.parametrize("together", at_once([48, 2048], 48))
def test_memory_stays_below_three_layers_beside_the_float_model(together: int) -> None:
    """However many layers there are, and whether few columns are rounded together or all."""
    assert max(memory("gptq_sequential", together)) < 3 * 4 * WIDTH**2


def test_second_moments_of_all_layers_are_held_once() -> None:
    """Calibration adds them up in place, and conversion takes under two float matrices, and integers."""
    calibrating, converting = memory("gptq", 2048)
    assert calibrating < 4 * WIDTH**2
    assert converting < (2 * 4 + LAYERS) * WIDTH**2


def wide(word: str) -> GraphModule:
    """Two products of 24,576 weights together, prepared for an algorithm."""
    model = seeded(nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 96))).eval()
    config = replace(MODES["weight-only"], algorithms=(word,))
    return prepare(export(model, wide_batches()[0]), toy(*PRODUCTS, config=config))


def wide_batches() -> list[Tensor]:
    """Seven, which three processes cannot share evenly."""
    return [data(number, 48, 96) for number in range(7)]


def rounded(model: GraphModule) -> dict[str, Tensor]:
    """The integers that conversion gives."""
    buffers = qompose.convert_pt2e(model).named_buffers()
    return {name: value.clone() for name, value in buffers if value.dtype is torch.int8}


WORDS = "gptq", "gptq_sequential"
TOGETHER = """
import torch
from tests.core.calibration.test_sequential import WORDS, rounded, wide, wide_batches
for word in WORDS:
    model = qompose.calibrate(wide(word), wide_batches()[rank::count], sharded=True)
    moments = [seen.total for _, seen in qompose.statistics(model).moments]
    torch.save((moments, rounded(model)), f"{out}/{word}.{rank}.pt")
from qompose.errors import CalibrationError
data = wide_batches()[:2] if rank else [wide_batches()[0] / 0]
try:
    qompose.calibrate(wide(word), data, sharded=True)
except CalibrationError as error:
    print(error)
"""


def test_three_processes_round_as_one_does(tmp_path: Path) -> None:
    """Moments are added in one order: all have the same, and of 10,000 integers one may differ."""
    done = together(tmp_path, TOGETHER, count=3)
    assert [process.returncode for process in done] == [0, 0, 0], done[0].stderr
    for word in WORDS:
        ranks = [torch.load(tmp_path / f"{word}.{rank}.pt") for rank in range(3)]
        model = qompose.calibrate(wide(word), wide_batches())
        alone = [seen.total for _, seen in qompose.statistics(model).moments], rounded(model)
        assert len(alone[0]) == (2 if word == "gptq" else 0) and len(alone[1]) == 2
        for moments, integers in ranks:
            for own, other in zip(alone[0], moments, strict=True):
                assert float((own - other).abs().max()) <= 1e-10 * float(own.abs().max())
            assert all(torch.equal(integers[name], value) for name, value in ranks[0][1].items())
            differ = sum(int((integers[n] != value).sum()) for n, value in alone[1].items())
            assert differ <= 1e-4 * sum(value.numel() for value in alone[1].values())


def test_a_reason_not_to_change_is_a_line() -> None:
    class Refusing(Watching):
        word: ClassVar[str] = "refusing"

        def learn(self, found: Calibrated, block: Block) -> None:
            for product in block.products:
                with noted(found, self, product):
                    raise NotChanged("it is Tuesday")

    converted = qompose.convert_pt2e(
        calibrated(net(1), replace(MODES["weight-only"], algorithms=(Refusing(),)))
    )
    assert notes(converted).count("it is Tuesday") == 3


def tied() -> nn.Module:
    """Two layers with one weight, and one of its own between them."""

    def through(m: Any, x: Tensor) -> Any:
        return m.second(torch.relu(m.between(torch.relu(m.first(x)))))

    layers = {name: nn.Linear(24, 24) for name in ("first", "between", "second")}
    model = seeded(Model(through, **layers), 0, 0.2)
    model.second.weight = model.first.weight  # type: ignore[union-attr, assignment]
    return model


def test_a_weight_of_several_layers_is_rounded_once_by_what_all_read() -> None:
    shown = list[tuple[int, int]]()
    gptq_of = gptq.SequentialGPTQ._round

    def watched(self: Any, found: Any, product: Any, inputs: Any) -> str:
        shown.append((len(inputs.products), inputs.number))
        return gptq_of(self, found, product, inputs)

    model, other = tied(), data(9, 16, 24)
    with mock.patch.object(gptq.SequentialGPTQ, "_round", watched):
        found = qompose.convert_pt2e(calibrated(model, SEQUENTIAL))
    plain = qompose.convert_pt2e(calibrated(model, replace(SEQUENTIAL, algorithms=())))
    assert shown == [(2, 128), (1, 64)]
    report = qompose.report(found)
    (line,) = [line for line in report.rewrites if "in first" in line]
    assert "in second" in line and not any("gptq_sequential" in note for note in report.notes)
    with torch.no_grad():
        exact = model(other)
        lost = [float((exact - m(other)).square().sum()) for m in (plain, found)]
    assert lost[1] * 1.3 < lost[0]


def test_a_weight_of_several_layers_that_stays_as_it_is_has_a_line_for_each() -> None:
    config = replace(MODES["weight-only"], algorithms=("sign_round",))
    found = notes(qompose.convert_pt2e(calibrated(tied(), config)))
    assert found.count("sign_round was not applied") == 2 and found.count("gptq_sequential") == 1


@dataclass(frozen=True)
class Earlier(Watching):
    """Rounds all weights down, when it is asked to correct; what learns comes too late."""

    word: ClassVar[str] = "earlier"

    def learns(self, claim: Claim) -> Part | None:
        return None

    def correct(self, found: Calibrated) -> None:
        def change(product: Operands, claim: Claim) -> str:
            _, q = weight_group(found, product)
            weight = found.factors.constant(product.weight.name)
            set_integers(found, product, integers_of(weight - q.scale[:, None] / 2, q))
            return "rounded down"

        change_products(found, self, change)


def test_integers_of_another_algorithm_are_not_what_was_learned() -> None:
    config = replace(MODES["weight-only"], algorithms=(Earlier(), "gptq_sequential"))
    prepared = calibrated(net(1), config)
    assert not qompose.statistics(prepared).learned.weights  # type: ignore[union-attr]
    report = qompose.report(qompose.convert_pt2e(prepared))
    assert len([line for line in report.rewrites if "earlier on" in line]) == 3
    assert not any("gptq_sequential" in line for line in report.rewrites)
    assert len([line for line in report.notes if "gptq_sequential was not applied" in line]) == 3


@dataclass(frozen=True)
class Shrinking(Algorithm):
    """Makes scales smaller, of all products but the head, of which it says nothing."""

    word: ClassVar[str] = "shrinking"

    def learns(self, claim: Claim) -> Part | None:
        return "product"

    def learn(self, found: Calibrated, block: Block) -> None:
        for product in block.products:
            _, q = weight_group(found, product)
            if block.name != "head":
                with noted(found, self, product) as effects:
                    set_scales(found, product, q.scale * 0.75, q.zero_point)
                    effects.append("made smaller")


def test_scales_alone_can_be_learned_and_silence_is_a_line() -> None:
    plain, found = (
        qompose.convert_pt2e(calibrated(net(1), replace(MODES["weight-only"], algorithms=each)))
        for each in ((), (Shrinking(),))
    )
    name = "layers.0.up.weight_scale"
    assert torch.equal(found.get_buffer(name), plain.get_buffer(name) * 0.75)
    report = qompose.report(found)
    assert len([line for line in report.rewrites if "made smaller" in line]) == 2
    (line,) = [line for line in report.notes if "shrinking" in line]
    assert "in head" in line


def test_what_was_learned_of_a_weight_names_all_that_share_it() -> None:
    made, refused = reported(tied(), Shrinking())
    (line,) = [line for line in made if "in first" in line]
    assert line.startswith("shrinking on linear (") and "in second" in line
    assert len(made) == 2 and "in second" not in "".join(refused)
    assert not any("shares" in line for line in reported(net(1), Shrinking())[0])


def reported(model: nn.Module, *algorithms: Any) -> tuple[list[str], list[str]]:
    """What algorithms say they did to the weights of a model, and what they did not."""
    config = replace(MODES["weight-only"], algorithms=algorithms)
    report = qompose.report(qompose.convert_pt2e(calibrated(model, config)))
    return list(report.rewrites), [line for line in report.notes if " not applied to " in line]


@pytest.mark.parametrize("first", [SequentialGPTQ(), SignRound(iterations=10)], ids=str)
def test_two_algorithms_that_learn_have_their_turn_and_a_line_each(first: Algorithm) -> None:
    """The second was never called, and nothing said so."""
    second = Watching()
    made, refused = reported(net(1), first, second)
    assert list(second.shown) and len(made) == 3
    assert all(line.startswith(f"{first} on ") for line in made)
    assert len(refused) == 3 and all(line.startswith("watching was not") for line in refused)


@dataclass(frozen=True)
class Nearest(Algorithm):
    """Learns the integers next to the weights, for all that read them."""

    word: ClassVar[str] = "nearest"

    def learns(self, claim: Claim) -> Part | None:
        return "block"

    def learn(self, found: Calibrated, block: Block) -> None:
        for product in block.products:
            with noted(found, self, product) as effects:
                _, q = weight_group(found, product)
                weight = found.factors.constant(product.weight.name)
                set_integers(found, product, integers_of(weight, q), shared=True)
                effects.append("rounded to nearest")


@pytest.mark.parametrize("order", [(Shrinking(), Nearest()), (Nearest(), Shrinking())], ids=str)
@pytest.mark.parametrize("of", [tied, lambda: net(1)], ids=["tied", "apart"])
def test_two_strangers_that_learn_have_their_turn_and_a_line_each(of: Any, order: Any) -> None:
    made, refused = reported(of(), *order)
    for product in ("linear (", "linear_1 (", "linear_2 ("):
        first, second = (
            [line.partition(" ")[0] for line in lines if product in line]
            for lines in (made, refused)
        )
        assert len(first) == 1 and {*first, *second} == {one.word for one in order}


def test_what_the_first_leaves_the_second_decides_on_of_tied_weights_too() -> None:
    """The second was not called, as if its own weight were that of another product."""
    made, refused = reported(tied(), SignRound(iterations=10), Shrinking())
    assert [line.partition(" on ")[0] for line in made if "in first" in line] == ["shrinking"]
    assert sum(line.startswith("sign_round with") for line in refused) == 2
    made, refused = reported(tied(), "gptq_sequential", Shrinking())
    assert len(made) == 2 and sum(line.startswith("shrinking was not") for line in refused) == 3


def test_statistics_have_what_one_of_two_has_learned_and_why_not_the_other() -> None:
    config = replace(MODES["weight-only"], algorithms=("gptq_sequential", Shrinking()))
    seen = qompose.statistics(calibrated(net(1), config))
    report = qompose.report(qompose.convert_pt2e(seen.apply(observed(net(1), config))))
    assert len(report.rewrites) == 3
    assert sum("shrinking was not applied" in line for line in report.notes) == 3


def test_a_word_does_not_ask_for_the_same_with_options_of_another_layer() -> None:
    quantizer = toy(*PRODUCTS, config=SEQUENTIAL).set_module_name(
        "head", replace(SEQUENTIAL, algorithms=(SequentialGPTQ(damping=0.5),))
    )
    prepared = prepare(export(net(1), batches(1)[0]), quantizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)
        report = qompose.report(qompose.convert_pt2e(qompose.calibrate(prepared, batches())))
    assert len(report.rewrites) == 3
    assert not any("gptq_sequential" in line for line in report.notes)


@dataclass(frozen=True)
class Both(Shrinking):
    """Learns scales, and rounds down at conversion whatever it has not learned of."""

    word: ClassVar[str] = "both"

    def correct(self, found: Calibrated) -> None:
        def change(product: Operands, claim: Claim) -> str:
            number, q = weight_group(found, product)
            if number in found.integers:
                raise NotChanged("they are there")
            weight = found.factors.constant(product.weight.name)
            set_integers(found, product, integers_of(weight - q.scale[:, None] / 2, q))
            return "rounded down"

        change_products(found, self, change)


def test_what_corrects_later_does_not_keep_itself_or_others_from_learning() -> None:
    """Drafts had its integers, which were taken for the decision of another."""
    made, refused = reported(net(1), Both())
    assert sum("made smaller" in line for line in made) == 2
    assert [line for line in made if "rounded down" in line and "head" in line]
    assert len(made) == 3 and sum("they are there" in line for line in refused) == 2
    made, refused = reported(net(1), "gptq_sequential", Both())
    assert len(made) == 3 and all(line.startswith("gptq_sequential on ") for line in made)
    assert {line.partition(" was ")[0] for line in refused} == {"both"}
