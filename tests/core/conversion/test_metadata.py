# SPDX-License-Identifier: Apache-2.0
"""What quantize and dequantize nodes say of where they come from, for tools that read it later."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.export import export
from torch.fx import GraphModule, Node

from tests.core.toy import INT8, RUN_TIME, WEIGHT, Annotator, annotate

aten = torch.ops.aten
X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    """A convolution and a linear layer, with a mean between them that nobody annotates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).mean((2, 3)))


def partitions(activation: Any, output: Any) -> qompose.Quantizer:
    """Annotates both products and puts each, with its parameters, in a partition."""

    def annotated(node: Node) -> None:
        if node.target in (aten.conv2d.default, aten.linear.default):
            x, weight, bias = node.all_input_nodes
            annotate(node, {x: activation, weight: WEIGHT}, output)
            for part in (node, weight, bias):
                part.meta["quantization_tag"] = f"part of {node.name}"

    return Annotator(annotated)


def converted(quantizer: qompose.Quantizer, x: Tensor = X) -> GraphModule:
    prepared = qompose.prepare_pt2e(export(Layers().eval(), (x,)), quantizer)
    prepared(x)
    return qompose.convert_pt2e(prepared)


def kind_of(node: Node) -> str:
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else node.op
    return name.partition(".")[0]


def in_partitions(model: GraphModule) -> list[tuple[str, str]]:
    tagged = (n for n in model.graph.nodes if "quantization_tag" in n.meta)
    return [(kind_of(n), n.meta["quantization_tag"].removeprefix("part of ")) for n in tagged]


def test_inserted_nodes_are_in_the_partition_of_who_asked_for_them() -> None:
    """The first quantize belongs to nobody, nor does what reads a tensor without annotating it."""
    assert sorted(in_partitions(converted(partitions(INT8, INT8)))) == sorted([
        ("get_attr", "conv2d"), ("get_attr", "conv2d"), ("dequantize_per_channel", "conv2d"),
        ("dequantize_per_tensor", "conv2d"), ("conv2d", "conv2d"), ("quantize_per_tensor", "conv2d"),
        ("get_attr", "linear"), ("get_attr", "linear"), ("dequantize_per_channel", "linear"),
        ("dequantize_per_tensor", "linear"), ("linear", "linear"), ("quantize_per_tensor", "linear"),
    ])  # fmt: skip


def test_what_is_chosen_at_run_time_is_in_its_readers_partition() -> None:
    found = in_partitions(converted(partitions(RUN_TIME, None)))
    assert [name for kind, name in found if kind == "choose_qparams"] == ["conv2d", "linear"]
    assert [name for kind, name in found if kind == "quantize_per_tensor"] == ["conv2d", "linear"]


def test_what_is_chosen_at_run_time_is_of_its_readers_module() -> None:
    """The quantize operator too, which a reader alone asks for, though another layer made the value."""
    model = converted(partitions(RUN_TIME, None))
    (layer,) = (n for n in model.graph.nodes if kind_of(n) == "mean")
    chosen = [n for n in layer.users if kind_of(n) in ("choose_qparams", "quantize_per_tensor")]
    paths = [next(reversed(n.meta["nn_module_stack"].values()))[0] for n in chosen]
    assert paths == ["linear", "linear"]


def source_of(node: Node) -> str | None:
    """The first operator that a node comes from, as torchao's debugger finds it."""
    found = node.meta.get("from_node")
    if node.op in ("placeholder", "output") or not found or "unlift" in found[-1].pass_name:
        return None
    source = found[-1]
    while source.from_node:
        source = source.from_node[-1]
    return source.name


def sources(model: GraphModule) -> list[tuple[str, str]]:
    return [(kind_of(n), name) for n in model.graph.nodes if (name := source_of(n)) is not None]


def test_each_inserted_node_comes_from_the_operator_whose_value_it_gives() -> None:
    found = sources(converted(partitions(INT8, INT8)))
    assert found == [
        ("quantize_per_tensor", "x"), ("dequantize_per_tensor", "x"),
        ("conv2d", "conv2d"), ("quantize_per_tensor", "conv2d"), ("dequantize_per_tensor", "conv2d"),
        ("mean", "mean"), ("quantize_per_tensor", "mean"), ("dequantize_per_tensor", "mean"),
        ("linear", "linear"), ("quantize_per_tensor", "linear"), ("dequantize_per_tensor", "linear"),
    ]  # fmt: skip
    prepared = qompose.prepare_pt2e(export(Layers(), (X,)), partitions(INT8, INT8))
    observed = [name for kind, name in sources(prepared) if kind == "call_module"]
    assert observed == ["x", "conv2d", "mean", "linear"]


@pytest.mark.parametrize("spec", [INT8, RUN_TIME], ids=["static", "dynamic"])
def test_handles_go_with_values_and_survive_another_export(spec: Any) -> None:
    program = export(Layers().eval(), (X,))
    handles = {}
    for number, node in enumerate(n for n in program.graph.nodes if n.op == "call_function"):
        node.meta["custom"] = {"numeric_debug_handle": number}
        handles[number] = node.name
    prepared = qompose.prepare_pt2e(program, partitions(spec, INT8))
    prepared(X)
    again = export(qompose.convert_pt2e(prepared), (X,))
    wanted = Recorder(program.module(check_guards=False)).values(X)
    given = Recorder(again.module(check_guards=False)).values(X)
    assert sorted(handles) == sorted(wanted) == sorted(given)
    for number, floats in wanted.items():
        assert len(given[number]) >= 2, handles[number]  # the operator and a dequantize
        for value in given[number]:
            error = (floats[0] - value).square().mean() / floats[0].square().mean()
            assert -10 * torch.log10(error) > 25, handles[number]


class Recorder(torch.fx.Interpreter):
    """Runs a program and keeps the float values that have a handle, by it."""

    def values(self, *inputs: Tensor) -> dict[int, list[Tensor]]:
        self.found: dict[int, list[Tensor]] = {}
        self.run(*inputs)
        return self.found

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        handle = (n.meta.get("custom") or {}).get("numeric_debug_handle")
        if handle is not None and isinstance(value, Tensor) and value.is_floating_point():
            self.found.setdefault(handle, []).append(value)
        return value


def test_a_folded_batch_norm_is_what_the_convolution_is_compared_with() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()

    def annotated(node: Node) -> None:
        if node.target is aten.conv2d.default:
            annotate(node, {node.all_input_nodes[0]: INT8, node.all_input_nodes[1]: WEIGHT})

    prepared = qompose.prepare_pt2e(export(model, (X,)), Annotator(annotated))
    prepared(X)
    found = dict(sources(qompose.convert_pt2e(prepared)))
    assert found["conv2d"] == "batch_norm"


def test_the_module_of_an_inserted_node_is_that_of_its_operator() -> None:
    model = converted(partitions(INT8, INT8))
    stacks = {
        (kind_of(n), next(reversed(n.meta["nn_module_stack"].values()))[0], "torch_fn" in n.meta)
        for n in model.graph.nodes
        if "quantize" in kind_of(n) and n.meta.get("nn_module_stack")
    }
    made = ("dequantize_per_channel", "dequantize_per_tensor", "quantize_per_tensor")
    assert {(kind, name, True) for kind in made for name in ("conv", "linear")} <= stacks
