# SPDX-License-Identifier: Apache-2.0
"""Control flow through all stages: what is inside a body is treated as what is outside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import qompose
import torch
from qompose.program.control_flow import graphs_in, nodes_in
from qompose.program.graph import module_path
from qompose.spec import qdq
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from tests.core.toy import (
    CONV,
    LINEAR,
    STATIC,
    Model,
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
from tests.zoo import ZooModel, by_name, tagged

MODELS = tagged("control_flow")
PRODUCTS = {torch.ops.aten.linear.default, torch.ops.aten.conv2d.default}
NEVER_CALLED = ("cond_weight_outside", "mixed_regions")
"""No batch here takes one of their branches; export with `strict=True` of autocast fails in torch."""
BOUNDS = {"map_rows": 18, "branches": 28}
"""For others 30 dB. What these two add up nearly cancels."""
KERNEL_BOUNDS = {"autocast": 35, "autocast_off": 35}
"""For others 100 dB. The kernel is exact where what it replaces computes in bfloat16."""


FULL = pytest.mark.full
COVERING = ("cond_nested", "cond_conv", "cond_shared_weight", "loop", "scan_cell", "map_rows")
REGIONS = ("no_grad_region", "autocast", "cond_weight_outside")


def of(*names: str) -> list[Any]:
    """All models, those of other names for the full run."""
    return [pytest.param(m, marks=() if m.name in names else FULL, id=m.name) for m in MODELS]


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


def calibrated(program: Any, model: ZooModel, *rules: Any) -> GraphModule:
    prepared = prepare(program, toy(*(rules or (CONV, LINEAR))))
    for batch in batches(model):
        prepared(*batch)
    return prepared


@cache
def exported(name: str, strict: bool = False, grad: bool = False) -> torch.export.ExportedProgram:
    model = by_name(name)
    with torch.set_grad_enabled(grad):
        if strict:
            return torch.export.export(model.build(), model.inputs(), strict=True)
        return model.export()


MODES = [
    pytest.param(model, strict, grad, marks=() if quick else FULL)
    for model in MODELS
    for strict, grad in product((False, True), repeat=2)
    if not (strict and model.name.startswith("autocast"))
    for quick in [
        model.name == "loop"
        if strict and grad
        else model.name in ("cond_nested", "scan_cell", *REGIONS) and not (strict or grad)
    ]
]


@pytest.mark.parametrize(("model", "strict", "grad"), MODES, ids=str)
def test_all_products_inside_become_integers(model: ZooModel, strict: bool, grad: bool) -> None:
    program = exported(model.name, strict, grad)
    with torch.set_grad_enabled(grad):
        prepared = calibrated(program, model)
    inside = [node for node in nodes_in(prepared) if node.target in PRODUCTS]
    assert {name for nodes in claimed(prepared).values() for name in nodes} >= {
        node.name for node in inside
    }
    modules = dict(model.build().named_modules())
    kinds = {type(modules[module_path(node)]) for node in inside if module_path(node)}
    assert kinds <= {nn.Linear, nn.Conv2d, nn.Embedding}, "each has the path of its own module"
    inputs = model.inputs()
    expected, observed = run(program.module(), inputs), run(prepared, inputs, grad=grad)
    if plan_of(prepared).rewrites:  # a batch norm was folded
        assert all(sqnr(one, other) > 100 for one, other in zip(expected, observed, strict=True))
    else:
        assert same(expected, observed)
    quantized = qompose.convert_pt2e(prepared, allow_uncalibrated=model.name in NEVER_CALLED)
    for one, other in zip(expected, run(quantized, inputs, grad=grad), strict=True):
        assert one.dtype is other.dtype
        assert sqnr(one, other) > BOUNDS.get(model.name, 30)
    assert same(run(quantized, inputs), run(quantized, inputs, grad=True))


@pytest.mark.parametrize("model", of(*COVERING))
def test_integers_are_stored_once_and_under_the_module_path(model: ZooModel) -> None:
    if model.name in NEVER_CALLED:
        pytest.skip("a part of it stays in float")
    quantized = qompose.convert_pt2e(calibrated(exported(model.name), model))
    paths = {module_path(node) for node in nodes_in(quantized) if node.target in PRODUCTS}
    state = quantized.state_dict()
    assert {name for name in state if "weight" in name and not name.endswith("_scale")} == {
        f"{path}.weight_q" for path in paths
    }
    assert all(state[f"{path}.weight_q"].dtype is torch.int8 for path in paths)
    for body in list(graphs_in(quantized))[1:]:
        assert not body.state_dict(), "bodies get all tensors as operands, as torch exports them"


@pytest.mark.parametrize("model", of(*COVERING, *REGIONS))
def test_kernels_stand_in_bodies_and_compute_the_same(model: ZooModel) -> None:
    # With gradients on: torch dissolves regions that change nothing. Loops cannot be exported so.
    grad = model.name not in ("loop", "scan_cell", "map_rows")
    prepared = calibrated(exported(model.name, grad=grad), model, LINEAR)
    idle = model.name in NEVER_CALLED
    quantized = qompose.convert_pt2e(prepared, allow_uncalibrated=idle)
    with warnings.catch_warnings():
        if idle:  # branches that never ran stay in float, which lower says
            warnings.simplefilter("ignore", qompose.QomposeWarning)
        lowered = qompose.lower(quantized, strict=not idle)
    rows = [r for r in qompose.report(lowered).rows if r.operator == "aten.linear"]
    assert all(r.state == "int8 kernel" for r in rows) or idle
    assert len(list(graphs_in(lowered))) > 1, "there are bodies"
    kernels = [n for n in nodes_in(lowered) if n.target is torch.ops.qompose_toy.linear.default]
    assert len(kernels) == sum(r.state == "int8 kernel" for r in rows) > 0
    for batch in batches(model):
        for one, other in zip(run(quantized, batch), run(lowered, batch), strict=True):
            assert sqnr(one, other) > KERNEL_BOUNDS.get(model.name, 100)
    assert same(run(lowered, model.inputs()), run(lowered, model.inputs(), grad=True))


@pytest.mark.parametrize("model", of("cond_shared_weight", "no_grad_region"))
def test_dynamic_dimensions_stay_dynamic(model: ZooModel) -> None:
    if not model.dynamic_shapes:
        pytest.skip("all its sizes are fixed")
    prepared = calibrated(model.export(dynamic=True), model)
    quantized = qompose.convert_pt2e(prepared, allow_uncalibrated=model.name in NEVER_CALLED)
    shapes = model.dynamic_shapes
    again = torch.export.export(quantized, model.inputs(), dynamic_shapes=shapes).module()
    larger = pytree.tree_map(lambda t: torch.cat([t] * 3) if t.dim() else t, model.inputs())
    expected = run(model.build(), larger)
    for one, other in zip(expected, run(quantized, larger), strict=True):
        assert sqnr(one, other) > BOUNDS.get(model.name, 30)
    assert same(run(quantized, larger), run(again, larger))


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


def carried(loop: Callable[..., Any]) -> nn.Module:
    """The carried value comes from a layer, goes through one in the body, and into one behind."""
    layers = {name: nn.Linear(4, 4) for name in ("before", "inside", "behind")}
    return seeded(Model(lambda m, x: m.behind(loop(m.before(x), m.inside)), **layers))


@pytest.mark.parametrize("loop", [a_while_loop, a_scan, a_branch, no_gradients])
def test_values_that_go_in_and_out_of_bodies_are_quantized_alike(loop: Any) -> None:
    x = randn(6, 4)
    with torch.set_grad_enabled(loop is no_gradients):
        program = export(carried(loop), x)
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
    "module type": (lambda q: q.set_object_type(nn.Linear, None), set()),
    "only one module": (lambda q: q.set_global(None).set_module_name("low", STATIC), {"low"}),
    "only one module type": (
        lambda q: q.set_global(None).set_object_type(nn.Linear, STATIC),
        {"first", "low", "no", "high"},
    ),
}


@pytest.mark.parametrize("name", SELECTORS)
def test_selectors_reach_operators_in_bodies(name: str) -> None:
    select, taken = SELECTORS[name]
    strict = name == "module type"
    program = exported("cond_nested", strict, strict)
    report = qompose.report(prepare(program, select(toy(LINEAR))))
    rows = {row.module: row for row in report.rows if row.operator == "aten.linear"}
    assert set(rows) == {"first", "low", "no", "high"}
    assert {path for path, row in rows.items() if row.state == "observed"} == taken
    assert {row.macs for row in rows.values()} == {4 * 6 * 6}
    assert not report.notes
    if taken:
        prepare(program, select(toy(LINEAR)), strict=True)
