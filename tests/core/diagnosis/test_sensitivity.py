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
from qompose.errors import BatchError, MemberError, StageError
from qompose.program.stepping import run_call
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.fx import GraphModule, Node

from tests.core.diagnosis.brute import cost, expected_costs, observed_costs
from tests.core.observers.test_delegation import Compressing, member as compressing
from tests.core.toy import (
    DYNAMIC,
    PER_TENSOR,
    STATIC,
    STATIC_UINT8,
    WEIGHT_ONLY,
    Annotator,
    Model,
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


def skips(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Linears with a residual, a concatenation, a view, and two outputs."""
    y = m.first(x).relu()
    z = m.second(y) + y
    return m.last(torch.cat([z, y], 1).view(-1, 12)), z.sigmoid()


def images(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x).relu()
    return m.head((m.body(x) + x).relu().mean((2, 3)))


def writes(m: Any, x: Tensor) -> Tensor:
    """Counts its calls, in a buffer that its output depends on, and has a relu in place."""
    m.calls += 1
    return m.two(m.one(x).relu_() * m.calls)


def adds(m: Any, x: Tensor) -> Tensor:
    """Adds in place: what the first linear gave is gone when the second one is run again."""
    y = m.one(x)
    y += m.two(x)
    return m.end(y.relu_())


def branches(m: Any, x: Tensor) -> Tensor:
    return m.end(torch.cond(x.sum() > 0, lambda x: m.one(x), lambda x: m.two(x).relu(), (x,)))


FLAT, PIXELS = randn(5, 6), randn(2, 2, 6, 6)
LAYERS: dict[str, tuple[Any, dict[str, tuple[Any, ...]]]] = {
    "skips": (skips, {"first": (6, 6), "second": (6, 6), "last": (12, 3)}),
    "images": (images, {"stem": (2, 4, 3, 1, 1), "body": (4, 4, 1), "head": (4, 3)}),
    "adds": (adds, {"one": (4, 4), "two": (4, 4), "end": (4, 2)}),
    "branches": (branches, {"one": (4, 4), "two": (4, 4), "end": (4, 2)}),
}
"""A function, and the sizes of a linear or a convolution."""
BATCHES = {
    "skips": [(FLAT,), (randn(5, 6, seed=1) * 2,)],
    "images": [(PIXELS,), (randn(2, 2, 6, 6, seed=1),)],
    "adds": [(randn(3, 4),), (randn(3, 4, seed=1),)],
    "branches": [(randn(3, 4).abs(),), (-randn(3, 4, seed=1).abs(),)],
}


def exported(name: str) -> torch.export.ExportedProgram:
    function, sizes = LAYERS[name]
    layers = {n: (nn.Linear if len(s) == 2 else nn.Conv2d)(*s) for n, s in sizes.items()}
    return export(seeded(Model(function, **layers)), *BATCHES[name][0])


def calibrated(name: str, **options: Any) -> tuple[GraphModule, list[tuple[Tensor]]]:
    batches = BATCHES[name]
    return qompose.calibrate(prepare(exported(name), toy(**options)), batches), batches


def observed(model: nn.Module, batches: Any, quantizer: Any = None) -> GraphModule:
    prepared = prepare(export(seeded(model), *batches[0]), quantizer or toy())
    return qompose.calibrate(prepared, batches)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(
            name, config, id=f"{name}-{config.name}",
            marks=[] if config is STATIC or (name, config) in COVERING else pytest.mark.full,
        )
        for name in LAYERS
        for config in CONFIGS
    ],
)  # fmt: skip
def test_costs_are_those_of_conversions_of_one_operator(name: str, config: Any) -> None:
    prepared, batches = calibrated(name, config=config)
    ranking = qompose.sensitivity(prepared, batches)
    assert observed_costs(ranking) == pytest.approx(expected_costs(prepared, batches), rel=1e-6)
    assert [row.cost for row in ranking] == sorted((row.cost for row in ranking), reverse=True)
    whole = qompose.convert_pt2e(prepared)
    assert ranking.together == pytest.approx(cost(whole, prepared, batches), rel=1e-6)
    assert ranking.batches == 2


def test_the_prepared_model_is_left_as_it_is() -> None:
    prepared, batches = calibrated("skips")
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
    prepared, batches = calibrated("skips")
    ran = runs(prepared, batches[0], products)
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


def test_what_stands_behind_a_loop_does_not_run_it_again(products: list[str]) -> None:
    def looped(m: Any, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.int64)
        return m.end(while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, m.one(y)), (start, x))[1])

    batches = BATCHES["adds"]
    prepared = observed(Model(looped, one=nn.Linear(4, 4), end=nn.Linear(4, 2)), batches)
    assert runs(prepared, batches[0], products)["linear"] == ["linear"]


def test_tensors_of_a_site() -> None:
    prepared, batches = calibrated("images")
    ranking = qompose.sensitivity(prepared, batches, tensors=True)
    tensors = dict(ranking["conv2d"].tensors)
    assert [*tensors] == ["stem_weight", "x", "relu"]
    assert 0 < tensors["stem_weight"] < ranking["conv2d"].cost
    assert all(row.tensors == () for row in qompose.sensitivity(prepared, batches))


def test_programs_that_write_run_as_a_whole_and_start_anew() -> None:
    batches = BATCHES["adds"]
    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4), "calls": nn.Buffer(torch.ones(1))}
    prepared = observed(Model(writes, **layers), batches)
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
    prepared, batches = calibrated("skips")
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
    with pytest.raises(error, match="metric="):
        qompose.sensitivity(*calibrated("images"), metric=metric)


def test_errors() -> None:
    prepared, batches = calibrated("images")
    for none in ([], 5):
        with pytest.raises(UserError, match="sensitivity"):
            qompose.sensitivity(prepared, none)
    with pytest.raises(UserError):
        qompose.sensitivity(prepared, batches, limit=-1)
    for number, wrong in enumerate((tuple(part[:, :-1] for part in batches[0]), (PIXELS, PIXELS))):
        with pytest.raises(BatchError) as caught:
            qompose.sensitivity(prepared, [*batches[:number], wrong])
        assert caught.value.number == number + 1
    with pytest.raises(StageError, match="sensitivity"):
        qompose.sensitivity(qompose.convert_pt2e(prepared), batches)
    with pytest.raises(qompose.errors.UncalibratedError):
        qompose.sensitivity(prepare(exported("images"), toy()), batches)
    ranking = qompose.sensitivity(*calibrated("skips"))
    for name, named in {"linea": "'linear'", "": "sigmoid"}.items():  # several have no module
        with pytest.raises(UserError, match=named):
            ranking[name]


def test_outputs_without_floats_need_a_metric() -> None:
    batches = [(randn(3, 4),)]
    picks = Model(lambda m, x: m.linear(x).argmax(-1), linear=nn.Linear(4, 3))
    prepared = observed(picks, batches)
    with pytest.raises(UserError, match="metric="):
        qompose.sensitivity(prepared, batches)
    apart = qompose.sensitivity(
        prepared, batches, metric=lambda one, other: (one != other).float().mean()
    )
    assert 0 <= apart.rows[0].cost <= 1


def test_what_stays_in_float_is_named() -> None:
    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
    masked = Model(lambda m, x, mask: m.two(m.one(x) + mask), **layers)
    mask = torch.zeros(3, 4)
    mask[0, 0] = -torch.inf
    batches = [(randn(3, 4), mask)]
    prepared = prepare(export(seeded(masked), *batches[0]), toy())
    prepared(*batches[0])
    ranking = qompose.sensitivity(prepared, batches, metric=lambda one, other: 0.0)
    (_,) = (note for note in ranking.notes if note.startswith("add"))
    assert "add" not in {row.name for row in ranking}


class Halving(Compressing):
    """An observer that converts itself: to float16 and back, in operators of its own."""

    def convert(self, model: GraphModule, node: Node) -> None:
        (value,) = node.all_input_nodes
        with model.graph.inserting_before(node):
            half = model.graph.call_function(aten.to.dtype, (value, torch.float16))
            whole = model.graph.call_function(aten.to.dtype, (half, torch.float32))
        node.replace_all_uses_with(whole)
        model.graph.erase_node(node)


HALVES = qompose.QuantizationSpec(torch.int8, Halving, -128, 127, torch.per_tensor_affine)


def test_observers_that_convert_themselves() -> None:
    def linears(node: Node) -> None:
        if node.target is aten.linear.default:
            annotate(node, {node.args[0]: HALVES, node.args[1]: HALVES})

    batches = BATCHES["skips"]
    prepared = prepare(exported("skips"), Annotator(linears))
    ranking = qompose.sensitivity(prepared, batches, tensors=True)
    assert observed_costs(ranking) == pytest.approx(expected_costs(prepared, batches), rel=1e-6)
    assert all(row.cost > 0 for row in ranking)
    assert [name for name, _ in ranking["linear"].tensors] == ["first_weight", "x"]


def test_what_cannot_be_switched_apart_is_named() -> None:
    """Two linears read one node of their observer's: they are quantized together, and measured together."""
    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4), "end": nn.Linear(4, 2)}
    twins = Model(lambda m, x: m.end(m.one(x) * m.two(x)), **layers)

    def linears(node: Node) -> None:
        if node.target is aten.linear.default:
            first = next(user for user in node.args[0].users if user.target is node.target)
            shared = qompose.spec.SharedQuantizationSpec((node.args[0], first))
            annotate(node, {node.args[0]: HALVES if node is first else shared})

    batches = [(randn(3, 4),)]
    prepared = prepare(export(seeded(twins), *batches[0]), Annotator(linears))
    ranking = qompose.sensitivity(prepared, batches)
    assert [row.name for row in ranking] == ["linear_2"]
    assert [note.partition(" ")[0] for note in ranking.notes] == ["linear", "linear_1"]
    whole = qompose.convert_pt2e(prepared)
    assert ranking.together == pytest.approx(cost(whole, prepared, batches), rel=1e-6)


