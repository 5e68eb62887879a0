# SPDX-License-Identifier: Apache-2.0
"""An exported program becomes the graph module that `program.module()` is, with all its state."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import qompose
import torch
from qompose.exported import as_graph_module
from qompose.graph import get_attribute
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.test_zoo import assert_same_outputs
from tests.core.toy import NullQuantizer, export, prepare, randn, seeded
from tests.zoo import ZooModel, by_name, tagged

MODELS = [
    *tagged(without="transformers"),
    *(by_name(n) for n in ("bert", "gpt2", "t5", "swin") if find_spec("transformers")),
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
    """Names, kinds, persistence and identity of all tensors."""
    saved = set(module.state_dict())
    return {
        name: (type(t), name in saved, t.data_ptr(), tuple(t.shape), t.requires_grad)
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
        self._qompose_0 = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.randn(3), persistent=False)
        self.register_buffer("calls", torch.zeros(()))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Linear(7, 7)
        self.items: list[Tensor] = [torch.randn(3)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.layers["second"](self.layers["first"](x)) * self._qompose_0 + self.scale
        return y * self.items[0] + torch.tensor([1.0, 2.0, 3.0]) + self.frozen + self.calls


X = randn(2, 3)


@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
def test_names_values_and_writes_are_the_same(strict: bool) -> None:
    ours = as_graph_module(export(State(), X, strict=strict), "a test")
    program = export(State(), X, strict=strict)
    ours, theirs = as_graph_module(program, "a test"), program.module(check_guards=False)
    for name in ("_qompose_0", "scale", "calls", "frozen", "layers.first.bias"):
        one, other = ours.get_parameter, theirs.get_parameter
        if name in ("scale", "calls"):
            one, other = ours.get_buffer, theirs.get_buffer
        assert one(name).data_ptr() == other(name).data_ptr(), name
    assert reads(ours) == reads(without_guards(theirs))
    first = ours(X)
    assert_same_outputs(first + 1, ours(X))
    assert ours.calls == 2, "and in the program's own buffer"
    assert program.state_dict["calls"] == 2


def test_tied_parameters_stay_one() -> None:
    ours = as_graph_module(export(State(), X), "a test")
    weights = [p for n, p in ours.named_parameters(remove_duplicate=False) if n.endswith("weight")]
    assert len({id(p) for p in weights if p.shape == (3, 3)}) == 1


def test_names_of_nodes_are_those_of_parameters() -> None:
    ours = as_graph_module(export(seeded(nn.Sequential(nn.Linear(3, 3))), X), "a test")
    names = {node.name: node.target for node in ours.graph.nodes if node.op == "get_attr"}
    assert names == {"_0_weight": "0.weight", "_0_bias": "0.bias"} or all(
        "qompose" not in name for name in names
    )
    assert set(names.values()) == {"0.weight", "0.bias"}


class DottedName(nn.Module):
    """A custom program is free to call a parameter anything; this one is renamed after the export."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.inner = nn.Module()
        self.block.inner.weight = nn.Parameter(torch.randn(3))
        self.block_inner_weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.block.inner.weight - self.block_inner_weight


def test_names_that_differ_in_a_dot_alone_stay_apart() -> None:
    model = DottedName()
    ours = as_graph_module(export(model, X), "a test")
    assert {n for n, _ in ours.named_parameters()} == {"block.inner.weight", "block_inner_weight"}
    assert torch.equal(ours(X), model(X))
    nodes = [node.name for node in ours.graph.nodes]
    assert len(nodes) == len(set(nodes))


def test_the_program_is_left_alone() -> None:
    program = export(State(), X)
    names = [spec.target for spec in program.graph_signature.input_specs]
    keys, constants = list(program.state_dict), list(program.constants)
    ours = as_graph_module(program, "a test")
    for node in list(ours.graph.nodes):
        node.meta.clear()
    ours.graph.erase_node(next(iter(reversed(ours.graph.nodes))))
    assert [spec.target for spec in program.graph_signature.input_specs] == names
    assert (list(program.state_dict), list(program.constants)) == (keys, constants)
    assert any("val" in node.meta for node in program.graph.nodes)
    assert program.module()(X).shape == X.shape


class Chain(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(length)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_no_parameter_looks_through_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attribute look-ups on modules grow with the number of parameters, not with its square."""
    count = 0
    original = nn.Module.named_modules

    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        for item in original(self, *args, **kwargs):
            count += 1
            yield item

    counts = []
    for length in (20, 40):
        program = export(Chain(length), randn(1, 2))
        monkeypatch.setattr(nn.Module, "named_modules", counting)
        count = 0
        as_graph_module(program, "a test")
        counts.append(count)
        monkeypatch.undo()
    assert counts[1] <= 2.2 * counts[0] + 50


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "a path", torch.fx.symbolic_trace(nn.ReLU())],
                         ids=["module", "string", "traced, not exported"])  # fmt: skip
def test_anything_else_is_refused(model: Any) -> None:
    with pytest.raises(qompose.NotExportedError, match="a test"):
        as_graph_module(model, "a test")


def test_what_went_through_qompose_is_refused_with_its_stage() -> None:
    prepared = prepare(export(nn.Linear(3, 3), X), NullQuantizer())
    with pytest.raises(qompose.StageError, match="got a prepared model"):
        as_graph_module(prepared, "a test")
    with pytest.raises(qompose.StageError, match="got a converted model"):
        as_graph_module(qompose.convert_pt2e(prepared), "a test")


def test_a_graph_module_is_copied() -> None:
    module = export(nn.Linear(3, 3), X).module()
    copied = as_graph_module(module, "a test")
    assert copied is not module and copied.graph is not module.graph
    assert torch.equal(copied(X), module(X))
    assert all(node.op != "call_module" for node in copied.graph.nodes), "no guards"
