# SPDX-License-Identifier: Apache-2.0
"""Control flow through all stages: what is inside a body is treated as what is outside."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import qompose
import torch
from qompose.program.control_flow import graphs_in, nodes_in
from qompose.program.graph import module_path
from qompose.spec import SharedQuantizationSpec, qdq
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from tests.core.preparation.test_zoo import fingerprint
from tests.core.toy import (
    CONV,
    INT8,
    LINEAR,
    STATIC,
    WEIGHT,
    Annotator,
    annotate,
    claimed,
    export,
    groups_of,
    plan_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)
from tests.sampling import one_of
from tests.zoo import ZooModel, by_name, tagged

MODELS = tagged("control_flow")
DYNAMIC = tuple(model for model in MODELS if model.dynamic_shapes)
PRODUCTS = {torch.ops.aten.linear.default, torch.ops.aten.conv2d.default}
NEVER_CALLED = ("cond_weight_outside", "mixed_regions")
"""No batch here takes one of their branches; export with `strict=True` of autocast fails in torch."""
BOUNDS = {"map_rows": 18, "branches": 28}
"""For others 30 dB. What these two add up nearly cancels."""
KERNEL_BOUNDS = {"autocast": 35, "autocast_off": 35}
"""For others 100 dB. The kernel is exact where what it replaces computes in bfloat16."""


@pytest.fixture(autouse=True)
def torchs_own_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a")
        warnings.filterwarnings("ignore", message="torch.compile is ignored when called inside")
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")
        yield


def batches(model: ZooModel) -> list[tuple[Any, ...]]:
    """The model's inputs, and others that take other branches and run loops more often."""

    def changed(factor: float) -> Any:
        return lambda t: t * factor if t.is_floating_point() else t.amax() - t

    inputs = model.inputs()
    others = [pytree.tree_map(changed(f), inputs) for f in (-1.0, 3.0, -3.0, 0.5)]
    turned = pytree.tree_map(lambda t: t.flip(-1) if t.dim() else t, inputs)
    crossed = [(inputs[0], *others[0][1:]), (others[0][0], *inputs[1:])]
    return [inputs, *others, *crossed, turned]


def floats(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if t.dtype.is_floating_point]


def run(module: Any, inputs: Any, *, grad: bool = False) -> list[Tensor]:
    with torch.set_grad_enabled(grad):
        return [tensor.detach() for tensor in floats(module(*inputs))]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def calibrated(program: Any, model: ZooModel) -> GraphModule:
    prepared = prepare(program, toy(CONV, LINEAR))
    for batch in batches(model):
        prepared(*batch)
    return prepared


def converted(model: ZooModel, **options: Any) -> GraphModule:
    prepared = calibrated(model.export(**options), model)
    return qompose.convert_pt2e(prepared, allow_uncalibrated=model.name in NEVER_CALLED)


MODES = [
    (model, strict, grad)
    for model in MODELS
    for strict in (False, True)
    for grad in (False, True)
    if not (strict and model.name.startswith("autocast"))
]


@pytest.mark.parametrize(("model", "strict", "grad"), one_of(3, MODES), ids=str)
def test_all_products_inside_become_integers(model: ZooModel, strict: bool, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model.build(), model.inputs(), strict=strict)
    prepared = calibrated(program, model)
    inside = [node for node in nodes_in(prepared) if node.target in PRODUCTS]
    assert {name for nodes in claimed(prepared).values() for name in nodes} >= {
        node.name for node in inside
    }
    modules = dict(model.build().named_modules())
    kinds = {type(modules[module_path(node)]) for node in inside if module_path(node)}
    assert kinds <= {nn.Linear, nn.Conv2d, nn.Embedding}, "each has the path of its own module"
    exported, inputs = program.module(), model.inputs()
    expected, observed = run(exported, inputs), run(prepared, inputs, grad=grad)
    if plan_of(prepared).rewrites:  # a batch norm was folded
        assert all(sqnr(one, other) > 100 for one, other in zip(expected, observed, strict=True))
    else:
        assert same(expected, observed)
    quantized = qompose.convert_pt2e(prepared, allow_uncalibrated=model.name in NEVER_CALLED)
    for one, other in zip(expected, run(quantized, inputs, grad=grad), strict=True):
        assert one.dtype is other.dtype
        assert sqnr(one, other) > BOUNDS.get(model.name, 30)
    assert same(run(quantized, inputs), run(quantized, inputs, grad=True))