def test_observers_that_remove_what_they_convert() -> None:
    """The parameter's node is gone, and the parameter still there."""
    batches = BATCHES["skips"]
    prepared = prepare(exported("skips"), compressing())
    ranking = qompose.sensitivity(prepared, batches)
    assert observed_costs(ranking) == pytest.approx(expected_costs(prepared, batches), rel=1e-6)
    assert ranking.notes == ()
    assert all(row.cost > 0 for row in ranking)


@pytest.mark.full
def test_memory_is_bound_by_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a batch is run, nothing is left of the one before."""
    prepared, _ = calibrated("images")
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
    ranking = qompose.sensitivity(*calibrated("images"), tensors=True)
    data = json.loads(json.dumps(ranking.to_dict()))
    assert [row["name"] for row in data["rows"]] == [row.name for row in ranking]
    text, table = ranking.to_text(), ranking.to_markdown()
    for row in ranking:
        assert row.rule in text
        assert f"| {', '.join(row.operators)} |" in table
    assert len(ranking) == len(ranking.rows)
    assert ranking["stem"] is ranking["conv2d"]


def test_a_branch_that_no_input_reaches_is_named() -> None:
    x = randn(3, 4).abs()
    prepared, _ = calibrated("branches")
    (told,) = qompose.sensitivity(prepared, [x]).notes
    assert "false_graph_0" in told
    assert not qompose.sensitivity(prepared, [x, -x]).notes
