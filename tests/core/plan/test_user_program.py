# SPDX-License-Identifier: Apache-2.0
"""An exported program becomes the graph module that `program.module()` is, with all its state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import qompose
import torch
from qompose.plan.user_program import as_graph_module
from qompose.program.graph import get_attribute, module_path, refresh
from qompose.program.meta import REGION_TAG, untag
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from tests.core.toy import LINEAR, Model, export, prepare, randn, toy
from tests.zoo import ZooModel, by_name, tagged

CHOSEN = {
    "cond_nested", "loop_of_branches", "scan_cell", "map_rows", "mixed_regions", "lstm", "bn_alone",
    "nested_inputs", "constants", "weight_of_two_names", "in_place", "key_cache", "integers_only",
}  # fmt: skip
FURTHER = [by_name(n) for n in ("bert", "gpt2", "t5", "swin") if find_spec("transformers")]
MODELS = [
    pytest.param(model, marks=() if model.name in CHOSEN else pytest.mark.full)
    for model in (*tagged(without="transformers"), *FURTHER)
]


def text(module: GraphModule) -> list[str]:
    """Every operation with its arguments, nodes by their places, bodies inside."""
    place = {node: str(i) for i, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        target = node.target if node.op in ("get_attr", "call_function") else ""
        shown = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: place[n])
        lines.append(f"{node.op} {target} {shown}")
        if node.op == "get_attr":
            value = get_attribute(module, str(node.target))
            lines += text(value) if isinstance(value, GraphModule) else []
    return lines


def without_guards(module: GraphModule) -> GraphModule:
    for node in list(module.graph.nodes):
        if node.op == "call_module":
            assert str(node.target) == "_guards_fn"
            module.graph.erase_node(node)
    return module


def state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Names, kinds and identity of all tensors."""
    return {
        name: (type(t), t.data_ptr(), tuple(t.shape), t.requires_grad)
        for tensors in (module.named_parameters, module.named_buffers)
        for name, t in tensors(remove_duplicate=False)
    }