@pytest.mark.parametrize("model", [m for m in MODELS if m.name not in NEVER_CALLED], ids=str)
def test_integers_are_stored_once_and_under_the_module_path(model: ZooModel) -> None:
    quantized = converted(model)
    paths = {module_path(node) for node in nodes_in(quantized) if node.target in PRODUCTS}
    state = quantized.state_dict()
    assert {name for name in state if "weight" in name and not name.endswith("_scale")} == {
        f"{path}.weight_q" for path in paths
    }
    assert all(state[f"{path}.weight_q"].dtype is torch.int8 for path in paths)
    for body in list(graphs_in(quantized))[1:]:
        assert not body.state_dict(), "bodies get all tensors as operands, as torch exports them"


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_kernels_stand_in_bodies_and_compute_the_same(model: ZooModel) -> None:
    prepared = prepare(model.export(), toy(LINEAR))
    for batch in batches(model):
        prepared(*batch)
    idle = model.name in NEVER_CALLED
    quantized = qompose.convert_pt2e(prepared, allow_uncalibrated=idle)
    with warnings.catch_warnings():
        if idle:  # branches that never ran stay in float, which lower says
            warnings.simplefilter("ignore", qompose.QomposeWarning)
        lowered = qompose.lower(quantized, strict=not idle)
    rows = [r for r in qompose.report(lowered).rows if r.operator == "aten.linear"]
    assert all(r.state == "int8 kernel" for r in rows) or idle
    kernels = [n for n in nodes_in(lowered) if n.target is torch.ops.qompose_toy.linear.default]
    assert len(kernels) == sum(r.state == "int8 kernel" for r in rows) > 0
    for batch in batches(model):
        for one, other in zip(run(quantized, batch), run(lowered, batch), strict=True):
            assert sqnr(one, other) > KERNEL_BOUNDS.get(model.name, 100)
    assert same(run(lowered, model.inputs()), run(lowered, model.inputs(), grad=True))


