# SPDX-License-Identifier: Apache-2.0
"""What each operator costs alone is what a conversion of it alone costs, from one conversion and few runs."""

from __future__ import annotations

import gc
import json
import math
from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
from qompose.diagnosis import operator_sensitivity
from qompose.diagnosis.operator_sensitivity import SwitchedProgram
from qompose.diagnosis.replay import run_call
from qompose.errors import BatchError, MemberError, StageError
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.diagnosis.brute import cost, expected_costs, observed_costs
from tests.core.observers.test_delegation import member as compressing
from tests.core.toy import (
    DYNAMIC,
    PER_TENSOR,
    STATIC,
    STATIC_UINT8,
    WEIGHT_ONLY,
    Annotator,
    annotate,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

aten = torch.ops.aten
CONFIGS = (STATIC, STATIC_UINT8, PER_TENSOR, DYNAMIC, WEIGHT_ONLY)
COVERING = [
    ("skips", STATIC_UINT8), ("images", PER_TENSOR), ("branches", DYNAMIC), ("adds", WEIGHT_ONLY),
]  # fmt: skip
"""Each configuration on one of the nets; all nets have the first."""


class Skips(nn.Module):
    """Linears with a residual, a concatenation, a view, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x).relu()
        z = self.second(y) + y
        return self.last(torch.cat([z, y], 1).view(-1, 12)), z.sigmoid()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.body = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head((self.body(x) + x).relu().mean((2, 3)))


class Writes(nn.Module):
    """Counts its calls, in a buffer that its output depends on, and has a relu in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.two(self.relu(self.one(x)) * self.calls)


class Adds(nn.Module):
    """Adds in place: what the first linear gave is gone when the second one is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y += self.two(x)
        return self.end(y.relu_())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.two(x).relu(), (x,))
        return self.end(y)


FLAT, PIXELS = randn(5, 6), randn(2, 2, 6, 6)
NETS = {
    "skips": (Skips, [(FLAT,), (randn(5, 6, seed=1) * 2,)]),
    "images": (Images, [(PIXELS,), (randn(2, 2, 6, 6, seed=1),)]),
    "adds": (Adds, [(randn(3, 4),), (randn(3, 4, seed=1),)]),
    "branches": (Branches, [(randn(3, 4).abs(),), (-randn(3, 4, seed=1).abs(),)]),
}


def calibrated(module: nn.Module, batches: Any, *rules: Any, **options: Any) -> Any:
    prepared = prepare(export(seeded(module), *batches[0]), toy(*rules, **options))
    return qompose.calibrate(prepared, batches)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(
            name, config, id=f"{name}-{config.name}",
            marks=[] if config is STATIC or (name, config) in COVERING else pytest.mark.full,
        )
        for name in NETS
        for config in CONFIGS
    ],
)  # fmt: skip
def test_costs_are_those_of_conversions_of_one_operator(name: str, config: Any) -> None:
    make, batches = NETS[name]
    prepared = calibrated(make(), batches, config=config)
    ranking = qompose.sensitivity(prepared, batches)
    assert observed_costs(ranking) == pytest.approx(expected_costs(prepared, batches), rel=1e-6)
    assert [row.cost for row in ranking] == sorted((row.cost for row in ranking), reverse=True)
    whole = qompose.convert_pt2e(prepared)
    assert ranking.together == pytest.approx(cost(whole, prepared, batches), rel=1e-6)
    assert ranking.batches == 2


def test_the_prepared_model_is_left_as_it_is() -> None:
    make, batches = NETS["skips"]
    prepared = calibrated(make(), batches)
    before, graph = prepared(*batches[0]), str(prepared.graph)
    state = {name: value.clone() for name, value in prepared.state_dict().items()}
    qompose.sensitivity(prepared, batches)
    assert str(prepared.graph) == graph
    assert state.keys() == prepared.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in prepared.state_dict().items())
    assert all(map(torch.equal, prepared(*batches[0]), before))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The linears that are run, by their names."""
    ran: list[str] = []

    def counted(node: Any, *args: Any) -> Any:
        ran.extend([node.name] if "linear" in str(node.target) else [])
        return run_call(node, *args)

    monkeypatch.setattr(operator_sensitivity, "run_call", counted)
    return ran


def runs(prepared: Any, batch: tuple[Tensor, ...], products: list[str]) -> dict[str, list[str]]:
    """By site, the linears that are run for it."""
    program = SwitchedProgram(prepared, prepared.meta["qompose"])
    run, found = program.in_float(list(batch)), {}
    for number, claim in enumerate(plan_of(prepared).claims):
        products.clear()
        program.quantized(run, [(number, name) for name in program.parts[number]])
        found[claim.anchor] = list(products)
    return found


def test_what_a_site_does_not_change_is_not_run_again(products: list[str]) -> None:
    """Behind the first linear stand all three, behind the last one stands itself, behind the sigmoid none."""
    make, batches = NETS["skips"]
    ran = runs(calibrated(make(), batches), batches[0], products)
    assert ran["linear"] == ["linear", "linear_1", "linear_2"]
    assert ran["linear_2"] == ["linear_2"]
    assert ran["sigmoid"] == []


def test_equal_values_end_a_site(products: list[str]) -> None:
    """A relu of negative numbers: whatever the linear before is quantized to, nothing behind it changes."""
    module = seeded(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    with torch.no_grad():
        module[0].bias.fill_(-100.0)
    prepared = prepare(export(module, randn(3, 4)), toy(config=WEIGHT_ONLY))
    assert qompose.sensitivity(prepared, [randn(3, 4)])["linear"].cost == 0.0
    assert runs(prepared, (randn(3, 4),), products)["linear"] == ["linear"]


def test_tensors_of_a_site() -> None:
    make, batches = NETS["images"]
    prepared = calibrated(make(), batches)
    ranking = qompose.sensitivity(prepared, batches, tensors=True)
    tensors = dict(ranking["conv2d"].tensors)
    assert [*tensors] == ["stem_weight", "x", "relu"]
    assert 0 < tensors["stem_weight"] < ranking["conv2d"].cost
    assert all(row.tensors == () for row in qompose.sensitivity(prepared, batches))


def test_programs_that_write_run_as_a_whole_and_start_anew() -> None:
    batches = [(randn(3, 4),), (randn(3, 4, seed=1),)]
    prepared = calibrated(Writes(), batches)
    ranking = qompose.sensitivity(prepared, batches)
    assert len(ranking.notes) == 1
    assert len(ranking) == 2
    single = [qompose.sensitivity(prepared, [batch]) for batch in batches]
    again = qompose.sensitivity(prepared, batches[::-1])
    assert observed_costs(again) == pytest.approx(observed_costs(ranking))
    for row in ranking:
        costs = [one[row.name].cost for one in single]
        assert min(costs) <= row.cost <= max(costs)
        assert row.cost > 0


def test_metric_of_ones_own() -> None:
    make, batches = NETS["skips"]
    prepared = calibrated(make(), batches)
    asked = []

    def furthest(outputs: Any, floats: Any) -> Tensor:
        asked.append(outputs)
        return (outputs[0] - floats[0]).abs().max()

    ranking = qompose.sensitivity(prepared, batches, metric=furthest)
    assert all(isinstance(outputs, tuple) and len(outputs) == 2 for outputs in asked)
    assert ranking["sigmoid"].cost == 0.0  # it is the other output's
    assert ranking.rows[0].cost > 0.0
    assert "dB" not in ranking.to_text()


@pytest.mark.parametrize(
    ("metric", "error"),
    [
        (lambda *_: math.nan, UserError),
        (lambda *_: "far", UserError),
        (lambda *_: torch.ones(2), UserError),
        (lambda *_: 1 / 0, MemberError),
    ],
)
def test_metrics_that_say_nothing(metric: Any, error: type[Exception]) -> None:
    make, batches = NETS["images"]
    with pytest.raises(error, match="metric="):
        qompose.sensitivity(calibrated(make(), batches), batches, metric=metric)


def test_errors() -> None:
    make, batches = NETS["images"]
    prepared = calibrated(make(), batches)
    for none in ([], 5):
        with pytest.raises(UserError, match="sensitivity"):
            qompose.sensitivity(prepared, none)
    for number, wrong in enumerate((tuple(part[:, :-1] for part in batches[0]), (PIXELS, PIXELS))):
        with pytest.raises(BatchError) as caught:
            qompose.sensitivity(prepared, [*batches[:number], wrong])
        assert caught.value.number == number + 1
    with pytest.raises(StageError, match="sensitivity"):
        qompose.sensitivity(qompose.convert_pt2e(prepared), batches)
    with pytest.raises(qompose.errors.UncalibratedError):
        qompose.sensitivity(prepare(export(seeded(make()), PIXELS), toy()), batches)
    with pytest.raises(UserError, match="'conv2d'"):
        qompose.sensitivity(prepared, batches)["conv"]


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(-1)


def test_outputs_without_floats_need_a_metric() -> None:
    batches = [(randn(3, 4),)]
    prepared = calibrated(Picks(), batches)
    with pytest.raises(UserError, match="metric="):
        qompose.sensitivity(prepared, batches)
    apart = qompose.sensitivity(
        prepared, batches, metric=lambda one, other: (one != other).float().mean()
    )
    assert 0 <= apart.rows[0].cost <= 1


def test_what_stays_in_float_is_named() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.two(self.one(x) + mask)

    mask = torch.zeros(3, 4)
    mask[0, 0] = -torch.inf
    batches = [(randn(3, 4), mask)]
    prepared = prepare(export(seeded(Masked()), *batches[0]), toy())
    prepared(*batches[0])
    ranking = qompose.sensitivity(prepared, batches, metric=lambda one, other: 0.0)
    (_,) = (note for note in ranking.notes if note.startswith("add"))
    assert "add" not in {row.name for row in ranking}


class Halving(nn.Module):
    """An observer that converts itself: to float16 and back, in operators of its own."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.dtype = arguments["dtype"]

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return torch.ones(()), torch.zeros(())

    def convert(self, model: GraphModule, node: Node) -> None:
        (value,) = node.all_input_nodes
        with model.graph.inserting_before(node):
            half = model.graph.call_function(aten.to.dtype, (value, torch.float16))
            whole = model.graph.call_function(aten.to.dtype, (half, torch.float32))
        node.replace_all_uses_with(whole)
        model.graph.erase_node(node)


def test_observers_that_convert_themselves() -> None:
    halves = qompose.QuantizationSpec(torch.int8, Halving, -128, 127, torch.per_tensor_affine)

    def linears(node: Node) -> None:
        if node.target is aten.linear.default:
            annotate(node, {node.args[0]: halves, node.args[1]: halves})

    make, batches = NETS["skips"]
    prepared = prepare(export(seeded(make()), *batches[0]), Annotator(linears))
    ranking = qompose.sensitivity(prepared, batches, tensors=True)
    assert observed_costs(ranking) == pytest.approx(expected_costs(prepared, batches), rel=1e-6)
    assert all(row.cost > 0 for row in ranking)
    assert [name for name, _ in ranking["linear"].tensors] == ["first_weight", "x"]


def test_what_cannot_be_switched_apart_is_named() -> None:
    """Two linears read one node of their observer's: they are quantized together, and measured together."""
    halves = qompose.QuantizationSpec(torch.int8, Halving, -128, 127, torch.per_tensor_affine)

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.one(x) * self.two(x))

    def linears(node: Node) -> None:
        if node.target is aten.linear.default:
            first = next(user for user in node.args[0].users if user.target is node.target)
            shared = qompose.spec.SharedQuantizationSpec((node.args[0], first))
            annotate(node, {node.args[0]: halves if node is first else shared})

    batches = [(randn(3, 4),)]
    prepared = prepare(export(seeded(Twins()), *batches[0]), Annotator(linears))
    ranking = qompose.sensitivity(prepared, batches)
    assert [row.name for row in ranking] == ["linear_2"]
    assert [note.partition(" ")[0] for note in ranking.notes] == ["linear", "linear_1"]
    whole = qompose.convert_pt2e(prepared)
    assert ranking.together == pytest.approx(cost(whole, prepared, batches), rel=1e-6)


def test_observers_that_remove_what_they_convert() -> None:
    """The parameter's node is gone, and the parameter still there."""
    make, batches = NETS["skips"]
    prepared = prepare(export(seeded(make()), *batches[0]), compressing())
    ranking = qompose.sensitivity(prepared, batches)
    assert observed_costs(ranking) == pytest.approx(expected_costs(prepared, batches), rel=1e-6)
    assert ranking.notes == ()
    assert all(row.cost > 0 for row in ranking)


@pytest.mark.full
def test_memory_is_bound_by_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a batch is run, nothing is left of the one before."""
    make, _ = NETS["images"]
    prepared = calibrated(make(), [(PIXELS,)])
    alive: list[int] = []
    original = SwitchedProgram.in_float

    def watched(self: SwitchedProgram, inputs: Any) -> Any:
        gc.collect()
        shape = (2, 4, 6, 6)  # of what the convolutions compute
        alive.append(sum(type(o) is Tensor and o.shape == shape for o in gc.get_objects()))
        return original(self, inputs)

    monkeypatch.setattr(SwitchedProgram, "in_float", watched)
    qompose.sensitivity(prepared, (randn(2, 2, 6, 6, seed=seed) for seed in range(4)), limit=3)
    assert len(alive) == 3
    assert alive[1] <= alive[0]
    assert alive[2] <= alive[0]


def test_told() -> None:
    make, batches = NETS["images"]
    ranking = qompose.sensitivity(calibrated(make(), batches), batches, tensors=True)
    data = json.loads(json.dumps(ranking.to_dict()))
    assert [row["name"] for row in data["rows"]] == [row.name for row in ranking]
    text, table = ranking.to_text(), ranking.to_markdown()
    for row in ranking:
        assert row.rule in text
        assert f"| {', '.join(row.operators)} |" in table
    assert len(ranking) == len(ranking.rows)
    assert ranking["stem"] is ranking["conv2d"]


def test_a_branch_that_no_input_reaches_is_named() -> None:
    branches, x = Branches(), randn(3, 4).abs()
    prepared = prepare(export(seeded(branches), x), toy())
    for batch in (x, -x):
        prepared(batch)
    found = qompose.sensitivity(prepared, [x])
    (told,) = found.notes
    assert "false_graph_0" in told
    assert not qompose.sensitivity(prepared, [x, -x]).notes
