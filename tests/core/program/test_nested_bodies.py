# SPDX-License-Identifier: Apache-2.0
"""Bodies as graphs: their parameters move in and out, names differ, what is not visited is said."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.program.control_flow import (
    RUNNERS,
    bodies_of,
    count_readers,
    graphs_in,
    hoist_constants,
    is_nested_call,
    name_apart,
    nodes_in,
    same_tensors,
    sink_constants,
)
from qompose.program.graph import copy_graph_module, get_attribute, refresh
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.preparation.test_zoo import assert_same_outputs
from tests.core.toy import (
    LINEAR,
    STATIC,
    Model,
    NullQuantizer,
    convert,
    export,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)
from tests.zoo import ZooModel, by_name, tagged

CHOSEN = ("cond_nested", "cond_weight_outside", "loop_of_branches", "scan_cell", "map_rows")
MODELS = [
    pytest.param(model, marks=() if model.name in CHOSEN else pytest.mark.full, id=model.name)
    for model in tagged("control_flow")
]
X = randn(6, 4)


def module_of(model: ZooModel) -> GraphModule:
    return copy_graph_module(model.export().module(check_guards=False))


def constants_read(module: GraphModule) -> list[tuple[str, int]]:
    """Path and address of every parameter that a graph reads itself."""
    return sorted(
        (str(node.target), value.data_ptr())
        for node in module.graph.nodes
        if node.op == "get_attr" and node.users
        if isinstance(value := get_attribute(module, str(node.target)), Tensor)
    )


@pytest.mark.parametrize("model", MODELS)
def test_parameters_sink_into_bodies_and_come_back(model: ZooModel) -> None:
    module, inputs = module_of(model), model.inputs()
    before, lengths = constants_read(module), [len(body.graph.nodes) for body in graphs_in(module)]
    with torch.no_grad():
        expected = module(*inputs)
    sink_constants(module)
    read = {address for body in graphs_in(module) for _, address in constants_read(body)}
    assert read == {address for _, address in before}
    for call in filter(is_nested_call, nodes_in(module)):
        operands = {a for a in call.all_input_nodes if a.op == "get_attr"}
        assert {get_attribute(a.graph.owning_module, a.target) for a in operands} == set(
            bodies_of(call)
        )
    hoist_constants(module)
    module = refresh(module)
    assert set(constants_read(module)) == set(before)
    assert [len(body.graph.nodes) for body in graphs_in(module)][1:] == lengths[1:]
    with torch.no_grad():
        assert_same_outputs(expected, module(*inputs))


@pytest.mark.parametrize("model", MODELS)
def test_no_two_nodes_have_one_name(model: ZooModel) -> None:
    module = module_of(model)
    outer = [node.name for node in module.graph.nodes]
    name_apart(module)
    names = [node.name for node in nodes_in(module)]
    assert len(names) == len(set(names))
    assert [node.name for node in module.graph.nodes] == outer, "outside of bodies they stay"
    name_apart(module)
    assert [node.name for node in nodes_in(module)] == names, "once is enough"


def test_readers_of_a_parameter_are_counted_everywhere_and_under_every_name() -> None:
    module = module_of(by_name("cond_weight_outside"))
    sink_constants(module)
    model = {name: p.data_ptr() for name, p in module.named_parameters()}
    counted = count_readers(module)
    weight, table = (
        next(a for n, a in model.items() if n.endswith(f"{m}.weight"))
        for m in ("linear", "embedding")
    )
    assert counted[weight] == 2, "before the branch and in it"
    assert counted[table] == 2, "the embedding, and the product in the branch"


@pytest.mark.full
def test_only_calls_with_observers_inside_run_in_python() -> None:
    program = by_name("cond_two_outputs").export()
    prepared = prepare(program, toy(LINEAR).set_global(None).set_module_name("last", STATIC))
    targets = [node.target for node in prepared.graph.nodes if is_nested_call(node)]
    assert targets == [torch.ops.higher_order.cond, RUNNERS[torch.ops.higher_order.cond]]
    untouched = next(node for node in prepared.graph.nodes if is_nested_call(node))
    assert any(a.op == "get_attr" and "weight" in str(a.target) for a in untouched.all_input_nodes)
    for batch in (randn(4, 6), randn(4, 6, seed=1)):
        for sign in (1, -1):
            prepared(sign * batch, batch * 0.5)
    converted = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    assert not {node.target for node in nodes_in(converted)} & set(RUNNERS.values())


C, B = "while_loop_cond_graph_0", "while_loop_body_graph_0"
T, F, S = "true_graph_0", "false_graph_0", "scan_combine_graph_0"
BORDERS: dict[str, list[set[str]]] = {
    "cond_nested": [
        {"x", f"{T}_x", f"{F}_x"},
        {f"{T}_linear", f"{T}_{T}_linear", f"{T}_{F}_linear"},
        {"getitem", f"{F}_linear", f"{T}_getitem", f"{T}_{T}_linear_1", f"{T}_{F}_linear_1"},
    ],
    "loop": [
        {"times", f"{C}_arg2_1", f"{B}_arg2_1"},
        {"linear", f"{C}_arg1_1", f"{B}_arg1_1", f"{B}_tanh", "getitem_1"},
        {"zeros_like", f"{C}_arg0_1", f"{B}_arg0_1", f"{B}_add", "getitem"},
    ],
    # What is sliced or stacked is another tensor than its slices.
    "scan_cell": [{"zeros_like", f"{S}_arg0_1", f"{S}_tanh", "getitem"}],
    "map_rows": [{"scale", "body_graph_0_scale"}],
}


@pytest.mark.parametrize(("name", "expected"), BORDERS.items(), ids=BORDERS)
def test_values_have_one_name_across_borders(name: str, expected: list[set[str]]) -> None:
    module = module_of(by_name(name))
    sink_constants(module)
    name_apart(module)
    found: dict[str, set[str]] = defaultdict(set)
    for one, common in same_tensors(module).items():
        found[common] |= {one, common}
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, expected))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_body_that_is_called_twice_is_treated_as_two() -> None:
    """Export makes none, passes that look for equal graphs do."""
    model = Model(
        lambda self, x: torch.cond(x.sum() > 0, self.yes, self.no, (x,)),
        yes=nn.Linear(4, 4), no=nn.Linear(4, 4),
    )  # fmt: skip
    module = export(seeded(model), X).module(check_guards=False)
    (call,) = (node for node in module.graph.nodes if is_nested_call(node))
    call.update_arg(2, call.args[1])
    module.recompile()
    assert sqnr(module(X), convert(module, toy(LINEAR), X, allow_uncalibrated=True)(X)) > 30
    assert sqnr(module(-X), prepare(module, NullQuantizer())(-X)) == float("inf")


def counting(m: Any, x: Tensor) -> Tensor:
    """A branch reads a buffer that is written to behind it."""
    y = torch.cond(x.sum() > 0, lambda x: m.layer(x) * m.count, torch.neg, (x,))
    m.count.add_(1)
    return y


def test_a_branch_reads_the_buffer_that_is_written_to() -> None:
    x = X.abs()
    with torch.no_grad():
        model = Model(counting, layer=nn.Linear(4, 4), count=nn.Buffer(torch.ones(())))
        program = export(seeded(model), x)
    prepared = prepare(program, toy(LINEAR))
    qompose.calibrate(prepared, [x] * 3)
    assert program.state_dict["count"] == 1
    converted, expected = qompose.convert_pt2e(prepared), program.module()
    for _ in range(3):
        assert sqnr(expected(x), converted(x)) > 30


def strict(self: Any, x: Tensor) -> Tensor:
    """`strict_mode` is an operator whose body no rule is to see."""
    from torch._higher_order_ops.strict_mode import strict_mode

    return self.behind(strict_mode(lambda x: self.inside(x), (x,)))


def flex(self: Any, x: Tensor) -> Tensor:
    """`flex_attention` with a function of its own for scores."""
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = (part[None, None] for part in self.inside(x).chunk(3, -1))
    scores: Callable[..., Tensor] = lambda score, b, h, i, j: score + (i - j)  # noqa: E731
    return self.behind(flex_attention(query, key, value, score_mod=scores)[0, 0])


@pytest.mark.parametrize(
    ("operator", "function", "width", "seen", "macs"),
    [
        ("strict_mode", strict, 4, {"behind"}, 6 * 4 * 4),
        ("flex_attention", flex, 12, {"inside", "behind"}, 0),
    ],
)
def test_what_is_not_visited_is_named_and_still_runs(
    operator: str, function: Any, width: int, seen: set[str], macs: int
) -> None:
    model = seeded(Model(function, inside=nn.Linear(4, width), behind=nn.Linear(4, 4)))
    model.requires_grad_(False)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own: flex_attention is to be compiled
        program = export(model, X)
        expected = program.module()(X)
        prepared = prepare(program, toy(LINEAR))
        assert torch.equal(prepared(X), expected)
        converted = qompose.convert_pt2e(prepared)
        assert sqnr(expected, converted(X)) > 25
    rows = {row.operator: row for row in qompose.report(converted).rows}
    assert (rows[operator].state, rows[operator].macs) == ("float", macs)
    paths = {r.module for r in qompose.report(converted).rows if r.operator == "aten.linear"}
    assert paths == seen