@pytest.mark.parametrize(
    ("model", "stage"), one_of(3, [*product(MODELS, ("converted", "lowered"))]), ids=str
)
def test_the_result_is_exported_and_saved_again(model: ZooModel, stage: str) -> None:
    result: Any = converted(model)
    if stage == "lowered":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", qompose.QomposeWarning)  # no kernel for convolutions
            result = qompose.lower(result)
    file = io.BytesIO()
    torch.export.save(torch.export.export(result, model.inputs()), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert same(run(result, model.inputs()), run(loaded, model.inputs()))


@pytest.mark.parametrize("model", DYNAMIC, ids=str)
def test_dynamic_dimensions_stay_dynamic(model: ZooModel) -> None:
    quantized = converted(model, dynamic=True)
    shapes = model.dynamic_shapes
    again = torch.export.export(quantized, model.inputs(), dynamic_shapes=shapes).module()
    larger = pytree.tree_map(lambda t: torch.cat([t] * 3) if t.dim() else t, model.inputs())
    expected = run(model.build(), larger)
    for one, other in zip(expected, run(quantized, larger), strict=True):
        assert sqnr(one, other) > BOUNDS.get(model.name, 30)
    assert same(run(quantized, larger), run(again, larger))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_program_is_left_alone_and_can_be_prepared_again(model: ZooModel) -> None:
    program = model.export()
    before, code = fingerprint(program), [g.code for g in graphs_in(program.graph_module)]
    results = []
    for _ in range(2):
        prepared = calibrated(program, model)
        results.append(run(qompose.convert_pt2e(prepared, allow_uncalibrated=True), model.inputs()))
    assert fingerprint(program) == before
    assert [body.code for body in graphs_in(program.graph_module)] == code
    assert same(*results)
    assert len(plan_of(prepared).claims) > 0


class Branches(nn.Module):
    """In `yes` the input and output of the layer are its own: no other branch can calibrate them."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.ModuleDict({"deep": nn.Linear(4, 4)}), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.yes["deep"](x.sin()).cos(), self.no, (x,))


POSITIVE = randn(6, 4).abs()


def test_a_branch_that_never_ran_is_named() -> None:
    prepared = prepare(export(seeded(Branches()), POSITIVE), toy(LINEAR))
    with pytest.warns(qompose.QomposeWarning, match="never saw data: no batch came there"):
        qompose.calibrate(prepared, [-POSITIVE])
    with pytest.raises(qompose.errors.UncalibratedError) as caught:
        qompose.convert_pt2e(prepared)
    assert len(caught.value.tensors) == 2
    for tensor in caught.value.tensors:
        assert "in yes.deep in true_graph_0 of cond (toy, rule linear)" in tensor


def test_a_branch_that_never_ran_may_stay_in_float() -> None:
    model = seeded(Branches())
    prepared = prepare(export(model, POSITIVE), toy(LINEAR))
    with pytest.warns(qompose.QomposeWarning, match="never saw data"):
        qompose.calibrate(prepared, [-POSITIVE])
    result = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    rows = {r.module: r for r in qompose.report(result).rows if r.operator == "aten.linear"}
    assert (rows["yes.deep"].state, rows["no"].state) == ("float", "simulated (Q/DQ)")
    assert "never saw calibration data" in rows["yes.deep"].reason
    assert torch.equal(result(POSITIVE), model(POSITIVE))
    assert not torch.equal(result(-POSITIVE), model(-POSITIVE))
    assert sqnr(model(-POSITIVE), result(-POSITIVE)) > 35
    assert {"yes.deep.weight", "no.weight_q"} <= set(result.state_dict())


STEP = "while_loop_body_graph_0"
CELL = "scan_combine_graph_0"
SHARED: dict[str, list[set[str]]] = {
    # The value before the loop, and the one each iteration hands on, are read by the body's layer.
    "loop_of_branches": [
        {"getitem_1 -> linear",
         f"{STEP}_true_graph_0_arg0_1 -> {STEP}_true_graph_0_linear",
         f"output of {STEP}_true_graph_0_linear",
         f"{STEP}_false_graph_0_arg0_1 -> {STEP}_false_graph_0_linear",
         f"output of {STEP}_false_graph_0_linear"},
        {"shared_weight -> linear", f"{STEP}_true_graph_0_shared_weight -> {STEP}_true_graph_0_linear"},
    ],
    # `before` makes the value that is carried, whose next value is a hyperbolic tangent: not claimed.
    "loop": [{"output of linear", f"{STEP}_arg1_1 -> {STEP}_linear"}],
    "cond_nested": [
        {"true_graph_0_x -> true_graph_0_linear", "false_graph_0_x -> false_graph_0_linear"},
        {"output of false_graph_0_linear", "output of true_graph_0_true_graph_0_linear_1",
         "output of true_graph_0_false_graph_0_linear_1"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), SHARED.items(), ids=SHARED)
def test_one_tensor_under_names_in_and_out_of_bodies_has_one_scale(
    name: str, expected: list[set[str]]
) -> None:
    groups = groups_of(prepare(by_name(name).export(), toy(LINEAR)))
    for group in expected:
        assert frozenset(group) in groups


class Carried(nn.Module):
    """The carried value comes from a layer, goes through one in the body, and into one behind."""

    def __init__(self, loop: Callable[..., Any]) -> None:
        super().__init__()
        self.before, self.inside, self.behind = (nn.Linear(4, 4) for _ in range(3))
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.loop(self.before(x), self.inside))


def a_while_loop(y: Tensor, inside: nn.Module) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    def step(count: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, inside(y)

    return while_loop(lambda count, y: count < 3, step, (torch.zeros((), dtype=torch.int64), y))[1]


def a_scan(y: Tensor, inside: nn.Module) -> Tensor:
    from torch._higher_order_ops.scan import scan

    def step(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return inside(y), x + 1

    return scan(step, y, torch.zeros(3, 2))[0]


def a_branch(y: Tensor, inside: nn.Module) -> Tensor:
    return torch.cond(y.sum() > 0, inside, lambda y: inside(inside(y)), (y,))


def no_gradients(y: Tensor, inside: nn.Module) -> Tensor:
    with torch.no_grad():
        return inside(y)


@pytest.mark.parametrize("loop", [a_while_loop, a_scan, a_branch, no_gradients])
def test_values_that_go_in_and_out_of_bodies_are_quantized_alike(loop: Any) -> None:
    x = randn(6, 4)
    program = export(seeded(Carried(loop)), x)
    prepared = prepare(program, toy(LINEAR))
    activations = [g for g in groups_of(prepared) if not any("weight" in p for p in g)]
    inside_alike = [g for g in activations if "output of linear" in g]
    assert len(inside_alike) == 1
    if loop in (a_while_loop, a_scan):
        assert len(activations) == 3, "the input, the carried value, the last output"
        assert len(inside_alike[0]) == 4
    for batch in (x, -x):
        prepared(batch)
    result = qompose.convert_pt2e(prepared)
    steps = {n.args[1:5] for n in nodes_in(result) if qdq.is_quantize(n)}
    assert len(steps) == len(activations)
    assert sqnr(program.module()(x), result(x)) > 22


SELECTORS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "one module": (lambda q: q.set_module_name("high", None), {"first", "low", "no"}),
    "regex": (lambda q: q.set_module_name_regex("high|low", None), {"first", "no"}),
    "module type": (lambda q: q.set_object_type(nn.Linear, None), set()),
    "operator": (lambda q: q.set_object_type(torch.ops.aten.linear.default, None), set()),
    "only one module type": (
        lambda q: q.set_global(None).set_object_type(nn.Linear, STATIC),
        {"first", "low", "no", "high"},
    ),
    "only one module": (lambda q: q.set_global(None).set_module_name("low", STATIC), {"low"}),
}


@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
@pytest.mark.parametrize(("select", "taken"), SELECTORS.values(), ids=SELECTORS)
def test_selectors_reach_operators_in_bodies(select: Any, taken: set[str], strict: bool) -> None:
    model = by_name("cond_nested")
    program = torch.export.export(model.build(), model.inputs(), strict=strict)
    report = qompose.report(prepare(program, select(toy(LINEAR))))
    rows = {row.module: row for row in report.rows if row.operator == "aten.linear"}
    assert set(rows) == {"first", "low", "no", "high"}
    assert {path for path, row in rows.items() if row.state == "observed"} == taken
    assert {row.macs for row in rows.values()} == {4 * 6 * 6}
    assert not any("matches no" in note or "occurs nowhere" in note for note in report.notes)
    if taken:
        prepare(program, select(toy(LINEAR)), strict=True)


def test_convolutions_in_bodies_have_their_type_and_path() -> None:
    quantizer = toy(CONV).set_object_type(nn.Conv2d, None)
    rows = qompose.report(prepare(by_name("cond_conv").export(), quantizer)).rows
    found = {row.module: (row.state, row.macs) for row in rows if row.operator == "aten.conv2d"}
    assert found == {"wide.0": ("float", 2 * 4 * 36 * 27), "narrow": ("float", 2 * 4 * 36 * 3)}


def wants_linear(node: Node) -> None:
    """Every layer shares its output's parameters with its input."""
    if node.target is torch.ops.aten.linear.default:
        x, weight = node.args[:2]
        edge = SharedQuantizationSpec((x, node))
        annotate(node, {x: INT8, weight: WEIGHT}, edge)  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["cond_nested", "scan_cell", "map_rows", "no_grad_method", "loop"])
def test_quantizers_that_annotate_see_bodies(name: str) -> None:
    model = by_name(name)
    prepared = prepare(model.export(), Annotator(wants_linear, "foreign"))
    linears = [n.name for n in nodes_in(prepared) if n.target is torch.ops.aten.linear.default]
    assert sorted(c.anchor for c in plan_of(prepared).claims) == sorted(linears)
    for group in groups_of(prepared):
        outputs = {p.removeprefix("output of ") for p in group if p.startswith("output of ")}
        assert outputs <= {p.partition(" -> ")[2] for p in group}, "shared with the input"
    assert same(run(model.export().module(), model.inputs()), run(prepared, model.inputs()))
    for batch in batches(model):
        prepared(*batch)
    result = qompose.convert_pt2e(prepared)
    for one, other in zip(
        run(model.build(), model.inputs()), run(result, model.inputs()), strict=True
    ):
        assert sqnr(one, other) > BOUNDS.get(name, 25)