def reads(module: GraphModule) -> set[str]:
    return {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_it_is_the_module_that_torch_makes(model: ZooModel) -> None:
    program = model.export()
    theirs = without_guards(program.module(check_guards=False))
    ours = as_graph_module(program, "a test")
    assert text(ours) == text(theirs)
    one, other = state(ours), state(theirs)
    shared = [name for name in reads(theirs) if name in other]
    assert {n: one[n] for n in shared} == {n: other[n] for n in shared}


class State(nn.Module):
    """Parameters and buffers under names that need care, a constant, a buffer that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
        self.layers["second"].weight = self.layers["first"].weight
        self._qompose_5 = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.randn(3), persistent=False)
        self.register_buffer("calls", torch.zeros(()))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Linear(7, 7)
        self.items: list[Tensor] = [torch.randn(3)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.layers["second"](self.layers["first"](x)) * self._qompose_5 + self.scale
        return y * self.items[0] + torch.tensor([1.0, 2.0, 3.0]) + self.frozen + self.calls


X = randn(2, 3)


@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
def test_names_values_and_writes_are_the_same(strict: bool) -> None:
    program = export(State(), X, strict=strict)
    theirs = program.module(check_guards=False)
    ours = as_graph_module(program, "a test")
    assert reads(ours) == reads(without_guards(program.module(check_guards=False)))
    ours = refresh(ours)
    for name in ("_qompose_5", "scale", "calls", "frozen", "layers.first.bias"):
        one, other = ours.get_parameter, theirs.get_parameter
        if name in ("scale", "calls"):
            one, other = ours.get_buffer, theirs.get_buffer
        assert one(name).data_ptr() == other(name).data_ptr(), name
    first, second = ours(X), theirs(X)
    torch.testing.assert_close(first + 1, second)
    assert program.state_dict["calls"] == 2, "both write to the program's own buffer"


def test_tied_parameters_stay_one() -> None:
    ours = as_graph_module(export(State(), X), "a test")
    weights = [p for n, p in ours.named_parameters(remove_duplicate=False) if n.endswith("weight")]
    assert len({id(p) for p in weights if p.shape == (3, 3)}) == 1
    names = {node.name: node.target for node in ours.graph.nodes if node.op == "get_attr"}
    assert names["layers_first_bias"] == "layers.first.bias"


def test_names_that_differ_in_a_dot_alone_stay_apart() -> None:
    model = Model(
        lambda m, x: x * m.block.inner.weight - m.block_inner_weight,
        block=nn.ModuleDict({"inner": nn.ParameterDict({"weight": randn(3)})}),
        block_inner_weight=nn.Parameter(randn(3, seed=1)),
    )
    ours = refresh(as_graph_module(export(model, X), "a test"))
    assert {n for n, _ in ours.named_parameters()} == {"block.inner.weight", "block_inner_weight"}
    assert torch.equal(ours(X), model(X))
    nodes = [node.name for node in ours.graph.nodes]
    assert len(nodes) == len(set(nodes))


def calls_in(function: Callable[[], Any]) -> int:
    """How many functions are called."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_is_linear_in_the_number_of_parameters() -> None:
    """Torch's own way to do it does 2.6 times as much here, and ever more in longer chains."""
    chains = (nn.Sequential(*(nn.Linear(2, 2) for _ in range(n))) for n in (10, 20, 40))
    programs = [export(chain, randn(1, 2)) for chain in chains]
    short, middle, long = (calls_in(lambda p=p: as_graph_module(p, "a test")) for p in programs)
    assert (long - middle) / (middle - short) < 2.1


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch 2.13, about itself
def test_writes_that_are_outputs_of_the_program() -> None:
    """In a program without operators in place, a buffer that is written to is one more output."""
    program = export(State(), X).run_decompositions()
    theirs, ours = program.module(check_guards=False), as_graph_module(program, "a test")
    assert text(ours) == text(without_guards(theirs))
    first, second = refresh(ours)(X), theirs(X)
    torch.testing.assert_close(first + 1, second)


def test_what_went_through_qompose_is_refused_with_its_stage() -> None:
    prepared = prepare(export(nn.Linear(3, 3), X), toy())
    with pytest.raises(qompose.errors.StageError, match="prepared"):
        as_graph_module(prepared, "a test")
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    with pytest.raises(qompose.errors.StageError, match="converted"):
        as_graph_module(converted, "a test")
    exported = torch.export.export(converted, (X,))
    for node in exported.graph.nodes:
        untag(node, REGION_TAG)  # as of a prepared model whose observers an export left out
    with pytest.raises(qompose.errors.StageError, match="linear"):
        qompose.prepare_pt2e(exported, toy())


PARTS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "parts with layers": (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), ("0", "1")),
    "layers": (lambda: nn.Linear(3, 3), ("",)),
    "functions": (
        lambda: Model(lambda m, x: functional.linear(x, m.a.weight).cos(), a=nn.Linear(3, 3)),
        ("", ""),
    ),
}


@pytest.mark.parametrize("named", PARTS)
@pytest.mark.parametrize("between", [nn.Tanh, nn.Identity])
def test_parts_quantized_before_have_their_paths_in_the_whole(
    named: str, between: type[nn.Module]
) -> None:
    """A strict export keeps those that operators had in their part, which two parts may have."""
    make, inside = PARTS[named]

    def part() -> nn.Module:
        prepared = prepare(export(make(), X), toy(LINEAR))
        prepared(X)
        return qompose.convert_pt2e(prepared)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.between = part(), between()
            self.blocks = nn.ModuleList([part()])
            self.last = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.blocks[0](self.between(self.one(x))))  # type: ignore[no-any-return]

    ours = as_graph_module(export(Whole(), X, strict=True), "a test")
    borders = ("quantize", "dequantize")
    called = [n for n in ours.graph.nodes if n.op == "call_function"]
    paths = [module_path(n) for n in called if not n.name.startswith(borders)]
    of_parts = [f"{place}.{path}".rstrip(".") for place in ("one", "blocks.0") for path in inside]
    assert [path for path in paths if path != "between"] == [*of_parts, "last"]
    assert {module_path(n) for n in called if n.name.startswith(borders)} <= {*of_parts}
